"""Checks that a model's layers, except attention, compute each row on its own, and that its loss is a sum over rows.

    whole   rows 0 … n-1 ─► model with dense attention        every module's output, q, k, v, logits, loss
    part    some of the rows, permuted ─► model, with attention results of the whole ─► the same rows, or an error

Works for any model: tests short positions, and positions beyond every length in the config. Models of custom loops are
checked in their first steps, by `backends.torch.trial`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from apportion.backends.torch.rehearsal import ExactMode, Rehearsal, are_close, is_whole, noiseless, recording
from apportion.ir.errors import ConfigError
from apportion.trainer.step.microbatch import IGNORED

#: (tokens, positions, labels, valid tokens, last position, handle) -> the kwargs of the model's forward
ForwardKwargs = Callable[..., dict[str, Any]]
#: (handle, the first five arguments above, changed kwargs) -> loss
Run = Callable[..., float]

_LOSS = 2e-5  # relative tolerance of the loss: a sum over some 60 rows in float32
_SHORT = (9, 6, 4)  # lengths of documents
_PARTS = (6, 12)  # rows of each part except the last, which has one
_LENGTH = re.compile("position|window|chunk|length|context|original|floor|seq")
_LONGEST = 1 << 24  # float32 represents all integers up to this one
_REMEDY = "train it without context parallelism; if it mixes rows on purpose, hf.enable(model, check=False)"
_HEAD = "use a decoder with a causal language-model head (...ForCausalLM), or train it without plans"


def check_rows(model: Any, arguments: ForwardKwargs) -> bool:
    """Checks a model; returns False, with a warning, if its weights are sharded or not in this process.

    Runs the model a few times on about 60 rows, in float32 or wider, in training mode without noise or gradients, and
    restores its state. Raises ConfigError, which names the first module that differs, or the loss.
    """
    if not is_whole(model):
        getLogger(__name__).warning(
            "%s is sharded or on the meta device: its layers are not checked; create the loader when its weights "
            "are in this process, or call hf.enable before they are sharded",
            type(model).__name__,
        )
        return False
    device = next(model.parameters()).device
    configs = model.config, model.config.get_text_config()
    with noiseless(model, device, *configs) as reset:

        def run(rehearsal: Rehearsal, *args: Any, **changes: Any) -> float:
            reset()
            model.train()
            return _forward(model, {**arguments(*args, rehearsal), **changes}, rehearsal)

        _check_default_positions(model, run, device)
        for positions, documents, parts in _microbatches(model):
            _compare(model, run, positions.to(device), documents.to(device), parts)
    return True


# ---- the runs


def _compare(model: Any, run: Run, positions: Tensor, documents: Tensor, parts: Sequence[Tensor]) -> None:
    count, device = len(positions), positions.device
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    tokens, labels = torch.randint(vocabulary, (2, count), generator=draw).to(device)
    labels[::5] = IGNORED
    valid, last = int((labels != IGNORED).sum()), int(positions.max())

    def share(rows: Tensor, decoy: int, full: Rehearsal | None = None) -> tuple[Rehearsal, float]:
        rehearsal = Rehearsal(rows, documents[rows], full)
        decoys = torch.full((1, len(rows)), decoy, device=device)  # a causal loss reads shift_labels instead
        return rehearsal, run(
            rehearsal, tokens[rows], positions[rows], labels[rows], valid, last, labels=decoys
        )

    full, loss = share(torch.arange(count, device=device), 0)
    shares = 0.0
    for rows in parts:
        part, part_loss = share(rows.to(device), IGNORED, full)
        shares += part_loss
        if (name := part.first_difference()) is not None:
            rule = f"{name} computes a row from other rows of the call, which a rank may not hold"
            raise ConfigError("model", type(model).__name__, rule, _REMEDY)
    if not abs(loss - shares) <= _LOSS * abs(loss):
        rule = "its loss is not the sum of the rows' losses of shift_labels over num_items_in_batch"
        rule += f": {loss:.5g} of all rows, {shares:.5g} of their parts"
        raise ConfigError("model", type(model).__name__, rule, _HEAD)


def _check_default_positions(model: Any, run: Run, device: torch.device) -> None:
    """Checks that the model's default positions of a text count from 0, as a plan's do. Raises ConfigError."""
    count, config = _SHORT[0], model.config.get_text_config()
    padding = getattr(config, "pad_token_id", None)  # RoBERTa counts from after this id, and skips it
    tokens = torch.full((count,), next(i for i in (1, 0) if i != padding), device=device)
    rows = torch.arange(count, device=device)
    rehearsals = list[Rehearsal]()
    for changes in ({}, {"position_ids": None}):
        rehearsal = Rehearsal(rows, torch.zeros_like(rows))
        try:
            run(rehearsal, tokens, rows, tokens, count, count - 1, **changes)
        except ConfigError:
            return  # nothing to compare with; `_compare` reports errors of the model
        rehearsals.append(rehearsal)
    with_ids, without_ids = rehearsals
    pairs = (
        (without_ids.seen[key].reshape(1, -1), with_ids.seen[key].reshape(1, -1)) for key in with_ids.decisive
    )
    if not all(are_close(*pair) for pair in pairs):
        rule = "does not count the positions of a text from 0, as plans do"
        raise ConfigError("model", type(model).__name__, rule, _REMEDY)


def _forward(model: Any, kwargs: dict[str, Any], rehearsal: Rehearsal) -> float:
    """The loss. Raises ConfigError for a model without a loss, or without exactly one row of logits per row."""
    with recording(model, rehearsal), ExactMode(), catch_warnings():
        simplefilter("ignore")
        try:
            output = model(**kwargs)
        except ConfigError:
            raise
        except Exception as error:
            description = (
                f"{rehearsal.rows} packed rows with position_ids, shift_labels and num_items_in_batch"
            )
            rule = f"cannot run on {description} ({type(error).__name__}: {error})"
            raise ConfigError("model", type(model).__name__, rule, _HEAD) from error
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if isinstance(logits, Tensor) and logits.shape[:-1] != (1, rehearsal.rows):
        rule = f"its logits are {[*logits.shape]} for {rehearsal.rows} rows, not one row for each token"
        raise ConfigError("model", type(model).__name__, rule, _HEAD)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError("model", type(model).__name__, "returns no loss for shift_labels", _HEAD)
    rehearsal.record("the head", logits, decides=True)
    return float(loss)


# ---- the rows


def _microbatches(model: Any) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yields (positions, documents, rows of each part): short documents, then these with additional positions
    around and beyond each threshold."""
    documents = torch.arange(len(_SHORT)).repeat_interleave(torch.tensor(_SHORT))
    positions = torch.cat([torch.arange(length) for length in _SHORT])
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(1))
    ends = [*torch.tensor(_PARTS).cumsum(0).tolist(), len(order)]
    yield positions, documents, [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    far_positions = [position for n in _thresholds(model) for position in (n - 1, n, n + 3, 2 * n + 5)]
    limit = _positions_known(model)
    if far_positions := sorted({position for position in far_positions if position < limit}):
        count, ids = len(positions), torch.arange(len(far_positions)) + len(_SHORT)
        parts = [order, torch.arange(len(far_positions)).flip(0) + count]
        yield torch.cat((positions, torch.tensor(far_positions))), torch.cat((documents, ids)), parts


def _thresholds(model: Any) -> list[int]:
    """All lengths in the config, at any depth."""
    lengths = set(_lengths(model.config.get_text_config().to_dict()))
    return sorted(length for length in lengths if 1 < length < _LONGEST // 4)


def _lengths(data: Any, name: str = "") -> Iterator[int]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _lengths(value, str(key))
    elif isinstance(data, int | float) and not isinstance(data, bool) and _LENGTH.search(name):
        yield from [int(data)] if data == data and abs(data) < _LONGEST else []


def _positions_known(model: Any) -> int:
    """The length of the model's position table: an embedding or buffer whose size is a length in the config, or
    slightly more (OPT reserves 2 rows)."""
    vocabulary = model.config.get_text_config().vocab_size
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    tables = {module.num_embeddings for module in embeddings} - {vocabulary}
    tables |= {size for buffer in model.buffers() if buffer.dim() > 1 for size in buffer.shape}
    lengths = _thresholds(model)
    return min((n for n in lengths for rows in tables if n <= rows <= n + 4), default=_LONGEST)
