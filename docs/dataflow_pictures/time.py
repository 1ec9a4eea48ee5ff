"""What is in flight when, and what fills a core's memory."""

from __future__ import annotations

from dataflow_pictures.svg import INK, PAPER, QUIET, RULE, TINTS, Picture, W, X, Y
from tilefuse import arch, plan
from tilefuse.configurations import Configuration
from tilefuse.layout import Layout, ZeroKind
from tilefuse.plan import WINDOW, PlainLayout, Plan

PARTS = {
    "sums": "#b48ad0",
    "weights": "#e39a4a",
    "activations": "#6ea3d8",
    "x kept": "#a9cbee",
    "results": "#7fbf8e",
    "scratch": "#d7c46a",
    "stack": "#b8c0c8",
    "constants": "#7d868f",
}
"""Colours of what lies in a core's memory."""


LANE = 84
"""From a channel's queue to the next."""


def segments(made: Plan) -> str:
    """Task groups and the queues of three channels, as segments are issued."""
    count = len(made.segments)
    left, step, top = 216.0, 80.0, 108.0
    height = 26
    below = top + count * height + 44
    picture = Picture(int(left + (count + 1) * step + 24), int(below + 3 * LANE + 20), "Segments and queues over time")
    picture.text(14, 28, f"Segments of {made.m} × {made.k} by {made.k} × {made.n}", size=15, bold=True)
    for i, said in enumerate(
        (
            f"{made.row_blocks} row blocks by {made.passes} passes. A segment is a task group; {WINDOW} are open, and "
            "the older one is waited for once the newer is issued.",
            "Steps, not to scale.",
        )
    ):
        picture.text(14, 48 + 16 * i, said, size=11, colour=QUIET)
    for i in range(count + 1):
        x = left + i * step
        picture.line([(x, top - 8), (x, below + 3 * LANE - 10)], RULE, width=1, dashed=True)
        picture.text(x + 4, top - 14, f"issue {i}" if i < count else "end", size=10, colour=QUIET)
    for i, segment in enumerate(made.segments):
        y = top + i * height
        row_block, number = divmod(i, count // made.row_blocks)
        picture.text(left - 14, y + 16, f"row block {row_block}, pass {number}", size=11, anchor="end")
        ends = min(i + WINDOW, count + 1)
        picture.box(left + i * step + 2, y + 2, (ends - i) * step - 4, height - 5, fill=TINTS[QUIET])
        kinds = [("w", W), ("x", X), ("y", Y)]  # the order of their issue
        at = left + i * step + 12
        for stream, colour in kinds:
            tasks = sum(t.stream == stream for t in segment.transfers)
            picture.text(at, y + 17, f"{tasks} {stream}", size=10.5, colour=colour, bold=True)
            at += 36
        picture.text(left + ends * step - 8, y + 17, "wait", size=9.5, colour=QUIET, anchor="end")
    for lane, (stream, colour, said) in enumerate(
        (("x", X, "activations, row 0"), ("w", W, "weights, column 0"), ("y", Y, "results, column 0"))
    ):
        base = below + lane * LANE + 62
        picture.text(left - 14, base - 22, said, size=11, anchor="end", colour=colour, bold=True)
        picture.text(left - 14, base - 7, "tasks on the channel", size=10, colour=QUIET, anchor="end")
        unit = 13.0
        for i, counts in enumerate(made.outstanding):
            depth = counts[stream, 0]
            x = left + i * step
            picture.box(x + 2, base - unit * depth, step - 4, unit * depth, fill=TINTS[colour], stroke=colour, radius=2)
            picture.text(x + step / 2, base - 3, str(depth), size=9.5, anchor="middle", colour=colour, bold=True)
        limit = base - unit * arch.QUEUE_DEPTH
        picture.line([(left, limit), (left + count * step, limit)], INK, width=1, dashed=True)
        picture.line([(left, base), (left + count * step, base)], RULE, width=1)
        picture.text(left + count * step + 6, limit + 4, f"queue: {arch.QUEUE_DEPTH}", size=10)
    return picture.render()


def configurations() -> list[tuple[str, Configuration]]:
    """Those whose memory is drawn, with what to call them."""

    def gemm(bits: int, group: int, tiles: int, zero: ZeroKind = ZeroKind.Z8) -> tuple[str, Configuration]:
        made = plan.gemm(Layout(4096, 4096, bits, group, zero), 4096, tiles=tiles)
        shape = f"{tiles} tile{'s' * (tiles > 1)}, {made.configuration.max_bands} bands"
        return f"GEMM {made.configuration.weights.tag}, {shape}", made.configuration

    layers = {bits: Layout(4096, 4096, bits, 128) for bits in (4, 8)}
    plain = PlainLayout(4096, 4096)
    return [
        gemm(4, 128, 2),
        gemm(4, 128, 1),
        gemm(4, 32, 2),
        gemm(8, 128, 1),
        gemm(8, 32, 1, ZeroKind.M16),
        ("GEMM bf16, baseline", plan.gemm_baseline(plain, 4096).configuration),
        ("GEMV w4g128", plan.gemv(layers[4]).configuration),
        ("GEMV w8g128, 2 streams", plan.gemv(layers[8], streams=2).configuration),
        ("GEMV bf16, baseline", plan.gemv_baseline(plain).configuration),
    ]


def memory() -> str:
    """A bar for each configuration: the 64 KiB of its fullest core."""
    shown = configurations()
    left, width, pitch, top = 224.0, 660.0, 34, 84.0
    bottom = top + len(shown) * pitch
    picture = Picture(int(left + width + 112), int(bottom + 44), "What fills a core's memory")
    picture.text(14, 28, f"A core's {arch.CORE.memory} bytes", size=15, bold=True)
    at = left
    for name, colour in PARTS.items():
        picture.box(at, 46, 12, 12, fill=colour, stroke=colour, radius=2)
        picture.text(at + 17, 56, name, size=10.5)
        at += 34 + 6.6 * len(name)
    scale = width / arch.CORE.memory
    for kib in range(0, arch.CORE.memory // 1024 + 1, 16):
        x = left + kib * 1024 * scale
        picture.line([(x, top - 8), (x, bottom + 4)], INK if kib * 1024 == arch.CORE.memory else RULE, width=1)
        picture.text(x, bottom + 20, f"{kib} KiB", size=10, colour=QUIET, anchor="middle")
    for i, (said, configuration) in enumerate(shown):
        y = top + i * pitch
        picture.text(left - 12, y + 16, said, size=11, anchor="end")
        budget = next(configuration.budgets())
        at = left
        totals = {name: sum(item.total for item in budget.items if item.name == name) for name in PARTS}
        assert sum(totals.values()) == budget.used, "an item has no colour"
        for name, nbytes in totals.items():
            if nbytes:
                picture.box(at, y, nbytes * scale, 24, fill=PARTS[name], stroke=PAPER, radius=1)
                if nbytes * scale > 40:
                    picture.text(at + nbytes * scale / 2, y + 16, str(nbytes), size=9.5, anchor="middle")
                at += nbytes * scale
        picture.text(left + width + 10, y + 16, f"{budget.used} B", size=11)
    return picture.render()
