"""A tiny vision-language model in a custom loop: images and text under two plans, or without plans in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import apportion as ap
from apportion.backends.torch.transport import Communicator
from tests.ranks.jobs import handle_of
from tests.ranks.loading import HereSource

MERGE, PATCH, WIDTH, HEADS, WORDS, IMAGE = 4, 6, 16, 2, 32, 31
LENGTHS = [50, 7, 36, 21, 64, 5, 30, 44]  # tokens of samples
#: sample, first token, tokens of each image; samples 1, 3, 5 and 6 have none
IMAGES = [(0, 2, 9), (0, 20, 25), (2, 0, 16), (4, 10, 4), (4, 14, 30), (7, 40, 4)]
RATE = 0.5
MODEL = ap.Model(HEADS, HEADS, WIDTH // HEADS, dtype="fp64", hidden=WIDTH, ffn=WIDTH, layers=2)


class Samples:
    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = np.random.default_rng(index).integers(0, IMAGE, LENGTHS[index])
        for _, first, count in (one for one in IMAGES if one[0] == index):
            tokens[first : first + count] = IMAGE
        place = np.arange(LENGTHS[index])
        mrope = np.stack([place, place // 2, place % 3], 1)
        return {"input_ids": tokens, "mrope": mrope, "loss_mask": tokens != IMAGE}


class Images:
    def __init__(self) -> None:
        self.lengths = [MERGE * count for *_, count in IMAGES]

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"patches": np.random.default_rng(100 + index).normal(size=(self.lengths[index], PATCH))}


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Attend, turn: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
        if turn is not None:
            q, k = q * turn, k * turn
        return x + self.out(attend(q, k, v).flatten(1)).tanh()


class VisionLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.see = nn.Linear(PATCH, WIDTH), nn.ModuleList([Layer(), Layer()])
        self.merge, self.embed = nn.Linear(MERGE * WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.read, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, mrope: Tensor, read: Attend, images: tuple[Any, ...] | None) -> Tensor:
        """images: patches, their attention, the function that moves rows, and the rows of image tokens."""
        x = self.embed(tokens)
        if images is not None:
            patches, see, move, rows = images
            encoded = self.patch(patches)
            for layer in self.see:
                encoded = layer(encoded, see)
            x = x.index_copy(0, rows, self.merge(move(encoded).reshape(-1, MERGE * WIDTH)).tanh())
        turn = torch.cos(mrope.double() / 7).repeat(1, 3)[:, None, : WIDTH // HEADS]
        for layer in self.read:
            x = layer(x, read, turn)
        return self.head(x)


def new_model() -> VisionLanguage:
    torch.manual_seed(0)
    return VisionLanguage().double()


def media(**changes: Any) -> ap.Media:
    defaults: dict[str, Any] = {"dataset": Images(), "model": MODEL, "places": [one[:2] for one in IMAGES]}
    return ap.Media(**{**defaults, "merge": MERGE, "recipe": "blend", **changes})


def loader(comm: Communicator, images: ap.Media | None, **changes: Any) -> ap.PlannedLoader:
    options = {"recipe": "mixed", "source": HereSource(), "communicator": comm, "media": images}
    options |= {"dataset": Samples(), "tokens_per_rank": 96 // comm.ranks, **changes}
    return ap.PlannedLoader(cluster=ap.Cluster(1, comm.ranks), model=MODEL, **options)


def planned(handle: Any) -> Attend:
    return lambda q, k, v: ap.planned_attention(q, k, v, handle)


def forward(model: VisionLanguage, batch: Any) -> Tensor:
    images = None
    if batch.media is not None:
        see = planned(batch.media.handle)
        images = batch.media.fields["patches"], see, lambda x: ap.move_rows(x, batch.feed), batch.feed.rows
    logits = model(batch.tokens, batch.fields["mrope"], planned(batch.handle), images)
    return ap.normalised_loss(logits, batch.labels, batch.valid_tokens)


def train(comm: Communicator, options: dict[str, Any], of_media: dict[str, Any]) -> tuple[Any, ...]:
    """(loss, samples, whether a step follows) of each microbatch on this rank, and the final parameters."""
    model = new_model()
    optimizer, records = torch.optim.SGD(model.parameters(), RATE), []
    for batch in (one.to("cpu") for one in loader(comm, media(**of_media), **options)):
        loss = forward(model, batch)
        loss.backward()
        records.append((loss.item(), batch.samples.tolist(), batch.is_last))
        if batch.is_last:
            ap.sum_gradients(model, comm._base)
            optimizer.step()
            optimizer.zero_grad()
    return records, [one.detach().numpy() for one in model.parameters()]


def alone(steps: list[list[list[int]]]) -> tuple[list[float], list[Any]]:
    """Losses of microbatches and final parameters in one process. steps: samples of each microbatch of each step."""
    model, losses = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for microbatches in steps:
        samples_by_microbatch = [[Samples()[i] for i in samples] for samples in microbatches]
        labels = [[_labels(one) for one in samples] for samples in samples_by_microbatch]
        valid = sum(int((one >= 0).sum()) for samples in labels for one in samples)
        for numbers, samples, targets in zip(microbatches, samples_by_microbatch, labels, strict=True):
            loss = _loss(model, numbers, samples, torch.cat(targets)) / valid
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [one.detach().numpy() for one in model.parameters()]


def _labels(sample: dict[str, Any]) -> Tensor:
    tokens = torch.from_numpy(sample["input_ids"])
    return torch.cat([tokens.masked_fill(tokens == IMAGE, -100)[1:], torch.tensor([-100])])


def _loss(model: VisionLanguage, numbers: list[int], samples: list[Any], labels: Tensor) -> Tensor:
    tokens = torch.from_numpy(np.concatenate([one["input_ids"] for one in samples]))
    image_numbers = [i for number in numbers for i, one in enumerate(IMAGES) if one[0] == number]
    images = None
    if image_numbers:
        patches = torch.from_numpy(np.concatenate([Images()[i]["patches"] for i in image_numbers]))
        see = dense([MERGE * IMAGES[i][2] for i in image_numbers], causal=False)
        images = patches, see, lambda x: x, torch.nonzero(tokens == IMAGE)[:, 0]
    mrope = torch.from_numpy(np.concatenate([one["mrope"] for one in samples]))
    logits = model(tokens, mrope, dense([len(one["input_ids"]) for one in samples], causal=True), images)
    return cross_entropy(logits, labels, reduction="sum")


def dense(lengths: list[int], causal: bool) -> Attend:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document[:, None] == document
    mask = mask.tril() if causal else mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)

    return attend


class ImageSamples(Samples):
    """Samples that consist of one image: each rank has as many rows as tokens, in different batches."""

    lengths = (32, 32, 48, 16)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, row = np.full(self.lengths[index], IMAGE), np.arange(self.lengths[index])
        return {"input_ids": tokens, "mrope": np.stack([row] * 3, 1)}


class MatchingImages(ImageSamples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"patches": np.ones((self.lengths[index], PATCH))}


def fed(comm: Communicator, places: list[Any], merge: int, more: int, pieces: tuple[bytes, bytes]) -> None:
    """Feeds rows at this rank's places. more: rows beyond the encoder's."""
    encoder, decoder = (handle_of(comm, piece) for piece in pieces)
    feed = ap.EncoderFeed(encoder, decoder, places[comm.rank % len(places)], merge)
    ap.move_rows(torch.zeros(encoder.rows + more, 2), feed)


def misled(comm: Communicator, fault: str) -> None:
    """A step of a model that ignores its images, or whose encoder runs under another plan."""
    model, first = new_model(), None
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    own = media(dataset=MatchingImages(), places=[(i, 0) for i in range(4)], merge=1)
    options = {"dataset": ImageSamples(), "tokens_per_rank": 64 // comm.ranks, "shuffle": False}
    for batch in loader(comm, own, **options):
        first = first or batch
        under = batch.handle if fault == "of the decoder" else first.media.handle
        x = model.embed(batch.tokens)
        if fault != "ignored":
            encoded = model.see[0](model.patch(batch.media.fields["patches"]), planned(under))
            x = x + ap.move_rows(encoded, batch.feed)
        logits = model.head(model.read[0](x, planned(batch.handle)))
        ap.normalised_loss(logits, batch.labels, batch.valid_tokens).backward()
        ap.sum_gradients(model, comm._base)
        optimizer.step()
        optimizer.zero_grad()


class ReorderingSampler:
    """Yields samples in a different order in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([[0, 2], [4]] if self.passes == 1 else [[4], [0, 2]])


def drawing_otherwise(comm: Communicator) -> None:
    list(loader(comm, media(), sampler=ReorderingSampler()))


def resumed(comm: Communicator) -> tuple[list[Any], list[Any]]:
    """The content of each microbatch of a pass, and of a loader that resumes after the third."""

    def record(batch: Any) -> list[Any]:
        images = [] if batch.media is None else [batch.media.samples.tolist(), batch.feed.rows.tolist()]
        return [batch.iteration, batch.microbatch, batch.samples.tolist(), *images]

    first, second = (loader(comm, media(), microbatches=2) for _ in range(2))
    whole = []
    for batch in first:
        whole.append(record(batch))
        if len(whole) == 3:
            second.load_state_dict(first.state_dict())
    return whole, [record(batch) for batch in second]
