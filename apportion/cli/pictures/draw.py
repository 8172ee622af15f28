"""`apportion show --svg`: the mask in the colours of the ranks that compute it, and the timelines of these ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion.cli.output import count
from apportion.cli.pictures import svg
from apportion.cli.pictures.mask_cells import Axis, axis_of, owners
from apportion.cli.printed.timelines import share
from apportion.ir.arrays import Bools, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.isa import ATTENTION, Op
from apportion.ir.request.hardware import Hardware
from apportion.ir.tensors import PHASES
from apportion.planner.simulate import Run, simulate

CELLS = 112  # per side of the mask
STEPS = 240  # cells of a timeline
MAX_BYTES = 280_000  # per file; larger pictures are drawn more coarsely
MIN_STEPS = 30  # cells of the coarsest timeline
MIN_BUSY = 0.3  # a step with a smaller busy share stays empty
MAX_RANKS = 64  # up to this number each rank has a colour and a timeline; above it colours are per node

WIDTH, LEFT, TOP = 900, 74, 64
MASK = 560
LEGEND = LEFT + MASK + 36
TRACK = WIDTH - LEFT - 40  # width of a timeline

# a rank's activity in a cell of its timeline, apart from attention, which has the rank's colour
OTHER, WAITING, EVEN, ODD = range(4)
_FILLS = {OTHER: "#57606a", WAITING: "#dfe3e8", EVEN: "#24292f", ODD: "#98a2ad"}


@dataclass(frozen=True)
class Colours:
    """The colours of ranks. nodes: True for one colour per node, False for one per rank."""

    ranks: int
    per_node: int
    nodes: bool

    def of(self, rank: int) -> str:
        if self.nodes:
            return svg.colour(rank // self.per_node, -(-self.ranks // self.per_node))
        return svg.colour(rank, self.ranks)

    def legend(self) -> list[tuple[str, str]]:
        """(name, colour) of ranks, or of the first nodes."""
        if not self.nodes:
            return [(f"rank {rank}", self.of(rank)) for rank in range(self.ranks)]
        nodes = range(min(-(-self.ranks // self.per_node), MAX_RANKS))
        return [(f"node {node}", self.of(node * self.per_node)) for node in nodes]


@dataclass(frozen=True, eq=False)
class _Scene:
    """A plan and its simulated run, to be drawn. coarse: number of cells or steps drawn as one, for a smaller file."""

    plan: Plan
    run: Run
    hardware: str
    coarse: int = 1

    @cached_property
    def axis(self) -> Axis:
        return axis_of(self.plan, CELLS // self.coarse)

    @property
    def steps(self) -> int:
        return STEPS // self.coarse

    @cached_property
    def colours(self) -> Colours:
        ranks = self.plan.header.ranks
        return Colours(ranks, self.plan.request.cluster.ranks_per_node, ranks > MAX_RANKS)


def draw(
    plan: Plan, kind: str | None = None, phase: str = "forward", hardware: Hardware | None = None
) -> str:
    """The plan as an SVG file: one kind (default: the first) and phase. Raises ConfigError if the plan lacks these,
    VerifyError for a plan that cannot run."""
    kind = plan.header.kinds[0] if kind is None else kind
    _check(plan, kind, phase)
    simulation = simulate(plan, hardware)
    scene = _Scene(plan, simulation.runs[kind, phase], simulation.hardware)
    picture = _svg_document(scene)
    while len(picture) > MAX_BYTES and scene.steps > MIN_STEPS:
        scene = replace(scene, coarse=2 * scene.coarse)
        picture = _svg_document(scene)
    return picture


def _svg_document(scene: _Scene) -> str:
    plan, run = scene.plan, scene.run
    timeline_top = TOP + max(MASK + 74, _legend_height(scene.colours) + 40)
    title = f"{_recipe(plan)}: {run.phase} of kind {run.kind} on {count(plan.header.ranks, 'rank')}"
    caption = _caption(plan, scene.axis)
    parts = [
        svg.text(LEFT, 28, title, 18, rest='font-weight="600"'),
        svg.text(LEFT, 48, caption, 12, rest=f'fill="{svg.PALE}"'),
        *_mask(scene),
        *_legend(scene.colours, plan),
        *_timelines(scene, timeline_top),
    ]
    height = timeline_top + _bar(run) * len(_ranks_to_draw(run)) + 70
    return svg.document(WIDTH, height, title, f"{caption}. {_run_summary(run, scene.hardware)}.", parts)


def _check(plan: Plan, kind: str, phase: str) -> None:
    for option, value, allowed in (("--kind", kind, plan.header.kinds), ("--phase", phase, PHASES)):
        if value not in allowed:
            raise ConfigError(option, value, f"the plan has {', '.join(allowed)}", "name one of these")


def _recipe(plan: Plan) -> str:
    """Name of the recipe and, after a search, of the recipe that it chose."""
    search = plan.report.get("search")
    return plan.header.recipe if search is None else f"{plan.header.recipe} ({search['recipe']['name']})"


def _caption(plan: Plan, axis: Axis) -> str:
    batch = plan.request.batch
    text = f"{count(len(batch.lengths), 'sequence')}, {batch.tokens:,} tokens"
    return text if len(axis.lengths) == len(batch.lengths) else f"the {len(axis.lengths)} longest of {text}"


def _run_summary(run: Run, hardware: str) -> str:
    return (
        f"{run.makespan_us / 1e3:.3f} ms on {hardware}, {100 * run.efficiency:.0f} % of it for balanced work without "
        f"communication"
    )


# --- the mask


def _mask(scene: _Scene) -> Iterator[str]:
    axis = scene.axis
    cells = owners(scene.plan, scene.run.kind, scene.run.phase, axis)
    fills = {rank: scene.colours.of(rank) for rank in np.unique(cells[cells != svg.NOBODY]).tolist()}
    yield svg.rect(LEFT, TOP, MASK, MASK, "#f6f8fa")
    offsets = 10 * MASK * axis.edges // axis.tokens
    yield svg.raster(cells, fills, 10 * LEFT + offsets, 10 * TOP + offsets)
    yield from _sequences(axis)
    middle = TOP + MASK / 2
    yield svg.text(LEFT + MASK / 2, TOP + MASK + 40, "keys (tokens)", 12, "middle")
    yield svg.text(20, middle, "queries (tokens)", 12, "middle", f'transform="rotate(-90 20 {middle:g})"')


def _sequences(axis: Axis) -> Iterator[str]:
    """An outline for each sequence, with the number of its first token if there is room."""
    scale = MASK / axis.tokens
    last = -100.0
    boxes = []
    for offset, length in zip(axis.offsets.tolist(), axis.lengths.tolist(), strict=True):
        position, side = round(offset * scale, 1), round(length * scale, 1)
        boxes.append(f"M{LEFT + position:g} {TOP + position:g}h{side:g}v{side:g}h-{side:g}z")
        if position - last >= 44 and position <= MASK - 44:
            yield from _tick(position, f"{offset:,}")
            last = position
    yield from _tick(MASK, f"{axis.tokens:,}")
    yield f'<path d="{"".join(boxes)}" fill="none" stroke="{svg.PALE}" stroke-width="0.7"/>'


def _tick(at: float, label: str) -> Iterator[str]:
    yield svg.text(LEFT + at, TOP + MASK + 20, label, 10, "middle", f'fill="{svg.PALE}"')
    yield svg.text(LEFT - 8, TOP + at + 4, label, 10, "end", f'fill="{svg.PALE}"')
    yield svg.lines(
        [(LEFT + at, TOP + MASK, LEFT + at, TOP + MASK + 6), (LEFT - 5, TOP + at, LEFT, TOP + at)]
    )


# --- the legend

_ROW = 19


def _columns(colours: Colours) -> int:
    return 1 if len(colours.legend()) <= 26 else 3


def _legend_height(colours: Colours) -> int:
    return -(-len(colours.legend()) // _columns(colours)) * _ROW


def _legend(colours: Colours, plan: Plan) -> Iterator[str]:
    entries, columns = colours.legend(), _columns(colours)
    rows = -(-len(entries) // columns)
    yield svg.text(LEGEND, TOP + 10, "computed by", 12, rest='font-weight="600"')
    for i, (name, fill) in enumerate(entries):
        x, y = LEGEND + 74 * (i // rows), TOP + 22 + _ROW * (i % rows)
        yield svg.rect(x, y, 13, 13, fill)
        yield svg.text(x + 18, y + 11, name, 11)
    if plan.header.head_sets:
        y = TOP + 44 + _ROW * rows
        for i, label in enumerate(("rows in turn: each shows", "one share of the heads")):
            yield svg.text(LEGEND, y + 14 * i, label, 11, rest=f'fill="{svg.PALE}"')


# --- the timeline


def _ranks_to_draw(run: Run) -> list[int]:
    """All ranks, or the longest-waiting ones if there are too many."""
    return sorted(np.argsort(-run.exposed_us, kind="stable")[:MAX_RANKS].tolist())


def _bar(run: Run) -> int:
    return min(max(300 // len(_ranks_to_draw(run)), 8), 22)


def _timelines(scene: _Scene, top: int) -> Iterator[str]:
    run = scene.run
    ranks, bar = _ranks_to_draw(run), _bar(run)
    yield svg.text(LEFT, top, f"simulated: {run.makespan_us / 1e3:.3f} ms", 14, rest='font-weight="600"')
    yield svg.text(LEFT + 186, top, _remark(run), 11, rest=f'fill="{svg.PALE}"')
    yield from _key(top)
    for i, rank in enumerate(ranks):
        yield from _timeline(scene, rank, top + 14 + i * bar, bar - 2)
        if bar >= 11 or i % 4 == 0:
            y = top + 14 + i * bar + min(bar, 14) - 3
            yield svg.text(LEFT - 8, y, rank, min(bar, 11), "end", f'fill="{svg.PALE}"')
    yield from _times(run, top + 16 + bar * len(ranks))


def _times(run: Run, bottom: int) -> Iterator[str]:
    """The axis under the timelines."""
    for part in range(5):
        x, time = LEFT + TRACK * part / 4, run.makespan_us / 1e3 * part / 4
        yield svg.lines([(x, bottom, x, bottom + 5)])
        yield svg.text(x, bottom + 18, f"{time:.3g}", 10, "middle", f'fill="{svg.PALE}"')
    yield svg.text(LEFT + TRACK / 2, bottom + 36, "milliseconds", 12, "middle")


def _remark(run: Run) -> str:
    hidden = len(run.exposed_us) > len(_ranks_to_draw(run))
    return f"the {MAX_RANKS} longest-waiting ranks" if hidden else f"{100 * run.efficiency:.0f} % efficient"


def _key(top: int) -> Iterator[str]:
    """Legend of the timelines' fills, to the right of their title."""
    x = LEFT + TRACK - 400
    entries = (
        ("attention: the rank's colour", None),
        ("other work", OTHER),
        ("waits", WAITING),
        ("rounds", EVEN),
    )
    for name, fill in entries:
        if fill is not None:
            height = 4 if fill == EVEN else 11
            yield svg.rect(x, top - (6 if fill == EVEN else 10), 11, height, _FILLS[fill])
        yield svg.text(x + (0 if fill is None else 15), top, name, 11)
        x += 174 if fill is None else 92


def _timeline(scene: _Scene, rank: int, top: int, height: int) -> Iterator[str]:
    """A rank's work and waits; in a thin strip below, its rounds in flight, alternately dark and light."""
    run, spans = scene.run, scene.run.spans
    is_rank = spans.rank == rank
    work, rounds = is_rank & (spans.stream == 0), is_rank & (spans.stream > 0)
    attends, waits = np.isin(spans.op, ATTENTION), spans.op == Op.WAIT
    activity = _dominant_spans(run, [work & attends, work & ~attends & ~waits, work & waits], scene.steps)
    parities = _dominant_spans(run, [rounds & (spans.round % 2 == parity) for parity in (0, 1)], scene.steps)
    fills = {0: scene.colours.of(rank), 1: _FILLS[OTHER], 2: _FILLS[WAITING]}
    x = 10 * LEFT + np.arange(scene.steps + 1) * 10 * TRACK // scene.steps
    y = [round(10 * (top + part * height)) for part in (0, 0.72, 0.77, 1)]
    yield svg.raster(activity[None, :], fills, x, np.array(y[:2]))
    yield svg.raster(parities[None, :], {0: _FILLS[EVEN], 1: _FILLS[ODD]}, x, np.array(y[2:]))


def _dominant_spans(run: Run, groups: Sequence[Bools], steps: int) -> Ints:
    """int64 [steps]: the group of spans that fills most of each step; NOBODY if all fill less than `MIN_BUSY` of it."""
    edges = np.linspace(0.0, run.makespan_us, steps + 1)
    shares = np.array([share(run, spans, edges) for spans in groups])
    dominant = np.argmax(shares, axis=0)
    return np.where(shares.sum(axis=0) >= MIN_BUSY, dominant, svg.NOBODY).astype(np.int64)
