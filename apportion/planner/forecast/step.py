"""Assembles a step from attention: the work of each stage on each microbatch, and the time of the pipeline.

    microbatch   forward   attention │ linear │ rows │ head          of the stage's layers
                 backward  attention │ linear │ rows │ head │ recomputation
    step         pipeline of the microbatches │ exposed data-parallel traffic │ optimizer

Ranks of a plan synchronize in every layer, so a layer takes the attention time of its last rank plus, for all other
work, the time of the fullest rank. Groups of a static grid synchronize once per step. Traffic of weights and gradients
overlaps products and row work, but not attention, which uses the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.ir.errors import ConfigError
from apportion.ir.layer_work import BACKWARD
from apportion.ir.masks.windows import Causal
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.congestion import Congestion
from apportion.planner.forecast.attention import AttentionTimes, PlannedMicrobatch, largest
from apportion.planner.forecast.collectives import exposed_us, gather_us, reduce_us
from apportion.planner.forecast.experts import ExpertRanks, ExpertRows
from apportion.planner.forecast.host import copies
from apportion.planner.forecast.layers import Layers, model_flops
from apportion.planner.forecast.memory import Memory, activations, in_flight, memory, vocabularies
from apportion.planner.forecast.parallelism import Parallelism
from apportion.planner.forecast.recurrent import layer_count
from apportion.planner.forecast.schedule import makespan_us
from apportion.planner.forecast.training import Training

PARTS = (
    *("attention", "recurrent", "linear", "rows", "remap", "head", "recomputation", "tensor_parallel"),
    *("data_parallel", "experts", "all_to_all", "host", "optimizer", "bubble"),
)


@dataclass(frozen=True)
class StepForecast:
    """Forecast of one step. parts: seconds by `PARTS`, of the busiest stage in the slowest group; their sum is the step
    time. tokens, flops: sums over ranks, without recomputation; pairs: computed pairs, over layers; whole_pairs: the
    same for uncut sequences; memory: peak of the rank that needs most; experts: rows of the microbatch that sends the
    most, if there are experts."""

    parts: dict[str, float]
    tokens: int
    flops: float
    pairs: int
    whole_pairs: int
    memory: Memory
    experts: ExpertRows | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Setting:
    """Inputs of a step. cluster: all ranks, and their links; model: the whole model; hardware: kernel times; excess:
    see `Experts.spread`."""

    parallelism: Parallelism
    cluster: Cluster
    model: Model
    training: Training
    hardware: Hardware
    excess: float = 1.0

    def check(self, batch: Batch) -> None:
        """Raises ConfigError for degrees that do not divide evenly, and for unsupported chunks."""
        layers = all_layers(self.model, batch.kinds)
        self.parallelism.check(self.cluster, self.model, layers, self.training.experts)
        if self.model.recurrent and self.training.chunks > 1:
            rule = (
                "apply to attention only: states of recurrent layers would have to pass through them in order"
            )
            raise ConfigError("training.chunks", self.training.chunks, rule, "write 1")
        if self.training.chunks > 1:
            self._check_chunks(batch)

    def _check_chunks(self, batch: Batch) -> None:
        """Raises ConfigError if the recipe does not support chunks, a sequence is not causal or not alone in its
        microbatch, or a rank has fewer tokens than chunks."""
        form, chunks = self.parallelism, self.training.chunks
        if form.recipe.name not in ("ulysses", "upipe"):
            rule = f"need heads split among ranks, but {form.recipe.name} keeps them together"
            raise ConfigError("training.chunks", chunks, rule, "use --recipes ulysses or upipe, or 1")
        microbatches = form.steps() * form.groups(self.cluster)
        causal = all(isinstance(spec, Causal) for kind in batch.masks.values() for spec in kind.specs)
        if len(batch.lengths) > microbatches or not causal:
            reason = f"got {len(batch.lengths)} for {microbatches}" if causal else "a mask is not causal"
            rule = f"need one causal sequence per microbatch, but {reason}"
            raise ConfigError("training.chunks", chunks, rule, "give such a batch, or write 1")
        tokens = batch.tokens // (form.stage(self.cluster).ranks * form.steps())
        if chunks > max(tokens, 1):
            rule = f"must be at most the {tokens} tokens of a rank and microbatch"
            raise ConfigError("training.chunks", chunks, rule, "use fewer")

    @cached_property
    def stage(self) -> Cluster:
        """See `Parallelism.stage`."""
        return self.parallelism.stage(self.cluster)

    @cached_property
    def layers(self) -> Layers:
        form, experts = self.parallelism, self.training.experts
        sparse = self.training.sparse_share(layer_count(self.model))
        spread = experts.spread(form.expert, self.excess)
        rank_model = form.rank_model(self.model)
        return Layers(self.hardware, rank_model, self.training, form.tensor, sparse, form.expert, spread)

    @cached_property
    def expert_ranks(self) -> ExpertRanks:
        form = self.parallelism
        return ExpertRanks(self.cluster, form.expert, self.stage.ranks * form.tensor)

    def expert_rows(self, planned: PlannedMicrobatch) -> ExpertRows:
        form, experts = self.parallelism, self.training.experts
        return ExpertRows.of(experts, planned.rows, form.expert, form.tensor, self.layers.spread)

    def experts_us(self, planned: PlannedMicrobatch) -> tuple[float, float]:
        """(compute, communication): forward times of one layer's routed experts, and of both all-to-alls."""
        layers, experts = self.layers, self.training.experts
        if not experts.count:
            return 0.0, 0.0
        rows, row_bytes = self.expert_rows(planned), layers.model.hidden * layers.model.element_bytes
        all_to_all = 2 * layers.sparse * self.expert_ranks.dispatch_us(experts, rows, row_bytes)
        return layers.experts_us(rows.received), all_to_all

    def stage_layers(self, planned: PlannedMicrobatch) -> float:
        return self.parallelism.stage_layers(all_layers(self.model, planned.plan.header.kinds))


def all_layers(model: Model, kinds: Iterable[str]) -> int:
    """Number of layers of all kinds; the attention kinds must be the model's. Raises ConfigError."""
    kinds = tuple(kinds)
    if isinstance(model.layers, int):
        if len(kinds) > 1:
            rule = f"is one number, but the sequences have masks of {len(kinds)} kinds ({', '.join(kinds)})"
            raise ConfigError("model.layers", model.layers, rule, "give the layers of each kind by its name")
        return layer_count(model)
    unknown = [kind for kind in kinds if kind not in model.layers]
    if unknown:
        rule = f"has no kind {unknown[0]}, for which the sequences have masks"
        remedy = "give each kind a mask in the batch, or by --mask '{kind: mask}'"
        raise ConfigError("model.layers", dict(model.layers), rule, remedy)
    missing = [kind for kind in model.layers if kind not in kinds]
    if missing:
        rule = (
            f"has layers of kind {missing[0]}, for which the sequences have no mask: a step runs all layers"
        )
        raise ConfigError("model.layers", dict(model.layers), rule, "give that kind a mask, or leave it out")
    return layer_count(model)


def step(
    setting: Setting,
    planned: list[list[PlannedMicrobatch]],
    attended: list[list[AttentionTimes]],
    pairs: int,
    batch: Batch,
) -> StepForecast:
    """The step of one batch. planned, attended: microbatches of the planned groups; pairs: computed pairs of all
    groups. Raises ConfigError."""
    if setting.parallelism.expert > setting.parallelism.tensor * len(planned[0][0].rows):
        attended = [[_slowest(times) for times in zip(*attended, strict=True)]] * len(planned)
    group_parts = [_group(setting, group, times) for group, times in zip(planned, attended, strict=True)]
    slowest = max(group_parts, key=lambda parts: sum(parts.values()))
    after = _after_step_us(setting, planned[0][0], _least_hiding_us(setting, planned))
    parts = {name: (slowest.get(name, 0.0) + after.get(name, 0.0)) / 1e6 for name in PARTS}
    count = all_layers(setting.model, batch.kinds)
    flops = model_flops(setting.model, setting.training, count, batch.tokens, pairs)
    whole_pairs = sum(setting.model.layers_of(kind) * batch.area(kind) for kind in batch.kinds)
    microbatches = [item for group in planned for item in group] if setting.training.experts.count else []
    rows = max((setting.expert_rows(item) for item in microbatches), default=None)
    return StepForecast(parts, batch.tokens, flops, pairs, whole_pairs, _memory(setting, planned), rows)


def _slowest(attended: Sequence[AttentionTimes]) -> AttentionTimes:
    """The slowest times of groups that exchange rows of experts, and so wait for each other in each layer."""
    forward, backward, *recurrent_us = (
        max(times)
        for times in zip(
            *((item.forward_us, item.backward_us, *item.recurrent) for item in attended), strict=True
        )
    )
    return AttentionTimes(forward, backward, (recurrent_us[0], recurrent_us[1]))


def around_us(setting: Setting, projects: bool) -> dict[str, tuple[float, float]]:
    """Microseconds per layer and token of the work before and after attention, for each phase: products, row work,
    tensor-parallel traffic, and recomputation in backward. With ping-pong, the work of one half of a microbatch
    overlaps the messages of the other. projects: True if programs compute Q, K and V."""
    layers, stage = setting.layers, setting.stage
    products = layers.linear_us(1, projects=True)
    projections = layers.linear_us(1) - products
    rows, tensor = layers.rows_us(1) / 2, (layers.tensor_us(1, stage) - layers.tensor_us(0, stage)) / 2
    before, after = projections * (not projects) + rows, products + rows
    recomputed = (before + after + 2 * tensor) * (setting.training.recompute != "none")
    return {
        "forward": (before + tensor, after + tensor),
        "backward": (recomputed + BACKWARD * after + tensor, BACKWARD * before + tensor),
    }


def _group(
    setting: Setting, group: Sequence[PlannedMicrobatch], attended: Sequence[AttentionTimes]
) -> dict[str, float]:
    """Microseconds by part of the busiest stage of a group, including its idle time."""
    stages = setting.parallelism.pipeline
    rows = [
        [_StageWork.of(setting, item, times, stage) for item, times in zip(group, attended, strict=True)]
        for stage in range(stages)
    ]
    forward, backward = (
        np.array([[getattr(work, phase) for work in row] for row in rows])
        for phase in ("forward_us", "backward_us")
    )
    total = makespan_us(forward, backward, setting.parallelism.virtual, _hop_us(setting, group))
    busy = (forward + backward).sum(1)
    stage = int(np.argmax(busy))
    parts = {name: float(sum(work.parts[name] for work in rows[stage])) for name in rows[stage][0].parts}
    return parts | {"bubble": total - float(busy[stage])}


@dataclass(frozen=True)
class _StageWork:
    """Work of a stage on a microbatch. parts: microseconds, forward and backward together."""

    forward_us: float
    backward_us: float
    parts: dict[str, float]

    @staticmethod
    def of(setting: Setting, planned: PlannedMicrobatch, attended: AttentionTimes, stage: int) -> _StageWork:
        form, layers = setting.parallelism, setting.layers
        count, recompute = setting.stage_layers(planned), setting.training.recompute
        linear, rows = _products_us(layers, planned) * count, layers.rows_us(planned.even) * count
        tensor = layers.tensor_us(planned.even, setting.stage) * count
        head = layers.head_us(planned.even) * (stage == form.pipeline - 1)
        experts, all_to_all = (us * count for us in setting.experts_us(planned))
        attention = attended.forward_us / form.pipeline
        recurrent_us, recurrent_grad_us = (us / form.pipeline for us in attended.recurrent)
        layer = recurrent_us + linear + rows + tensor + experts + all_to_all
        recomputed = {"none": 0.0, "selective": layer}.get(recompute, layer + attention)
        remap_us = planned.moves_us * count / 2
        exposed, exposed_grad = _exposed_traffic_us(setting, planned, stage)
        forward = {"attention": attention, "linear": linear, "rows": rows, "remap": remap_us, "head": head}
        forward |= {"tensor_parallel": tensor, "data_parallel": exposed, "recomputation": 0.0}
        forward |= {"experts": experts, "all_to_all": all_to_all, "recurrent": recurrent_us}
        recomputed += layers.mlp_us(planned.even) * count * setting.training.tiles_mlp
        backward = {
            "attention": attended.backward_us / form.pipeline,
            "linear": BACKWARD * linear,
            "rows": BACKWARD * rows,
            "remap": remap_us,
            "head": BACKWARD * head,
            "tensor_parallel": tensor,
            "data_parallel": exposed_grad,
            "recomputation": recomputed,
            "recurrent": recurrent_grad_us,
            "experts": BACKWARD * experts,
            "all_to_all": all_to_all,
        }
        for phase, entry in (("forward", forward), ("backward", backward)):
            entry["host"] = _exposed_copies_us(setting, planned, phase, sum(entry.values()) - entry["head"])
        parts = {name: forward[name] + backward[name] for name in forward}
        return _StageWork(sum(forward.values()), sum(backward.values()), parts)


def _products_us(layers: Layers, planned: PlannedMicrobatch) -> float:
    """Time of one layer's products, forward; with a remap, some run in the balanced linear layout."""
    linear = layers.linear_us(planned.busy, planned.projects)
    if planned.even == planned.busy:
        return linear
    share = 1 - layers.projection_parameters / layers.linear_parameters
    return (1 - share) * linear + share * layers.linear_us(planned.even, planned.projects)


def _exposed_copies_us(setting: Setting, planned: PlannedMicrobatch, phase: str, work_us: float) -> float:
    """Exposed host copies: the excess over the layers' work, `work_us` in total."""
    count, host_gbs = setting.stage_layers(planned), setting.hardware.host_gbs.value
    moved = copies(setting.layers, planned.tokens, phase, planned.stages)
    return max(moved.us(host_gbs) * count - work_us, 0.0)


def _hiding_us(setting: Setting, planned: PlannedMicrobatch) -> float:
    """Work that hides weight and gradient traffic: one layer's products and row work, forward; 0 without overlap."""
    if not setting.training.overlap:
        return 0.0
    layers = setting.layers
    return _products_us(layers, planned) + layers.rows_us(planned.even) + setting.experts_us(planned)[0]


def _exposed_traffic_us(setting: Setting, planned: PlannedMicrobatch, stage: int) -> tuple[float, float]:
    """Exposed microseconds of a microbatch, (forward, backward): gathering of sharded weights for every pass over a
    layer, and scattering of sharded gradients after each microbatch. The embedding's transfers are fully exposed, since
    it is used first and its gradient comes last; the head's are hidden if traffic overlaps at all."""
    if not setting.training.shards("gradients"):
        return 0.0, 0.0
    layers, ranks = setting.layers, setting.stage
    count, hiding_us = setting.stage_layers(planned), _hiding_us(setting, planned)
    sizes = layers.model.element_bytes, layers.gradient_bytes
    gathered, scattered = (_layer_us(setting, gather_us, size) for size in sizes)
    matrices = float(stage == 0)
    if not setting.training.overlap and stage in (0, setting.parallelism.pipeline - 1):
        matrices = vocabularies(setting.training, setting.parallelism.pipeline)[stage > 0]
    first, last = (gather_us(layers.vocabulary_parameters * size, ranks) * matrices for size in sizes)
    recomputed = hiding_us * (setting.training.recompute != "none")
    if not setting.training.shards("weights"):
        return 0.0, exposed_us(scattered, BACKWARD * hiding_us + recomputed, count) + last
    forward = exposed_us(gathered, hiding_us, count) + first
    return forward, exposed_us(gathered + scattered, BACKWARD * hiding_us + recomputed, count) + last


def _layer_us(setting: Setting, collective: Callable[[float, Cluster], float], size: int) -> float:
    """Collective time for the weights or gradients of a layer, `size` bytes per parameter: over all ranks; those
    of experts over the experts' copies."""
    layers, shared = setting.layers, collective(setting.layers.parameters * size, setting.stage)
    if not layers.sparse:
        return shared
    return shared + collective(layers.expert_parameters * size, setting.expert_ranks.replica_cluster)


def _least_hiding_us(setting: Setting, planned: list[list[PlannedMicrobatch]]) -> float:
    """The minimum over groups of `_hiding_us` of their last microbatch."""
    return min(_hiding_us(setting, group[-1]) for group in planned)


def _after_step_us(setting: Setting, planned: PlannedMicrobatch, hiding_us: float) -> dict[str, float]:
    """Microseconds once per step: reduction of gradients that were not scattered earlier and gathering of weights with
    a sharded optimizer (both fully exposed for vocabulary matrices), and the optimizer."""
    layers, training = setting.layers, setting.training
    stage = setting.stage
    count = setting.stage_layers(planned)
    first, last = vocabularies(training, setting.parallelism.pipeline)
    parameters = layers.parameters * count + layers.vocabulary_parameters * max(first, last)
    experts = layers.expert_parameters * count
    share = parameters + experts
    if training.shards("optimizer"):
        share = parameters / stage.ranks + experts * setting.parallelism.expert / setting.expert_ranks.ranks
    result = {"optimizer": layers.optimizer_us(share)}
    if training.shards("weights"):
        return result
    exposed, vocabulary = 0.0, layers.vocabulary_parameters * max(first, last)
    if not training.shards("gradients"):
        reduce = gather_us if training.shards("optimizer") else reduce_us
        hidden = (BACKWARD + (training.recompute != "none")) * hiding_us
        exposed += exposed_us(_layer_us(setting, reduce, layers.gradient_bytes), hidden, count)
        exposed += reduce(vocabulary * layers.gradient_bytes, stage)
    if training.shards("optimizer"):
        number = layers.model.element_bytes
        exposed += exposed_us(_layer_us(setting, gather_us, number), hiding_us, count)
        exposed += gather_us(vocabulary * number, stage)
    return result | {"data_parallel": exposed}


def _hop_us(setting: Setting, group: Sequence[PlannedMicrobatch]) -> float:
    """Time to send the hidden states of the largest microbatch to the next stage."""
    form, cluster, model = setting.parallelism, setting.cluster, setting.model
    if form.pipeline == 1:
        return 0.0
    size = max(microbatch.tokens for microbatch in group) * model.hidden * model.element_bytes / form.tensor
    stage = setting.stage
    is_inside = stage.ranks * form.tensor * form.pipeline <= cluster.ranks_per_node
    if is_inside:
        return size / (cluster.intra_gbs * 1e3) + cluster.intra_latency_us
    congestion = Congestion.of(setting.hardware) or Congestion()  # each stage sends to a single peer
    return size / (cluster.inter_gbs_per_rank * congestion.one_peer * 1e3) + cluster.inter_latency_us


def _memory(setting: Setting, planned: list[list[PlannedMicrobatch]]) -> Memory:
    """Memory of the first or the last stage, whichever needs more."""
    form, fullest, layers = setting.parallelism, largest(planned), setting.layers
    ranks, count = setting.stage.ranks, setting.stage_layers(fullest)
    memories = []
    for stage, ends in zip(
        (0, form.pipeline - 1), vocabularies(setting.training, form.pipeline), strict=True
    ):
        flight = in_flight(form.pipeline, form.steps(), form.virtual, last=stage > 0)
        has_head = stage == form.pipeline - 1
        sizes = activations(layers, count * flight, fullest.tokens, fullest.bytes, fullest.projects, has_head)
        copies = ranks * form.tensor // form.expert
        memories.append(memory(layers, count, ranks, ends, sizes, has_head, copies))
    return max(memories, key=lambda item: item.total)
