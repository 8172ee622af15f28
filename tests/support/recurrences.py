"""Recurrent layers computed token by token in numpy, without a plan: the reference for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion import Batch, Plan, Recurrent
from apportion.ir.arrays import Ints
from apportion.ir.plan.tables import Recurrence, Table
from tests.support.recurrent_executor import Inputs, Outputs

Array = NDArray[Any]
Edit = Callable[[dict[str, Ints]], object]  # edits the columns of a table, int64


def changed(plan: Plan, name: str, edit: Edit) -> Plan:
    """The plan, unsealed, with the columns of one recurrent table edited."""
    assert plan.recurrence is not None
    table = plan.recurrence[name]
    columns = {key: np.array(column, np.int64) for key, column in table.columns.items()}
    edit(columns)
    tables = {**plan.recurrence.tables, name: Table.of(table.ptr, columns)}
    return replace(plan, recurrence=Recurrence(tables), sections=None)


def setting(column: str, row: int, value: int) -> Edit:
    """An edit that sets one number."""

    def edit(columns: dict[str, Ints]) -> None:
        columns[column][row] = value

    return edit


def predecessors(batch: Batch) -> list[int]:
    """The predecessor of each token; -1 if it has none."""
    branches = batch.branches()
    ends = np.append(branches.starts[1:], batch.tokens) - 1
    before = np.arange(batch.tokens) - 1
    before[branches.starts] = np.where(branches.parent < 0, -1, ends[branches.parent])
    return [int(token) for token in before]


def random_inputs(kind: Recurrent, tokens: int, seed: int = 0) -> tuple[Inputs, Array]:
    """Random inputs and a random gradient of the output."""
    draw = np.random.default_rng(seed)
    decays = (tokens, kind.heads) if kind.gate == "scalar" else (tokens, kind.heads, kind.key_dim)
    inputs = Inputs(
        draw.normal(size=(tokens, kind.conv_channels)) / 2,
        draw.uniform(0.8, 1, decays),
        draw.uniform(0, 1, (tokens, kind.heads)) if kind.delta else None,
        draw.normal(size=(kind.conv_channels, kind.conv)) / 2 if kind.halo else None,
    )
    return inputs, draw.normal(size=(tokens, kind.heads, kind.value_dim))


def dense(kind: Recurrent, before: list[int], inputs: Inputs, do: Array) -> Outputs:
    """Runs a recurrent kind forward and backward. before: the predecessor of each token, which is earlier; -1 if
    none."""
    tokens, keys, groups = len(before), kind.qk_heads * kind.key_dim, kind.heads // kind.qk_heads
    weight = np.ones((kind.conv_channels, 1)) if inputs.weight is None else inputs.weight
    reads = [[*_path(before, token, weight.shape[1])] for token in range(tokens)]
    x = np.stack([sum(weight[:, -1 - age] * inputs.x[one] for age, one in enumerate(read)) for read in reads])
    of_keys = (one.reshape(tokens, -1, kind.key_dim) for one in (x[:, :keys], x[:, keys : 2 * keys]))
    q, k = (np.repeat(one, groups, axis=1) for one in of_keys)
    v = x[:, 2 * keys :].reshape(tokens, kind.heads, -1)
    decay = inputs.decay.reshape(tokens, kind.heads, -1, 1)
    zero = np.zeros((kind.heads, kind.key_dim, kind.value_dim))
    states, decayed, residuals, updates, o = ([*[zero] * tokens] for _ in range(5))
    for t, last in enumerate(before):
        decayed[t] = decay[t] * (states[last] if last >= 0 else zero)
        residuals[t] = v[t] - np.einsum("hk,hkv->hv", k[t], decayed[t])
        updates[t] = v[t] if inputs.beta is None else inputs.beta[t, :, None] * residuals[t]
        states[t] = decayed[t] + np.einsum("hk,hv->hkv", k[t], updates[t])
        o[t] = np.einsum("hk,hkv->hv", q[t], states[t])

    dstate = [zero] * tokens
    dq, dk, dv, dgate, dbeta = (np.zeros_like(one) for one in (q, k, v, decay, v[..., 0]))
    for t in reversed(range(tokens)):
        dstate[t] = dstate[t] + np.einsum("hk,hv->hkv", q[t], do[t])
        dq[t] = np.einsum("hkv,hv->hk", states[t], do[t])
        dk[t] = np.einsum("hkv,hv->hk", dstate[t], updates[t])
        dv[t] = np.einsum("hk,hkv->hv", k[t], dstate[t])
        ddecayed = dstate[t]
        if inputs.beta is not None:
            dbeta[t] = (dv[t] * residuals[t]).sum(axis=1)
            dv[t] *= inputs.beta[t, :, None]
            dk[t] -= np.einsum("hkv,hv->hk", decayed[t], dv[t])
            ddecayed = ddecayed - np.einsum("hk,hv->hkv", k[t], dv[t])
        if before[t] >= 0:
            of_rows = (ddecayed * states[before[t]]).sum(axis=2, keepdims=True)
            dgate[t] = of_rows if decay.shape[2] > 1 else of_rows.sum(axis=1, keepdims=True)
            dstate[before[t]] = dstate[before[t]] + decay[t] * ddecayed

    shared = (one.reshape(tokens, -1, groups, kind.key_dim).sum(axis=2) for one in (dq, dk))
    dconv = np.concatenate([one.reshape(tokens, -1) for one in (*shared, dv)], axis=1)
    dx, dweight = np.zeros_like(inputs.x), np.zeros_like(weight)
    for t, read in enumerate(reads):
        for age, one in enumerate(read):
            dx[one] += weight[:, -1 - age] * dconv[t]
            dweight[:, -1 - age] += dconv[t] * inputs.x[one]
    of_beta = None if inputs.beta is None else dbeta
    of_weight = None if inputs.weight is None else dweight
    return Outputs(np.stack(o), dx, dgate.reshape(inputs.decay.shape), of_beta, of_weight)


def _path(before: list[int], token: int, most: int) -> list[int]:
    """The token and its predecessors, at most `most` tokens."""
    path: list[int] = []
    while token >= 0 and len(path) < most:
        path.append(token)
        token = before[token]
    return path
