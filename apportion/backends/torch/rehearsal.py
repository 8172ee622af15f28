"""Row-independence check: a model runs on a subset of rows with attention's results replayed from a run on more rows,
and must compute the same for each row.

Ranks hold parts of a microbatch: a layer that depends on the number of rows, their order or other rows would compute
different values on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from apportion.backends.torch.memory.arrays import DTYPES

_Place = tuple[str, int, int]  # module, number of its call, index of the result
_TOLERANCE = 1e-4  # relative to a row's norm; 16-bit models run in 32 bits
_ROUGH = 2e-2  # for models that cannot run in 32 bits
_SYNCS = ("reduce_grads", "all_reduce_grads")  # of FSDP2's parameter groups, which a hook of forward may set
LOW = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


class Rehearsal:
    """Stands in for a plan's handle in one process. A run of the whole microbatch computes dense attention; a run of a
    part takes its rows from those results. selected: rows of the microbatch, int64 [rows], in the order of the call."""

    def __init__(self, selected: Tensor, documents: Tensor, whole: Rehearsal | None = None) -> None:
        self.selected, self.rows, self.whole, self.exact = selected, len(selected), whole, True
        self._documents = documents
        is_earlier = selected[:, None] >= selected
        self._mask = is_earlier & (documents[:, None] == documents)
        self.outputs: list[Tensor] = []
        self.gathered: list[list[int]] = []
        self.seen = dict[_Place, Tensor]()  # in the order of recording
        self.decisive = set[_Place]()
        self._calls: dict[str, int] = {}
        self.communicator = self

    @property
    def lengths(self) -> list[int]:
        """In a run of the whole microbatch: the number of rows of each document, in order."""
        counts: list[int] = torch.unique_consecutive(self._documents, return_counts=True)[1].tolist()
        return counts

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [1, heads, rows, width] -> [1, rows, heads, width]."""

        def run() -> Tensor:
            mask, groups = self._mask, query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, mask, enable_gqa=groups).transpose(1, 2)

        return self.replay(f"the queries, keys and values of {layer}", (query, key, value), run)

    def replay(self, label: str, inputs: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
        """For the whole microbatch, the result of `run`, [1, rows, ...]; for a part, its rows of the whole result."""
        self.record(label, inputs, decides=True)
        out = run() if self.whole is None else self.whole.outputs[len(self.outputs)][:, self.selected]
        self.outputs.append(out)
        return out

    def all_gather(self, numbers: list[int], about: str) -> list[list[int]]:
        """Returns the numbers that ranks would sum; for a part, those of the whole."""
        self.gathered.append(numbers)
        return [numbers] if self.whole is None else [self.whole.gathered[len(self.gathered) - 1]]

    def record(self, name: str, output: Any, decides: bool = False) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for number, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.seen[name, call, number] = tensor.detach().clone()
                self.decisive |= {(name, call, number)} if decides else set()

    def first_difference(self) -> str | None:
        """The first module whose rows differ from the whole run's, if the difference reaches attention or logits."""
        assert self.whole is not None
        if all(self._agrees(key) for key in self.decisive):
            return None
        return next(key[0] for key in self.seen if not self._agrees(key))

    def _agrees(self, key: _Place) -> bool:
        """True if rows agree to rounding, or there are no rows to compare."""
        assert self.whole is not None
        whole, actual = self.whole.seen.get(key), self.seen[key]
        dims = [] if whole is None else _rows_dims(whole.shape, actual.shape, self.whole.rows, self.rows)
        return whole is None or not dims or any(self._agree_in(dim, whole, actual) for dim in dims)

    def _agree_in(self, dim: int, whole: Tensor, actual: Tensor) -> bool:
        expected = whole.index_select(dim, self.selected)
        rows, expected_rows = (tensor.movedim(dim, 0)[..., None].flatten(1) for tensor in (actual, expected))
        return are_close(rows, expected_rows, self.exact)


@contextmanager
def recording(model: Any, rehearsal: Rehearsal) -> Iterator[None]:
    """Records every module's results in `rehearsal`, inner modules first."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(lambda *args, name=name: rehearsal.record(name, args[-1]))
                stack.callback(hook.remove)
        yield


def _rows_dims(whole: Sequence[int], part: Sequence[int], count: int, rows: int) -> list[int]:
    """The dimensions that may index rows: the only one in which the shapes differ, if its sizes are the numbers of
    rows; for equal numbers of rows, all of this size."""
    if len(whole) != len(part):
        return []
    sizes = [*enumerate(zip(whole, part, strict=True))]
    differing = [dim for dim, (a, b) in sizes if a != b]
    dims = [dim for dim, pair in sizes if pair == (count, rows)]
    return dims if differing == (dims if count != rows else []) else []


def are_close(actual: Tensor, expected: Tensor, exact: bool = True) -> bool:
    """True if each row [rows, width] is close, relative to its norm and that of all rows; NaN in both is equal. If
    not exact, most rows must be close, to 16-bit precision."""
    actual, expected = (torch.nan_to_num(tensor.double(), 0.0, 0.0, 0.0) for tensor in (actual, expected))
    norms = expected.norm(dim=1)
    is_far = (actual - expected).norm(dim=1) > (_TOLERANCE if exact else _ROUGH) * (norms + norms.mean())
    return float(is_far.double().mean()) <= (0 if exact else 0.25)


def is_whole(model: Any) -> bool:
    """True if all weights of the model are in this process, unsharded."""
    tensors = [*model.parameters(), *model.buffers()]
    elsewhere = any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in tensors)
    return not elsewhere and all(tensor.numel() for tensor in model.parameters())


@contextmanager
def noiseless(model: Any, device: torch.device, *others: Any) -> Iterator[Callable[[], None]]:
    """Runs a block without noise or gradients, in float32 or wider, and with other values for constant parameters.
    Yields a function that restores the state of modules and of `others` (configs), which is also restored at the end,
    like the parameters."""
    precision, restore = torch.get_float32_matmul_precision(), snapshot(model, others)
    cuda = [device] if device.type == "cuda" else []
    try:
        torch.set_float32_matmul_precision("highest")
        with (
            torch.random.fork_rng(cuda),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            _varied(model),
        ):
            yield snapshot(model, others)
    finally:
        torch.set_float32_matmul_precision(precision)
        restore()
        for module in model.modules():
            # an FSDP root stays unsharded after forward and would keep stale values
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def _varied(model: Any) -> Iterator[None]:
    """Gives parameters of equal elements random values: gates, tables and layers that begin at zero, or close to it,
    would hide that their rows depend on others. Equal on ranks with equal parameters."""
    saved = list[tuple[Tensor, Tensor]]()
    try:
        for number, parameter in enumerate(model.parameters()):
            values: Tensor = parameter.data
            values = values.to_local() if isinstance(values, DTensor) else values
            if values.dtype not in DTYPES.values() or values.is_meta or not values.numel():
                continue
            low, high = values.aminmax()
            if low == high:
                saved.append((values, low))
                draw = torch.Generator(values.device).manual_seed(number)
                if values.dim() > 1:
                    values.normal_(std=values.shape[-1] ** -0.5, generator=draw)
                else:
                    values.uniform_(0.5, 1.5, generator=draw)
        yield
    finally:
        for values, constant in saved:
            values.copy_(constant)


def snapshot(model: Any, others: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that restores whatever forward may change: attributes of modules and configs, their dicts
    (buffers, and hooks that transformers adds with the first call), and values of buffers (statistics of batches)."""
    dicts = [vars(obj) for obj in (*model.modules(), *others)]
    dicts += [v for obj in dicts for k, v in obj.items() if isinstance(v, dict) and k != "_parameters"]
    attributes, values = [(obj, dict(obj)) for obj in dicts], [(obj, obj.clone()) for obj in model.buffers()]
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    groups = [vars(group) for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    syncs = [(group, {name: group[name] for name in _SYNCS if name in group}) for group in groups]

    def restore() -> None:
        for current, saved in attributes:
            current.clear()
            current.update(saved)
        for buffer, value in values:
            buffer.copy_(value)
        for group, flags in syncs:
            group.update(flags)

    return restore


#: op -> the mean of its random draw, from its arguments after the first
_MEANS: Mapping[Any, Callable[..., float]] = {
    aten.bernoulli_.float: lambda p=0.5, *_: p,
    aten.uniform_.default: lambda low=0.0, high=1.0, *_: (low + high) / 2,
    aten.normal_.default: lambda mean=0.0, *_: mean,
    aten.exponential_.default: lambda rate=1.0, *_: 1 / rate,
    aten.rand.default: lambda *_: 0.5,
    aten.rand_like.default: lambda *_: 0.5,
    aten.randn.default: lambda *_: 0.0,
    aten.randn_like.default: lambda *_: 0.0,
}


class ExactMode(TorchDispatchMode):
    """Dispatch mode in which random draws return their mean (dropout and jitter do not make rows depend on others) and
    16-bit tensors compute in 32 bits (rounding of a product depends on its number of rows, and a router's choice on the
    rounding). wide: False for weights gathered from shards, whose buffers have a fixed dtype."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide = wide

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].dtype in LOW
        if self._wide and not writes:
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        return result.fill_(_MEANS[func](*args[1:])) if func in _MEANS else result


def _in_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in LOW:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value
