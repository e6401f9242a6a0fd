"""How a simulated fleet of which nobody is left goes back to its newest checkpoint."""

from __future__ import annotations

from raycloud import events as e


class Restoring:
    """For a fleet with its `manifests`, `spans`, `bodies`, and an `at` to say when."""

    def go_back(self, newest):
        began = self.scene.settings
        if newest is not None:
            self.manifests = {at: one for at, one in self.manifests.items() if at <= newest}
            if self.published is not None:  # those after it were withdrawn
                self.published = max(self.manifests, default=None)
        step = max(self.manifests, default=began.step)
        position, ledger = self.manifests.get(step, (began.position, began.ledger or {}))
        self.step, self.position = step, self.settled(position)
        self.running = self.broken = False
        self.formed_as = -1  # whatever is under way comes to nothing
        self.group, self.following = (), ()
        self.changes.clear()
        for body in self.bodies.values():
            body.reported, body.micro_batches, body.compute_s = None, 0, 0.0
        word = e.RolledBack(step=step, ledger=ledger)

        def gone_back():
            if not self.job.finished:  # else the run has ended where it stood
                self.spans = {at: span for at, span in self.spans.items() if at < step}
            self.feed(word)

        self.at(self.now_s + self.some_s(), gone_back)
