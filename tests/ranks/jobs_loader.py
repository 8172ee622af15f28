"""Pool jobs with loaders."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.loading.sources import ServiceSource
from apportion.trainer.step.gradients import sum_gradients
from tests.ranks.loading import HereSource, Recorded, seen


def passes(
    comm: Communicator, given: dict[str, Any], count: int, dataset: Recorded | None = None
) -> tuple[list[list[Any]], list[int]]:
    """This rank's batches in each of `count` passes, and the samples that it read. given: arguments of the loader."""
    data = Recorded() if dataset is None else dataset
    loader = PlannedLoader(data, communicator=comm, **given)
    return [[seen(batch) for batch in loader] for _ in range(count)], data.read


def agreeing(comm: Communicator, given: list[dict[str, Any]]) -> tuple[list[bytes], int, str]:
    """Ids that this rank runs, its fallbacks, and the error that ends it. given: arguments of each rank's loader."""
    mine = {"communicator": comm, "timeout_s": 4.0, "on_timeout": "local", **given[comm.rank]}
    known = {**given[0], "source": HereSource()}
    list(PlannedLoader(Recorded(), communicator=comm, **known))  # warms up planning
    loader, ids = PlannedLoader(Recorded(), **mine), []
    try:
        ids.extend(batch.handle.id for batch in loader)
    except ApportionError as error:
        return ids, loader.metrics()["fallbacks"], f"{type(error).__name__}: {error}"
    return ids, loader.metrics()["fallbacks"], ""


class SilentSource(ServiceSource):
    """A source that submits nothing, as if its rank were lost."""

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        pass


def without_rank_0(comm: Communicator, given: dict[str, Any]) -> list[bytes]:
    """Ids that each rank gets if rank 0 submits nothing."""
    kind = SilentSource if comm.rank == 0 else ServiceSource
    loader = PlannedLoader(Recorded(), **{**given, "source": kind((given["source"],))}, communicator=comm)
    return [batch.handle.id for batch in loader]


def stalled(comm: Communicator, given: dict[str, Any], pid: int) -> tuple[list[bytes], int]:
    """Ids that a rank runs and its fallbacks, if the server stops answering after the first iteration."""
    options = {"sampler": [[0], [1], [2, 3]], "on_timeout": "local", "timeout_s": 3.0, "lookahead": 1}
    loader = PlannedLoader(Recorded(), communicator=comm, **given, **options)
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


def apart(comm: Communicator, given: dict[str, Any]) -> Any:
    """The error of ranks that begin at different places."""
    loader = PlannedLoader(Recorded(), **given, communicator=comm)
    loader.set_epoch(0, start=comm.rank)
    try:
        return len(list(loader))
    except ApportionError as error:
        return str(error)


def drawn(comm: Communicator, given: dict[str, Any], samplers: list[Any]) -> tuple[int, str]:
    """The number of microbatches from a rank's own sampler, and the error that ends its pass. samplers: per rank."""
    loader, got = PlannedLoader(Recorded(), **given, communicator=comm, sampler=samplers[comm.rank]), 0
    try:
        for _ in loader:
            got += 1
    except ApportionError as error:
        return got, f"{type(error).__name__}: {error}"
    return got, ""


class Augmented(Recorded):
    """Samples of a wide field whose values a rank draws by itself."""

    def __init__(self, rank: int) -> None:
        super().__init__([64] * 8)
        self.draw = torch.Generator().manual_seed(rank)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index), "image": torch.randn(64, 30, generator=self.draw)}


def equally_long(comm: Communicator, given: dict[str, Any], how: str) -> str:
    """The error of a pass over equally long samples that differ between ranks, by their samplers or datasets."""
    dataset, options = Recorded([64] * 8), dict[str, Any]()
    if how == "sampler":
        options["sampler"] = [[comm.rank, comm.rank + 1]]
    else:
        options["shuffle"] = False
        if how == "dataset, samples whole":
            given = {**given, "recipe": "hybrid_dp"}
        if how.startswith("dataset"):
            dataset.first = comm.rank
        else:
            dataset = Augmented(comm.rank)
    loader = PlannedLoader(dataset, **given, communicator=comm, **options)
    try:
        return str(len(list(loader)))
    except ApportionError as error:
        return str(error)


def summed_again(comm: Communicator) -> tuple[float, str]:
    """The gradient of the second of two steps of a plain module, zeroed in place between; a second sum's error."""
    model = nn.Linear(1, 1, bias=False)
    for step in range(2):
        model.zero_grad(set_to_none=False)
        model(torch.full((1, 1), 1.0 + comm.rank + step)).sum().backward()
        sum_gradients(model, comm._base)
    grad = float(model.weight.grad)
    try:
        sum_gradients(model, comm._base)
    except ApportionError as error:
        return grad, str(error)
    return grad, ""


def summed_twice(comm: Communicator, inside: bool) -> str:
    """The error of summing DDP's gradients twice, also if DDP is inside of another wrapper, as in Fabric."""
    wrapped: nn.Module = DistributedDataParallel(nn.Linear(2, 2), process_group=comm._base)
    model = sum_gradients(nn.Sequential(wrapped) if inside else wrapped)
    try:
        sum_gradients(model)
    except ApportionError as error:
        return str(error)
    return ""
