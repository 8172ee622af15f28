"""Forecasts DistCA against Megatron-LM, FlexSP+ and WLB-ideal (its section 6): rows of `benchmarks/papers.py`.

batch       ⎡ sequence 0 ⎤⎡ sequence 1 ⎤...      packed with documents in data order, cut where a sequence ends
Megatron    a sequence is a microbatch, cut zig-zag over CP ranks regardless of its documents; DP groups get
            the same number of sequences, heaviest first to the group with the least work: the best DP x CP
WLB-ideal   documents to DP groups, cut by document or by sequence, whichever is faster: the best DP x CP
FlexSP+     groups of unequal size, balanced over whole layers, with as many tokens per rank as memory holds
DistCA      equal tokens in order, attention balanced over all ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.ir.errors import ApportionError
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.tensors import PHASES
from apportion.planner.cost import CostModel
from apportion.planner.forecast.parallelism import Degrees, Parallelism
from apportion.planner.forecast.step import around_us
from apportion.planner.forecast.training import Training
from apportion.planner.iteration.ticks import TickTable, plan_tick, tick_table
from apportion.planner.pack import Wlb
from apportion.planner.problem import Problem
from apportion.planner.simulate import simulate
from apportion.planner.simulate.pair.run import turns_us
from benchmarks.comparison import LLAMA_8B, with_steps
from benchmarks.paper_runs import AMPLE_GIB, GROUP, K, Row, Run, Theirs, part, row, seconds

Lengths = list[list[int]]  # lengths of the documents of each sequence

#: lengths that DistCA publishes for its data set "Pretrain" (hao-ai-lab/distca, Apache-2.0): upper edge of a bin -> its
#: number of documents
PRETRAIN = {
    1024: 8042,
    2048: 7894,
    4096: 15744,
    6144: 15849,
    8192: 1033,
    16384: 527,
    32768: 221,
    65536: 196,
    131072: 253,
}
#: DistCA's Table 2; FFN and KV heads as in Code Llama 34B (the table has no FFN size; it does have GQA)
LLAMA_34B = Model(64, 16, 128, hidden=8192, ffn=22016, layers=48)
#: DistCA's Table 4: model -> MaxDocLen in thousands -> GPUs -> sequences per batch (without 34B on 256 GPUs)
BATCHES = {
    "8B": {128: {64: 8, 128: 16, 256: 32}, 256: {64: 4, 128: 8, 256: 16}, 512: {64: 2, 128: 4, 256: 8}},
    "34B": {128: {64: 4, 128: 8}, 256: {64: 2, 128: 4}, 512: {64: 2, 128: 4}},
}
#: from DistCA's Table 5, with pipeline stages
BATCHES_4D = {"8B": {128: {64: 32}, 256: {64: 16}, 512: {64: 8}}, "34B": {128: {128: 32}}}
MODELS = {"8B": LLAMA_8B, "34B": LLAMA_34B}
TENSOR = 8
FLAT = Degrees(tensor=TENSOR)
TRAINING = Training(sharding="zero1", recompute="none")
#: section 6.2, without pipeline: the largest gain over each baseline among all models, data sets and sizes
MOST = {"Megatron-LM": 1.92, "WLB-ideal": 1.20, "FlexSP+": 1.35}
#: the same with pipeline, for each model
MOST_4D = {"8B": {"Megatron-LM": 1.83, "WLB-ideal": 1.35}, "34B": {"Megatron-LM": 1.72, "WLB-ideal": 1.25}}
STAGES = (2, 4)
#: per-sequence sharding: the whole sequence zig-zag, keys and values gathered
PER_SEQUENCE = with_steps("per-sequence", "allgather", place={"zigzag": {"over": "batch"}})
#: FlexSP+: candidate token caps per rank, relative to the mean; the largest that fits is used
TOKEN_CAPS = (2.0, 1.75, 1.5, 1.25, 1.0)
ASSUMED = (
    "documents even in the bins of its list, longer ones in proportion, packed into sequences of the longest, two "
    "batches; zero1, no recomputation"
)


@dataclass(frozen=True, order=True)
class SystemTime:
    """A system's time, and the name of the parallelism that stands for it."""

    seconds: float
    name: str


def pack_documents(sequences: int, longest: int, seed: int) -> Lengths:
    """Packs documents of "Pretrain" into sequences of `longest` tokens, cut at sequence ends. Lengths are uniform
    within the bins, whose edges are scaled so that the last one is `longest`."""
    edges, counts = np.array([0, *PRETRAIN], np.float64), np.array(list(PRETRAIN.values()))
    rng = np.random.Generator(np.random.PCG64(seed))
    bins = rng.choice(len(counts), 1024 * sequences, p=counts / counts.sum())
    values = edges[bins] + (edges[bins + 1] - edges[bins]) * rng.random(len(bins))
    ends = np.cumsum(np.ceil(values * (longest / edges[-1])).astype(np.int64))
    bounds = np.unique(np.append(ends[ends < sequences * longest], np.arange(sequences + 1) * longest))
    owner = bounds[:-1] // longest
    return [np.diff(bounds)[owner == i].tolist() for i in range(sequences)]


def join(sequences: Lengths) -> Batch:
    return Batch.from_lengths([length for sequence in sequences for length in sequence])


def deal_sequences(sequences: Lengths, groups: int) -> Lengths:
    """Assigns sequences to groups, heaviest first, each to the group with the least work that is not full; all groups
    get the same number. Returns them in this order: sequence i · groups + g is microbatch i of group g."""
    work = [sum(length**2 for length in item) for item in sequences]
    capacity = len(sequences) // groups
    shares: list[list[int]] = [[] for _ in range(groups)]
    for index in sorted(range(len(sequences)), key=lambda item: -work[item]):
        free = [item for item in shares if len(item) < capacity]
        min(free, key=lambda item: sum(work[i] for i in item)).append(index)
    return [sequences[item[i]] for i in range(capacity) for item in shares]


@dataclass(frozen=True)
class Setting:
    """One setting of DistCA's Table 4 or 5: `sequences` sequences of `longest` thousand tokens on `nodes` nodes with
    `memory_gib` per rank."""

    size: str
    longest: int
    sequences: int
    nodes: int
    memory_gib: float = Hardware.load("h200").memory_gib.value

    @property
    def case(self) -> str:
        return f"{self.size}, {self.nodes * GROUP} GPUs, Pretrain, {self.longest}K"

    @property
    def ranks(self) -> int:
        return self.nodes * GROUP // TENSOR

    def draw(self) -> list[Lengths]:
        return [pack_documents(self.sequences, self.longest * K, seed) for seed in range(2)]

    def run(self, draws: Sequence[Lengths], degrees: Degrees = FLAT) -> Run:
        batches = tuple(join(sequences) for sequences in draws)
        return Run("h200", self.nodes, MODELS[self.size], TRAINING, batches, degrees, self.memory_gib)


# --- baselines


def megatron(setting: Setting, draws: Sequence[Lengths], stages: int = 1) -> list[SystemTime]:
    """The times of every DP x CP grid that fits, with `stages` pipeline stages."""
    times, ranks, sequences = [], setting.ranks // stages, setting.sequences
    for groups in _divisors(ranks):
        if sequences % (groups * stages):
            continue
        degrees = Degrees(TENSOR, stages, microbatches=sequences // (groups * stages))
        run = setting.run([deal_sequences(sample, groups) for sample in draws], degrees)
        grid = Parallelism(PER_SEQUENCE, degrees, ranks // groups, "order")
        try:
            steps = run.steps(grid)
        except ApportionError:
            continue
        if run.fits(steps):
            name = f"per-sequence, DP {groups} x CP {ranks // groups}" + f" x PP {stages}" * (stages > 1)
            times.append(SystemTime(seconds(steps), name))
    return times


def wlb(setting: Setting, draws: Sequence[Lengths], stages: int = 1) -> list[SystemTime]:
    """The time of WLB-ideal's best DP x CP grid, with the fewest microbatches that fit."""
    for microbatches in _divisors(setting.sequences // stages):
        run = setting.run(draws, Degrees(TENSOR, stages, microbatches=microbatches))
        try:
            name, steps = run.best_grid("wlb")
        except (ApportionError, SystemExit):
            continue
        return [SystemTime(seconds(steps), name)]
    return []


def flexsp(setting: Setting, draws: Sequence[Lengths]) -> list[SystemTime]:
    """The time of FlexSP+ with the largest token cap per rank that fits."""
    run = setting.run(draws)
    mean = run.batches[0].tokens / setting.ranks
    for limit in TOKEN_CAPS:
        options = {"flexsp": {"linear": True, "capacity": round(limit * mean)}}
        try:
            steps = run.whole(with_steps("flexsp", "flexsp", place=options))
        except ApportionError:
            continue
        if run.fits(steps):
            return [SystemTime(seconds(steps), f"flexsp, at most {limit:g} of the mean")]
    return []


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# --- DistCA


def distca(
    setting: Setting, draws: Sequence[Lengths], stages: int, hidden: bool = False, ping_pong: bool = False
) -> list[SystemTime]:
    """The times of DistCA with pipeline ticks, a tick's attention spread over the ranks of all stages, for every number
    of microbatches that fits. A tick has the other work of one microbatch. hidden: see `Run`; ping_pong: whether
    each microbatch is split into halves that take turns within a tick."""
    times = []
    for count in _divisors(setting.sequences):
        if count < stages:
            continue
        degrees = Degrees(TENSOR, stages, microbatches=count // stages)
        run = replace(setting.run(draws, degrees), hidden=hidden)
        table = tick_table(stages, count, cap=2 * stages - 1)
        try:
            steps = run.whole("distca")
            attention = [_ticks_seconds(run, table, sequences, ping_pong) for sequences in draws]
        except ApportionError:
            continue
        # microbatches in flight, relative to 1F1B
        in_flight = min(count, 2 * stages - 1) / min(count, stages)
        memory = max(step.memory.total + (in_flight - 1) * step.memory.activations.kept for step in steps)
        if memory <= run.memory_gib * 2**30:
            work = ("head",) if ping_pong else ("linear", "rows", "head", "tensor_parallel")
            work_s = sum(part(steps, name) for name in work)
            fixed_s = part(steps, "data_parallel") + part(steps, "optimizer")
            total_s = float(np.mean(attention)) + work_s * table.ticks / (2 * count) + fixed_s
            name = f"distca, PP {stages}, {count} microbatches" + ", ping-pong" * ping_pong
            times.append(SystemTime(total_s, name))
    return times


def _ticks_seconds(run: Run, table: TickTable, sequences: Lengths, ping_pong: bool) -> float:
    """The seconds of attention in all ticks of a step; with `ping_pong`, of whole layers."""
    size = len(sequences) // table.microbatches
    microbatches = [join(sequences[i * size : (i + 1) * size]) for i in range(table.microbatches)]
    form = Parallelism(PER_SEQUENCE, FLAT)
    cluster, model, links = form.stage(run.cluster), form.rank_model(run.model), form.stage(run.links)
    halves = [microbatches]
    if ping_pong:
        policy, pack = Policy(PER_SEQUENCE), Wlb(microbatches=2)
        problems = [Problem(item, cluster, model, policy, run.hardware) for item in microbatches]
        packings = [pack(problem).microbatches for problem in problems]
        halves = [
            [item.take(packing[half]) for item, packing in zip(microbatches, packings, strict=True)]
            for half in range(2)
        ]
    other_us, costs = around_us(run.setting(form, run.links), projects=False), CostModel(run.hardware, model)
    total = 0.0
    for tick in range(table.ticks):
        options: Any = {"hardware": run.hardware, "verify": False}
        plans = [plan_tick(table, tick, item, cluster, model, **options)[0] for item in halves]
        phase = PHASES[table.phase[tick]]
        if ping_pong:
            total += turns_us(plans[0], plans[1], costs, other_us, links)["default", phase]
        else:
            total += simulate(plans[0], run.hardware, links).runs["default", phase].makespan_us
    return total * run.model.layers_of("default") / table.stages / 1e6


# --- rows


def rows() -> Iterator[Row]:
    """Yields rows: the gain over each baseline in every setting, and the largest gains."""
    yield from _flat_rows()
    yield from _pipeline_rows()


def _flat_rows() -> Iterator[Row]:
    gains: dict[str, list[tuple[float, str]]] = {name: [] for name in MOST}
    hidden: list[float] = []
    for setting in _settings(BATCHES):
        draws = setting.draw()
        run = setting.run(draws)
        planned_steps = run.whole("distca")
        if not run.fits(planned_steps):  # the paper ran it without saying how: assume enough memory for all
            setting = replace(setting, memory_gib=AMPLE_GIB)
        others = {"Megatron-LM": megatron, "WLB-ideal": wlb, "FlexSP+": flexsp}
        fastest = {name: min(times) for name, method in others.items() if (times := method(setting, draws))}
        for name, baseline in fastest.items():
            gains[name].append((baseline.seconds / seconds(planned_steps), baseline.name))
            yield _row(setting.case, "distca", baseline.name, name, (1.0, MOST[name]), gains[name][-1][0])
        ideal = replace(setting.run(draws), hidden=True).whole("distca")
        hidden.append(fastest["Megatron-LM"].seconds / seconds(ideal))
    for name, results in gains.items():
        gain, form = max(results)
        yield _row("most of all settings", "distca", form, name, MOST[name], gain)
    case, name = "most, if ping-pong hid all of DistCA's traffic", "Megatron-LM"
    yield _row(case, "distca", "per-sequence", name, MOST[name], max(hidden))


def _pipeline_rows() -> Iterator[Row]:
    for setting in _settings(BATCHES_4D):
        draws = setting.draw()
        systems = {
            case: min(base for count in STAGES for base in distca(setting, draws, count, *options))
            for case, options in (("", ()), (", traffic hidden", (True,)), (", ping-pong", (False, True)))
        }
        for name, method in {"Megatron-LM": megatron, "WLB-ideal": wlb}.items():
            if candidates := [base for count in STAGES for base in method(setting, draws, count)]:
                published, base = (1.0, MOST_4D[setting.size][name]), min(candidates)
                for case, planned in systems.items():
                    gain = base.seconds / planned.seconds
                    yield _row(f"4D: {setting.case}{case}", planned.name, base.name, name, published, gain)


def _settings(batches: Mapping[str, Mapping[int, Mapping[int, int]]]) -> Iterator[Setting]:
    for size, by_length in batches.items():
        for longest, counts in by_length.items():
            for gpus, sequences in counts.items():
                yield Setting(size, longest, sequences, gpus // GROUP)


def _row(case: str, system: str, form: str, name: str, theirs: Theirs, ours: float) -> Row:
    return row(case, system, form, f"throughput over {name}", theirs, ours, ASSUMED)
