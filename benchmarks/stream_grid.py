"""What it costs of the held-out loss that fragments of a round travel while members compute.

    python -m benchmarks.stream_grid     # all points; what is in the file is not done again

Four members are simulated, as in `benchmarks.sync_grid`, whose small model and data these are; runs
may be shorter. The
parameters are cut into fragments. Each is exchanged once in `period` steps, in turns, and what
comes of that is applied `delay` steps later; after so many periods all are exchanged at once, and
all members have the same. What a member has done of a fragment meanwhile is kept, or mixed, as
Streaming DiLoCo has it: `kept` of its own parameters and the rest of what all have.

No time is measured here; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sync_grid import ALL, BLOCK, MEMBERS, Exchange, Point, Side, machine, text_setting
from raycloud.step.rounds import OUTER_MOMENTUM, outer_rate

RESULTS = Path(__file__).parent / "results" / "stream_grid.json"
WARM = 1.0 / 7


@dataclass(frozen=True, order=True)
class Streamed:
    """What is tried.

    Attributes:
        period: Steps between two exchanges of a fragment.
        fragments: How many; 1: rounds, in which nothing travels while members compute.
        delay: Steps until what has come is applied.
        kept: Of a member's own parameters then; None: all that it has done since it has sent.
        whole: Periods until all is exchanged at once; 0: at the end alone.
        codec: A key of `ALL`.
        seed: Of weights and order.
        updates: How many.
        spread: The momentum is of steps: an exchange after fewer of them moves by less of it.
    """

    period: int
    fragments: int
    delay: int
    kept: float | None
    whole: int
    codec: str
    seed: int
    updates: int = 800
    spread: bool = True


def grid(seeds: Sequence[int], updates: int) -> Iterator[Streamed]:
    """All points."""
    for seed in seeds:
        plain = Streamed(16, 1, 0, None, 1, "none", seed, updates)
        streamed = replace(plain, fragments=4, delay=4, whole=4)
        yield from (plain, streamed, replace(streamed, kept=0.5), replace(streamed, delay=1))
        yield replace(streamed, spread=False)
    for seed in seeds:
        for period in (16, 8):
            plain = Streamed(period, 1, 0, None, 1, "int4", seed, updates)
            yield plain
            yield replace(plain, fragments=4, delay=period // 4, whole=4)


class Fragments(Side):
    """One point: its members, and what of theirs is on its way."""

    def __init__(self, point: Streamed, device: torch.device) -> None:
        period = point.period
        plain = Point("small", period, point.codec, "nesterov", 0, 0, WARM, point.seed)
        super().__init__(text_setting(66, 3e-3, point.updates), [plain], device)
        self.point = point
        blocks = self._rows.shape[-1] // (MEMBERS * BLOCK)
        sizes = [len(part) for part in torch.arange(blocks).tensor_split(point.fragments)]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._parts = [
            slice((end - size) * MEMBERS * BLOCK, end * MEMBERS * BLOCK)
            for end, size in zip(ends, sizes, strict=True)
        ]
        self._exchanges = [
            Exchange(ALL[point.codec], (1, MEMBERS, part.stop - part.start), device)
            for part in self._parts
        ]
        self._given = [0] * point.fragments  # when each was exchanged, in steps since the warm ones
        self._flying: tuple[int, int, Tensor, Tensor] | None = None

    def _ends(self, *_: Any) -> bool:
        return False

    def _update(self, update: int) -> None:
        super()._update(update)
        point, done = self.point, update + 1 - self._warm[0]
        last = update + 1 == self._setting.updates
        if done <= 0:
            return
        whole = last or (point.whole > 0 and done % (point.whole * point.period) == 0)
        if self._flying is not None and (whole or done == self._flying[0] + point.delay):
            self._land()
        every = point.period // point.fragments
        if whole:
            for number in range(point.fragments):
                self._send(number, done)
                self._land(mixes=False)
        elif done % every == 0:
            self._send(done // every % point.fragments, done)
            if point.delay == 0:
                self._land()

    def _send(self, number: int, done: int) -> None:
        own = self._rows[0, :, self._parts[number]].clone()
        rows = self._anchors[0, None, self._parts[number]] - own
        mean = self._exchanges[number].mean(rows[None], torch.tensor([0]))[0]
        self._flying = done, number, own, mean

    def _land(self, *, mixes: bool = True) -> None:
        assert self._flying is not None  # noqa: S101 - of the benchmark's own
        (sent, number, own, mean), self._flying = self._flying, None
        part, point = self._parts[number], self.point
        steps, self._given[number] = sent - self._given[number], sent
        keeps = OUTER_MOMENTUM ** (steps / point.period if point.spread else 1.0)
        momentum = self._momenta[0, part].mul_(keeps).add_(mean)
        moves = OUTER_MOMENTUM * (1.0 - keeps) / (1.0 - OUTER_MOMENTUM)
        moved = outer_rate(point.period) * (mean + moves * momentum)
        anchor = self._anchors[0, part].sub_(moved)
        rows = self._rows[0, :, part]
        if point.kept is None or not mixes:
            rows.add_(anchor - own)
        else:
            rows.mul_(point.kept).add_(anchor, alpha=1.0 - point.kept)

    def losses(self) -> dict[int, float]:
        """Held out, of the mean of members, in the midst and at the end."""
        found = {}
        for update in range(self._setting.updates):
            self._update(update)
            if (update + 1) * 2 % self._setting.updates == 0:
                [found[update + 1]] = self._evaluate()
        return found


def main() -> None:
    """Train by all points that the file lacks, and add each to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--most", type=int, help="points of this call; not: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    rows: list[dict[str, Any]] = json.loads(asked.json.read_text()) if asked.json.exists() else []
    here = [row for row in rows if row["machine"] == machine(device)]
    known = {tuple(row[name] for name in Streamed.__annotations__) for row in here}
    left = [
        point
        for point in grid(asked.seeds, asked.updates)
        if tuple(asdict(point).values()) not in known
    ]
    for point in left[: asked.most]:
        losses = Fragments(point, device).losses()
        rows.append({**asdict(point), "machine": machine(device), "losses": losses})
        print(rows[-1], flush=True)
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
