"""Plans, problems and reference answers for multi-rank tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from apportion import Batch, Model, Plan, Sequence
from apportion.ir.masks import bands, specs as masks
from tests.ranks import jobs
from tests.ranks.jobs import Shard
from tests.ranks.rank_pool import Pool
from tests.support import oracle
from tests.support.oracle import Problem

Array = NDArray[Any]
Arrays = tuple[Array | None, ...]
# mask family -> sequences, about 60 tokens; in the last two, some queries see no key
BATCHES: dict[str, list[Any]] = {
    "causal": [(33, masks.causal()), (1, masks.causal()), (20, masks.causal())],
    "full": [(24, masks.full()), (17, masks.full())],
    "window": [(50, masks.sliding_window(9)), (13, masks.sliding_window(4, 3))],
    "sink": [(45, masks.sink_window(3, 8))],
    "blockwise": [(47, masks.causal_blockwise(6, 2))],
    "shared": [(40, masks.shared_question(14, [9, 5, 12]))],
    "prefix": [(30, masks.prefix_lm(11)), (20, masks.prefix_lm(20))],
    "chunks": [(41, masks.block_causal(7, 2)), (23, masks.chunked(8))],
    "image": [(39, masks.image_spans([[4, 13], [20, 31]]))],
    "tree": [(36, masks.tree([[-1, 12], [0, 9], [0, 5], [1, 10]]))],
    "documents": [(44, masks.documents([15, 9, 20]))],
    "bands": [(30, masks.bands([[5, 20, 2, 18, -3, 9]])), (12, masks.causal())],
    "slices": [(32, masks.slices([[4, 16, 0, 12, 2], [20, 30, 4, 30, 3]]))],
}


def recipe(block: int = 8, reshuffle: bool = False) -> dict[str, Any]:
    steps = {
        "shard": {"blocks": {"block": block, "zigzag": True}},
        "place": {"lpt": {}},
        "schedule": {"matchings": {"coalesce": 2, "buffers": 3}},
        "reshuffle": reshuffle,
    }
    return {"name": "fcp", "steps": steps}


def model(
    ratio: int = 2,
    dtype: str = "fp64",
    widths: tuple[int, int] = (8, 8),
    kv_heads: int = 1,
    kinds: Any = None,
) -> Model:
    layers = 1 if kinds is None else dict.fromkeys(kinds, 1)
    return Model(ratio * kv_heads, kv_heads, *widths, dtype=dtype, hidden=16, ffn=16, layers=layers)


def batch_of(name: str) -> Batch:
    return Batch.from_sequences([Sequence(length, mask) for length, mask in BATCHES[name]])


def problem_of(plan: Plan, seed: int = 0, sinks: bool = False, softcap: float | None = None) -> Problem:
    m, tokens = plan.request.model, plan.request.batch.tokens
    sizes = m.q_heads, m.kv_heads, m.head_dim, m.value_dim
    return oracle.Problem.random(seed, tokens, *sizes, sinks, softcap)


def shards(plan: Plan, problem: Problem) -> list[Shard]:
    """Each rank's rows of the problem in the plan's home layout."""
    home = plan.layout(plan.header.home_layout)
    rows = [home.tokens(rank) for rank in range(plan.header.ranks)]
    arrays = (problem.q, problem.k, problem.v, problem.do)
    return [Shard(plan.for_rank(i).encode(), *(x[one] for x in arrays)) for i, one in enumerate(rows)]


def in_token_order(plan: Plan, parts: tuple[Array, ...] | list[Array]) -> Array:
    home = plan.layout(plan.header.home_layout)
    tokens = np.concatenate([home.tokens(rank) for rank in range(plan.header.ranks)])
    out = np.empty_like(np.concatenate(parts))
    out[tokens] = np.concatenate(parts)
    return out


def gathered(plan: Plan, results: list[list[Any]]) -> Arrays:
    """(o, dq, dk, dv, dsinks) in token order from the ranks' results; dsinks are summed, like in data parallelism."""
    columns = list(zip(*results, strict=True))
    dsinks = None if columns[4][0] is None else np.sum(columns[4], axis=0)
    return *(in_token_order(plan, parts) for parts in columns[:4]), dsinks


def run(pool: Pool, plan: Plan, problem: Problem, kind: str | None = None) -> Arrays:
    options, each = {"scale": problem.scale, "softcap": problem.softcap}, shards(plan, problem)
    results = pool.run(jobs.attention, plan.header.ranks, kind, problem.sinks, options, each=each)
    return gathered(plan, results)


def run_with_lse(
    pool: Pool, plan: Plan, problem: Problem, uses_out: bool = True, compiled: bool = False
) -> tuple[Arrays, Array]:
    """((o, dq, dk, dv, dsinks), lse) for a loss with the problem's dLSE, and its dO if `uses_out`."""
    home = plan.layout(plan.header.home_layout)
    dlse = [problem.dlse[home.tokens(rank)] for rank in range(plan.header.ranks)]
    each = list(zip(shards(plan, problem), dlse, strict=True))
    options = {"scale": problem.scale, "softcap": problem.softcap}
    job = jobs.attention_with_lse
    results = pool.run(job, plan.header.ranks, problem.sinks, options, uses_out, compiled, each=each)
    lse = in_token_order(plan, [result.pop(1) for result in results])
    return gathered(plan, results), lse


def allowed(batch: Batch, kind: str = "default") -> Array:
    return bands.dense(batch.bands(kind), batch.tokens, batch.tokens)


def answer(problem: Problem, mask: Array) -> Arrays:
    """The float64 oracle's (o, dq, dk, dv, dsinks)."""
    expected = oracle.dense(problem, mask)
    return expected.o, expected.dq, expected.dk, expected.dv, expected.dsinks


def plain(problem: Problem, mask: Array, dtype: torch.dtype) -> Arrays:
    """One process's attention in a dtype, without rows that see no key: (o, dq, dk, dv, dsinks) in float64.

    It is torch's own attention or, with a softcap, explicit matrix products."""
    arrays = problem.q, problem.k, problem.v, problem.sinks
    leaves = [None if x is None else torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays]
    q, k, v, sinks = leaves
    alive = torch.from_numpy(mask.any(1) | (problem.sinks is not None))
    visible = torch.from_numpy(mask)[alive]
    if problem.softcap is None:
        rows = sdpa(q[alive], k, v, sinks, visible)
    else:
        rows = _written_out(q[alive], k, v, visible, problem.softcap)
    out = torch.zeros(*problem.do.shape, dtype=dtype).index_put((alive.nonzero()[:, 0],), rows)
    out.backward(torch.from_numpy(problem.do).to(dtype))
    grads = [None if x is None else x.grad for x in leaves]
    return tuple(None if x is None else x.detach().double().numpy() for x in (out, *grads))


def sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor) -> Tensor:
    """torch's attention, with a sink as an extra key of value 0. visible: bool [T, S]."""
    kv_of = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose(0, 1) for x in (q, k[:, kv_of], v[:, kv_of]))
    if sinks is not None:
        q = pad(q, (0, 1), value=1.0)
        k = torch.cat([pad(k, (0, 1)), pad(sinks[:, None, None] / scale, (k.shape[-1], 0))], 1)
        v = pad(v, (0, 0, 0, 1))
        visible = pad(visible, (0, 1), value=True)
    out = scaled_dot_product_attention(q[None], k[None], v[None], visible, scale=scale)
    return out[0].transpose(0, 1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float) -> Tensor:
    kv_of = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    scores = torch.einsum("thd,shd->hts", q, k[:, kv_of]) * q.shape[-1] ** -0.5
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    return torch.einsum("hts,shd->thd", torch.softmax(scores, -1), v[:, kv_of])


def assert_good(actual: Arrays, problem: Problem, mask: Array, dtype: str = "fp64") -> None:
    """Asserts that no error exceeds 1e-10 in float64, or twice the error of plain attention in other dtypes; NaN fails.

    The error of a tensor is a norm, since the largest error of a few hundred entries varies by chance."""
    limits = [1e-10] * 5
    if dtype != "fp64":
        problem = rounded(problem, jobs.DTYPES[dtype])
        limits = _error_bounds(problem, mask, jobs.DTYPES[dtype])
    actual_errors = errors(actual, answer(problem, mask))
    for name, error, limit in zip(("o", "dq", "dk", "dv", "dsinks"), actual_errors, limits, strict=True):
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


def _error_bounds(problem: Problem, mask: Array, dtype: torch.dtype) -> list[float]:
    """Twice the error of plain attention, but at least twice that of rounding the exact answer once; for dsinks, of
    rounding its terms, which cancel."""
    expected, exact = answer(problem, mask), oracle.dense(problem, mask)
    sizes = [0.0 if x is None else float(np.linalg.norm(x)) for x in expected]
    if problem.sinks is not None:
        terms = np.exp(problem.sinks - exact.lse) * (problem.do * exact.o).sum(-1)
        sizes[-1] = max(sizes[-1], float(np.linalg.norm(terms)))
    actual_errors = errors(plain(problem, mask, dtype), expected)
    eps = torch.finfo(dtype).eps
    return [2 * max(error, eps * size) for error, size in zip(actual_errors, sizes, strict=True)]


def errors(actual: Arrays, expected: Arrays) -> list[float]:
    """The norm of the difference of each tensor; 0 for absent tensors."""
    return [0.0 if b is None else float(np.linalg.norm(a - b)) for a, b in zip(actual, expected, strict=True)]


def rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    arrays = (problem.q, problem.k, problem.v, problem.do, problem.sinks)
    visible = [None if x is None else torch.from_numpy(x).to(dtype).double().numpy() for x in arrays]
    return oracle.Problem(*visible, problem.scale, problem.softcap)
