"""Rank pool jobs with loaders."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apportion import ApportionError, Communicator, PlannedLoader, sum_gradients
from apportion.trainer.loading.sources import ServiceSource
from tests.ranks.loading import HereSource, Recorded, seen


def passes(
    comm: Communicator, arguments: dict[str, Any], count: int, dataset: Recorded | None = None
) -> tuple[list[list[Any]], list[int]]:
    """This rank's batches in each of `count` passes, and the samples that it reads. arguments: the loader's."""
    data = Recorded() if dataset is None else dataset
    loader = PlannedLoader(data, communicator=comm, **arguments)
    return [[seen(batch) for batch in loader] for _ in range(count)], data.read


def agreeing(comm: Communicator, arguments: list[dict[str, Any]]) -> tuple[list[bytes], int, str]:
    """The ids of this rank's plans, the number of its fallbacks, and the error that ends its pass. arguments: for
    each rank's loader."""
    own_arguments = {"communicator": comm, "timeout_s": 4.0, "on_timeout": "local", **arguments[comm.rank]}
    warm_up_arguments = {**arguments[0], "source": HereSource()}
    list(PlannedLoader(Recorded(), communicator=comm, **warm_up_arguments))  # warms up planning
    loader, ids = PlannedLoader(Recorded(), **own_arguments), []
    try:
        ids.extend(batch.handle.id for batch in loader)
    except ApportionError as error:
        return ids, loader.metrics()["fallbacks"], f"{type(error).__name__}: {error}"
    return ids, loader.metrics()["fallbacks"], ""


class SilentSource(ServiceSource):
    """A source that submits nothing, as if its rank had failed."""

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        pass


def without_rank_0(comm: Communicator, arguments: dict[str, Any]) -> list[bytes]:
    """The ids of this rank's plans if rank 0 submits nothing."""
    kind = SilentSource if comm.rank == 0 else ServiceSource
    arguments = {**arguments, "source": kind((arguments["source"],))}
    return [batch.handle.id for batch in PlannedLoader(Recorded(), **arguments, communicator=comm)]


def stalled(comm: Communicator, arguments: dict[str, Any], pid: int) -> tuple[list[bytes], int]:
    """The ids of this rank's plans and its number of fallbacks if the server stops answering after the first
    iteration."""
    options = {"sampler": [[0], [1], [2, 3]], "on_timeout": "local", "timeout_s": 3.0, "lookahead": 1}
    loader = PlannedLoader(Recorded(), communicator=comm, **arguments, **options)
    ids = []
    try:
        for batch in loader:
            ids.append(batch.handle.id)
            if comm.rank == 0:
                os.kill(pid, signal.SIGSTOP)
    finally:
        if comm.rank == 0:
            os.kill(pid, signal.SIGCONT)
    return ids, loader.metrics()["fallbacks"]


def apart(comm: Communicator, arguments: dict[str, Any]) -> None:
    """Starts a pass at another iteration on each rank."""
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm)
    loader.set_epoch(0, start=comm.rank)
    list(loader)


def drawn(comm: Communicator, arguments: dict[str, Any], samplers: list[Any]) -> tuple[int, str]:
    """The number of microbatches of this rank's own sampler, and the error that ends its pass. samplers: per rank."""
    count_read = 0
    try:
        for _ in PlannedLoader(Recorded(), **arguments, communicator=comm, sampler=samplers[comm.rank]):
            count_read += 1
    except ApportionError as error:
        return count_read, f"{type(error).__name__}: {error}"
    return count_read, ""


class Augmented(Recorded):
    """Samples with a wide field whose values each rank draws independently."""

    def __init__(self, rank: int) -> None:
        super().__init__([64] * 8)
        self.draw = torch.Generator().manual_seed(rank)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index), "image": torch.randn(64, 30, generator=self.draw)}


def equally_long(comm: Communicator, arguments: dict[str, Any], difference: str) -> None:
    """A pass over samples of equal length that differ between ranks because samplers or datasets differ."""
    dataset, options = Recorded([64] * 8), dict[str, Any]()
    if difference == "sampler":
        options["sampler"] = [[comm.rank, comm.rank + 1]]
    else:
        options["shuffle"] = False
        if "whole" in difference:
            arguments = {**arguments, "recipe": "hybrid_dp"}
        if difference.startswith("dataset"):
            dataset.first = comm.rank
        else:
            dataset = Augmented(comm.rank)
    loader = PlannedLoader(dataset, **arguments, communicator=comm, **options)
    loader.set_epoch(0, start=int(difference.endswith("resumed")))
    list(loader)


def summed_again(comm: Communicator, times: int) -> float:
    """The gradient of the second of two steps of a plain module, with gradients zeroed in place. times: the number of
    sums of the second step."""
    model = nn.Linear(1, 1, bias=False)
    for step in range(2):
        model.zero_grad(set_to_none=False)
        model(torch.full((1, 1), 1.0 + comm.rank + step)).sum().backward()
        for _ in range(times if step else 1):
            sum_gradients(model, comm._base)
    return float(model.weight.grad)


def summed_twice(comm: Communicator, inside: bool) -> None:
    """Sums DDP's gradients twice. inside: whether DDP is within another wrapper, as in Fabric."""
    wrapped: nn.Module = DistributedDataParallel(nn.Linear(2, 2), process_group=comm._base)
    sum_gradients(sum_gradients(nn.Sequential(wrapped) if inside else wrapped))
