"""Vision-language models of transformers: loss and gradients summed over ranks match one process."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests.ranks.rank_pool import Pool
from tests.support.programs import run

pytest.importorskip("transformers")

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError
from apportion.trainer import hf, hf_vision
from tests.adapters import jobs_hf_vision
from tests.ranks.loading import HereSource


@pytest.mark.parametrize("name", jobs_hf_vision.VISION)
@pytest.mark.parametrize(("ranks", "checkpointing"), [(2, True), (4, False)])
def test_loss_and_gradients_equal_one_process(pool: Pool, name: str, ranks: int, checkpointing: bool) -> None:
    results = pool.run(jobs_hf_vision.planned, ranks, name, checkpointing)
    loss, gradients = jobs_hf_vision.reference(name)
    assert results is not None
    assert sum(own for own, _ in results) == pytest.approx(loss, abs=1e-6)  # transformers' loss is float32
    assert results[0][1].keys() == gradients.keys()
    for parameter, expected in gradients.items():
        assert abs(expected).max() > 1e-5
        summed = sum(own[parameter] for _, own in results)
        np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-12, err_msg=parameter)


def test_a_microbatch_without_images_runs_only_the_text_model(pool: Pool) -> None:
    results = pool.run(jobs_hf_vision.text_only, 2)
    assert results is not None
    loss, gradients = jobs_hf_vision.reference("Qwen2VL", [1, 3, 5])
    assert sum(own for own, _ in results) == pytest.approx(loss, abs=1e-6)
    assert not any("visual" in parameter for parameter in results[0][1])
    for parameter, expected in gradients.items():
        summed = sum(own[parameter] for _, own in results)
        np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-12, err_msg=parameter)


@pytest.mark.parametrize("name", jobs_hf_vision.VISION)
def test_positions_of_images_follow_the_branches_of_a_tree(pool: Pool, name: str) -> None:
    results = pool.run(jobs_hf_vision.tree, 2, name, True)
    assert results is not None
    for parameter, expected in jobs_hf_vision.tree_reference(name).items():
        summed = sum(own[parameter] for own in results)
        np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-5, err_msg=parameter)
    errors = pool.run(jobs_hf_vision.tree, 2, name, False)
    assert errors is not None
    assert all("mrope_position_ids = 'other positions': must continue from the parent" in e for e in errors)


def test_placeholder_tokens_of_encoders_without_an_adapter_are_refused() -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(vocab_size=64, **sizes)
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    model = hf.enable(transformers.LlavaForConditionalGeneration(config))

    def loss(tokens: list[int]) -> float:
        options = {"lengths": [len(tokens)], "source": HereSource()}
        (batch,) = hf.loader([tokens], model, ap.Cluster(1, 1), 8, communicator=Communicator(), **options)
        return model(**hf.inputs(batch)).loss.item()

    assert loss([1, 2, 3]) > 0
    with pytest.raises(ConfigError, match="has 2 placeholder tokens on this rank, but media are at 0 rows"):
        loss([1, 60, 60, 2])


def test_inputs_and_models_that_change_the_result_are_refused(pool: Pool) -> None:
    results = pool.run(jobs_hf_vision.refusals, 2)
    assert results is not None
    for without_positions, without_media, misplaced, replaced in results:
        assert "mrope_position_ids = None" in without_positions
        assert "placeholder tokens on this rank, but media are at 0 rows" in without_media
        assert "placeholder tokens on this rank, but media are at" in misplaced
        assert "the encoder's attention was replaced" in replaced
    import transformers

    with pytest.raises(ConfigError, match="model_type = 'llama'"):
        hf_vision.mrope(transformers.LlamaForCausalLM(transformers.LlamaConfig(**jobs_hf_vision.TEXT)), [1])


def test_grids_of_other_images_are_refused() -> None:
    model = jobs_hf_vision.new_model("Qwen2VL")
    tokens = [1, *[jobs_hf_vision.IMAGE] * 12, 2, *[jobs_hf_vision.IMAGE] * 2]
    assert hf_vision.mrope(model, tokens, [(1, 6, 8), (1, 2, 4)]).shape == (16, 3)
    for grids in ([], [(1, 6, 8)], [(1, 2, 4), (1, 6, 8)], [(1, 6, 8), (1, 2, 4), (1, 2, 4)]):
        with pytest.raises(
            ConfigError, match=r"grids = .*come in runs of \[12, 2\]; pass those of the sample"
        ):
            hf_vision.mrope(model, tokens, grids)
    image = {"pixel_values": np.zeros((48, 12)), "image_grid_thw": [[1, 6, 8]]}
    assert len(hf_vision.media([image], model, [(1, 6, 8)], [(0, 1)]).dataset[0]["patches"]) == 48
    with pytest.raises(
        ConfigError, match=r"image 0: image_grid_thw = \[1, 6, 8\]: was planned with the grid \["
    ):
        hf_vision.media([image], model, [(1, 8, 6)], [(0, 1)]).dataset[0]


def test_the_example_trains_like_one_process_with_even_layouts() -> None:
    printed = run(sys.executable, "examples/vision/train.py", env={"OMP_NUM_THREADS": "1"})
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+);", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1.0
    rows = [[int(one) for one in own.split(", ")] for own in re.findall(r"\[([\d, ]+)\]", printed)]
    assert len(rows) == 10
    assert all(max(own) <= 1.02 * sum(own) / len(own) for own in rows)


def test_an_enabled_model_that_is_sent_to_other_processes_runs_there() -> None:
    model = hf.enable(jobs_hf_vision.new_model("Qwen3VL"))
    fresh = Pool(timeout_s=240, size=2)
    shares = fresh.run(jobs_hf_vision.loss_of, 2, model)
    fresh.close()
    assert shares is not None
    assert sum(shares) == pytest.approx(jobs_hf_vision.reference("Qwen3VL")[0], abs=1e-6)
