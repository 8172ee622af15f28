"""Training on samples that begin alike (rollouts of one prompt, branches of a search): each shared token is computed
once, and losses and gradients are those of independent samples.

    forest = ap.trees.fold(rollouts, groups=prompts)
    for batch in ap.PlannedLoader(forest, …):
        found = ap.trees.unfold(forest, batch, loss_mask)
        ratio = (found.log_probs(model(batch.tokens, …)) - found.take(old_log_probs)).exp()
        loss = -(ratio * found.take(advantages) * found.take(token_weights)).sum()

A *prediction* is (sample, token): token t of sample s, which the row of token t - 1 predicts. Where samples share both
tokens, one row predicts one id for all of them; where they part, one row predicts another id for each:

    rows     5 ─ 6 ─┬─ 7 ─┬─ 8 ─ 9          predictions of row 6      (s0, 7) (s1, 7) (s2, 4)
                    │     └─ 3              predictions of row 7      (s0, 8) (s1, 3)
                    └─ 4

Each belongs to one rank, the one that holds the row, so a loss is a local sum, and the ranks' sums add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.forest import Forest, Saving, fold

__all__ = ["Forest", "Predictions", "Saving", "fold", "unfold"]

Ints = NDArray[np.int64]


class Rows(Protocol):
    """A rank's rows, as `PlannedBatch` has them. Both int64 [rows]: the dataset's item that each is of (-1: of none),
    and its place in it."""

    @property
    def sample_ids(self) -> Tensor: ...

    @property
    def local_to_sample(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Predictions:
    """What this rank's rows predict, int64 [n], sorted by sample and token within each tree.

    row: of this rank, which predicts; target: the id that it predicts; sample, token: whose, and its place there, from
    1 on. What is known of each row (values, entropies) is known of each prediction as `x[found.row]`. predicting: the
    rows that predict anything, and at [n]: which of them does. starts: int64 [samples + 1], where each sample's tokens
    begin, all samples end to end.
    """

    row: Tensor
    target: Tensor
    sample: Tensor
    token: Tensor
    predicting: Tensor
    at: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.row)

    def log_probs(self, logits: Tensor) -> Tensor:
        """[n] log-probabilities of the targets, differentiable, in float32 (float64 for float64).

        logits: [rows, vocabulary], or [1, rows, vocabulary], of this rank's rows."""
        logits = logits[0] if logits.dim() == 3 and len(logits) == 1 else logits
        scores = logits[self.predicting].to(torch.promote_types(logits.dtype, torch.float32))
        return scores[self.at, self.target] - scores.logsumexp(-1)[self.at]

    def take(self, values: Tensor | Sequence[Tensor]) -> Tensor:
        """[n] what each prediction has of `values`: [samples], such as advantages, or one for every token: [samples,
        longest], padded behind, or a list of [length] each. A token's value is at its own place, so that of a sample's
        first is never taken. Raises ConfigError for other shapes."""
        return _taken(values, self.sample, self.token, self.starts)

    def gather(self, values: Tensor, group: Any = None) -> tuple[Tensor, ...]:
        """Of each sample [length]: the values [n] of all ranks, 0 where none predicts; differentiable.

        For what needs whole samples, such as ratios of sequences: every rank computes the same loss, and divides it by
        the number of ranks. Samples of other microbatches are 0. A collective; group: the ranks that share the plan, by
        default all, or this process alone where torch.distributed is not initialised."""
        flat = values.new_zeros(int(self.starts[-1])).index_copy(0, self._place, values)
        return _Sum.apply(flat, group).split(self.starts.diff().tolist())  # type: ignore[no-any-return,no-untyped-call]

    @property
    def _place(self) -> Tensor:
        """Of all samples' tokens, end to end."""
        return self.starts[self.sample] + self.token


def unfold(
    forest: Forest, batch: Rows | None = None, loss_mask: Tensor | Sequence[Tensor] | None = None
) -> Predictions:
    """What this rank's rows of a microbatch predict: the way to each sample's log-probabilities, and back.

    batch: of a loader whose dataset is `forest`; without, all rows of the forest are here, in their order. loss_mask:
    which tokens count, as `Predictions.take` takes it; without, all but the first of each sample do. All is on the
    batch's device: unfold before the batch goes to a GPU, or this waits for it. Raises ExecutionError where the batch is
    not of the forest, ConfigError for a loss mask of another shape."""
    row, target, sample, token = map(torch.from_numpy, _predictions(forest, _flat_rows(forest, batch)))
    starts = torch.from_numpy(forest.starts)
    if loss_mask is not None:
        counts = _taken(loss_mask, sample, token, starts).bool()
        row, target, sample, token = row[counts], target[counts], sample[counts], token[counts]
    predicting, at = map(torch.from_numpy, np.unique(row.numpy(), return_inverse=True))
    columns = (row, target, sample, token, predicting, at, starts)
    device = torch.device("cpu") if batch is None else batch.sample_ids.device
    return Predictions(*(column.to(device) for column in columns))


def _flat_rows(forest: Forest, batch: Rows | None) -> Ints:
    """[rows] the forest's flat row of each row that is here; -1 where it has none."""
    if batch is None:
        return np.arange(len(forest.tokens))
    tree, place = (x.cpu().numpy() for x in (batch.sample_ids, batch.local_to_sample))
    known = (tree < len(forest)) & (place < forest.lengths[np.minimum(tree, len(forest) - 1)])
    if not known.all():
        first = int(np.flatnonzero(~known)[0])
        raise ExecutionError(
            f"row {first} is token {place[first]} of item {tree[first]}, and the forest of {len(forest)} trees has no "
            "such token: give the loader the forest as its dataset"
        )
    return np.where(tree >= 0, forest.trees[tree] + place, -1)


def _predictions(forest: Forest, here: Ints) -> tuple[Ints, ...]:
    """(row, target, sample, token) of what the rows that are here predict. here: [rows] flat rows, or -1."""
    held, row_of = here[here >= 0], np.flatnonzero(here >= 0)
    tree_of = np.searchsorted(forest.trees, held, side="right") - 1
    columns = [(np.zeros(0, np.int64),) * 4]
    for tree in np.unique(tree_of).tolist():
        first, own = forest.trees[tree], tree_of == tree
        local = np.full(forest.trees[tree + 1] - first, -1)
        local[held[own] - first] = row_of[own]
        for sample in np.flatnonzero(forest.tree_of == tree).tolist():
            rows = forest.rows[forest.starts[sample] : forest.starts[sample + 1]]
            token = np.flatnonzero(local[rows[:-1] - first] >= 0) + 1
            row, target = local[rows[token - 1] - first], forest.tokens[rows[token]]
            columns.append((row, target, np.full(len(token), sample), token))
    return tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))


def _taken(values: Tensor | Sequence[Tensor], sample: Tensor, token: Tensor, starts: Tensor) -> Tensor:
    lengths = starts.diff().tolist()
    if len(values) != len(lengths):
        rule = f"there must be something for each of the {len(lengths)} samples"
        raise ConfigError("values", f"{len(values)} items", rule, "give them in the order that was folded")
    if isinstance(values, Tensor):
        index = (sample,) if values.dim() == 1 else (sample, token)
        return values.to(sample.device)[index]
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if len(value) != length:
            rule = f"there must be one for each of the sample's {length} tokens"
            raise ConfigError(f"values[{i}]", f"{len(value)} values", rule, "fill up what predicts nothing")
    flat = torch.cat([torch.as_tensor(value) for value in values])
    return flat.to(sample.device)[starts[sample] + token]


class _Sum(torch.autograd.Function):
    """x of all ranks added up; so is its gradient, since each rank has a share of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total
