"""The pictures of the pages: docs/generate.py writes them, and tells when one is old."""

from __future__ import annotations

from collections.abc import Callable

from picture import Picture

STEP = 8  # micro-batches of the step that is drawn


def step() -> str:
    """A step: a piece of the sequence, shared by speed, summed by weight."""
    paper = Picture(760, 300, "A step: micro-batches of the sequence, shared by two workers")
    paper.words((20, 28), "the sequence of epoch 0, in an order drawn from the seed")
    for i in range(12):
        kind = "plain" if i >= STEP else "first" if i < 5 else "second"
        paper.box((20 + 56 * i, 40), (52, 28), f"m{i % STEP}", kind)
    paper.words((712, 59), "...")
    for first, last, name in ((0, 7, "step 0: global_batch samples"), (8, 11, "step 1 ...")):
        left, right = 20 + 56 * first, 72 + 56 * last
        paper.line((left, 74), (left, 82), (right, 82), (right, 74))
        paper.words(((left + right) / 2, 99), name, anchor="middle", quiet=True)
    for row, (name, kind, first, last) in enumerate(
        (("worker 0, share 5", "first", 0, 4), ("worker 1, share 3", "second", 5, 7))
    ):
        y = 136 + 84 * row
        paper.words((20, y + 19), name)
        for i in range(first, last + 1):
            paper.box((150 + 46 * (i - first), y), (42, 28), f"m{i}", kind)
        paper.words((150, y + 46), "its part of the gradient", quiet=True)
        paper.line((156 + 46 * (last - first + 1), y + 14), (440, y + 14))
        paper.arrow((440, y + 14), (440, 188 + 8 * (2 * row - 1)), (464, 188 + 8 * (2 * row - 1)))
    paper.box((468, 162), (130, 52), "sum, weighted\nby samples", "kept")
    paper.arrow((600, 188), (622, 188))
    paper.box((626, 162), (114, 52), "one update,\non both alike", "kept")
    paper.words((468, 244), "Shares say who computes what,", quiet=True)
    paper.words((468, 262), "never what the step means.", quiet=True)
    return paper.svg()


def data() -> str:
    """From files to micro-batches."""
    paper = Picture(760, 340, "How data is fed: files, blocks, partitions, lanes, micro-batches")
    paper.words((20, 28), "once, on any CPU; kept under a digest of files, code and settings")
    top = [("files", 90), ("slices", 90), ("read, clean,\nTask.preprocess", 150), ("blocks", 110)]
    _row(paper, 42, top, "first")
    paper.words((600, 72), "Arrow files on disk", quiet=True)
    paper.arrow((537, 96), (537, 112), (70, 112), (70, 144))
    paper.words((90, 134), "arithmetic alone: the same for any number of workers")
    middle = [("partitions", 110), ("lanes", 100), ("windows", 100), ("positions", 130)]
    _row(paper, 148, middle)
    notes = (
        (75, "equal parts"),
        (224, "micro-batch k's"),
        (368, "mixed"),
        (527, "(epoch, offset)"),
    )
    for x, note in notes:
        paper.words((x, 217), note, anchor="middle", quiet=True)
    paper.arrow((594, 174), (640, 174), (640, 236), (70, 236), (70, 272))
    paper.words((90, 260), "in each worker, ahead of the step")
    _row(paper, 276, [("gather rows", 120), ("Task.batch(rows, rng)", 180)], "second")
    paper.arrow((368, 302), (404, 302))
    paper.box((408, 276), (150, 52), "a micro-batch,\nmade ready", "kept")
    return paper.svg()


def _row(
    paper: Picture, y: float, boxes: list[tuple[str, float]], kind: str = "plain", x: float = 20
) -> None:
    """Boxes from left to right with arrows between them."""
    for i, (text, width) in enumerate(boxes):
        if i:
            paper.arrow((x + 4, y + 26), (x + 40, y + 26))
            x += 44
        paper.box((x, y), (width, 52), text, kind)
        x += width


def change() -> str:
    """A change that is sent ahead takes effect at the same step everywhere, without a pause."""
    paper = Picture(760, 236, "A change: sent ahead, agreed on with the gradients, then applied")
    left, wide = 130, 74
    for i in range(8):
        paper.words((left + wide * (i + 0.5), 26), f"step {115 + i}", anchor="middle", quiet=True)
    paper.words((20, 62), "driver")
    paper.box((left, 42), (150, 32), "prepare change 3", "kept")
    for row, (name, kind) in enumerate((("member 0", "first"), ("member 1", "second"))):
        y = 104 + 48 * row
        paper.words((20, y + 21), name)
        for i in range(8):
            paper.box((left + wide * i, y), (wide - 4, 32), "new" if i >= 4 else "old",
                      kind if i >= 4 else "plain")  # fmt: skip
        paper.arrow((left + 40 + 32 * row, 74), (left + 40 + 32 * row, y - 2))
    edge = left + wide * 4 - 2
    paper.line((edge, 36), (edge, 196), dashed=True)
    paper.words((edge - 6, 212), "the last gradients of 118 say:", anchor="end", quiet=True)
    paper.words((edge - 6, 228), "all have it at hand", anchor="end", quiet=True)
    paper.words((edge + 6, 212), "applied before 119,", quiet=True)
    paper.words((edge + 6, 228), "by all at once", quiet=True)
    return paper.svg()


def resume() -> str:
    """What a kill loses, and what it cannot."""
    paper = Picture(760, 250, "Resuming: steps after the last checkpoint are computed again")
    left, wide = 150, 58
    for row, name in enumerate(("the run", "train --resume")):
        paper.words((20, 62 + 96 * row), name)
    for i in range(9):
        kind = "kept" if i < 6 else "lost"
        paper.box((left + wide * i, 42), (wide - 4, 32), f"s{i}", kind)
    edge = left + wide * 6 - 2
    paper.line((edge, 34), (edge, 190), dashed=True)
    paper.words((edge, 26), "checkpoint of step 6", anchor="middle", quiet=True)
    paper.words((left + wide * 9 + 4, 62), "killed")
    paper.words((edge + 6, 96), "the ledger goes back with the model", quiet=True)
    for i in range(6, 10):
        paper.box((left + wide * i, 138), (wide - 4, 32), f"s{i}", "kept")
    paper.words((left + wide * 10 - 20, 190), "...")
    paper.words(
        (20, 214), "A sample may be computed more than once; it is committed exactly once in the"
    )
    paper.words((20, 233), "model's state. What user code does besides happens at least once.")
    return paper.svg()


def house() -> str:
    """The way of a job through the rooms."""
    paper = Picture(760, 356, "The way through the house: from job.yaml to checkpoints and reports")
    _row(paper, 20, [("job.yaml", 90), ("spec: checked once", 160)], x=20)
    paper.arrow((318, 46), (352, 46))
    paper.box((356, 20), (180, 52), "on_ray: starts or joins\nRay, finds the task")
    paper.arrow((446, 72), (446, 96))
    paper.box((300, 100), (292, 48), "planner: members, shares, sync,\npredicted seconds and bytes")
    paper.arrow((446, 148), (446, 176))
    paper.box((246, 180), (400, 66), "", "first")
    paper.words((446, 200), "workers, one placement group each", anchor="middle")
    paper.words((446, 218), "feed > compute > exchange > commit", anchor="middle")
    paper.words((446, 236), "(training, sync, data)", anchor="middle", quiet=True)
    paper.box((20, 180), (150, 66), "control:\nevents in,\ncommands out", "kept")
    paper.arrow((244, 200), (172, 200))
    paper.words((208, 193), "events", anchor="middle", quiet=True)
    paper.arrow((172, 230), (244, 230))
    paper.words((208, 246), "commands", anchor="middle", quiet=True)
    paper.arrow((270, 246), (270, 268), (95, 268), (95, 286))
    paper.box(
        (20, 290), (260, 48), "report: log, ledger, scalars,\nsummary, what the terminal shows"
    )
    paper.arrow((446, 246), (446, 286))
    paper.box((330, 290), (232, 48), "checkpoint: parts first,\nthe manifest last", "kept")
    return paper.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "step": step,
    "data": data,
    "change": change,
    "resume": resume,
    "house": house,
}
