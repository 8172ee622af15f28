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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.transport import Transport
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.forest import Forest, Saving, fold
from apportion.trainer.batch import PlannedBatch

__all__ = ["Forest", "Predictions", "Saving", "fold", "unfold"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What this rank's rows predict, all int64 [n], sorted by sample and token within each tree.

    transport: the ranks that hold the rest of the microbatch, where there are any. row: of this rank, which predicts;
    target: the id that it predicts; sample, token: whose, and its place there, from 1 on; place: the same, all samples
    end to end. What is known of each row (values, entropies) is known of each prediction as `x[found.row]`. predicting:
    the rows, int64, that predict anything; at: which of them does.
    """

    forest: Forest
    transport: Transport | None
    row: Tensor
    target: Tensor
    sample: Tensor
    token: Tensor
    place: Tensor
    predicting: Tensor
    at: Tensor

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
        return _taken(values, self.forest, self.sample, self.token, self.place)

    def gather(self, values: Tensor) -> tuple[Tensor, ...]:
        """Of each sample [length]: the values [n] of all ranks, 0 where none predicts, and in samples of other
        microbatches. For what needs whole samples, such as ratios of sequences: every rank computes the same loss and
        divides it by their number. A collective, differentiable: the gradient is the sum of what all losses want."""
        place, lengths = self.place, np.diff(self.forest.starts).tolist()
        if self.transport is not None:
            everywhere = _to_all(self.transport, len(self))
            place, values = everywhere(place), everywhere(values)
        return torch.split(values.new_zeros(sum(lengths)).index_copy(0, place, values), lengths)


def unfold(
    forest: Forest, batch: PlannedBatch | None = None, loss_mask: Tensor | Sequence[Tensor] | None = None
) -> Predictions:
    """What this rank's rows of a microbatch predict: the way to each sample's log-probabilities, and back.

    batch: of a loader whose dataset is `forest`; without, all rows of the forest are here, in their order. loss_mask:
    which tokens count, as `Predictions.take` takes it; without, all but the first of each sample do. All is on the
    batch's device: unfold before the batch goes to a GPU, or this waits for it. Raises ExecutionError for a batch of
    another dataset, ConfigError for a loss mask of another shape."""
    columns = [torch.from_numpy(column) for column in _predictions(forest, _flat_rows(forest, batch))]
    if loss_mask is not None:
        counts = _taken(loss_mask, forest, *columns[2:]).bool()
        columns = [column[counts] for column in columns]
    columns += map(torch.from_numpy, np.unique(columns[0].numpy(), return_inverse=True))
    if batch is None:
        return Predictions(forest, None, *columns)
    device = batch.sample_ids.device
    return Predictions(forest, batch.handle.communicator, *(column.to(device) for column in columns))


def _flat_rows(forest: Forest, batch: PlannedBatch | None) -> Ints:
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
    """(row, target, sample, token, place) of what the rows that are here predict. here: [rows] flat rows, or -1."""
    held, row_of = here[here >= 0], np.flatnonzero(here >= 0)
    tree_of = np.searchsorted(forest.trees, held, side="right") - 1
    columns = [(np.zeros(0, np.int64),) * 5]
    for tree in np.unique(tree_of).tolist():
        first, own = forest.trees[tree], tree_of == tree
        local = np.full(forest.trees[tree + 1] - first, -1)
        local[held[own] - first] = row_of[own]
        for sample in np.flatnonzero(forest.tree_of == tree).tolist():
            rows = forest.rows[forest.starts[sample] : forest.starts[sample + 1]]
            token = np.flatnonzero(local[rows[:-1] - first] >= 0) + 1
            row, target = local[rows[token - 1] - first], forest.tokens[rows[token]]
            columns.append((row, target, np.full(len(token), sample), token, forest.starts[sample] + token))
    return tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))


def _taken(
    values: Tensor | Sequence[Tensor], forest: Forest, sample: Tensor, token: Tensor, place: Tensor
) -> Tensor:
    if len(values) != forest.samples:
        rule = f"there must be something for each of the {forest.samples} samples"
        raise ConfigError("values", f"{len(values)} items", rule, "give them in the order that was folded")
    if isinstance(values, Tensor):
        index = (sample,) if values.dim() == 1 else (sample, token)
        return values.to(sample.device)[index]
    for i, (value, length) in enumerate(zip(values, np.diff(forest.starts).tolist(), strict=True)):
        if len(value) != length:
            rule = f"there must be one for each of the sample's {length} tokens"
            raise ConfigError(f"values[{i}]", f"{len(value)} values", rule, "fill up what predicts nothing")
    flat = torch.cat([torch.as_tensor(value) for value in values])
    return flat.to(sample.device)[place]


def _to_all(transport: Transport, count: int) -> Exchange:
    """Each rank's entries to every rank, those of rank 0 first. count: of this one's. A collective among hosts."""
    counts = [row[0] for row in transport.all_gather([count])]
    take, into = torch.arange(count).repeat(transport.ranks), torch.arange(sum(counts))
    return Exchange(transport, take, [count] * transport.ranks, into, counts, len(into))
