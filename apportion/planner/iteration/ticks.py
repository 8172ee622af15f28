"""Pipeline ticks (DistCA, section 4.1 and figure 8): all stages of a tick run the same phase, so that the attention of
a tick is one batch over the ranks of all stages, idle ones included.

    1F1B     stage 0   F0 F1 .  B0 F2 B1 .  B2       a stage runs backward while its neighbours run forward
             stage 1   .  F0 B0 F1 B1 F2 B2 .

    ticks    stage 0   F0 F1 .  F2 B0 .  B1 B2       backwards wait for a backward tick; the last ones fill the drain
             stage 1   .  F0 B0 F1 B1 F2 B2 .

    microbatches ──tick_table──► ticks ──tick_batch──► one Batch per tick ──plan(distca)──► one Plan per tick

A tick's plan has both programs; a forward tick runs one, a backward tick the other. Every sequence is on the ranks of
its stage, in a layout that does not depend on the tick, so that a backward tick, under another plan, finds the rows
that the forward tick of the same microbatch has saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.job import Job
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.fields import instance, instances, integer, name, sequence
from apportion.ir.isa import MAX_RANKS
from apportion.ir.masks.spec import Mask
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.sequences import DEFAULT_KIND, Kind
from apportion.ir.tensors import PHASES
from apportion.planner.api import plan

FORWARD, BACKWARD = range(2)
IDLE = -1
#: homes are ranges of rows for any mask, so that a microbatch has one layout in all ticks and stages. (`head_tail: all`
#: would work as well; on 4 stages x 4 ranks of 32K tokens it took 9 % longer.)
RECIPE = Recipe(
    "distca",
    {
        "shard": {"sequences": {}},
        "place": {"distca": {"head_tail": "none"}},
        "route": {"node": {}},
        "schedule": {"gather": {"local": "first"}},
    },
)

MAX_ENTRIES = 2**20  # entries of a table per phase, each a chunk of a microbatch on a stage


@dataclass(frozen=True, eq=False)
class TickTable:
    """The microbatch of each stage in each tick.

    virtual: model chunks per stage (1: plain; more: interleaved); chunk c of stage p is virtual stage c * stages + p.
    phase: int64 [ticks], 0 forward, 1 backward. microbatch, chunk: int64 [ticks, stages], -1 if the stage is idle.
    """

    stages: int
    microbatches: int
    virtual: int
    phase: Ints
    microbatch: Ints
    chunk: Ints

    @property
    def ticks(self) -> int:
        return len(self.phase)

    @cached_property
    def peak(self) -> Ints:
        """int64 [stages]: maximum chunks of microbatches in flight on each stage (forward begun, backward not done).
        With `virtual` 1 these are microbatches; otherwise each has the activations of 1 / virtual of a stage."""
        starts = (self.microbatch != IDLE) & (self.phase == FORWARD)[:, None]
        ends = (self.microbatch != IDLE) & (self.phase == BACKWARD)[:, None]
        counts: Ints = (np.cumsum(starts, 0) - np.cumsum(ends, 0)).max(0)
        return counts

    @property
    def idle_fraction(self) -> float:
        """Fraction of (tick, stage) slots in which the stage runs no microbatch and can serve attention."""
        return float((self.microbatch == IDLE).mean())

    def __str__(self) -> str:
        names = [[self._name(tick, stage) for tick in range(self.ticks)] for stage in range(self.stages)]
        width = max(len(name) for row in names for name in row)
        lines = (" ".join(name.ljust(width) for name in row) for row in names)
        return "\n".join(f"stage {stage}  {line}".rstrip() for stage, line in enumerate(lines))

    def _name(self, tick: int, stage: int) -> str:
        if self.microbatch[tick, stage] == IDLE:
            return "."
        chunk = "abcdefghijklmnopqrstuvwxyz"[self.chunk[tick, stage] % 26] if self.virtual > 1 else ""
        return f"{'FB'[self.phase[tick]]}{self.microbatch[tick, stage]}{chunk}"


def tick_table(stages: int, microbatches: int, virtual: int = 1, cap: int | None = None) -> TickTable:
    """Finds the table with the fewest ticks under the memory cap; among equals, the lowest peak.

    cap: maximum chunks of microbatches in flight on a stage (None: on each stage as many as 1F1B, plain or interleaved,
    has there). Plain tables need a cap of min(microbatches, 2 stages - 1) for as few ticks as 1F1B, which needs only
    `stages`; with a lower cap stages wait for their backwards. Tries every limit on consecutive ticks of a phase while
    the other could run; 1 is enough under a high cap. Interleaved stages process chunks in the order of Megatron-LM
    (groups of `stages` microbatches, chunk after chunk). Raises ConfigError; CapacityError for a cap below `virtual`.
    """
    stages = integer("ticks.stages", stages)
    microbatches, virtual = integer("ticks.microbatches", microbatches), integer("ticks.virtual", virtual)
    total = virtual * microbatches
    integer("ticks.stages x ticks.microbatches x ticks.virtual", stages * total, 1, MAX_ENTRIES)
    caps = _chunks_in_1f1b(stages, virtual) if cap is None else [integer("ticks.cap", cap)] * stages
    if min(caps) < virtual:
        raise CapacityError(
            f"a microbatch has {virtual} chunks on every stage, all in flight before its backward; the cap is {cap}: "
            f"raise it to {virtual} or use fewer virtual stages"
        )
    runs = range(1, min(total, 2 * stages * virtual) + 1)
    tables = [_Pipeline(stages, microbatches, virtual, caps).run(longest) for longest in runs]
    return min(tables, key=lambda table: (table.ticks, int(table.peak.max()), int(table.peak.sum())))


def _chunks_in_1f1b(stages: int, virtual: int) -> list[int]:
    """Maximum chunks in flight on each stage of 1F1B: its warm-up, as in Megatron-LM, plus one."""
    later = [stages - 1 - stage for stage in range(stages)]
    return [after + 1 if virtual == 1 else 2 * after + (virtual - 1) * stages + 1 for after in later]


@dataclass
class _Pipeline:
    """Simulated pipeline stages. room: maximum chunks in flight on each stage. done: microbatches finished by each
    virtual stage, [phase][virtual stage]."""

    stages: int
    microbatches: int
    virtual: int
    room: list[int]
    done: list[list[int]] = field(init=False)
    live: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.done = [[0] * (self.stages * self.virtual) for _ in PHASES]
        self.live = [0] * self.stages

    def run(self, longest: int) -> TickTable:
        """Fills the table with at most `longest` consecutive ticks of a phase while the other could run."""
        phases: list[int] = []
        rows: list[list[tuple[int, int]]] = []
        phase, row = FORWARD, 0
        while self.done[BACKWARD][0] < self.microbatches:
            ready = [[self._ready(p, stage) for stage in range(self.stages)] for p in (FORWARD, BACKWARD)]
            is_ready = [any(v != IDLE for v in stages) for stages in ready]
            if not is_ready[phase] or (row >= longest and is_ready[1 - phase]):
                phase, row = 1 - phase, 0
            row += 1
            rows.append([self._advance(phase, v) for v in ready[phase]])
            phases.append(phase)
        microbatch, chunk = np.moveaxis(np.array(rows, np.int64), 2, 0)
        return TickTable(self.stages, self.microbatches, self.virtual, np.array(phases), microbatch, chunk)

    def _ready(self, phase: int, stage: int) -> int:
        """The virtual stage that `stage` runs in a tick of this phase, or IDLE."""
        is_ready = self._can_forward if phase == FORWARD else self._can_backward
        chunks = [v for v in range(stage, len(self.done[phase]), self.stages) if is_ready(v)]
        return min(chunks, key=lambda v: self._priority(phase, v), default=IDLE)

    def _priority(self, phase: int, v: int) -> tuple[int, int]:
        chunk = v // self.stages
        return self.done[phase][v] // self.stages, chunk if phase == FORWARD else -chunk

    def _can_forward(self, v: int) -> bool:
        """True if room remains for the later chunks of the same microbatch, without which no backward could ever
        start."""
        count, later = self.done[FORWARD][v], self.virtual - 1 - v // self.stages
        available = self.microbatches if v == 0 else self.done[FORWARD][v - 1]
        return count < available and self.live[v % self.stages] + 1 + later <= self.room[v % self.stages]

    def _can_backward(self, v: int) -> bool:
        counts, last = self.done[BACKWARD], len(self.done[BACKWARD]) - 1
        available = self.done[FORWARD][v] if v == last else counts[v + 1]
        return counts[v] < available

    def _advance(self, phase: int, v: int) -> tuple[int, int]:
        """Starts a virtual stage; returns its (microbatch, chunk)."""
        if v == IDLE:
            return IDLE, IDLE
        microbatch = self.done[phase][v]
        self.done[phase][v] += 1
        self.live[v % self.stages] += 1 if phase == FORWARD else -1
        return microbatch, v // self.stages


# ------------------------------------------------------------------------------------------------- batches of ticks


@dataclass(frozen=True)
class TickPart:
    """One stage's part of a tick: chunk `chunk` of microbatch `microbatch`, with sequences [first, last) and tokens
    [start, start + tokens) of the tick's batch."""

    stage: int
    chunk: int
    microbatch: int
    first: int
    last: int
    start: int
    tokens: int


@dataclass(frozen=True, eq=False)
class TickBatch:
    """The batch of one tick, its phase ("forward", "backward"), and the parts of busy stages, in order."""

    batch: Batch
    phase: str
    parts: tuple[TickPart, ...]


def stage_ranks(stage: int, replicas: int) -> tuple[int, ...]:
    """The ranks of a stage: stages are consecutive, `replicas` ranks each."""
    return tuple(range(stage * replicas, (stage + 1) * replicas))


def tick_batch(
    table: TickTable,
    tick: int,
    microbatches: Sequence[Batch],
    replicas: int,
    kinds: Sequence[str] | None = None,
) -> TickBatch:
    """Builds the batch of a tick from the sequences of all busy stages, with homes on the ranks of their stage.

    microbatches: the batch of each, for the `replicas` ranks of a stage together (their home_ranks count from 0);
    kinds: the attention kind of each virtual stage's layer (None: the only kind). The batch has a single kind, in which
    every sequence has the mask of its stage's kind. Raises ConfigError.
    """
    instance("table", table, TickTable)
    microbatches = list(instances("microbatches", microbatches, Batch))
    tick, replicas = integer("tick", tick, 0, table.ticks - 1), integer("replicas", replicas, 1, MAX_RANKS)
    kinds = _kinds(table, microbatches, kinds)
    parts, pieces, sequences, tokens = [], [], 0, 0
    for stage in range(table.stages):
        index, chunk = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
        if index == IDLE:
            continue
        batch = microbatches[index]
        count = len(batch.lengths)
        parts.append(TickPart(stage, chunk, index, sequences, sequences + count, tokens, batch.tokens))
        pieces.append(
            _Piece(batch, kinds[chunk * table.stages + stage], sequences, stage_ranks(stage, replicas))
        )
        sequences, tokens = sequences + count, tokens + batch.tokens
    return TickBatch(_concatenate(pieces), PHASES[table.phase[tick]], tuple(parts))


def tick_job(job: Job, table: TickTable, kinds: Sequence[str] | None = None) -> Job:
    """The job with each tick of an iteration as a microbatch of one layer. job: for the ranks of all stages; kinds: of
    the virtual stages, which have equally many layers. Raises ConfigError."""
    layers = job.model.layers
    if kinds is not None and isinstance(layers, Mapping):
        counts, total = Counter(kinds), sum(layers.values())
        if any(counts[kind] * total != count * len(kinds) for kind, count in layers.items()):
            rule = f"must be in proportion to the model's layers, {dict(layers)}: stages have equally many"
            raise ConfigError("kinds", [*kinds], rule, "name the kind of each virtual stage's layers")
    if job.ranks % table.stages:
        rule = f"must be a multiple of the {table.stages} stages"
        raise ConfigError("cluster.ranks", job.ranks, rule, "give every stage the same number of ranks")
    if job.packs:
        rule = "would mix sequences of several ticks"
        raise ConfigError(
            "recipe.pack", job.policy.recipe.name, rule, "leave it out: ticks are planned one by one"
        )
    place = job.policy.recipe.step("place")
    if place is None or place.name != "distca":
        rule = "does not keep a microbatch's rows in place in all ticks; only the place pass distca does"
        remedy = "leave recipe out, or pass distca or a recipe with that pass"
        raise ConfigError("recipe", job.policy.recipe.name, rule, remedy)
    return replace(job, microbatches=table.ticks, model=replace(job.model, layers=1))


def ticks_of(
    table: TickTable,
    samples: Sequence[Ints],
    microbatches: Sequence[Batch],
    ranks: int,
    kinds: Sequence[str] | None = None,
) -> tuple[tuple[Ints, ...], tuple[Batch, ...]]:
    """(samples of each tick's sequences, batch of each tick), from the samples and batches of the microbatches. ranks:
    of all stages. Raises ConfigError."""
    replicas = ranks // table.stages
    tick_batches = [tick_batch(table, tick, microbatches, replicas, kinds) for tick in range(table.ticks)]
    sample_ids = (np.concatenate([samples[part.microbatch] for part in tick.parts]) for tick in tick_batches)
    return tuple(sample_ids), tuple(tick.batch for tick in tick_batches)


def _kinds(table: TickTable, microbatches: Sequence[Batch], kinds: Sequence[str] | None) -> Sequence[str]:
    if len(microbatches) != table.microbatches:
        rule = f"the table has {table.microbatches} microbatches"
        raise ConfigError("microbatches", len(microbatches), rule, "give one batch for each")
    count = table.stages * table.virtual
    if kinds is None:
        names = {kind for batch in microbatches for kind in batch.kinds}
        if len(names) > 1:
            rule = "must name the attention kind of each stage if there are several"
            raise ConfigError("kinds", None, rule, f"list one of {', '.join(sorted(names))} for each stage")
        return [*names] * count
    kinds = [name("kinds", kind) for kind in sequence("kinds", kinds)]
    if len(kinds) != count:
        rule = f"must name the attention kind of each of the {count} virtual stages"
        raise ConfigError("kinds", list(kinds), rule, "list one for each, chunk after chunk")
    return kinds


@dataclass(frozen=True)
class _Piece:
    """One microbatch in the tick's batch: its active kind, its first sequence there, and its ranks."""

    batch: Batch
    kind: str
    first: int
    ranks: tuple[int, ...]

    @property
    def masks(self) -> list[Mask]:
        """The mask of each sequence."""
        if self.kind not in self.batch.masks:
            rule = f"the microbatch has the kinds {', '.join(self.batch.kinds)}"
            raise ConfigError("kinds", self.kind, rule, "use one of them")
        kind_masks = self.batch.masks[self.kind]
        return [kind_masks.specs[index] for index in kind_masks.index.tolist()]

    def homes(self) -> dict[int, tuple[int, ...]]:
        homes = self.batch.home_ranks
        return {
            self.first + i: tuple(self.ranks[rank] for rank in homes[i]) if i in homes else self.ranks
            for i in range(len(self.batch.lengths))
        }

    def shifted(self, values: Mapping[int, Any]) -> dict[int, Any]:
        return {self.first + i: value for i, value in values.items()}


def _concatenate(pieces: list[_Piece]) -> Batch:
    """Concatenates all pieces into one batch of one kind."""
    masks = [mask for piece in pieces for mask in piece.masks]
    number = {mask: index for index, mask in enumerate(dict.fromkeys(masks))}
    kind = Kind(tuple(number), np.array([number[mask] for mask in masks]))
    homes: dict[int, tuple[int, ...]] = {}
    positions: dict[int, Ints] = {}
    labels: dict[int, Ints] = {}
    for piece in pieces:
        homes |= piece.homes()
        positions |= piece.shifted(piece.batch.own_positions)
        labels |= piece.shifted(piece.batch.own_labels)
    lengths = np.concatenate([piece.batch.lengths for piece in pieces])
    return Batch(lengths, {DEFAULT_KIND: kind}, homes, positions, labels)


def plan_tick(
    table: TickTable,
    tick: int,
    microbatches: Sequence[Batch],
    cluster: Cluster,
    model: Model,
    kinds: Sequence[str] | None = None,
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    *,
    hardware: Hardware | str | None = None,
    verify: bool = True,
) -> tuple[Plan, TickBatch]:
    """Plans one attention layer in one tick over the ranks of all stages, `cluster.ranks` = stages x replicas.

    A tick runs the program of its phase. recipe: DistCA's by default. Other arguments as in `tick_batch` and `plan`.
    Raises ConfigError, CapacityError.
    """
    instance("table", table, TickTable)
    instance("cluster", cluster, Cluster)
    instance("model", model, Model)
    if cluster.ranks % table.stages:
        rule = f"must be a multiple of the {table.stages} stages"
        raise ConfigError("cluster.ranks", cluster.ranks, rule, "give every stage the same number of ranks")
    result = tick_batch(table, tick, microbatches, cluster.ranks // table.stages, kinds)
    layer_model = replace(model, layers=1)
    chosen = RECIPE if recipe is None else recipe
    return plan(result.batch, cluster, layer_model, chosen, hardware=hardware, verify=verify), result
