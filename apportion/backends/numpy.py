"""The reference executor: runs all ranks of a plan in one process, in float64 on numpy. It is slow and simple; other
executors are tested against it.

    from apportion.backends import numpy as executor

    result = executor.run(plan, "default", q, k, v, do)     # tensors in token order
    result.o, result.lse, result.dq, result.dk, result.dv

    tensors in token order ──scatter──► home rows of each rank ──programs──► home rows ──gather──► token order

It shows authors of plans, passes and executors what a plan computes, without devices or processes. All numbers are
float64, including partial sums and transferred rows; only gradients are rounded in transit, if the plan's model asks
for it. In shapes T is the number of tokens, Hq and Hk the query and KV heads, D and Dv the widths of keys and values,
E the width of hidden states.

Ranks are generators that take turns. A launch copies what it sends; a wait yields until every peer of the round has
launched it too. Unwritten rows hold NaN, and so do rows in flight and consumed partials. A plan that reads them, sends
rows that no rank receives, writes to rows of a round in flight, or deadlocks, ends in an ExecutionError that shows the
current instruction of each rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from apportion.backends.interp import (
    GradTask,
    Machine,
    Operand,
    Program,
    RowOp,
    Step,
    Task,
    compile_program,
    components,
)
from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import ExecutionError, UnknownNameError
from apportion.ir.isa import ALL_TO_ALL, Op
from apportion.ir.plan.tables import Header, Layout
from apportion.ir.tensors import HEADLESS, PARTIALS, TENSOR_NAMES, Tensor

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan  # loads the compiled core, which execution does not need

__all__ = ["Context", "LocalLayer", "Projection", "Result", "backward", "forward", "gather", "run", "scatter"]

Array = NDArray[Any]
Arrays = tuple[Floats, ...]
Heads = tuple[int, ...]
Strip = tuple[slice, slice, Floats]
#: a rank's home rows, tensor -> its arrays
Home = dict[Tensor, Arrays]

#: query rows computed at a time; the logits of 256 rows × 8K keys × 8 heads take 128 MiB
STRIP = 256


# --- calls


class Projection(Protocol):
    """A layer's projection, for plans that take hidden states: it holds the weights."""

    def project(self, hidden: Floats, positions: Ints, q_heads: Heads, kv_heads: Heads, /) -> Arrays:
        """Projects hidden [n, E] to q [n, len(q_heads), D], k [n, len(kv_heads), D], v [n, len(kv_heads), Dv].
        positions: int64 [n], each token's position in its sequence."""

    def gradient(self, hidden: Floats, positions: Ints, q: Heads, kv: Heads, grads: Arrays, /) -> Floats:
        """The gradient [n, E] of hidden from `grads`, the gradients of q, k and v for the heads `q` and `kv`; weight
        gradients stay in the object."""


@dataclass(frozen=True)
class LocalLayer:
    """Per-layer inputs of a plan. sinks: [Hq], learned logits; scale: factor on q·k, D^-1/2 by default; softcap: logits
    become softcap·tanh(logit / softcap); project: the projection, for a plan that takes hidden states."""

    sinks: Array | None = None
    scale: float | None = None
    softcap: float | None = None
    project: Projection | None = None


PLAIN = LocalLayer()


class Result(NamedTuple):
    """float64, in token order: o [T, Hq, Dv], lse [T, Hq], dq [T, Hq, D], dk [T, Hk, D], dv [T, Hk, Dv], dsinks [Hq].
    Gradients are None if there is no `do`, dsinks also if there are no sinks."""

    o: Floats
    lse: Floats
    dq: Floats | None = None
    dk: Floats | None = None
    dv: Floats | None = None
    dsinks: Floats | None = None


@dataclass(frozen=True)
class Context:
    """State that forward saves for backward: each rank's home rows of q, k, v (or hidden states), o and lse."""

    layer: LocalLayer
    homes: tuple[Home, ...]


def run(
    plan: Plan, kind: str, q: Array, k: Array, v: Array, do: Array | None = None, layer: LocalLayer = PLAIN
) -> Result:
    """Runs forward, and backward if the output's gradient `do` is given. Shapes and errors as in `forward`."""
    o, lse, saved = forward(plan, kind, (q, k, v), layer)
    return Result(o, lse) if do is None else Result(o, lse, *backward(plan, kind, saved, do))


def forward(
    plan: Plan, kind: str, inputs: Sequence[Array], layer: LocalLayer = PLAIN
) -> tuple[Floats, Floats, Context]:
    """Runs planned attention of one kind, in token order.

    inputs: q [T, Hq, D], k [T, Hk, D] and v [T, Hk, Dv]; or only hidden states x [T, E], for a layer that projects.
    Any real dtype, converted to float64. Returns o [T, Hq, Dv], lse [T, Hq] (natural logarithm) and state for
    `backward`.
    A row that sees no key has o = 0 and lse = -inf (with sinks: its sink logit). Raises UnknownNameError for a kind
    that the plan does not have, ExecutionError for wrong shapes, for NaN, and for a plan that cannot be executed.
    """
    home = plan.layout(plan.header.home_layout)
    tensors = {Tensor.Q: tuple(inputs[:1]), Tensor.KV: tuple(inputs[1:])}
    if layer.project is not None:
        positions = gather(home, [home.position_ids(rank) for rank in range(plan.header.ranks)])
        tensors = {Tensor.X: (*inputs, positions)}
    homes = _execute(plan, (kind, "forward"), layer, _home_rows(plan, tensors))
    o, lse = _in_token_order(plan, homes, Tensor.O)
    saved = tuple({tensor: rows[tensor] for tensor in (*tensors, Tensor.O)} for rows in homes)
    return o, lse, Context(layer, saved)


def backward(plan: Plan, kind: str, saved: Context, do: Array) -> tuple[Floats | None, ...]:
    """The gradients of `forward`'s inputs from its output's gradient do [T, Hq, Dv], followed by the gradient of the
    sinks [Hq], None if there are none. Raises the errors of `forward`. `saved` may be used again."""
    do_rows = _home_rows(plan, {Tensor.DO: (do,)})
    homes = [deepcopy(rows) | extra for rows, extra in zip(saved.homes, do_rows, strict=True)]
    homes = _execute(plan, (kind, "backward"), saved.layer, homes)
    results = (Tensor.DX,) if Tensor.X in saved.homes[0] else (Tensor.DQ, Tensor.DKV)
    grads = [array for tensor in results for array in _in_token_order(plan, homes, tensor)]
    if saved.layer.sinks is None:
        return (*grads, None)
    o, lse = _in_token_order(plan, saved.homes, Tensor.O)
    share = np.exp(saved.layer.sinks - np.where(lse > -np.inf, lse, np.inf))
    return (*grads, -(share * (do * o).sum(axis=-1)).sum(axis=0))


def scatter(layout: Layout, x: Array) -> list[Array]:
    """The rows of x [T, ...] that each rank holds, in row order."""
    return [x[layout.tokens(rank)] for rank in range(layout.spans.ranks)]


def gather(layout: Layout, parts: Sequence[Array]) -> Array:
    """The inverse of `scatter`: [T, ...] in token order."""
    rows = np.concatenate(list(parts))
    out = np.empty_like(rows)
    out[np.concatenate([layout.tokens(rank) for rank in range(layout.spans.ranks)])] = rows
    return out


def _home_rows(plan: Plan, tensors: Mapping[Tensor, tuple[Array, ...]]) -> list[Home]:
    """Each rank's home rows of the given tensors."""
    layout, head = plan.layout(plan.header.home_layout), plan.header
    homes: list[Home] = [{} for _ in range(head.ranks)]
    for tensor, arrays in tensors.items():
        tokens, hidden = int(layout.rows_per_rank.sum()), np.shape(arrays[0])[-1] if arrays else 0
        shapes = _shapes(head, tensor, tokens, head.heads_of(tensor), hidden)
        if len(arrays) != len(shapes):
            raise ExecutionError(f"got {len(arrays)} arrays; the plan takes {', '.join(shapes)}")
        for (name, shape), array in zip(shapes.items(), arrays, strict=True):
            if np.shape(array) != shape:
                raise ExecutionError(f"{name} has shape {np.shape(array)}; the plan is for {shape}")
            if np.isnan(array).any():
                raise ExecutionError(f"{name} holds NaN, which this executor reserves for unwritten rows")
        parts = (scatter(layout, np.asarray(array, np.float64)) for array in arrays)
        for rows, home in zip(zip(*parts, strict=True), homes, strict=True):
            home[tensor] = rows
    return homes


def _shapes(head: Header, tensor: Tensor, rows: int, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a tensor, by name."""
    leading = (rows,) if tensor in HEADLESS else (rows, heads)
    parts = components(tensor, head, hidden)
    return {part.name: (*leading, part.width) if part.width else leading for part in parts}


def _in_token_order(plan: Plan, homes: Sequence[Home], tensor: Tensor) -> Arrays:
    """The arrays of a tensor in token order, from the home rows of all ranks."""
    for rank, home in enumerate(homes):
        if any(np.isnan(array).any() for array in home[tensor]):
            rows = f"home rows of {TENSOR_NAMES[tensor]}"
            raise ExecutionError(f"rank {rank}: {rows} were never written, or were consumed")
    arrays = zip(*(home[tensor] for home in homes), strict=True)
    return tuple(gather(plan.layout(plan.header.home_layout), parts) for parts in arrays)


def _execute(plan: Plan, key: tuple[str, str], layer: LocalLayer, homes: Sequence[Home]) -> list[Home]:
    """Runs the programs of a kind and phase (`key`) on all ranks; returns each rank's home rows."""
    head, network = plan.header, Network()
    if layer.sinks is not None and np.shape(layer.sinks) != (head.q_heads,):
        raise ExecutionError(
            f"sinks have shape {np.shape(layer.sinks)}; the plan has {head.q_heads} query heads"
        )
    if head.latent is not None:
        raise ExecutionError("the numpy executor cannot expand latent rows: execute the plan with torch")
    if key not in plan.programs:
        raise UnknownNameError("kind", key[0], f"the plan has {', '.join(head.kinds)}", "name one of these")
    programs = [compile_program(plan.programs[key].rank(rank), head) for rank in range(head.ranks)]
    rows = plan.layout(plan.header.home_layout).rows_per_rank.tolist()
    ranks = [
        Rank(rank, program, layer, network, rows[rank], homes[rank]) for rank, program in enumerate(programs)
    ]
    _take_turns(ranks, " ".join(key))
    for (round_, source, target), queue in network.mail.items():
        for tile, _ in queue:
            raise ExecutionError(f"round {round_}: rank {target} does not receive {tile} from rank {source}")
    return [rank.home for rank in ranks]


# --- attention of one task: n query rows, m key rows, h query heads; keys and values with a column per query head


class Partial(NamedTuple):
    """Normalised output [n, h, Dv] and log-sum-exp [n, h]; (0, -inf) is the identity of `merge`."""

    o: Floats
    lse: Floats


def _strips(q: Floats, k: Floats, task: Task | GradTask, layer: LocalLayer) -> Iterator[Strip]:
    """Yields query rows, the keys that any of them sees, and logits [h, rows, keys], -inf where a pair is not allowed.
    No dense mask of a whole task is ever built."""
    for a in range(0, len(q), STRIP):
        b = min(a + STRIP, len(q))
        keys = slice(max(0, a - task.dmax), min(len(k), b - task.dmin))
        if keys.start < keys.stop:
            distance = np.arange(a, b)[:, None] - np.arange(keys.start, keys.stop)
            logits = q[a:b].swapaxes(0, 1) @ k[keys].transpose(1, 2, 0) * _scale(q, layer)
            if layer.softcap is not None:
                logits = layer.softcap * np.tanh(logits / layer.softcap)
            allowed = (task.dmin <= distance) & (distance <= task.dmax)
            yield slice(a, b), keys, np.where(allowed, logits, -np.inf)


def _scale(q: Floats, layer: LocalLayer) -> float:
    return float(q.shape[2] ** -0.5) if layer.scale is None else layer.scale


def attend(q: Floats, k: Floats, v: Floats, task: Task, layer: LocalLayer) -> Partial:
    """Attention of q [n, h, D] to k [m, h, D], v [m, h, Dv] inside the task's band; (0, -inf) for rows without keys."""
    out = Partial(np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf))
    for rows, keys, logits in _strips(q, k, task, layer):
        top = _finite(logits.max(axis=-1))
        with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf
            lse = top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))
        weights = np.exp(logits - _finite(lse)[..., None])
        out.o[rows] = (weights @ v[keys].swapaxes(0, 1)).swapaxes(0, 1)
        out.lse[rows] = lse.T
    return out


def attend_grad(q: Floats, kv: Arrays, do: Floats, sums: Arrays, task: GradTask, layer: LocalLayer) -> Arrays:
    """dq [n, h, D], dk [m, h, D] and dv [m, h, Dv], per query head. sums: the merged lse and delta =
    rowsum(dO · O), both [n, h]. Rows whose merged LSE is -inf saw no key anywhere and contribute nothing."""
    (k, v), (lse, delta) = kv, sums
    dq, dk, dv = (np.zeros_like(array) for array in (q, k, v))
    for rows, keys, logits in _strips(q, k, task, layer):
        allowed, do_rows = np.isfinite(logits), do[rows].swapaxes(0, 1)
        weights = np.where(allowed, np.exp(logits - _finite(lse[rows].T)[..., None]), 0)
        d_weights = do_rows @ v[keys].transpose(1, 2, 0)
        d_logits = weights * (d_weights - delta[rows].T[..., None]) * _scale(q, layer)
        if layer.softcap is not None:  # tanh' = 1 - tanh²
            d_logits *= 1 - (np.where(allowed, logits, 0) / layer.softcap) ** 2
        dq[rows] += (d_logits @ k[keys].swapaxes(0, 1)).swapaxes(0, 1)
        dk[keys] += (d_logits.swapaxes(1, 2) @ q[rows].swapaxes(0, 1)).swapaxes(0, 1)
        dv[keys] += (weights.swapaxes(1, 2) @ do_rows).swapaxes(0, 1)
    return dq, dk, dv


def merge(a: Partial, b: Partial) -> Partial:
    """Combines the attention over two disjoint sets of keys (online softmax)."""
    lse = np.logaddexp(a.lse, b.lse)
    weight_a, weight_b = (np.exp(part.lse - _finite(lse))[..., None] for part in (a, b))
    return Partial(a.o * weight_a + b.o * weight_b, lse)


def rounded(values: Floats, dtype: str) -> Floats:
    """Rounds to the nearest bf16 or fp16 numbers, ties to even (bf16 via float32); returns float64."""
    if dtype == "fp16":
        with np.errstate(over="ignore"):  # values out of range become infinite, as on a device
            return values.astype(np.float16).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    carry = np.where(np.isfinite(values), 0x7FFF + (bits >> 16 & 1), 0)  # may carry into the exponent
    return (bits + carry.astype(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _finite(lse: Floats) -> Floats:
    """Replaces -inf with 0, so that no difference is inf - inf."""
    return np.where(lse == -np.inf, 0.0, lse)


# --- ranks


class Network:
    """The links between ranks: which ranks launched each round, and the tiles in flight by (round, from, to)."""

    def __init__(self) -> None:
        self.launched = defaultdict[int, set[int]](set)
        self.mail = defaultdict[tuple[int, int, int], deque[tuple[Operand, Arrays]]](deque)

    def receive(self, round_: int, source: int, target: int, operand: Operand) -> Arrays:
        """Returns the pair's next tile. Raises ExecutionError if the two sides list their transfers differently."""
        queue = self.mail[round_, source, target]
        if not queue:
            raise ExecutionError(
                f"receives {operand} from rank {source}, which has no more to send in round {round_}"
            )
        tile, values = queue.popleft()
        if (tile.tensor, tile.rows, tile.heads) != (operand.tensor, operand.rows, operand.heads):
            raise ExecutionError(f"receives {operand} from rank {source}, which sends {tile}")
        return values


@dataclass(frozen=True, eq=False)
class LocalView:
    """An operand in a rank's memory: `arrays` are the tensor's whole home or work arrays."""

    operand: Operand
    arrays: Arrays

    @property
    def _index(self) -> tuple[Any, ...]:
        rows = self.operand.row_slice
        return (rows,) if self.operand.tensor in HEADLESS else (rows, self.operand.columns)

    def peek(self) -> Arrays:
        """A copy of the values, unchecked."""
        return tuple(np.array(array[self._index]) for array in self.arrays)

    def read(self) -> Arrays:
        """A copy of the values. Raises ExecutionError if a row has no value."""
        values = self.peek()
        for value in values:
            if np.isnan(value).any():
                row = self.operand.row + int(np.argwhere(np.isnan(value))[0][0])
                raise ExecutionError(f"reads {self.operand}: row {row} is unwritten, consumed or in flight")
        return values

    def take(self) -> Arrays:
        """Like `read`, but consumes partials."""
        values = self.read()
        if self.operand.tensor in PARTIALS:
            self.poison()
        return values

    def write(self, values: Sequence[Floats | float]) -> None:
        """Stores values: for each of the tensor's arrays, an array or one number for all rows."""
        for array, value in zip(self.arrays, values, strict=True):
            array[self._index] = value

    def add(self, values: Sequence[Floats], first: bool) -> None:
        """Adds values to the rows, or overwrites the rows if `first`."""
        self.write(values if first else [a + b for a, b in zip(self.read(), values, strict=True)])

    def merge(self, part: Partial, first: bool) -> None:
        """Merges a partial into the rows of O, or overwrites the rows if `first`."""
        self.write(part if first else merge(Partial(*self.read()), part))

    def poison(self) -> None:
        """Marks the rows as unwritten."""
        self.write([np.nan] * len(self.arrays))


class Rank(Machine[LocalView]):
    """One rank's machine."""

    def __init__(
        self, rank: int, program: Program, layer: LocalLayer, network: Network, rows: int, home: Home
    ) -> None:
        super().__init__(program)
        if program.uses_project and Tensor.X not in home:
            raise ExecutionError("the plan takes hidden states (X.home): pass them, and a projecting layer")
        self.rank, self.position, self._layer, self._network = rank, 0, layer, network
        self._hidden_width = home[Tensor.X][0].shape[1] if Tensor.X in home else 0
        self.home = {t: home.get(t) or self._empty(t, rows, program.header.heads_of(t)) for t in Tensor if t}
        self._work = {arena.tensor: self._empty(*arena) for arena in program.arenas}
        #: launched rounds: the launch, and the values that each operand must hold until the wait
        self._flights: dict[int, tuple[Step, list[tuple[LocalView, Arrays]]]] = {}
        self.bind()

    def _empty(self, tensor: Tensor, rows: int, heads: int) -> Arrays:
        shapes = _shapes(self.program.header, tensor, rows, heads, self._hidden_width)
        return tuple(np.full(shape, np.nan) for shape in shapes.values())

    def view(self, operand: Operand) -> LocalView:
        arrays = (self.home if operand.is_home else self._work).get(operand.tensor)
        if arrays is None or operand.row + operand.rows > len(arrays[0]):
            raise ExecutionError(f"rank {self.rank}: {operand} exceeds the rows of its tensor")
        return LocalView(operand, arrays)

    def advance(self) -> Iterator[set[int]]:
        """Executes the program; at a wait, yields the ranks that have not yet launched the round."""
        for step in self.program.steps:
            self.position = step.index
            while missing := self._missing(step):
                yield missing
            self.handlers[step.op](step)
        self.position = len(self.program.steps)
        if self._flights:
            raise ExecutionError(f"the program ends without a wait for rounds {sorted(self._flights)}")

    def _missing(self, step: Step) -> set[int]:
        if step.op != Op.WAIT or step.round not in self._flights:
            return set()
        launch, _ = self._flights[step.round]
        all_ranks, peers = range(self.program.header.ranks), {transfer.peer for transfer in launch.transfers}
        return {*(all_ranks if launch.mode & ALL_TO_ALL else peers)} - self._network.launched[step.round]

    def __str__(self) -> str:
        return f"rank {self.rank}, instruction {self.position} of {len(self.program.steps)}"

    def excerpt(self) -> str:
        """Shows the instructions around the current one, which an arrow marks."""
        steps = self.program.steps[max(0, self.position - 2) : self.position + 2]
        return "\n".join(f"  {'→' if s.index == self.position else ' '} {s.index}: {s}" for s in steps)

    # the ops

    def launch(self, step: Step) -> None:
        head, views = self.program.header, [self.views[transfer.operand] for transfer in step.transfers]
        for view, transfer in zip(views, step.transfers, strict=True):
            if transfer.send:
                values = view.take()
                if head.narrows(view.operand.tensor):
                    values = tuple(rounded(value, head.dtype) for value in values)
                self._network.mail[step.round, self.rank, transfer.peer].append((view.operand, values))
            else:
                view.poison()
        self._flights[step.round] = step, [(view, view.peek()) for view in views]
        self._network.launched[step.round].add(self.rank)

    def wait(self, step: Step) -> None:
        if step.round not in self._flights:
            raise ExecutionError(f"waits for round {step.round}, which it did not launch")
        launch, flight = self._flights.pop(step.round)
        for (view, saved), transfer in zip(flight, launch.transfers, strict=True):
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(view.peek(), saved, strict=True)):
                raise ExecutionError(f"{view.operand} was overwritten while round {step.round} was in flight")
            if not transfer.send:
                view.write(self._network.receive(step.round, transfer.peer, self.rank, view.operand))

    def attend(self, step: Step) -> None:
        for task in step.tasks:
            (q,), (k, v) = self.views[task.q].read(), self.views[task.kv].read()
            part = attend(q, k[:, task.kv_of], v[:, task.kv_of], task, self._layer)
            self.views[task.o].merge(part, task.first)

    def attend_grad(self, step: Step) -> None:
        for task in step.grads:
            (q,), (k, v), (do,) = (self.views[index].read() for index in (task.q, task.kv, task.do))
            kv, sums = (k[:, task.kv_of], v[:, task.kv_of]), self.views[task.delta].read()
            dq, dk, dv = attend_grad(q, kv, do, sums, task, self._layer)
            self.views[task.dq].add([dq], task.first_dq)
            readers = np.eye(k.shape[1])[:, task.kv_of]  # the query heads whose gradients each KV head sums
            self.views[task.dkv].add([readers @ dk, readers @ dv], task.first_dkv)

    def delta(self, step: Step) -> None:
        for row in step.rowops:
            (do,), (o, lse) = self.views[row.a].read(), self.views[row.b].read()
            self.views[row.c].write([lse, (do * o).sum(axis=-1)])

    def merge(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].merge(Partial(*self.views[row.a].take()), row.first)

    def add(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].add(self.views[row.a].take(), row.first)

    def copy(self, step: Step) -> None:
        for row in step.rowops:
            self.views[row.c].write(self.views[row.a].take())

    deliver = copy

    def clear(self, step: Step) -> None:
        for row in step.rowops:
            view = self.views[row.c]
            view.write([0.0, -np.inf if view.operand.tensor == Tensor.O else 0.0][: len(view.arrays)])

    def project(self, step: Step) -> None:
        for row in step.rowops:
            q, k, v = cast("Projection", self._layer.project).project(*self._projected(row))
            for index, values in ((row.b, [q]), (row.c, [k, v])):
                if index:
                    self.views[index].write(values)

    def project_grad(self, step: Step) -> None:
        for row in step.rowops:
            grads = (*self._grads(row, row.b, Tensor.Q), *self._grads(row, row.c, Tensor.KV))
            dx = cast("Projection", self._layer.project).gradient(*self._projected(row), grads)
            self.views[row.d].add([dx], row.first)

    def _projected(self, row: RowOp) -> tuple[Floats, Ints, Heads, Heads]:
        hidden, positions = self.views[row.a].read()
        q, kv = (self.program.operands[index].heads for index in (row.b, row.c))
        return hidden, positions.astype(np.int64), q, kv

    def _grads(self, row: RowOp, index: int, tensor: Tensor) -> Arrays:
        """Consumes the gradients of an operand; if there is none, returns gradients with zero heads."""
        rows = self.program.operands[row.a].rows
        return self.views[index].take() if index else self._empty(tensor, rows, 0)

    def finish(self, step: Step) -> None:
        for row in step.rowops:
            view, (o, lse) = self.views[row.c], self.views[row.c].read()
            if self._layer.sinks is not None:
                sinks = np.broadcast_to(self._layer.sinks[list(view.operand.heads)], lse.shape)
                view.merge(Partial(np.zeros_like(o), sinks), first=False)


def _take_turns(ranks: list[Rank], label: str) -> None:
    """Runs every rank in turn as far as it can go, until all are done."""
    running = {rank: rank.advance() for rank in ranks}
    while running:
        positions, waits = [rank.position for rank in ranks], dict[Rank, set[int]]()
        for rank, steps in running.items():
            try:
                waits[rank] = next(steps, set())
            except ExecutionError as error:
                raise ExecutionError(f"{label}: {rank}: {error}\n{rank.excerpt()}") from error
        running = {rank: running[rank] for rank, missing in waits.items() if missing}
        if running and positions == [rank.position for rank in ranks]:
            lines = [f"{label}: deadlock, no rank can proceed"]
            for rank in running:
                lines += [f"{rank}: waits for ranks {sorted(waits[rank])} to launch", rank.excerpt()]
            raise ExecutionError("\n".join(lines))
