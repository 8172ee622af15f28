"""Checks that a model's layers, attention apart, compute each row from that row alone, and its loss as a sum over rows.

    whole   rows 0 … n-1 ─► model with dense attention        every module's output, q, k, v, logits, loss
    part    some of the rows, permuted ─► model, attention's results taken from the whole ─► the same rows, or an error

Ranks hold parts of a microbatch: what a layer takes from how many rows there are, from their order or from another row
would be another number on each. No list of models: positions are short, and beyond every length that the config names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from logging import getLogger
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from apportion.ir.errors import ConfigError
from apportion.trainer.step.microbatch import IGNORED

#: (tokens, positions, labels, valid tokens, last position, handle) -> the kwargs of the model's forward
Arguments = Callable[..., dict[str, Any]]
#: (the handle, the first five of these, kwargs that are others) -> the loss
Run = Callable[..., float]

_Place = tuple[str, int, int]  # module, its call, number of a result
_TOLERANCE = 1e-4  # of a row's norm; models of 16 bits are run in 32
_LOSS = 2e-5  # of the loss: a sum over some 60 rows in float32
_SHORT = (9, 6, 4)  # lengths of documents
_PARTS = (6, 12)  # rows of all parts but the last, which has one
_LENGTH = re.compile("position|window|chunk|length|context|original|floor|seq")
_LONGEST = 1 << 24  # float32 tells positions apart up to here
_LOW = (torch.bfloat16, torch.float16)
_REMEDY = "train it without context parallelism, or give hf.enable(model, check=False) where you know better"
_HEAD = "give a decoder with a causal language-model head (...ForCausalLM), or train it without plans"
aten = torch.ops.aten


def check_rows(model: Any, arguments: Arguments) -> bool:
    """Whether the model could be checked: not where its weights are sharded or not in this process (a warning says so).

    Runs the model a few times on about 60 rows, in float32 or wider, in training mode without noise and gradients; its
    state stays as it was. Raises ConfigError, which names the module that differs first, or the loss.
    """
    if not _is_here(model):
        getLogger(__name__).warning(
            "%s is sharded or on the meta device: its layers are not checked; make the loader when its weights "
            "are here, or call hf.enable before they are sharded",
            type(model).__name__,
        )
        return False
    device = next(model.parameters()).device
    with _undisturbed(model, device) as reset:

        def run(held: Rehearsal, *given: Any, **changed: Any) -> float:
            reset()
            return _forward(model, {**arguments(*given, held), **changed}, held)

        _check_first(model, run, device)
        for positions, documents, parts in _microbatches(model):
            _compare(model, run, positions.to(device), documents.to(device), parts)
    return True


class Rehearsal:
    """Stands in for a plan's handle in one process. The whole microbatch has dense attention; a part takes its rows of
    the whole's results. rows of the microbatch: int64 [rows], in the order of the call."""

    def __init__(self, taken: Tensor, documents: Tensor, whole: Rehearsal | None = None) -> None:
        self.taken, self.rows, self.whole = taken, len(taken), whole
        behind = taken[:, None] >= taken
        self._mask = behind & (documents[:, None] == documents)
        self.attended: list[Tensor] = []
        self.gathered: list[list[int]] = []
        self.seen = dict[_Place, Tensor]()  # as they come
        self.decisive = set[_Place]()
        self._calls: dict[str, int] = {}
        self.communicator = self

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [1, heads, rows, width] -> [1, rows, heads, width]."""
        self.record(f"the queries, keys and values of {layer}", (query, key, value), decides=True)
        if self.whole is None:
            mask, groups = self._mask, query.shape[1] != key.shape[1]
            out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=groups).transpose(1, 2)
        else:
            out = self.whole.attended[len(self.attended)][:, self.taken]
        self.attended.append(out)
        return out

    def all_gather(self, numbers: list[int], about: str) -> list[list[int]]:
        """What ranks add up: the whole's own numbers, on a part too."""
        self.gathered.append(numbers)
        return [numbers] if self.whole is None else [self.whole.gathered[len(self.gathered) - 1]]

    def record(self, name: str, output: Any, decides: bool = False) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        for number, found in enumerate(tree_leaves(output)):
            if isinstance(found, Tensor) and found.is_floating_point():
                self.seen[name, call, number] = found.detach().clone()
                self.decisive |= {(name, call, number)} if decides else set()

    def differing(self) -> str | None:
        """The first module whose rows are not the whole's, where that reaches attention or the logits."""
        assert self.whole is not None
        if all(self._agrees(key) for key in self.decisive):
            return None
        return next(key[0] for key in self.seen if not self._agrees(key))

    def _agrees(self, key: _Place) -> bool:
        """Rows agree to rounding; also where there are no rows to compare."""
        assert self.whole is not None
        whole, own = self.whole.seen.get(key), self.seen[key]
        dim = None if whole is None else _rows_dim(whole.shape, own.shape, self.whole.rows, self.rows)
        if whole is None or dim is None:
            return True
        wanted = whole.index_select(dim, self.taken).movedim(dim, 0).flatten(1)
        return _close(own.movedim(dim, 0).flatten(1), wanted)


# ---- the runs


def _compare(model: Any, run: Run, positions: Tensor, documents: Tensor, parts: Sequence[Tensor]) -> None:
    count, device = len(positions), positions.device
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    tokens, labels = torch.randint(vocabulary, (2, count), generator=draw).to(device)
    labels[::5] = IGNORED
    valid, last = int((labels != IGNORED).sum()), int(positions.max())

    def share(taken: Tensor, decoy: int, whole: Rehearsal | None = None) -> tuple[Rehearsal, float]:
        held = Rehearsal(taken, documents[taken], whole)
        decoys = torch.full((1, len(taken)), decoy, device=device)  # a causal loss reads shift_labels
        return held, run(held, tokens[taken], positions[taken], labels[taken], valid, last, labels=decoys)

    whole, loss = share(torch.arange(count, device=device), 0)
    shares = 0.0
    for taken in parts:
        part, own = share(taken.to(device), IGNORED, whole)
        shares += own
        if (name := part.differing()) is not None:
            rule = f"{name} computes a row from other rows of the call, which ranks do not hold"
            raise ConfigError("model", type(model).__name__, rule, _REMEDY)
    if not abs(loss - shares) <= _LOSS * abs(loss):
        rule = "its loss is not the sum of the rows' losses of shift_labels over num_items_in_batch"
        rule += f": {loss:.5g} of all rows, {shares:.5g} of their parts"
        raise ConfigError("model", type(model).__name__, rule, _HEAD)


def _check_first(model: Any, run: Run, device: torch.device) -> None:
    """Positions of a plan count from 0: so must those that the model gives a text by itself. Raises ConfigError."""
    count, config = _SHORT[0], model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)  # RoBERTa counts behind it, and not over it
    tokens = torch.full((count,), next(i for i in (1, 0) if i != padding), device=device)
    rows = torch.arange(count, device=device)
    found = list[Rehearsal]()
    for changed in ({}, {"position_ids": None}):
        held = Rehearsal(rows, torch.zeros_like(rows))
        try:
            run(held, tokens, rows, tokens, count, count - 1, **changed)
        except ConfigError:
            return  # nothing to compare with; what is wrong with a model is said by `_compare`
        found.append(held)
    given, own = found
    pairs = ((own.seen[key].reshape(1, -1), given.seen[key].reshape(1, -1)) for key in given.decisive)
    if not all(_close(*pair) for pair in pairs):
        rule = "does not count the positions of a text from 0, as plans do"
        raise ConfigError("model", type(model).__name__, rule, _REMEDY)


def _forward(model: Any, kwargs: dict[str, Any], held: Rehearsal) -> float:
    """The loss. Raises ConfigError for a model that has none, or no logits a row."""
    with _recorded(model, held), _Exact(), catch_warnings():  # type: ignore[no-untyped-call]
        simplefilter("ignore")
        try:
            output = model(**kwargs)
        except ConfigError:
            raise
        except Exception as error:
            what = f"{held.rows} packed rows with position_ids, shift_labels and num_items_in_batch"
            rule = f"cannot run on {what} ({type(error).__name__}: {error})"
            raise ConfigError("model", type(model).__name__, rule, _HEAD) from error
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if isinstance(logits, Tensor) and logits.shape[:-1] != (1, held.rows):
        rule = f"its logits are {[*logits.shape]} for {held.rows} rows, not one row of them for each token"
        raise ConfigError("model", type(model).__name__, rule, _HEAD)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError("model", type(model).__name__, "gives no loss for shift_labels", _HEAD)
    held.record("the head", logits, decides=True)
    return float(loss)


@contextmanager
def _recorded(model: Any, held: Rehearsal) -> Iterator[None]:
    """Every module's results go to `held`, inner modules' before those around them."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(lambda *given, name=name: held.record(name, given[-1]))
                stack.callback(hook.remove)
        yield


def _rows_dim(whole: Sequence[int], part: Sequence[int], count: int, rows: int) -> int | None:
    """The one dimension in which the shapes differ, by the numbers of rows."""
    if len(whole) != len(part):
        return None
    apart = [dim for dim, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]]
    return apart[0] if len(apart) == 1 and (whole[apart[0]], part[apart[0]]) == (count, rows) else None


def _close(own: Tensor, wanted: Tensor) -> bool:
    """Each row [rows, width], against its norm and that of all rows; NaN where the whole has it is no difference."""
    own, wanted = (torch.nan_to_num(tensor.double(), 0.0, 0.0, 0.0) for tensor in (own, wanted))
    norms = wanted.norm(dim=1)
    return bool(((own - wanted).norm(dim=1) <= _TOLERANCE * (norms + norms.mean())).all())


# ---- the rows


def _microbatches(model: Any) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """(positions, documents, rows of each part): documents of short positions; some of them beside positions around
    and beyond each threshold."""
    documents = torch.arange(len(_SHORT)).repeat_interleave(torch.tensor(_SHORT))
    positions = torch.cat([torch.arange(length) for length in _SHORT])
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(1))
    cuts = [*torch.tensor(_PARTS).cumsum(0).tolist(), len(order)]
    yield positions, documents, [order[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    far = [place for n in _thresholds(model) for place in (n - 1, n, n + 3, 2 * n + 5)]
    limit = _positions_known(model)
    if far := sorted({place for place in far if place < limit}):
        count, alone = len(positions), torch.arange(len(far)) + len(_SHORT)
        parts = [order, torch.arange(len(far)).flip(0) + count]
        yield torch.cat((positions, torch.tensor(far))), torch.cat((documents, alone)), parts


def _thresholds(model: Any) -> list[int]:
    """Lengths that the config names, at any depth."""
    found = set(_lengths(model.config.get_text_config().to_dict()))
    return sorted(length for length in found if 1 < length < _LONGEST // 4)


def _lengths(data: Any, name: str = "") -> Iterator[int]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _lengths(value, str(key))
    elif isinstance(data, int | float) and not isinstance(data, bool) and _LENGTH.search(name):
        yield from [int(data)] if data == data and abs(data) < _LONGEST else []


def _positions_known(model: Any) -> int:
    """Where a table of positions ends: of embeddings and buffers as long as a length of the config, or a few more (OPT
    begins behind 2 rows)."""
    vocabulary = model.config.get_text_config().vocab_size
    embeddings = (one for one in model.modules() if isinstance(one, torch.nn.Embedding))
    tables = {one.num_embeddings for one in embeddings} - {vocabulary}
    tables |= {size for held in model.buffers() if held.dim() > 1 for size in held.shape}
    lengths = _thresholds(model)
    return min((n for n in lengths for rows in tables if n <= rows <= n + 4), default=_LONGEST)


# ---- the model as it was


def _is_here(model: Any) -> bool:
    held = [*model.parameters(), *model.buffers()]
    elsewhere = any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in held)
    return not elsewhere and all(tensor.numel() for tensor in model.parameters())


@contextmanager
def _undisturbed(model: Any, device: torch.device) -> Iterator[Callable[[], None]]:
    """Training mode without noise, in float32 or wider. Gives what puts the state of modules and config back, which is
    done at the end as well."""
    precision, before = torch.get_float32_matmul_precision(), _snapshot(model)
    cuda = [device] if device.type == "cuda" else []
    try:
        torch.set_float32_matmul_precision("highest")
        model.train()
        with torch.random.fork_rng(cuda), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield _snapshot(model)
    finally:
        torch.set_float32_matmul_precision(precision)
        before()


def _snapshot(model: Any) -> Callable[[], None]:
    """Puts back what a forward may change: attributes of modules and configs (`max_seq_len_cached`), their dicts
    (buffers, and hooks that transformers adds with the first call), and values of buffers (statistics of batches)."""
    held = [vars(one) for one in (*model.modules(), model.config, model.config.get_text_config())]
    held += [value for one in held for value in one.values() if isinstance(value, dict)]
    attributes, values = [(one, dict(one)) for one in held], [(one, one.clone()) for one in model.buffers()]

    def put_back() -> None:
        for own, before in attributes:
            own.clear()
            own.update(before)
        for buffer, value in values:
            buffer.copy_(value)

    return put_back


#: op -> the mean of what it draws, by its arguments behind the first
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


class _Exact(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws give their mean: dropout and jitter are noise, not a look at other rows. Computes with 16-bit tensors in
    32: the rounding of a product depends on how many rows it has, and a router's choice on that."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].dtype in _LOW
        if not writes:
            args, kwargs = tree_map(_widened, (args, kwargs))
        result = func(*args, **kwargs)
        return result.fill_(_MEANS[func](*args[1:])) if func in _MEANS else result


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _LOW:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in _LOW else value
