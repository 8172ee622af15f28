"""Rank pool jobs with the batches of loaders."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import apportion as ap
from apportion import Communicator, HeadProjection, Job, PlannedLoader, Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.step.loss import IGNORED
from tests.ranks.loading import Recorded, job, planning, seen

Array = NDArray[Any]


class ManyFields(Recorded):
    """A dataset with labels, weights and two more fields."""

    def __getitem__(self, index: int) -> dict[str, Array | torch.Tensor]:
        ids = super().__getitem__(index)
        labels = np.where(ids % 3 == 0, IGNORED, ids)
        return {
            "input_ids": ids,
            "labels": labels,
            "loss_weights": (ids % 5).astype(np.float32),
            "advantages": torch.from_numpy(ids).double() / 7,
            "places": np.stack([ids, ids + 1], axis=1),
        }


def fields(
    comm: Communicator, arguments: dict[str, Any], options: dict[str, int | list[list[Any] | int]]
) -> list[dict[str, Array]]:
    """All fields of each batch on this rank, as arrays."""
    loader = PlannedLoader(ManyFields(), **arguments, communicator=comm, **options)
    found, names = [], ("tokens", "labels", "sample_ids", "local_to_sample", "position_ids")
    for b in loader:
        columns = {**{name: getattr(b, name) for name in names}, **b.fields}
        totals = np.array([b.valid_tokens, b.total_weight])
        found.append({name: value.numpy() for name, value in columns.items()} | {"totals": totals})
    return found


def verbs(comm: Communicator, arguments: dict[str, Any], seed: int) -> tuple[bool, ...]:
    """Whether the token functions and their gradients are right on this rank, for the first batch."""
    batch = next(iter(PlannedLoader(Recorded(), **arguments, communicator=comm)))
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(batch.batch.tokens, 3, dtype=torch.float64, generator=generator)
    local = batch.shard_tokens(full, fill=9.0).requires_grad_()
    gathered = batch.gather_tokens(local)
    weights = torch.arange(float(gathered.numel()), dtype=torch.float64).view_as(gathered)
    (gathered * weights * (1 + comm.rank)).sum().backward()
    back = batch.shard_tokens(weights) * sum(range(1, comm.ranks + 1))
    exact = bool(torch.equal(gathered, full)) and bool(torch.equal(local.grad, back))

    def loss(x: torch.Tensor, shift: int) -> torch.Tensor:
        return (batch.roll(x, shift) * batch.shard_tokens(weights)).sum()

    rolled = batch.roll(batch.labels)
    direct = {int(t): int(target) for t, target in enumerate(batch.batch.labels())}
    ids = np.concatenate([Recorded()[s] for s in batch.samples.tolist()])
    expected = [
        ids[direct[direct[t]]] if direct[t] >= 0 and direct[direct[t]] >= 0 else IGNORED
        for t in batch.handle.tokens.tolist()
    ]
    x = batch.shard_tokens(full).requires_grad_()
    loss(x, 2).backward()
    grads = torch.zeros_like(full)
    for token in range(len(ids)):
        first = direct[token]
        if first >= 0 and direct[first] >= 0:
            grads[direct[first]] += weights[token]
    gradients_match = bool(torch.equal(x.grad, batch.shard_tokens(grads)))
    chained = bool(torch.equal(batch.roll(rolled), batch.roll(batch.labels, 2)))
    return exact, rolled[: batch.handle.rows].tolist() == expected, chained, gradients_match


def padded(
    comm: Communicator, arguments: dict[str, Any], options: dict[str, Any]
) -> tuple[list[int], float, Array]:
    """Numbers of rows, then loss and gradients of attention with a residual, summed over ranks, with or without
    padding."""
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm, shuffle=False, **options)
    torch.manual_seed(3)
    table = torch.randn(800, 8, requires_grad=True)
    counts, total = [], 0.0
    for b in loader:
        x = table[b.tokens]
        q, k = torch.stack([x, x.sin()], 1), x[:, None]
        out, lse = ap.planned_attention(q, k, k.cos(), b.handle, return_lse=True)
        assert not out[b.handle.rows :].any()
        assert bool((lse[b.handle.rows :] == -torch.inf).all())
        logits = (out.mean(1) + x) @ table[:40].T
        loss = ap.normalised_loss(logits, b.labels.where(b.labels < 0, b.labels % 40), b.valid_tokens)
        loss.backward()
        counts.append(len(b.tokens))
        total += loss.item()
    grad, sums = table.grad.clone(), torch.tensor(total)
    for tensor in (grad, sums):
        dist.all_reduce(tensor, group=comm._groups[0])
    return counts, sums.item(), grad.numpy()


def groups(
    comm: Communicator,
    options: dict[str, Any],
    dataset: Recorded | Broken | None = None,
    evaluates: bool = False,
) -> list[tuple[float | list[Any], ...]] | None:
    """The content of each batch, with labels and weights counted over all, if two groups of four ranks share a job."""
    group, place = divmod(comm.rank, 4)
    own_group = [dist.new_group(range(first, first + 4)) for first in (0, 4)][group]
    others = [dist.new_group([first, first + 4]) for first in range(4)][place]
    options = {**planning(job(4, 64, microbatches=2)), **options}
    group = ap.Communicator(own_group)
    loader = PlannedLoader(dataset or Recorded(), communicator=group, replicas=others, **options)
    assert loader.state_dict()["groups"] == 2
    with torch.set_grad_enabled(not evaluates), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return [
            (b.iteration, b.microbatch, b.is_last, b.valid_tokens, b.samples.tolist(), b.total_weight)
            for b in loader
        ]


def passed(comm: Communicator, dataset: Recorded, arguments: dict[str, Any], sampler: Any) -> None:
    list(PlannedLoader(dataset, **arguments, communicator=comm, sampler=sampler))


def resumed(
    comm: Communicator, arguments: dict[str, Any], stop: int, options: dict[str, int]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The batches of an uninterrupted pass, and of one that another loader resumes after `stop` batches."""

    def loader_of(**loader_options: int) -> PlannedLoader:
        loader = PlannedLoader(Recorded(), **arguments, communicator=comm, **loader_options)
        loader.set_epoch(3)
        return loader

    whole = [seen(b) for b in loader_of()]
    first, first_contents = loader_of(), []
    for batch in first:
        first_contents.append(seen(batch))
        if len(first_contents) == stop:
            break
    state = first.state_dict()
    second = loader_of(**options)
    second.load_state_dict(state)
    second.set_epoch(3)
    return whole, first_contents + [seen(b) for b in second]


def padded_block(comm: Communicator, multiple: int | None, sinks: bool) -> tuple[list[Array], list[float]]:
    """Output and gradients of a layer whose heads the plan projects: those of the rank's rows, and sums of those of
    padding."""
    dims = ap.Model(4, 2, 8, dtype="fp64", hidden=12)
    policy = Policy(find_recipe("upipe"))
    arguments = planning(Job(ap.Cluster(1, comm.ranks), dims, policy, 40))
    torch.manual_seed(2)
    q, k, v = (torch.nn.Linear(12, width, dtype=torch.float64) for width in (32, 16, 16))
    project = HeadProjection(q, k, v, 8, 8)
    learned = torch.randn(4, dtype=torch.float64) if sinks else None
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm, shuffle=False, rows_multiple=multiple)
    batch = next(iter(loader))
    rows = batch.handle.rows
    hidden = torch.zeros(len(batch.tokens), 12, dtype=torch.float64)
    hidden[:rows] = torch.sin(batch.tokens[:rows, None] * torch.arange(1.0, 13).double())
    hidden.requires_grad_()
    rows_of_batch = hidden, batch.position_ids, batch.handle
    out = ap.planned_attention_block(*rows_of_batch, project, project.params, sinks=learned)
    out.square().sum().backward()
    found = [out, hidden.grad]
    weights = [param.grad.numpy() for param in project.params]
    return [x[:rows].detach().numpy() for x in found] + weights, [float(x[rows:].abs().sum()) for x in found]


class Broken(Recorded):
    """A dataset with one unreadable sample."""

    def __getitem__(self, index: int) -> Array | None:
        if index == 2:
            raise OSError("a sample is lost")
        return super().__getitem__(index)


class Mixed(Recorded):
    """A dataset with a field whose dtype differs between samples."""

    def __getitem__(self, index: int) -> dict[str, Array]:
        ids = super().__getitem__(index)
        return {"input_ids": ids, "rewards": ids.astype((np.float32, np.float64)[index])}
