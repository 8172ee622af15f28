"""One rank's share of a microbatch, and conversion of token tensors between its rows and the caller's samples.

full [tokens, ...]   concatenated samples ──shard_tokens──► [rows, ...] ──gather_tokens──► full, on every rank
x [rows, ...]        ──roll(x, 1)──► for each row, the row of its next token
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.transport import Transport
from apportion.ir.arrays import Ints, group_of, index_in_group
from apportion.ir.errors import ExecutionError
from apportion.ir.fields import integer
from apportion.ir.request.batch import Batch
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import IGNORED, Microbatch


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PlannedBatch(Microbatch):
    """One rank's share of one microbatch; rows are in the plan's home layout, followed by padding if the loader
    pads."""

    position_ids: Tensor  # [rows] int64
    samples: Ints  # int64, samples of the microbatch on all ranks, in order
    batch: Batch  # their lengths and masks
    media: PlannedBatch | None = None  # this rank's rows of the encoder, if the microbatch has media
    _places: list[Places] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        wiring.watch.add(self)
        if self._replicas is None:  # groups of ranks have batches of their own
            self.handle.longest = self.batch.last_position

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PlannedBatch:
        """The batch with its tensors on a device."""
        tensors = (name for name, value in vars(self).items() if isinstance(value, Tensor))
        values = {name: getattr(self, name) for name in (*tensors, "fields")}
        moved = tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), values)
        media, feed = self.media and self.media.to(device, non_blocking), self.feed and self.feed.to(device)
        return replace(self, **moved, media=media, feed=feed)

    # ---- token tensors

    def shard_tokens(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """full [tokens, ...], an entry for each token of the concatenated `samples` -> this rank's [rows, ...], with
        `fill` for padding. Raises ExecutionError for a different number of tokens."""
        if len(full) != self.batch.tokens:
            expected = f"an entry for each of the {self.batch.tokens} tokens of the microbatch"
            raise ExecutionError(f"shard_tokens takes {expected}, got {len(full)}")
        out = full.new_full((len(self.tokens), *full.shape[1:]), fill)
        out[: self.handle.rows] = full[self.handle.tokens.to(full.device)]
        return out

    def gather_tokens(self, local: Tensor) -> Tensor:
        """The inverse of `shard_tokens`: local [rows, ...] -> [tokens, ...] on every rank; padding is dropped. A
        collective, differentiable: gradients of all ranks' losses are summed. Raises ExecutionError."""
        self._check_rows("gather_tokens", local)
        places, handle = self._all_places(), self.handle
        name, targets = f"gather_tokens under plan {handle.name}", torch.from_numpy(places.tokens)
        return to_all(handle.communicator, name, places.counts.tolist(), targets)(local)

    def roll(self, x: Tensor, shift: int = 1, fill: float | None = None) -> Tensor:
        """x [rows, ...] -> [rows, ...]: for each row, the row of the token `shift` predictions ahead, where each
        token predicts the next one (same document); `fill` if there is none, by default 0, and IGNORED for int64, as in
        `batch.roll(batch.labels)`, the labels two tokens ahead. A collective, differentiable. Raises ExecutionError,
        ConfigError."""
        self._check_rows("roll", x)
        fill = float(IGNORED if x.dtype == torch.int64 else 0) if fill is None else fill
        return self._all_places().exchange_for(self, integer("shift", shift, 1))(x, fill)

    def _check_rows(self, verb: str, x: Tensor) -> None:
        wiring.watch.require_all_rows(verb)
        if len(x) != len(self.tokens):
            raise ExecutionError(f"{verb} takes this rank's {len(self.tokens)} rows, got {len(x)}")

    def _all_places(self) -> Places:
        """The places of all tokens; a collective the first time."""
        if not self._places:
            self._places.append(Places.of(self.handle))
        return self._places[0]


@dataclass
class Places:
    """The places of a microbatch's tokens. tokens: int64 [tokens], the tokens of rank 0 in row order, then of rank 1,
    …; counts: rows of each rank."""

    tokens: Ints
    counts: Ints
    _rolls: dict[int, Exchange] = field(default_factory=dict)

    @staticmethod
    def of(handle: PlanHandle) -> Places:
        """Gathers the places; a collective on CPU tensors."""
        handle.agree()
        numbers, transport = handle.tokens.tolist(), handle.communicator
        gathered = transport.all_gather(numbers, f"places of tokens of plan {handle.name}")
        tokens = np.concatenate([np.asarray(row, np.int64) for row in gathered])
        return Places(tokens, np.array([len(row) for row in gathered]))

    def exchange_for(self, batch: PlannedBatch, shift: int) -> Exchange:
        """The exchange that brings to each row the row of the token `shift` steps after its own."""
        if shift not in self._rolls:
            self._rolls[shift] = self._roll(batch, shift)
        return self._rolls[shift]

    def _roll(self, batch: PlannedBatch, shift: int) -> Exchange:
        transport, rank_of, row_of = batch.handle.communicator, *self._homes()
        target, ranks = _tokens_ahead(batch.batch.labels(), shift)[self.tokens], len(self.counts)
        indexes = np.flatnonzero(target >= 0)  # indices, over all ranks, of the rows that receive one
        source, token = rank_of[target[indexes]], self.tokens[indexes]
        token_rank, token_row = rank_of[token], row_of[token]
        sent, received = source == transport.rank, token_rank == transport.rank
        order = np.argsort(source[received], kind="stable")
        sources = torch.from_numpy(row_of[target[indexes]][sent])
        targets = torch.from_numpy(token_row[received][order])
        counts = (
            np.bincount(which, minlength=ranks).tolist() for which in (token_rank[sent], source[received])
        )
        name = f"roll by {shift} under plan {batch.handle.name}"
        return Exchange(transport, name, sources, next(counts), targets, next(counts), len(batch.tokens))

    def _homes(self) -> tuple[Ints, Ints]:
        """(rank, row) of each token."""
        rank, row = np.empty_like(self.tokens), np.empty_like(self.tokens)
        rank[self.tokens] = group_of(self.counts)
        row[self.tokens] = index_in_group(self.counts)
        return rank, row


def to_all(transport: Transport, name: str, counts: list[int], into: Tensor | None = None) -> Exchange:
    """An all-gather of rows. counts: rows of each rank; into: target rows of those from rank 0, 1, …,
    by default in this order."""
    count = counts[transport.rank]
    sources = torch.arange(count).repeat(transport.ranks)
    into = torch.arange(sum(counts)) if into is None else into
    return Exchange(transport, name, sources, [count] * transport.ranks, into, counts, len(into))


def _tokens_ahead(labels: Ints, steps: int) -> Ints:
    """The token `steps` steps after each token, -1 if there is none."""
    closed, target = np.append(labels, -1), np.arange(len(labels))
    for _ in range(steps):
        target = closed[target]
    return target
