"""Test matrix: a sequence for every mask spec, layers of several shapes, and comparison with dense attention."""

from __future__ import annotations

import numpy as np

from apportion import Batch, Plan, Sequence
from apportion.backends import numpy as executor
from apportion.backends.numpy import LocalLayer
from apportion.ir.masks import bands, specs as masks
from apportion.ir.masks.spec import Mask
from tests.support import oracle

EXACT = 1e-10


#: sequences with every mask spec, some in several forms; most lengths are odd on purpose
SEQUENCES: dict[str, tuple[int, Mask]] = {
    "causal": (41, masks.causal()),
    "full": (33, masks.full()),
    "window": (41, masks.sliding_window(7)),
    "window_both_sides": (41, masks.sliding_window(5, right=3)),
    "sink_window": (41, masks.sink_window(3, 9)),
    "causal_blockwise": (45, masks.causal_blockwise(8, 1)),
    "shared_question": (41, masks.shared_question(11, [13, 9, 8])),
    "prefix_lm": (37, masks.prefix_lm(13)),
    "block_causal": (37, masks.block_causal(8)),
    "block_causal_window": (45, masks.block_causal(8, window=2)),
    "chunked": (41, masks.chunked(16)),
    "image_spans": (41, masks.image_spans([[5, 14], [20, 33]])),
    "tree": (41, masks.tree([[-1, 9], [0, 8], [0, 7], [1, 9], [1, 8]])),
    "documents": (41, masks.documents([17, 1, 23])),
    "bands": (41, masks.bands([[0, 20, 0, 41, -3, 12], [25, 41, 3, 17, 0, 30]])),
    # some rows see no key
    "slices": (41, masks.slices([[0, 9, 0, 9, 1], [20, 41, 3, 9, 0], [20, 41, 20, 41, 2]])),
}


#: (query heads, KV heads, width of Q and K, width of V, sinks, softcap): GQA 1, 4 and 8
LAYERS = [(2, 2, 4, 4, False, None), (4, 1, 6, 4, True, None), (8, 1, 2, 6, True, 2.0)]


def batch_of(*names: str) -> Batch:
    return Batch.from_sequences([Sequence(*SEQUENCES[name]) for name in names])


def compare(plan: Plan, kind: str, layer: tuple, seed: int) -> None:
    batch, (heads, kv_heads, width, v_width, sinks, softcap) = plan.request.batch, layer
    p = oracle.Problem.random(seed, batch.tokens, heads, kv_heads, width, v_width, sinks, softcap)
    expected = oracle.dense(p, bands.dense(batch.bands(kind), batch.tokens, batch.tokens))
    found = executor.run(plan, kind, p.q, p.k, p.v, p.do, LocalLayer(p.sinks, softcap=p.softcap))
    for name, actual, reference in zip(oracle.Answer._fields, found, expected, strict=True):
        assert (actual is None) == (reference is None), name
        if actual is not None:
            np.testing.assert_allclose(actual, reference, rtol=EXACT, atol=EXACT, err_msg=name)
