"""Models of transformers that choose keys at run time: loss and gradients summed over ranks match one process, up to
the rounding of the models' float32 softmax, router and logits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.rank_pool import Pool

pytest.importorskip("transformers")

from apportion.ir.errors import ConfigError
from apportion.trainer import hf_sparse
from tests.adapters import jobs_hf_sparse


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_loss_and_gradients_equal_one_process(
    pool: Pool, shape: tuple[int, int], name: str, implementation: str
) -> None:
    results = pool.run(jobs_hf_sparse.planned, shape[0] * shape[1], name, implementation, shape)
    loss, gradients = jobs_hf_sparse.reference(name, implementation)
    assert results is not None
    assert sum(own for own, _ in results) == pytest.approx(loss, abs=1e-6)
    for place, expected in enumerate(gradients):
        np.testing.assert_allclose(sum(own[place] for _, own in results), expected, rtol=0, atol=1e-6)


def test_settings_that_change_the_result_are_refused(pool: Pool) -> None:
    results = pool.run(jobs_hf_sparse.refusals, 2)
    assert results is not None
    for skipped, checkpointed in results:
        assert skipped == "layers [1] of DeepseekV32Model did not read gathered rows"
        assert "gradient_checkpointing" in checkpointed
    import transformers

    with pytest.raises(ConfigError, match="model_type = 'llama'"):
        hf_sparse.model_of(transformers.LlamaConfig(), "fp64")
