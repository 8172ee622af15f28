"""Hugging Face models on planned batches, against their own attention in one process."""

import jobs_hf as jobs
import pytest

LOSS, GRADIENT = 5e-7, 1e-6
SEVERAL = (("tokens", 60), ("microbatches", 2), ("drop_last", False))  # microbatches an iteration, of 4 ranks


def agrees(pool, ranks, *args):
    for loss, gradient, _ in pool.run(jobs.agreement, ranks, *args):
        assert loss <= LOSS
        assert gradient <= GRADIENT


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", jobs.MODELS)
def test_losses_and_gradients_are_those_of_one_process(pool, name, ranks):
    agrees(pool, ranks, name)


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_sums_of_gradients_are_exact_with_checkpointing_and_accumulation(pool, name, wrap):
    agrees(pool, 4, name, wrap, True, False, SEVERAL)


def test_tied_weights(pool):
    agrees(pool, 4, "llama", "ddp", False, False, SEVERAL, {"tie_word_embeddings": True})


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bfloat16_by_autocast(pool, name):
    for loss, gradient, _ in pool.run(jobs.agreement, 4, name, "ddp", True, True, (("dtype", "bf16"),)):
        assert loss <= 2e-3
        assert gradient <= 3e-2
