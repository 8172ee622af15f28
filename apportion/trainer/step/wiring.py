"""Checks that plans reach attention and that ranks train one model.

PlannedBatch ──► Watch ◄── losses (`shares`), queries, kwargs of models
                   └──optimizer's step──► missing calls; parameters and gradients, compared between ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any
from warnings import warn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from apportion.backends.torch.graphs import nodes
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.trial import ModelTrial
from apportion.ir.errors import ExecutionError
from apportion.trainer.step.accumulation import Accumulation
from apportion.trainer.step.microbatch import Microbatch
from apportion.trainer.step.reduction import SUMS, averaging_error, holds_unreduced, reduction_of, shards_of
from apportion.trainer.step.terms import is_known, running_loss_scale, stepping

_CLOSE = 1e-5  # relative tolerance of norms of equal values on different ranks
_FACTORS = "shares of one mean must have the same factors and divisors on all ranks"
_ROUNDED = 0.01  # relative tolerance of factors in 16 bits
_UNSTEPPED = 32  # iterations without a step of an optimizer that cause a warning
_CLIP = "take norms over all shards, as torch.nn.utils.clip_grad_norm_ does, or p.grad.full_tensor().norm()"
_RATES = "give all ranks the same one, from a value of all ranks, such as the sum of their losses"
#: values that are equal on all ranks, in the order of `Watch._compare`: text of a difference, its rule or remedy, and
#: the relative tolerance
_COMPARISONS = (
    ("factors of losses differ between ranks", _FACTORS, _CLOSE),
    ("factors of losses differ between ranks", _FACTORS, _CLOSE),
    ("weights of losses are different multiples of a batch field", _FACTORS, _CLOSE),
    ("ranks multiplied the gradients of their shards by different factors", _CLIP, _ROUNDED),
    ("learning rates differ between ranks", _RATES, _CLOSE),
)
_LINEAR = ("apportion", "torch")  # packages whose gradient hooks are linear
_HOOKED = (
    "they get a rank's contribution to a gradient, not the sum over ranks; only multiplications, such as masks, are "
    "correct; clip after ap.sum_gradients"
)
UNKNOWN = (
    "on each rank it must be a share of one sum over all ranks, so divide by batch.valid_tokens, "
    "not by a rank's own number of labels (unless all ranks have equally many, and you also divide by the "
    "number of ranks), and sum gradients; "
    "ap.normalised_loss is checked"
)


class Watch:
    """Tracks the batches, models and losses of this process.

    batches: in use. models: changed by `hf.enable`, with a function that checks them again before each pass. modules:
    that call attention, or whose gradients were summed; in both, frozen parameters and buffers are compared too.
    Watches optimizers that step on parameters of a planned loss, which are found once from its graph. Passed checks are
    repeated in each pass over a loader, and for each model. trusted: loaders of trainers' adapters."""

    def __init__(self) -> None:
        self.batches = WeakKeyDictionary[Any, None]()  # the newest last
        self.models = WeakKeyDictionary[Any, Callable[[Any], None]]()
        self.trusted = WeakSet[Any]()
        self.modules = WeakKeyDictionary[nn.Module, None]()  # in the order of their calls, as on other ranks
        self.trial: ModelTrial | None = ModelTrial()  # None if a trainer's adapter checks its models
        self.shared: PlanHandle | None = None  # a handle whose losses are shares of a sum
        self.divided: Microbatch | None = None  # microbatch of a loss that all ranks compute and divide
        self.settled = False  # a step passed the checks, in this pass and for these parameters
        self.latest: Microbatch | None = None  # the microbatch of the latest loss
        self.staged = False  # ranks of the plan hold different layers
        self.stage_layers: Any = WeakIdKeyDictionary()  # this rank's parameters -> number of their stage
        self._with_loss = set[tuple[int, int]]()  # iteration and number of microbatches that had a loss
        self.accounted = False  # factors of losses are known, or the trainer's responsibility
        self.own_loss = False  # an enabled model's forward ran eagerly and may have computed its own loss
        self.unknown = False  # a trainer's loss has no known share
        self.scale = 0.0  # factor of a loss's share in the last backward
        self.divisor = self.multiple = 0.0  # divisor of the last loss; ratio of its weights to a field
        self._scaled: list[
            tuple[Callable[[float], None], float, int]
        ] = []  # checks of a scale, the scale, iteration
        #: of an iteration, microbatch -> divisors of its losses of labels other than the batch's
        self._divisors: tuple[int, dict[int, list[float]]] = -1, {}
        self._pending: list[PlanHandle] = []
        self.accumulation = Accumulation()
        self._unused = False  # kwargs handed out since the last step are not used yet
        self._reached = False
        self._attended = False  # in training, since the last step
        self._hook: Any = None
        self._used, self._past = WeakSet[Any](), WeakSet[Any]()  # plans used since the last loss; with a loss
        self._unmarked = WeakSet[Any]()  # plans with a backward of a loss that has no known term
        self.ranks = 1  # ranks over whose tokens means are taken: a plan's, times groups
        self._transports: list[Any] = []  # of ranks that train one model: of the plan, and across groups
        self.heads: Any = WeakIdKeyDictionary()  # weights of tiled losses since the last step
        self.owners: Any = WeakIdKeyDictionary()  # parameter -> reference to its optimizer, at first None
        self.scanned: Any = WeakIdKeyDictionary()  # parameters of losses whose graphs were read
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # number of an optimizer's parameters that require gradients
        self._trained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._samples: Any = WeakIdKeyDictionary()  # shard -> `_sample` of its gradient as it was reduced
        self._sample_hooks: list[Any] = []  # hooks that do this

    def add(self, batch: Microbatch) -> None:
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)
        batch.handle.observer = self.observe
        if not batch._staged:  # for ticks `TickPipeline` adds the microbatches
            self.batches[batch] = None
        of_plan, groups, self.staged = batch.handle.communicator, batch._replicas, batch._staged
        self.ranks = of_plan.ranks * (1 if groups is None else groups.ranks)
        transports = None if batch._staged else of_plan, groups
        self._transports = [
            transport for transport in transports if transport is not None and transport.ranks > 1
        ]

    def record_attention(self, handle: PlanHandle) -> None:
        """Records that a layer is called under the plan, except for recomputation in backward."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._used.add(handle)
            self._attended = True

    def observe(self, handle: PlanHandle, results: tuple[Tensor, ...]) -> None:
        """Records attention's results of a compiled graph for the check that reruns the model eagerly."""
        trial, self._attended = self.trial, True
        if not (trial is None or trial.part is not None or trial.eager or handle.feeds):
            trial.handle = ref(handle)
            trial.keep(handle, results, partial(self.tensors, handle), self.models)

    def tensors(self, handle: PlanHandle) -> list[Tensor]:
        """The tensors of a handle's batch."""
        return [value for batch in self.batches if batch.handle is handle for value in batch.tensors]

    def record_loss(self, batch: Microbatch, loss: Tensor) -> None:
        """Records a loss of the batch. Raises ExecutionError if some of its layers used an earlier batch's plan."""
        if not batch.microbatch:
            self._with_loss.clear()
        self.latest = batch
        self._with_loss.add((batch.iteration, batch.microbatch))
        handles = {batch.handle, batch.feed.encoder} if batch.feed else {batch.handle}
        late, self._used = {*self._used} & {*self._past} - handles, WeakSet()
        if late and any(node.metadata.get("handle") in late for node in nodes([loss.grad_fn])):
            rule = "attention of some layers used the plan of an earlier batch, not of the loss's batch"
            raise ExecutionError(f"{rule}: pass batch.handle on to every layer, which must not keep it")
        self._past |= handles

    def note_backward(self, handle: PlanHandle, grad: Tensor) -> None:
        """Notes the plan of a running backward whose loss has no known term."""
        if not (self.settled or handle in self._unmarked or is_known()):
            self._unmarked.add(handle)
        self.begin_backward(checks=False)

    def begin_backward(self, checks: bool = True) -> None:
        """Called in a backward of the latest microbatch, before ranks have been compared; see `Accumulation.begin`."""
        if not (self.settled or self.staged or self.latest is None):
            self.accumulation.begin(self.latest, self.owners, checks)

    def expect(self, handle: PlanHandle) -> None:
        """Records that the handle is about to be passed to a model."""
        self._unused, self.shared = True, handle
        if not self._seen():
            self._pending.append(handle)

    def trust(self) -> None:
        """Records that a trainer's adapter checks its models and divides losses correctly."""
        self.trial, self.accounted = None, True

    def begin(self, loader: Any) -> None:
        """Starts a pass over a loader, possibly with another model or loss."""
        self.settled, self._reached, self.latest = False, False, None
        for model, check in [*self.models.items()]:
            check(model)
        self.scale = self.divisor = self.multiple = 0.0
        self.owners.update(dict.fromkeys([*self.owners]))
        if loader in self.trusted:
            self.trust()
        elif self.trial is None:
            self.trial, self.accounted = ModelTrial(), False
        else:
            self.trial.begin()

    def add_unknown(self, parameters: Iterable[Tensor]) -> None:
        """Marks the new parameters of a model whose loss is not known yet."""
        if unknown := [parameter for parameter in parameters if parameter not in self.owners]:
            self.accounted = False
            self.track(unknown)

    def require_all_rows(self, operation: str) -> None:
        """Raises ExecutionError while a trial reruns the model on a few rows: an exchange needs all of them."""
        if self.trial is not None and self.trial.part is not None:
            raise ExecutionError(f"{operation} needs all rows of a rank")

    def check_scaled(self, check: Callable[[float], None]) -> None:
        """Checks `scale` now, and again, without the GradScaler's scale, before its step, when that scale is known.
        Warns if no optimizer steps."""
        check(self.scale)
        if not self.settled:
            iteration = 0 if self.latest is None else self.latest.iteration
            self._scaled.append((check, self.scale, iteration))
            if iteration - self._scaled[0][-1] == _UNSTEPPED and self._transports:
                text = f"{_UNSTEPPED} iterations had a backward, but no torch.optim.Optimizer has stepped"
                warn(f"{text}: neither the model nor its gradients are checked", stacklevel=1)

    def check_divisor(self) -> None:
        """Warns if `divisor`, of labels other than the batch's, differs between the microbatches of an iteration."""
        newest = next(reversed([*self.batches]), None)
        if newest is None:
            return
        if newest.iteration != self._divisors[0]:
            self._divisors = newest.iteration, {}
        divisors = self._divisors[1]
        own, first = divisors.setdefault(newest.microbatch, []), next(iter(divisors.values()))
        own.append(self.divisor)
        if any(abs(a - b) > _CLOSE * abs(a) for a, b in zip(own, first, strict=False)):
            text = (
                f"losses of other labels have the divisors {first} and {own} in an iteration's microbatches"
            )
            warn(f"{text}: divide all by one number, of all ranks and microbatches", stacklevel=1)

    def find_batch(self, handle: PlanHandle | None) -> Microbatch | None:
        """The batch of a handle."""
        return next((batch for batch in self.batches if batch.handle is handle), None)

    def track(self, parameters: Iterable[Tensor]) -> None:
        """Marks parameters of a planned model."""
        for parameter in parameters:
            if parameter not in self.owners:
                self.owners[parameter], self.settled = None, False

    def graph(self, loss: Tensor) -> Iterator[Any]:
        """Yields the nodes of a loss's graph, up to the first parameter of another loss; marks parameters."""
        for node in nodes([loss.grad_fn]):
            if (leaf := getattr(node, "variable", None)) is not None:
                if leaf in self.scanned:
                    return
                self.scanned[leaf] = None
                self.track([leaf])
            yield node

    # ---- around an optimizer's step

    def _seen(self) -> bool:
        if not self._reached and any(handle.calls for handle in self._pending):
            self._reached = True
            self._pending.clear()
        return self._reached

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Runs the checks before a step. Raises ExecutionError."""
        # left over from an earlier loop in this process, or inside another optimizer
        if self is not watch or stepping() not in (None, optimizer):
            return
        if not self._seen() and self._pending:
            text = "a batch was passed to a model, but no attention has used its plan: pass its handle to every layer"
            hf = "for transformers models it is the argument 'apportion' of hf.inputs(batch)"
            raise ExecutionError(f"{text}; {hf}")
        for batch in self.batches:
            fed = batch.feed is None or (batch.handle.fed and batch.feed.encoder.calls)
            if batch.handle.calls and not fed:
                text = "a batch has media, but the model that ran under its plan did not get them"
                remedy = "run the encoder on batch.media, under its handle, and ap.move_rows(x, batch.feed)"
                raise ExecutionError(f"{text}: {remedy}")
        heads = {*map(id, (*self.heads, *shards_of(self.heads)))} if self.heads else {*()}
        self.heads.clear()
        for module in self.modules:
            self.track(module.parameters())  # a functional call has replaced them during forward
            for part in module.modules() if heads else ():
                if id(getattr(part, "weight", None)) in heads and getattr(part, "bias", None) is not None:
                    rule = "multiplies hidden states by the head's weight only, but the head has a bias"
                    raise ExecutionError(f"tiled_loss {rule}: make it without one, or use normalised_loss")
        has_calls = any(batch.handle.calls and not batch._staged for batch in self.batches)
        if has_calls and self.trial is not None and not (self.owners or self.settled):
            # a compiled step, or ping-pong layers
            self.add_unknown(_parameters(optimizer))
        if has_calls and holds_unreduced(_parameters(optimizer)):
            rule = (
                "FSDP2 has not reduced the gradients of the latest microbatch, which the step would leave out"
            )
            raise ExecutionError(f"{rule}: call model.set_requires_gradient_sync(batch.is_last)")
        checks, self._scaled = self._scaled, []
        if checks and (scaled := running_loss_scale()) != 1:
            for check, scale, _iteration in checks:
                check(scale / scaled)
        self._check_models(_parameters(optimizer))
        if self.trial is not None:
            has_run = self.trial.run(_parameters(optimizer), self._transports)
            if has_run and not self.settled and (batch := self.find_batch(self.trial.handle())) is not None:
                batch.check_kinds()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Compares ranks, after the step, since its closure may run backward. Raises ExecutionError."""
        if self is not watch or stepping() not in (None, optimizer):
            return
        params = _parameters(optimizer)
        attended, self._attended = self._attended, False
        # a loss that was not checked
        if self.shared is not None and self.shared.calls and not self.accounted:
            reduction = reduction_of(self.shared.wrapper, {*map(id, params)})
            if reduction is not None and reduction.ranks > 1 and not reduction.sums:
                raise averaging_error(reduction)
        if any(isinstance(param, DTensor) and param not in self.owners for param in params):
            self.track([*shards_of(self.owners)])
        owned = [param for param in params if param in self.owners]
        met = attended and self.trial is not None and self.trial.met
        if not owned and met and self.owners and not any(self.owners.values()):  # the met modules still exist
            steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
            if steps == 2:
                text = "an optimizer steps, but on no parameter of the modules that call attention"
                warn(f"{text}: neither these nor their gradients are checked", stacklevel=1)
        owner = self.owners[owned[0]] if owned else None
        if not owned or (owner is not None and owner() not in (None, optimizer)):  # the first one is checked
            return
        self._check_place()
        if self._transports:
            self.owners.update(dict.fromkeys(owned, ref(optimizer)))
            trained = sum(param.requires_grad for param in params)
            steps, before = self._steps.get(optimizer, 0) + 1, self._trained.get(optimizer, trained)
            steps = steps if trained == before else 1  # DDP does not reduce what is unfrozen later
            self._steps[optimizer], self._trained[optimizer] = steps, trained
            if steps & (steps - 1) == 0:  # at exponentially growing intervals
                self._compare(optimizer, params)
            self._prepare_next(steps, owned)
            hooks = (hook for param in owned for hook in (param._backward_hooks or {}).values())
            if steps == 1 and any(str(hook.__module__).partition(".")[0] not in _LINEAR for hook in hooks):
                warn(f"parameters have hooks: {_HOOKED}", stacklevel=1)
            if self.accounted and {*self._unmarked} & {*self._past}:
                warn(f"a backward is of a loss other than the cross entropy: {UNKNOWN}", stacklevel=1)
            self._unmarked.clear()
            self.settled = True
            if steps == 2 and (
                self.unknown or (not self.accounted and (self.shared is None or self.own_loss))
            ):
                warn(f"the loss cannot be checked: {UNKNOWN}", stacklevel=1)

    def _prepare_next(self, steps: int, owned: list[Tensor]) -> None:
        """Records gradients, and checks models again, in the next step if that is compared. steps: so far."""
        self._samples.clear()
        while self._sample_hooks:
            self._sample_hooks.pop().remove()
        if steps & (steps + 1) != 0:
            return
        if self.trial is not None:
            self.trial.again()
        shards: list[Any] = [one for one in owned if isinstance(one, DTensor) and one.requires_grad]
        self._sample_hooks = [param.register_post_accumulate_grad_hook(self._record) for param in shards]

    def _check_place(self) -> None:
        """Raises ExecutionError if the loss was not the last of an iteration; warns if microbatches had none."""
        if self.latest is None:
            return
        iteration, number = self.latest.iteration, self.latest.microbatch
        if skipped := [i for i in range(number) if (iteration, i) not in self._with_loss]:
            message = f"microbatches {skipped} of iteration {iteration} had no loss before the step"
            rule = "losses are shares of the mean over all: run all, save and resume after is_last"
            warn(f"{message}: {rule}", stacklevel=1)
        if not self.latest.is_last:
            position = f"microbatch {self.latest.microbatch} of iteration {self.latest.iteration}"
            rule = (
                "which has more microbatches; losses are shares of the mean over all: step if batch.is_last"
            )
            raise ExecutionError(f"an optimizer stepped after {position}, {rule}")

    def _check_models(self, params: list[Tensor]) -> None:
        """Raises ExecutionError for an enabled model that trains without plans while batches are yielded."""
        param_ids = {*map(id, params)}
        for model in self.models:
            ran = model.base_model._ran
            if ran and param_ids & {*map(id, model.parameters())}:
                if ran == {False} and self._unused:
                    message = f"{type(model).__name__} ran without a plan while the loader yielded batches"
                    remedy = "its wrapper must pass on the argument 'apportion' of hf.inputs(batch)"
                    raise ExecutionError(f"{message}: {remedy}, like all others")
                ran.clear()
        self._unused = False

    def _record(self, shard: Any) -> None:
        if shard.grad is not None:  # not freed by a step in backward
            self._samples[shard] = _sample(shard).clone()

    def _clip_factor(self, params: list[Any]) -> float:
        """The factor of the gradients of this rank's shards since their reduction; 0.0 if they have not one factor."""
        shards = [param for param in params if param in self._samples and param.grad is not None]
        pairs = [torch.stack((self._samples[shard], _sample(shard))).double().cpu() for shard in shards]
        before, after = torch.cat((torch.zeros(2, 1), *pairs), 1)
        factors = (after / before)[before != 0].tolist()
        return max(factors) if factors and min(factors) > max(factors) * (1 - _ROUNDED) else 0.0

    def _compare(self, optimizer: Any, params: list[Tensor]) -> None:
        """Raises ExecutionError if values of parameters or gradients, factors or learning rates differ between ranks,
        and warns of weights. A collective."""
        by_id = {id(tensor): tensor for tensor in params}
        buffers = dict[int, Tensor]()
        in_backward = torch._C._current_graph_task_id() != -1  # FSDP2's parameters are not sharded then
        for model in () if in_backward else dict.fromkeys((*self.modules, *self.models)):
            model_params = {id(tensor): tensor for tensor in model.parameters()}
            if model_params.keys() & by_id.keys():
                by_id |= model_params  # frozen ones too
                buffers |= {id(tensor): tensor for tensor in _buffers(model)}
        unused = "if some parameters get no gradient, pass find_unused_parameters=True to DDP; unfreeze before wrapping"
        remedies = {"gradients": f"{SUMS}; {unused}", "parameters": "make them equal before the first step"}
        remedies["buffers"] = "sum over ranks what each computes from its own rows"
        for transport in self._transports:
            rate = sum(_rates(optimizer), 0.0)
            factors = [self.scale, self.divisor, self.multiple, self._clip_factor(params), rate]
            by_rank = zip(*transport.gather_floats(factors, "factors"), strict=True)
            for row, (text, rule, close) in zip(by_rank, _COMPARISONS, strict=True):
                if max(row) <= min(filter(None, row), default=0.0) * (1 + close):
                    continue
                if not text.startswith("weights"):
                    raise ExecutionError(f"{text}, {[*row]}: {rule}")
                warn(f"{text}, {[*row]}: {rule}", stacklevel=1)
        for transport, (kind, remedy) in product(self._transports, remedies.items()):
            group = buffers if kind == "buffers" else by_id
            tensors = [tensor for tensor in group.values() if _is_replicated(tensor, transport)]
            values = [tensor.grad if kind == "gradients" else tensor for tensor in tensors]
            rows = transport.gather_floats(_norms(values, transport), f"norms of {kind}")
            if len({*(counts := [*map(len, rows)])}) > 1:
                raise ExecutionError(f"optimizers step on different numbers of parameters: {counts}")
            norms = torch.tensor(rows, dtype=torch.float64)
            differs = ~torch.isclose(norms[0], norms, rtol=_CLOSE, atol=0, equal_nan=True).all(0)
            if differs.any():
                first = int(differs.nonzero()[0])
                raise ExecutionError(
                    f"{kind} differ between ranks, {int(differs.sum())} of {len(differs)}, first of shape "
                    f"{tuple(tensors[first].shape)}: norms {norms[:, first].tolist()}. Remedy: {remedy}; "
                    "if a parameter differs between ranks on purpose, like an expert's, set its attribute `rank_local`"
                )


watch = Watch()


def _parameters(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _rates(optimizer: Any) -> set[float]:
    """The learning rates of parameters that ranks share."""
    groups = optimizer.param_groups
    return {float(one.get("lr", 0.0)) for one in groups if not all(map(_is_local, one["params"]))}


def _buffers(model: nn.Module) -> Iterator[Tensor]:
    """The buffers that checkpoints contain."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


def _sample(shard: Any) -> Tensor:
    """Some elements of the gradient of this rank's shard."""
    return shard.grad.to_local().flatten()[:64]  # type: ignore[no-any-return]


def _is_replicated(param: Tensor, transport: Any) -> bool:
    """True if these ranks hold the same values of the parameter, of the same shard of it, or of several copies of its
    shards."""
    elsewhere = hasattr(param, "_fsdp_flattened") or param.is_meta
    if isinstance(param, DTensor):
        elsewhere |= not _others(transport) - _mesh_ranks(param)
    return param.is_floating_point() and not elsewhere and not _is_local(param)


def _is_local(param: Tensor) -> bool:
    """True for parameters that differ between ranks on purpose, such as experts."""
    return getattr(param, "rank_local", False) or not getattr(param, "allreduce", True)  # Megatron's name


def _others(transport: Any) -> set[int]:
    return {*dist.get_process_group_ranks(transport._base)} - {dist.get_rank()}


def _mesh_ranks(tensor: DTensor) -> set[int]:
    return {*tensor.device_mesh.mesh.flatten().tolist()}


def check_stage(
    number: int, parameters: Iterable[Tensor], transport: Any, ranks: slice, compares: bool
) -> None:
    """Records the parameters of a pipeline stage's layers. Raises ExecutionError if they differ between its ranks. A
    collective of all stages."""
    layers = dict.fromkeys(parameters, number)
    watch.stage_layers.update(layers)
    if compares:
        values: Any = [param.detach() for param in layers if _is_replicated(param, transport)]
        norms = torch.tensor(transport.gather_floats(_norms(values, transport), "norms of layers")[ranks])
        if not torch.isclose(norms[0], norms, rtol=_CLOSE, atol=0, equal_nan=True).all():
            rule = f"parameters differ between the ranks of stage {number}: sum gradients over them"
            raise ExecutionError(f"{rule}, ap.sum_gradients(model, group), since DDP's forward is not called")


def _norms(values: list[Tensor | None], transport: Any) -> list[float]:
    """The norm of each value, -1.0 for None: of this rank's shard, or of all shards if the ranks hold several."""
    with torch.no_grad():
        norms = []
        for value in values:
            if isinstance(value, DTensor) and _others(transport).isdisjoint(_mesh_ranks(value)):
                value = value.to_local()
            norm = -1.0 if value is None else value.float().norm()
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        return norms
