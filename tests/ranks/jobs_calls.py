"""Rank pool jobs in which ranks make different calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from apportion import ApportionError, ping_pong_attention
from apportion.backends.torch import calls
from apportion.trainer.step.attention import Communicator, planned_attention
from tests.ranks.jobs import Shard, inputs_of


class Rank:
    """One rank's handles and inputs for two microbatches."""

    def __init__(self, comm: Communicator, shards: tuple[Shard, Shard]) -> None:
        self.comm = comm
        self.handles, self.rows = zip(*(inputs_of(comm, shard) for shard in shards), strict=True)
        for handle in self.handles:
            handle.agree()

    def attend(self, index: int = 0, kind: str | None = None, **options: Any) -> torch.Tensor:
        return planned_attention(*self.rows[index], self.handles[index], kind, **options)

    def sinks(self) -> torch.Tensor:
        return torch.zeros(self.handles[0].slice.header.q_heads, dtype=self.handles[0].dtype)

    def wrong_shape(self) -> torch.Tensor:
        q, k, v = self.rows[0]
        return planned_attention(q[:, :1], k, v, self.handles[0], "a")

    def pair(self) -> Any:
        return ping_pong_attention(*self.rows, *self.handles, "a")


def _recompute(one: Rank, deviates: bool) -> None:
    out = one.attend(0, "a")
    if deviates:
        one.attend(0, "a")
    out.sum().backward()


def _skipped(one: Rank, deviates: bool) -> None:
    outs = [one.attend(0, "a") for _ in range(1 if deviates else 2)]
    torch.stack(outs).sum().backward()


def _skipped_at_the_end(one: Rank, deviates: bool) -> None:
    if not deviates:
        one.attend(0, "a")
    one.comm.all_gather([1], "metrics")


def _late_failure(one: Rank, deviates: bool) -> None:
    with one.comm.call("a step"):
        if deviates:
            time.sleep(1.5)
            raise MemoryError("out of memory")
    one.attend(0, "a")


#: name -> the calls of a rank, with whether it deviates
CASES: dict[str, Callable[[Rank, bool], object]] = {
    "kinds": lambda one, deviates: [one.attend(0, kind) for kind in ("ba" if deviates else "ab")],
    "handles": lambda one, deviates: [one.attend(i, "a") for i in ((1, 0) if deviates else (0, 1))],
    "scale": lambda one, deviates: one.attend(0, "a", scale=0.5 if deviates else 0.25),
    "softcap": lambda one, deviates: one.attend(0, "a", softcap=2.0 if deviates else None),
    "sinks": lambda one, deviates: one.attend(0, "a", sinks=one.sinks() if deviates else None),
    "lse": lambda one, deviates: one.attend(0, "a", return_lse=deviates),
    "recompute": _recompute,
    "skipped": _skipped,
    "skipped_at_the_end": _skipped_at_the_end,
    "pair": lambda one, deviates: one.attend(0, "a") if deviates else one.pair(),
    "shape": lambda one, deviates: one.wrong_shape() if deviates else one.attend(0, "a"),
    "late_failure": _late_failure,
}


def apart(comm: Communicator, case: str, rank: int, shards: tuple[Shard, Shard]) -> tuple[str, float]:
    """The error of a case in which `rank` deviates, and the seconds until it is raised."""
    one = Rank(comm, shards)
    begin = time.monotonic()
    try:
        CASES[case](one, comm.rank == rank)
    except (ApportionError, MemoryError) as error:
        outcome = f"{type(error).__name__}: {error}", time.monotonic() - begin
    else:
        outcome = "", time.monotonic() - begin
    time.sleep(2.0)  # keeps a failed rank alive: closed connections would end other ranks
    return outcome


def threads(comm: Communicator, shards: tuple[Shard, Shard]) -> list[str]:
    """The errors of a second thread that calls during a call and after it."""
    one, errors = Rank(comm, shards), list[str]()

    def second() -> None:
        try:
            one.attend(0, "a")
        except ApportionError as error:
            errors.append(str(error))
        else:
            errors.append("")

    def run() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    with comm.call("a step"):
        run()
    run()
    return errors


def resumed(comm: Communicator) -> tuple[str, list[list[int]]]:
    """The error of a gather before which only rank 1 makes another call, and the values of the next gather."""
    if comm.rank:
        with comm.call("a step"):
            pass
    message = ""
    try:
        comm.all_gather([1], "metrics")
    except ApportionError as error:
        message = str(error)
    return message, comm.all_gather([comm.rank], "ranks")


def stopped(comm: Communicator) -> list[list[int]]:
    """The values that ranks gather after rank 0 catches an error within a call, checkpointing ends a recomputation
    within a call, and all ranks catch an error within a call; rank 0 gathers late."""
    with suppress(MemoryError), comm.call("a step"):
        if comm.rank == 0:
            raise MemoryError("out of memory")

    def block(x: torch.Tensor) -> torch.Tensor:
        with comm.call("a block"):
            return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    with suppress(MemoryError), comm.call("a last step"):
        raise MemoryError("out of memory")
    if comm.rank == 0:
        time.sleep(4 * calls.CHECK_INTERVAL_S)
    return comm.all_gather([comm.rank], "ranks")
