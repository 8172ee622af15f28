"""Training on samples with shared prefixes (rollouts of one prompt, branches of a search): each shared token is
computed once, and losses and gradients equal those of independent samples.

    forest = ap.trees.fold(rollouts, groups=prompts)
    for batch in ap.PlannedLoader(forest, …):
        predictions = ap.trees.unfold(forest, batch, loss_mask)
        ratio = (predictions.log_probs(model(batch.tokens, …)) - predictions.take(old_log_probs)).exp()
        loss = -(ratio * predictions.take(advantages) * predictions.take(token_weights)).sum()

A *prediction* is (sample, token): token t of sample s, which the row of token t - 1 predicts. If samples share both
tokens, one row predicts one id for all of them; where they diverge, one row predicts a different id for each:

    rows     5 ─ 6 ─┬─ 7 ─┬─ 8 ─ 9          predictions of row 6      (s0, 7) (s1, 7) (s2, 4)
                    │     └─ 3              predictions of row 7      (s0, 8) (s1, 3)
                    └─ 4

Each belongs to the rank that holds the row, so a loss is a local sum, and the ranks' sums add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.masks.forest import Forest, Saving, fold
from apportion.trainer.loading.batch import PlannedBatch, to_all
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import check_share
from apportion.trainer.step.terms import LOGITS, mark, means

__all__ = ["Forest", "Predictions", "Saving", "fold", "unfold"]

Columns = tuple[Ints, ...]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of this rank's rows, all int64 [n], sorted by sample and token.

    rows: number on this rank, with padding. samples: numbers of the trees of which the rank has a part. batch: their
    sequences. row: this rank's predicting row; target: the predicted id; sample, token: the predicted token's sample
    and place in it, from 1; place: its place in the concatenated `samples`. Values per row (values, entropies) become
    values per prediction as `x[predictions.row]`. predicting: int64, the rows with predictions; at: the index of each
    `row` in `predicting`.
    """

    forest: Forest
    rows: int
    samples: tuple[int, ...]
    batch: PlannedBatch | None
    row: Tensor
    target: Tensor
    sample: Tensor
    token: Tensor
    place: Tensor
    predicting: Tensor
    at: Tensor

    @staticmethod
    def of(
        forest: Forest, rows: int, samples: tuple[int, ...], batch: PlannedBatch | None, columns: Columns
    ) -> Predictions:
        """Builds predictions. columns: row, target, sample, token, place."""
        is_used = np.bincount(columns[0], minlength=1) > 0
        arrays = (*columns, np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[columns[0]])
        return Predictions(forest, rows, samples, batch, *map(torch.from_numpy, arrays))

    def __len__(self) -> int:
        return len(self.row)

    def to(self, device: torch.device | str) -> Predictions:
        """The predictions with tensors on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]

    def log_probs(self, logits: Tensor) -> Tensor:
        """[n] log-probabilities of the targets, differentiable, in float32 (float64 for float64).

        logits: [rows, vocabulary], or [1, rows, vocabulary], of this rank's rows. Raises ExecutionError for other
        shapes."""
        logits = logits[0] if logits.dim() == 3 and len(logits) == 1 else logits
        if logits.dim() != 2 or len(logits) != self.rows:
            expected = f"logits of this rank's {self.rows} rows, [rows, vocabulary]"
            raise ExecutionError(f"log_probs takes {expected}, got {list(logits.shape)}")
        if self.batch is not None:
            check_share(logits, self.batch, None)
            wiring.watch.shared, wiring.watch.own_loss = self.batch.handle, False
        scores = logits[self.predicting].to(torch.promote_types(logits.dtype, torch.float32))
        result = scores[self.at, self.target] - scores.logsumexp(-1)[self.at]
        if self.batch is not None and result.requires_grad and not wiring.watch.settled:
            mark(result, LOGITS)
            result.register_hook(partial(_check_mean, self))  # type: ignore[no-untyped-call]
        return result

    def take(self, values: Tensor | Sequence[Tensor]) -> Tensor:
        """[n]: selects each prediction's value from `values`: [samples], such as advantages, or one per token:
        [samples, longest], padded at the end, or a list of [length] each. A token's value is at its own position, so
        the value of a sample's first token is never used. Raises ConfigError for other shapes."""
        if not isinstance(values, Tensor) and np.ndim(values[0] if len(values) else 0) == 0:
            values = torch.as_tensor(values)
        if len(values) != self.forest.samples:
            rule = f"there must be an item for each of the {self.forest.samples} samples"
            remedy = "pass them in the order of `fold`"
            raise ConfigError("values", f"{len(values)} items", rule, remedy)
        if isinstance(values, Tensor):
            longest = int(np.diff(self.forest.starts).max(initial=0))
            if values.dim() > 1 and values.shape[1] < longest:
                rule, remedy = f"samples have up to {longest} tokens", "pad at the end, or pass a list"
                raise ConfigError("values", f"shape {tuple(values.shape)}", rule, remedy)
            index = (self.sample,) if values.dim() == 1 else (self.sample, self.token)
            return values.to(self.row.device)[index]
        parts = [_token_values(values[i], self.forest, i) for i in self.samples]
        return torch.cat(parts).to(self.row.device)[self.place] if parts else self.row.new_zeros(0)

    def gather(self, values: Tensor) -> tuple[Tensor, ...]:
        """Gathers the values [n] of all ranks to [length] for each sample, 0 for tokens without a prediction and for
        samples of other microbatches. For losses on whole samples, such as sequence ratios: every rank computes the
        same loss, and passes it to `share`. A collective, differentiable: gradients are summed over all losses."""
        starts, lengths = torch.from_numpy(self.forest.starts), np.diff(self.forest.starts).tolist()
        position = starts.to(self.sample.device)[self.sample] + self.token
        if self.batch is not None:
            ranks = self.batch.handle.communicator
            counts = [row[0] for row in ranks.all_gather([len(self)], "predictions")]
            everywhere = to_all(ranks, "gather of predictions", counts)
            position, values = everywhere(position), everywhere(values)
        full = values.new_zeros(sum(lengths)).index_copy(0, position, values)
        if self.batch is not None and ranks.ranks > 1 and full.requires_grad and not wiring.watch.settled:
            full.register_hook(partial(_check_alike, self.batch))  # type: ignore[no-untyped-call]
        return torch.split(full, lengths)

    def share(self, loss: Tensor, averaged_over: int = 1) -> Tensor:
        """This rank's share of a loss on gathered values, which every rank computes identically: gradients of all ranks
        are summed. averaged_over: see `normalised_loss`. Backward raises the errors that `check_share` lists."""
        if self.batch is None:
            return loss
        wiring.watch.divided = self.batch
        share = loss * (averaged_over / self.batch.handle.communicator.ranks)
        check_share(share, self.batch, averaged_over)
        return share

    def sums(self, values: Tensor) -> Tensor:
        """[samples]: sums the values [n] of all ranks for each sample, such as the log-probability of an answer; 0 for
        samples of other microbatches. A collective, differentiable, like `gather`."""
        return torch.stack([sample.sum() for sample in self.gather(values)])

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[pairs], [pairs]: splits `values` [samples], such as log-ratios of answers, into samples 0, 2, … and 1, 3, …
        of this microbatch. Raises ExecutionError for a pair split between microbatches: give both the same group in
        `fold`."""
        trees = np.arange(len(self.forest)) if self.batch is None else self.batch.samples
        is_present = np.isin(self.forest.tree_of, trees)
        if len(values) != self.forest.samples or self.forest.samples % 2:
            expected = f"an even number of samples, {self.forest.samples}"
            raise ExecutionError(f"pairs takes {expected}, got {len(values)}")
        split = np.flatnonzero(is_present[0::2] != is_present[1::2])
        if len(split):
            remedy = (
                "the two must share a prefix of at least `min_length` tokens, and have one group in `fold`"
            )
            raise ExecutionError(f"only one sample of pair {split[0]} is in this microbatch: {remedy}")
        first = torch.from_numpy(np.flatnonzero(is_present[0::2]) * 2).to(values.device)
        return values[first], values[first + 1]


def _check_mean(predictions: Predictions, _: Tensor) -> None:
    """Warns of a loss with a mean over this rank's rows or predictions, or over its predictions of a sample."""
    sizes = {predictions.rows, len(predictions), *predictions.sample.bincount().tolist()}
    local = (means() & sizes) - {0, 1, predictions.forest.samples}
    if predictions.batch is not None and predictions.batch.handle.communicator.ranks > 1 and local:
        rule = "their number differs between ranks, and gradients of all ranks are summed"
        remedy = "divide the sum by a number of all ranks, such as the number of samples"
        warn(
            f"the loss has a mean over {max(local)} rows or predictions of this rank: {rule}; {remedy}",
            stacklevel=1,
        )


def _check_alike(batch: PlannedBatch, grad: Tensor) -> None:
    """Raises ConfigError if all ranks have equal gradients of gathered values, and none used `share`. A collective."""
    if wiring.watch.divided is batch:
        return
    gathered = batch.handle.communicator.gather_floats([float(grad.norm())], "gradients of samples")
    norms = [norm for (norm,) in gathered]
    if 0 < max(norms) <= min(norms) * (1 + 1e-5):
        rule = "is computed identically on every rank, and gradients of all ranks are summed"
        remedy = "pass the whole loss to predictions.share(loss), and run backward on the result"
        raise ConfigError("loss", "of gathered values", rule, remedy)


def unfold(
    forest: Forest, batch: PlannedBatch | None = None, loss_mask: Tensor | Sequence[Tensor] | None = None
) -> Predictions:
    """The predictions of this rank's rows of a microbatch, which map between rows and samples' log-probabilities.

    batch: of a loader whose dataset is `forest`; by default all rows of the forest, in order. loss_mask: the tokens
    that count, in the form of `Predictions.take`; by default all but the first of each sample. The result is on the
    batch's device; waits for a batch on a GPU, so unfold before moving it. Raises ExecutionError for a batch of another
    dataset, ConfigError for a loss mask of another shape."""
    flat = _flat_rows(forest, batch)
    trees = np.searchsorted(forest.trees, flat[flat >= 0], side="right") - 1
    samples = tuple(np.flatnonzero(np.isin(forest.tree_of, trees)).tolist())
    columns = _columns(forest, samples, flat)
    predictions = Predictions.of(forest, len(flat), samples, batch, columns)
    if loss_mask is not None:
        counts = predictions.take(loss_mask).bool().numpy()
        selected = tuple(column[counts] for column in columns)
        predictions = Predictions.of(forest, len(flat), samples, batch, selected)
    return predictions if batch is None else predictions.to(batch.sample_ids.device)


def _flat_rows(forest: Forest, batch: PlannedBatch | None) -> Ints:
    """[rows]: the forest's flat row of each row on this rank; -1 for padding."""
    if batch is None:
        return np.arange(len(forest.tokens))
    drawn = np.sort(np.asarray(batch.samples))
    if len(repeated := drawn[1:][drawn[1:] == drawn[:-1]]):
        message = (
            f"tree {repeated[0]} is in the microbatch more than once, and a sample has one log-probability"
        )
        raise ExecutionError(f"{message} per token: draw each tree once, or repeat its samples in `fold`")
    columns = batch.sample_ids, batch.local_to_sample, batch.tokens
    tree, position, tokens = (x.cpu().numpy() for x in columns)
    index = np.clip(tree, 0, len(forest) - 1)
    flat = np.where((tree == index) & (position < forest.lengths[index]), forest.trees[index] + position, -1)
    is_padding = tree < 0
    is_known = is_padding | ((flat >= 0) & (forest.tokens[flat] == tokens))
    if not is_known.all():
        first = int(np.flatnonzero(~is_known)[0])
        row = f"row {first} is token {position[first]} of item {tree[first]}"
        rule = f"the forest of {len(forest)} trees has no such token: pass the loader's forest to unfold"
        raise ExecutionError(f"{row}, and {rule}")
    if not (is_padding | (forest.position_ids[flat] == batch.position_ids.cpu().numpy())).all():
        rule = (
            "the batch was not planned with the masks of the forest: give the loader the forest, or its masks"
        )
        raise ExecutionError(f"{rule} as masks=")
    return flat


def _columns(forest: Forest, samples: tuple[int, ...], flat: Ints) -> Columns:
    """(row, target, sample, token, place) of the predictions of this rank's rows."""
    order = np.argsort(flat, kind="stable")
    sorted_rows = np.append(flat[order], -1)
    columns, offset = list[Columns]([(np.zeros(0, np.int64),) * 5]), 0
    for sample in samples:
        rows = forest.rows[forest.starts[sample] : forest.starts[sample + 1]]
        index = np.searchsorted(sorted_rows[:-1], rows[:-1])
        token = np.flatnonzero(sorted_rows[index] == rows[:-1]) + 1
        target, owner = forest.tokens[rows[token]], np.full(len(token), sample)
        columns.append((order[index[token - 1]], target, owner, token, offset + token))
        offset += len(rows)
    return tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))


def _token_values(values: Tensor, forest: Forest, sample: int) -> Tensor:
    """`values` as a tensor. Raises ConfigError unless there is one for each token of the sample."""
    length = int(forest.starts[sample + 1] - forest.starts[sample])
    if len(values) != length:
        rule = f"there must be one value for each of the sample's {length} tokens"
        raise ConfigError(f"values[{sample}]", f"{len(values)} values", rule, "pad with unused values")
    return torch.as_tensor(values)
