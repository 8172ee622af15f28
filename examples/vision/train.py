"""Trains a tiny Qwen3-VL on four processes, with images and text balanced separately; compares losses with one process.

The model is transformers' own. One plan spreads the patches of a step's images evenly over the ranks, another one the
tokens, and rows of patches go to the placeholder tokens. Each image has one brightness, which the text after it names.
Run: python examples/vision/train.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch.nn.functional import cross_entropy

import apportion as ap
from apportion.trainer import hf, hf_vision

RANKS, SAMPLES, RATE, TOLERANCE = 4, 112, 0.02, 1e-10
PATCH, MERGE, LEVELS, IMAGE, END = 2, 2, 8, 60, 62
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
VISION = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
VISION |= {"patch_size": PATCH, "temporal_patch_size": 1, "spatial_merge_size": MERGE}
VISION |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}


class Images:
    """The level and the patch grid (1, height, width) of each image, from small to large."""

    def __init__(self, count):
        draw = torch.Generator().manual_seed(1)
        self.levels = torch.randint(LEVELS, (count,), generator=draw).tolist()
        sizes = (MERGE * torch.randint(1, 9, (count, 2), generator=draw)).tolist()
        self.grids = [(1, height, width) for height, width in sizes]

    def __len__(self):
        return len(self.grids)

    def __getitem__(self, index):
        _, height, width = self.grids[index]
        noise = torch.randn(
            height * width, 3 * PATCH**2, generator=torch.Generator().manual_seed(index)
        ).double()
        return {"pixel_values": 2 * self.levels[index] / LEVELS - 1 + noise / 10}

    def tokens(self, index):
        _, height, width = self.grids[index]
        return height * width // MERGE**2


class Samples:
    """Samples of zero to three images, each followed by the word for its brightness level."""

    def __init__(self, model, images, counts):
        self.model, self.images, self.parts, self.places = model, images, [], []
        numbers = iter(range(sum(counts)))
        for sample, count in enumerate(counts):
            parts = [torch.arange(3 + sample % 5)]
            for image in (next(numbers) for _ in range(count)):
                self.places.append((sample, sum(map(len, parts))))
                tokens = torch.full((images.tokens(image),), IMAGE)
                parts += [tokens, torch.tensor([END, 20 + images.levels[image], 7])]
            self.parts.append(torch.cat(parts))
        self.lengths = [*map(len, self.parts)]

    def __len__(self):
        return len(self.parts)

    def images_of(self, sample):
        """The sample's images."""
        return [image for image, (owner, _) in enumerate(self.places) if owner == sample]

    def __getitem__(self, sample):
        tokens = self.parts[sample]
        grids = [self.images.grids[image] for image in self.images_of(sample)]
        return {
            "input_ids": tokens,
            "loss_mask": tokens != IMAGE,
            "mrope_position_ids": hf_vision.mrope(self.model, tokens, grids),
        }


def new_model():
    torch.manual_seed(0)
    ids = {
        "image_token_id": IMAGE,
        "vision_end_token_id": END,
        "video_token_id": 61,
        "vision_start_token_id": 63,
    }
    config = transformers.Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config).double()


def planned_loss(model, batch):
    """This rank's share of the mean loss."""
    arguments = hf.inputs(batch)
    del arguments["labels"]  # transformers' own loss is in float32
    return ap.normalised_loss(model(**arguments).logits[0], batch.labels, batch.valid_tokens)


def single_process_loss(model, data, samples):
    """The mean loss of some samples, by the model's own forward, one sample after another."""
    total, valid = 0.0, 0
    for sample in samples:
        tokens, images = data[sample]["input_ids"][None], data.images_of(sample)
        arguments = {"input_ids": tokens, "use_cache": False}
        if images:
            arguments["pixel_values"] = torch.cat([data.images[image]["pixel_values"] for image in images])
            arguments["image_grid_thw"] = torch.tensor([data.images.grids[image] for image in images])
            arguments["mm_token_type_ids"] = (tokens == IMAGE).int()
        labels = tokens[0, 1:].masked_fill(tokens[0, 1:] == IMAGE, -100)
        total += cross_entropy(model(**arguments).logits[0, :-1], labels, reduction="sum")
        valid += int((labels >= 0).sum())
    return total / valid


def train(compare):
    """Trains; returns for each step the loss of all ranks, its difference from one process, and this rank's numbers of
    patches and tokens. compare: whether this rank also trains the single-process model."""
    model, reference = hf.enable(new_model()), new_model()
    counts = [sample % 4 for sample in range(SAMPLES)]
    images = Images(sum(counts))
    data, results = Samples(model, images, counts), []
    media = hf_vision.media(images, model, images.grids, data.places, recipe="blend")
    cluster = ap.Cluster(nodes=1, ranks_per_node=RANKS)
    loader = hf.loader(data, model, cluster=cluster, tokens_per_rank=256, recipe="blend", media=media)
    optimizer, ref_optimizer = (torch.optim.Adam(net.parameters(), RATE) for net in (model, reference))
    for batch in loader:
        loss = planned_loss(model, batch)
        loss.backward()
        ap.sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        gap = 0.0
        if compare:
            expected = single_process_loss(reference, data, batch.samples.tolist())
            expected.backward()
            ref_optimizer.step()
            ref_optimizer.zero_grad()
            gap = abs(expected.item() - loss.item())
        results.append((loss.item(), gap, torch.tensor([batch.media.handle.rows, batch.handle.rows])))
    return results


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    for number, (loss, gap, rows) in enumerate(train(compare=rank == 0)):
        gathered = [torch.empty_like(rows) for _ in range(RANKS)]
        dist.all_gather(gathered, rows)
        patches, tokens = torch.stack(gathered, 1).tolist()
        if rank == 0:
            print(f"step {number}: loss {loss:.6f}; one process differs by {gap:.0e}", end="")
            print(f"; patches of ranks {patches}, tokens {tokens}")
        if gap > TOLERANCE:
            raise SystemExit("ranks and one process must agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)
