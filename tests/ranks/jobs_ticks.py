"""What the ranks of the pool do in a pipeline of ticks: each is one replica of one stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from apportion.backends.torch.autograd import backward_home, run
from apportion.backends.torch.executor import Layer
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.transport import Communicator
from apportion.ir.bytes.slices import Slice
from apportion.ir.request.sequences import DEFAULT_KIND
from apportion.ir.tensors import Tensor as Name

HEADS, WIDTH = 2, 8


class Tick(NamedTuple):
    """This rank's slice of the tick's plan, the phase, and the (microbatch, virtual stage) it works on or None."""

    piece: bytes
    phase: str
    key: tuple[int, int] | None


class Work(NamedTuple):
    """The ticks of one rank, its rows of every microbatch's input and of the gradient of every output, and the weights
    [3, WIDTH, WIDTH] of every virtual stage."""

    ticks: list[Tick]
    stages: int
    given: list
    asked: list
    weights: list


def project(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v of hidden states [rows, HEADS, WIDTH]; keys and values are those of head 0."""
    return x @ weight[0], x[:, :1] @ weight[1], x[:, :1] @ weight[2]


def pipeline(
    comm: Communicator, work: Work
) -> tuple[dict[int, NDArray[Any]], dict[int, NDArray[Any]], list[NDArray[Any] | None]]:
    """(outputs, input gradients) of this rank's rows by microbatch, where it has them, and the weights' gradients."""
    stage = Stage(comm, work)
    for tick in work.ticks:
        stage.run(tick)
    for sent in stage.sent:
        sent.wait()
    grads = [None if weight.grad is None else weight.grad.numpy() for weight in stage.weights]
    return stage.outputs, stage.gradients, grads


class Stage:
    def __init__(self, comm: Communicator, work: Work) -> None:
        self.comm, self.work = comm, work
        self.replicas = comm.ranks // work.stages
        self.weights = [torch.from_numpy(weight).requires_grad_() for weight in work.weights]
        self.layer = Layer(Score(WIDTH**-0.5))
        self.sent, self.left, self.outputs, self.gradients = [], {}, {}, {}

    def run(self, tick: Tick) -> None:
        handle = PlanHandle(Slice.decode(tick.piece), self.comm)
        if tick.phase == "forward":
            self.forward(handle, tick.key)
        else:
            self.backward(handle, tick.key)

    def forward(self, handle: PlanHandle, key: tuple[int, int] | None) -> None:
        x = self.rows(key) if key is None or key[1] == 0 else self.receive(key, key[1] - 1, 0)
        x.requires_grad_()
        q, k, v = project(x, self.weights[key[1] if key else 0])
        machine = run(handle, DEFAULT_KIND, "forward", {Name.Q: (q,), Name.KV: (k, v)}, self.layer)
        if key is None:
            return
        out, lse = machine.output(q.dtype)
        self.left[key] = (x, q, k, v, out, lse)
        self.pass_on((x + out).detach(), key, key[1] + 1, 0, self.outputs)

    def backward(self, handle: PlanHandle, key: tuple[int, int] | None) -> None:
        """On what a forward tick left, under another plan."""
        if key is None:
            x = self.rows(None)
            q, k, v = project(x, self.weights[0].detach())
            home = backward_home({Name.Q: (q,), Name.KV: (k, v)}, q, q[..., 0], q)
            run(handle, DEFAULT_KIND, "backward", home, self.layer)
            return
        last = key[1] == len(self.weights) - 1
        dy = torch.from_numpy(self.work.asked[key[0]]) if last else self.receive(key, key[1] + 1, 1)
        x, q, k, v, out, lse = self.left.pop(key)
        home = backward_home({Name.Q: (q,), Name.KV: (k, v)}, out, lse, dy)
        machine = run(handle, DEFAULT_KIND, "backward", home, self.layer)
        torch.autograd.backward((q, k, v), machine.input_gradients(q.dtype))
        self.pass_on(dy + x.grad, key, key[1] - 1, 1, self.gradients)

    def rows(self, key: tuple[int, int] | None) -> torch.Tensor:
        if key is None:
            return torch.zeros(0, HEADS, WIDTH, dtype=torch.float64)
        return torch.from_numpy(self.work.given[key[0]])

    def pass_on(
        self, rows: torch.Tensor, key: tuple[int, int], to: int, back: int, results: dict[int, NDArray[Any]]
    ) -> None:
        """Rows go to the virtual stage `to`, or are a result where there is none."""
        if not 0 <= to < len(self.weights):
            results[key[0]] = rows.numpy()
        elif len(rows):
            tag = self.tag(key[0], max(to, key[1]), back)
            self.sent.append(dist.isend(rows.contiguous(), self.peer(to), tag=tag))

    def receive(self, key: tuple[int, int], source: int, back: int) -> torch.Tensor:
        rows = torch.empty(len(self.work.given[key[0]]), HEADS, WIDTH, dtype=torch.float64)
        if len(rows):
            dist.recv(rows, self.peer(source), tag=self.tag(key[0], max(source, key[1]), back))
        return rows

    def peer(self, v: int) -> int:
        return v % self.work.stages * self.replicas + self.comm.rank % self.replicas

    def tag(self, microbatch: int, v: int, back: int) -> int:
        return 1 + (microbatch * len(self.weights) + v) * 2 + back
