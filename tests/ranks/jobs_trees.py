"""Rank pool jobs with GRPO of a small policy, on samples one by one and on the forest into which they fold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from apportion import Batch, Cluster, Communicator, Job, Model, PlannedBatch, Policy, Sequence, trees
from apportion.demo.decoder import Decoder
from apportion.ir.masks.forest import Forest
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.step.attention import planned_attention
from apportion.trainer.step.plain import plain_attention
from tests.ranks.loading import planning

VOCABULARY = 11
MODEL = Model(hidden=16, ffn=24, q_heads=2, kv_heads=1, head_dim=8, layers=2)
CLIP, KL = 0.2, 0.04
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Rollouts:
    """Samples of two prompts, which diverge right after the prompt, later, or never; one is a prefix of another."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        ids = [rng.integers(0, VOCABULARY, size) for size in (9, 13, 7, 5, 21, 4)]
        first, second, a, b, c, d = ids
        rollouts = [(first, *rest) for rest in ((a, c), (a, b), (a,), (d, c), (d, c))]
        rollouts += [(second, b), (second, a, d)]
        self.samples = [np.concatenate(parts) for parts in rollouts]
        self.groups = [0] * 5 + [1] * 2
        prompts = [len(parts[0]) for parts in rollouts]
        self.counts = [torch.arange(len(ids)) >= n for ids, n in zip(self.samples, prompts, strict=True)]
        rewards = torch.from_numpy(rng.standard_normal(len(rollouts)))
        self.advantages = torch.cat([(part - part.mean()) / part.std() for part in rewards.split([5, 2])])
        self.old, self.reference = self._log_probs(rng), self._log_probs(rng)
        self.weights = torch.tensor([1 / (len(rollouts) * int(counts.sum())) for counts in self.counts])

    def _log_probs(self, rng: Any) -> list[Tensor]:
        return [torch.from_numpy(rng.normal(-np.log(VOCABULARY), 0.3, len(ids))) for ids in self.samples]


def grpo(log_probs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """The clipped objective with its KL term (Shao et al., 2024). Arguments have an entry per prediction, or are
    scalars."""
    ratio, log_ratio = (log_probs - old).exp(), reference - log_probs
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return ((KL * (log_ratio.exp() - log_ratio - 1) - surrogate) * weights).sum()


def policy(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder(MODEL, VOCABULARY).to(dtype)


def attention_of(batch: Batch) -> Callable[..., Any]:
    return lambda q, k, v, kind: plain_attention(q, k, v, batch, kind)


def independent(dtype: str) -> tuple[float, NDArray[Any]]:
    """(loss, gradients) of the samples, computed one by one."""
    rollouts, model = Rollouts(), policy(DTYPES[dtype])
    losses = []
    for i, ids in enumerate(rollouts.samples):
        tokens, positions = torch.from_numpy(ids), torch.arange(len(ids))
        logits = model(tokens, positions, attention_of(Batch.from_lengths([len(ids)])))
        log_probs = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        counts = rollouts.counts[i][1:]
        columns = (log_probs, rollouts.old[i][1:], rollouts.reference[i][1:])
        losses.append(grpo(*(x[counts] for x in columns), rollouts.advantages[i], rollouts.weights[i]))
    return result(sum(losses), model)


def folded_loss(rollouts: Rollouts, forest: Forest, logits: Tensor, batch: Any = None) -> Tensor:
    unfolded = trees.unfold(forest, batch, rollouts.counts)
    per_sample = (rollouts.old, rollouts.reference, rollouts.advantages, rollouts.weights)
    return grpo(unfolded.log_probs(logits), *(unfolded.take(values) for values in per_sample))


def folded(dtype: str, **options: int | list[int]) -> tuple[float, NDArray[Any]]:
    """(loss, gradients) of the forest in one process."""
    rollouts, model = Rollouts(), policy(DTYPES[dtype])
    forest = trees.fold(rollouts.samples, **options)
    pieces = (Sequence(int(n), mask) for n, mask in zip(forest.lengths, forest.masks, strict=True))
    batch = Batch.from_sequences(pieces)
    tokens, positions = torch.from_numpy(forest.tokens), torch.from_numpy(forest.position_ids)
    return result(folded_loss(rollouts, forest, model(tokens, positions, attention_of(batch))), model)


def on_ranks(
    comm: Communicator, dtype: str, options: dict[str, list[int]], tokens: int = 128, rows_multiple: int = 1
) -> tuple[float, NDArray[Any], int]:
    """(loss, gradients, number of microbatches) of this rank's share of the forest, from a loader."""
    rollouts, model = Rollouts(), policy(DTYPES[dtype])
    forest = trees.fold(rollouts.samples, **options)
    losses = []
    for batch in loader_of(comm, forest, dtype, tokens, rows_multiple):
        logits = model(batch.tokens, batch.position_ids, planned(batch))
        losses.append(folded_loss(rollouts, forest, logits, batch))
    return (*result(sum(losses), model), len(losses))


def sequence_ratios(comm: Communicator, dtype: str, shares: bool = True) -> Any:
    """(loss, gradients) of an objective on ratios of whole samples, which every rank computes before it takes its
    share if `shares`."""
    rollouts, model = Rollouts(), policy(DTYPES[dtype])
    forest = trees.fold(rollouts.samples, rollouts.groups)
    (batch,) = loader_of(comm, forest, dtype)
    unfolded = trees.unfold(forest, batch, rollouts.counts)
    log_probs = unfolded.log_probs(model(batch.tokens, batch.position_ids, planned(batch)))
    wholes = unfolded.gather(log_probs)
    kept = [whole[counts] for whole, counts in zip(wholes, rollouts.counts, strict=True)]
    loss = sequence_loss(rollouts, kept)
    return result(unfolded.share(loss) if shares else loss, model)


def averaged(comm: Communicator, shares: bool) -> None:
    """DDP, which averages gradients, of a sum over this rank's predictions or of a share of a common loss."""
    rollouts = Rollouts()
    model = DistributedDataParallel(policy(torch.float32), process_group=comm._base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forest = trees.fold(rollouts.samples, rollouts.groups)
    (batch,) = loader_of(comm, forest, "fp32")
    unfolded = trees.unfold(forest, batch, rollouts.counts)
    log_probs = unfolded.log_probs(model(batch.tokens, batch.position_ids, planned(batch)))
    loss = unfolded.share(unfolded.sums(log_probs).sum()) if shares else -log_probs.sum()
    loss.backward()
    optimizer.step()


def mean_of_rank(comm: Communicator, over: str) -> list[str]:
    """The warnings of a loss with a mean of this rank's values."""
    rollouts, model = Rollouts(), policy(torch.float32)
    forest = trees.fold(rollouts.samples, rollouts.groups)
    (batch,) = loader_of(comm, forest, "fp32")
    predictions = trees.unfold(forest, batch)
    logits = model(batch.tokens, batch.position_ids, planned(batch))
    values = predictions.log_probs(logits).exp()
    samples = predictions.sample.unique()
    loss = {
        "predictions": lambda: values.mean(),
        "rows": lambda: values.sum() / len(rollouts.samples) - logits.logsumexp(-1).mean(),
        "sample": lambda: sum(values[predictions.sample == sample].mean() for sample in samples),
        "samples": lambda: (
            values.new_zeros(len(rollouts.samples)).index_add(0, predictions.sample, values).mean()
        ),
    }[over]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    return [str(one.message) for one in caught]


def sequence_loss(rollouts: Rollouts, log_probs: list[Tensor]) -> Tensor:
    old = torch.stack([x[counts].mean() for x, counts in zip(rollouts.old, rollouts.counts, strict=True)])
    ratios = (torch.stack([x.mean() for x in log_probs]) - old).exp()
    return -(ratios * rollouts.advantages).sum()


def independent_sequences(dtype: str) -> tuple[float, NDArray[Any]]:
    rollouts, model = Rollouts(), policy(DTYPES[dtype])
    log_probs = []
    for ids, counts in zip(rollouts.samples, rollouts.counts, strict=True):
        tokens = torch.from_numpy(ids)
        logits = model(tokens, torch.arange(len(ids)), attention_of(Batch.from_lengths([len(ids)])))
        log_probs.append(logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0][counts[1:]])
    return result(sequence_loss(rollouts, log_probs), model)


def loader_of(
    comm: Communicator, dataset: Forest, dtype: str, tokens: int = 128, rows_multiple: int = 1
) -> PlannedLoader:
    model = Model(2, 1, 8, dtype=dtype)
    job = Job(Cluster(1, comm.ranks), model, Policy(find_recipe("fcp")), tokens // comm.ranks, 2)
    return PlannedLoader(dataset, **planning(job), communicator=comm, rows_multiple=rows_multiple)


def planned(batch: PlannedBatch) -> Callable[..., Any]:
    return lambda q, k, v, kind: planned_attention(q, k, v, batch.handle, kind)


def result(loss: Tensor, model: Decoder) -> tuple[float, NDArray[Any]]:
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters()]).numpy()
