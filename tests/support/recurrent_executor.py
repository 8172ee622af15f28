"""Reference executor of a plan's recurrent layers, in float64 on numpy, with all ranks in one process. It is slow and
simple; other executors are tested against it.

    outputs = recurrent_executor.run(plan, "linear", Inputs(x, decay, beta, weight), do)    # tensors in token order

    x ──convolution over halo and run──► q, k, v ──U, M of runs ──folds──► incoming states──► o

For each token the state S [K, V] of a head decays and is then updated: to S + k ⊗ beta (v - kᵀ S) with delta, else to
S + k ⊗ v; the output is qᵀ S. In shapes, T is the number of tokens, H of heads, K and V are the widths of a head, and C
is the number of channels: q and k of all key heads, then v of all heads. Head h reads key head h // (H / key heads).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from apportion.ir.arrays import Floats
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import RECURRENCE_TABLES
from apportion.ir.plan.tables import Table
from apportion.ir.request.recurrent import Recurrent, widest_halo

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan  # loads the compiled core, which execution does not need

#: identifies a run, a slot or a row: (rank, number on that rank)
Place = tuple[int, int]
Row = dict[str, int]
OfRuns = dict[Place, Floats]


class Inputs(NamedTuple):
    """Inputs of one kind: x [T, C]; decay [T, H], or [T, H, K] for a diagonal gate; beta [T, H] for a kind with delta;
    weight [C, width] of the convolution, whose last column applies to the token itself."""

    x: Floats
    decay: Floats
    beta: Floats | None = None
    weight: Floats | None = None


class Outputs(NamedTuple):
    """o [T, H, V] and, after backward, gradients in the shapes of the inputs; None for absent inputs."""

    o: Floats
    dx: Floats | None = None
    ddecay: Floats | None = None
    dbeta: Floats | None = None
    dweight: Floats | None = None


class Tokens(NamedTuple):
    """A run of n tokens, or its gradients: q, k [n, H, K], v [n, H, V], decay [n, H, 1 or K], beta [n, H]."""

    q: Floats
    k: Floats
    v: Floats
    decay: Floats
    beta: Floats


def run(plan: Plan, kind: str, inputs: Inputs, do: Floats | None = None) -> Outputs:
    """Runs forward, and backward if there is a gradient `do` [T, H, V] of the output. Raises ExecutionError
    for a plan with unmatched sends or receives."""
    layer = _Scan(plan, kind)
    try:
        return layer(inputs, do)
    except KeyError as error:
        raise ExecutionError(f"a state of {error} is read but never computed or received") from error


class _Scan:
    """The tables of one kind. The home rows of all ranks form one axis, rank after rank.

    order: int64 [T], the token of each row. rows: the rows of each run. before: run -> int64 [halo], the preceding rows
    that its convolution reads; -1 if there is none. later: runs with a predecessor; leading: runs that precede one.
    pairs: (run, slot, their heads). parents: slot -> its parent; (rank, -1): none.
    """

    def __init__(self, plan: Plan, kind: str) -> None:
        assert plan.recurrence is not None
        layout, ranks = plan.layout(plan.header.home_layout), range(plan.header.ranks)
        number = [*plan.header.recurrent].index(kind)
        first = (np.cumsum(layout.rows_per_rank) - layout.rows_per_rank).tolist()
        self.kind = plan.header.recurrent[kind]
        self.order = np.concatenate([layout.tokens(rank) for rank in ranks])
        runs, folds, states, halo = (_rows(plan.recurrence[name]) for name in RECURRENCE_TABLES)
        self.rows = {run: _span(row, first[run[0]]) for run, row in runs.items()}
        self.later = {run for run, row in runs.items() if row["past"] >= 0}
        self.leading = {run for run, row in runs.items() if row["leads"]}

        slots = {place: row for place, row in folds.items() if row["kind"] == number}
        self.parents = {slot: (slot[0], row["parent"]) for slot, row in slots.items()}
        sends = {place: row for place, row in states.items() if row["kind"] == number}
        self.pairs = [
            ((place[0], sends[place]["run"]), slot, slice(row["head"], row["head"] + row["heads"]))
            for place, slot in _paired_rows(sends, slots)
            for row in [_checked_row(sends[place], slots[slot], ("run", "head", "heads"))]
        ]
        width = widest_halo(plan.header.recurrent)
        halos = [np.full(len(plan.recurrence["runs"].rank(rank)) * width, -1) for rank in ranks]
        outgoing, arrives = ({at: row for at, row in halo.items() if row["send"] == sent} for sent in (1, 0))
        for place, target in _paired_rows(outgoing, arrives):
            row = _checked_row(outgoing[place], arrives[target], ("rows",))
            rows = _span(row, first[place[0]])
            halos[target[0]][_span(arrives[target], 0)] = np.arange(rows.start, rows.stop)
        ends = {(rank, n): (n + 1) * width for rank, n in runs}
        self.before = {run: halos[run[0]][end - self.kind.halo : end] for run, end in ends.items()}

    def __call__(self, inputs: Inputs, do: Floats | None) -> Outputs:
        """Runs the kind like `run`."""
        x, decay = inputs.x[self.order], inputs.decay[self.order]
        beta = np.ones(decay.shape[:2]) if inputs.beta is None else inputs.beta[self.order]
        decay = decay.reshape(*decay.shape[:2], -1)
        padded = {run: self._padded(x, run) for run in self.rows}
        tokens = {
            run: Tokens(*self._convolved(padded[run], inputs.weight), decay[rows], beta[rows])
            for run, rows in self.rows.items()
        }
        both = self.later & self.leading
        transitions = self._to_slots({run: transition(self.kind, tokens[run]) for run in both})
        states = self._states(tokens, transitions)
        o = self._whole({run: scan(self.kind, one, states[run])[0] for run, one in tokens.items()})
        if do is None:
            return Outputs(o)
        grads = self._gradients(tokens, transitions, states, do[self.order])
        dx = np.zeros_like(x)
        weights = []
        for run, grad in grads.items():
            dpadded, of_weight = self._convolved_grad(padded[run], inputs.weight, grad)
            present = self.before[run] >= 0
            np.add.at(dx, self.before[run][present], dpadded[: self.kind.halo][present])
            dx[self.rows[run]] += dpadded[self.kind.halo :]
            weights.append(of_weight)
        ddecay = self._whole({run: grad.decay for run, grad in grads.items()})
        dbeta = self._whole({run: grad.beta for run, grad in grads.items()})
        return Outputs(
            o,
            self._in_order(dx),
            ddecay.reshape(inputs.decay.shape),
            None if inputs.beta is None else dbeta,
            None if inputs.weight is None else np.sum(weights, axis=0),
        )

    # ---- rows

    def _whole(self, parts: OfRuns) -> Floats:
        """Joins the rows of all runs to [T, ...] in token order."""
        return self._in_order(np.concatenate([*parts.values()]))

    def _in_order(self, rows: Floats) -> Floats:
        found = np.empty_like(rows)
        found[self.order] = rows
        return found

    def _padded(self, x: Floats, run: Place) -> Floats:
        before = self.before[run]
        return np.concatenate([np.where(before[:, None] < 0, 0.0, x[before]), x[self.rows[run]]])

    def _convolved(self, padded: Floats, weight: Floats | None) -> tuple[Floats, Floats, Floats]:
        """q, k and v of a run; q and k are repeated to match the heads of v."""
        kind, rows = self.kind, len(padded) - self.kind.halo
        if weight is not None and kind.halo:
            padded = np.sum([padded[n : n + rows] * weight[:, n] for n in range(kind.conv)], axis=0)
        keys = kind.qk_heads * kind.key_dim
        q, k, v = np.split(padded, [keys, 2 * keys], axis=1)
        shared = (one.reshape(rows, kind.qk_heads, kind.key_dim) for one in (q, k))
        wide = (np.repeat(one, kind.heads // kind.qk_heads, axis=1) for one in shared)
        return next(wide), next(wide), v.reshape(rows, kind.heads, kind.value_dim)

    def _convolved_grad(self, padded: Floats, weight: Floats | None, grad: Tokens) -> tuple[Floats, Floats]:
        """The gradients of the padded rows and of the weight."""
        kind, rows = self.kind, len(grad.q)
        groups = (rows, kind.qk_heads, -1, kind.key_dim)
        dq, dk = (one.reshape(groups).sum(axis=2).reshape(rows, -1) for one in (grad.q, grad.k))
        d = np.concatenate([dq, dk, grad.v.reshape(rows, -1)], axis=1)
        if weight is None or not kind.halo:
            return d, np.zeros(())
        dpadded = np.zeros_like(padded)
        for n in range(kind.conv):
            dpadded[n : n + rows] += d * weight[:, n]
        return dpadded, np.stack([(padded[n : n + rows] * d).sum(axis=0) for n in range(kind.conv)], axis=1)

    # ---- states

    def _states(self, tokens: Mapping[Place, Tokens], transitions: OfRuns) -> OfRuns:
        """The incoming state [H, K, V] of each run."""
        zero = np.zeros((self.kind.heads, self.kind.key_dim, self.kind.value_dim))
        sums = self._to_slots({run: scan(self.kind, tokens[run], zero)[1] for run in self.leading})
        incoming, outgoing = OfRuns(), OfRuns()
        for slot, parent in self.parents.items():
            if parent[1] >= 0:
                incoming[slot] = outgoing[parent]
            if slot in sums:
                outgoing[slot] = sums[slot]
            if slot in transitions:
                outgoing[slot] = sums[slot] + transitions[slot] @ incoming[slot]
        return self._to_runs(incoming, self.later, zero)

    def _gradients(
        self, tokens: Mapping[Place, Tokens], transitions: OfRuns, states: OfRuns, do: Floats
    ) -> dict[Place, Tokens]:
        """The gradients of the inputs of each run's recurrence."""
        zero = np.zeros((self.kind.heads, self.kind.key_dim, self.kind.value_dim))
        own = {run: (tokens[run], states[run], do[rows]) for run, rows in self.rows.items()}
        incoming = self._to_slots({run: scan_grad(self.kind, *own[run], zero)[1] for run in self.later})
        outgoing: OfRuns = dict.fromkeys(self.parents, np.zeros(()))
        for slot, parent in reversed(self.parents.items()):
            if parent[1] >= 0:
                outgoing[parent] = outgoing[parent] + incoming[slot]
            if slot in transitions:
                outgoing[parent] = outgoing[parent] + transitions[slot].mT @ outgoing[slot]
        dstate = self._to_runs(outgoing, self.leading, zero)
        return {run: scan_grad(self.kind, *one, dstate[run])[0] for run, one in own.items()}

    def _to_slots(self, inputs: OfRuns) -> OfRuns:
        """The values of these runs' slots, with the heads of each slot."""
        return {slot: inputs[run][heads] for run, slot, heads in self.pairs if run in inputs}

    def _to_runs(self, inputs: OfRuns, runs: set[Place], zero: Floats) -> OfRuns:
        """The slots' values of each run in `runs`; `zero` for the other runs."""
        found = {run: np.full_like(zero, np.nan) if run in runs else zero for run in self.rows}
        for run, slot, heads in self.pairs:
            if run in runs:
                found[run][heads] = inputs[slot]
        return found


def scan(kind: Recurrent, tokens: Tokens, state: Floats) -> tuple[Floats, Floats, list[Floats]]:
    """o [n, H, V] of a run from an initial state [H, K, V], its final state, and the state before each token."""
    o, found = np.empty_like(tokens.v), []
    for n, (q, k, v, decay, beta) in enumerate(zip(*tokens, strict=True)):
        found.append(state)
        state = decay[..., None] * state
        update = beta[:, None] * (v - _through(k, state)) if kind.delta else v
        state = state + k[..., None] * update[:, None]
        o[n] = _through(q, state)
    return o, state, found


def transition(kind: Recurrent, tokens: Tokens) -> Floats:
    """The transition matrix M [H, K, K] of a run, which maps the state before it to the state after it, without k ⊗
    v."""
    one = np.eye(kind.key_dim)
    found = np.broadcast_to(one, (kind.heads, *one.shape))
    for k, decay, beta in zip(tokens.k, tokens.decay, tokens.beta, strict=True):
        found = decay[..., None] * found
        if kind.delta:
            found = found - beta[:, None, None] * k[..., None] * _through(k, found)[:, None]
    return found


def scan_grad(
    kind: Recurrent, tokens: Tokens, state: Floats, do: Floats, dstate: Floats
) -> tuple[Tokens, Floats]:
    """The gradients of a run's tokens and of its initial state, from the gradients of its output and of its final state
    [H, K, V]."""
    grads = Tokens(*(np.zeros_like(one) for one in tokens))
    found = scan(kind, tokens, state)[2]
    for n in reversed(range(len(do))):
        q, k, v, decay, beta = (one[n] for one in tokens)
        decayed = decay[..., None] * found[n]
        residual = v - _through(k, decayed)
        update = beta[:, None] * residual if kind.delta else v
        grads.q[n] = np.einsum("hkv,hv->hk", decayed + k[..., None] * update[:, None], do[n])
        dstate = dstate + q[..., None] * do[n][:, None]
        grads.k[n], dupdate = np.einsum("hkv,hv->hk", dstate, update), _through(k, dstate)
        grads.v[n] = beta[:, None] * dupdate if kind.delta else dupdate
        if kind.delta:
            grads.beta[n] = (dupdate * residual).sum(axis=1)
            grads.k[n] -= np.einsum("hkv,hv->hk", decayed, grads.v[n])
            dstate = dstate - k[..., None] * grads.v[n][:, None]
        of_rows = (dstate * found[n]).sum(axis=2)
        grads.decay[n] = of_rows if decay.shape[1] > 1 else of_rows.sum(axis=1, keepdims=True)
        dstate = decay[..., None] * dstate
    return grads, dstate


def _through(k: Floats, state: Floats) -> Floats:
    """kᵀ S [H, V], for k [H, K] and S [H, K, V]."""
    found: Floats = np.einsum("hk,hkv->hv", k, state)
    return found


# ---- tables


def _rows(table: Table) -> dict[Place, Row]:
    """(rank, number) -> row, for all ranks."""
    ranks, ptr = table.rank_of_row().tolist(), table.ptr.tolist()
    rows = (dict(zip(table.names, row, strict=True)) for row in table.values.T.tolist())
    return {(rank, n - ptr[rank]): row for n, (rank, row) in enumerate(zip(ranks, rows, strict=True))}


def _span(row: Row, first: int) -> slice:
    return slice(first + row["row"], first + row["row"] + row["rows"])


def _paired_rows(sends: Mapping[Place, Row], expected: Mapping[Place, Row]) -> Iterator[tuple[Place, Place]]:
    """Pairs the k-th row that i sends to j with the k-th row that j receives from i. Raises ExecutionError for an
    unpaired row."""
    unpaired = defaultdict[Place, deque[Place]](deque)
    for place, row in sends.items():
        unpaired[place[0], row["peer"]].append(place)
    for place, row in expected.items():
        if not unpaired[row["peer"], place[0]]:
            raise ExecutionError(f"rank {place[0]}, row {place[1]}: rank {row['peer']} sends no matching row")
        yield unpaired[row["peer"], place[0]].popleft(), place
    for (rank, peer), unmatched in unpaired.items():
        for _ in unmatched:
            raise ExecutionError(f"rank {rank} sends a row that rank {peer} never receives")


def _checked_row(sends: Row, expected: Row, names: Sequence[str]) -> Row:
    """The sent row. Raises ExecutionError if it does not match the expected row."""
    if any(sends[name] != expected[name] for name in names):
        raise ExecutionError(f"{expected} receives {sends}")
    return sends
