"""Trains sparse attention like DeepSeek-V3.2's on rows that a plan gathers; compares four processes with one.

An indexer scores the earlier tokens of each query and keeps the best TOP; attention sees only their latents (MLA), in
plain torch. The indexer learns from attention's weights on the chosen tokens. The plan has the mask, "causal within
documents", and the cost of TOP keys per query; the selection happens at run time.
Run: python examples/sparse/train.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, rms_norm

import apportion as ap

NODES, PER_NODE, RATE = 2, 2, 0.2
WIDTH, HEADS, LATENT, ROPE, NOPE, VALUE = 32, 4, 16, 8, 8, 8
INDEX_HEADS, INDEX, TOP, LAYERS, VOCABULARY = 2, 8, 12, 2, 64
TOLERANCE = 1e-12
# sent per token: its latent, its rotated key and the indexer's key; fp64, so that rounding hides no mistake
MODEL = ap.Model(
    HEADS, 1, LATENT + ROPE, INDEX, "fp64", WIDTH, 4 * WIDTH, LAYERS, balance={"default": {"keys": TOP}}
)


class SparseAttention(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {
            "q": (WIDTH, HEADS * (NOPE + ROPE)),
            "kv": (WIDTH, LATENT + ROPE),
            "out": (HEADS * VALUE, WIDTH),
            "index_q": (WIDTH, INDEX_HEADS * INDEX),
            "index_k": (WIDTH, INDEX),
            "index_weight": (WIDTH, INDEX_HEADS),
        }
        self.maps = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.key_up = nn.Parameter(torch.randn(HEADS, NOPE, LATENT) / LATENT**0.5)
        self.value_up = nn.Parameter(torch.randn(HEADS, LATENT, VALUE) / LATENT**0.5)

    def forward(self, x, positions, gather):
        """x [rows, WIDTH] -> [rows, WIDTH], and the indexer's divergence from attention, summed over rows."""
        q = self.maps["q"](x).view(len(x), HEADS, NOPE + ROPE)
        latent, rotated = self.maps["kv"](x).split([LATENT, ROPE], -1)
        (latent, rotated), mask = gather(rms_norm(latent, (LATENT,)), rope(rotated, positions))
        scores, indexes = self.choose(x.detach(), gather)
        is_visible = mask.gather(1, indexes)
        latent, rotated = latent[indexes], rotated[indexes]  # [rows, TOP, ...]
        nope = torch.einsum("rhn,hnl->rhl", q[..., :NOPE], self.key_up)
        q_rotated = rope(q[..., NOPE:], positions[:, None])
        logits = torch.einsum("rhl,rkl->rhk", nope, latent) + torch.einsum("rhd,rkd->rhk", q_rotated, rotated)
        weights = (logits / (NOPE + ROPE) ** 0.5).masked_fill(~is_visible[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("rhk,rkl,hlv->rhv", weights, latent, self.value_up)
        target = weights.detach().mean(1)
        log_probs = (
            scores.gather(1, indexes).masked_fill(~is_visible, torch.finfo(scores.dtype).min).log_softmax(-1)
        )
        return self.maps["out"](out.flatten(1)), kl_div(log_probs, target, reduction="sum")

    def choose(self, x, gather):
        """The indexer's scores [rows, visible], and the TOP rows of each query. Visible rows are in token order for
        every placement, so a stable sort breaks ties the same way."""
        (key,), mask = gather(self.maps["index_k"](x))
        q = self.maps["index_q"](x).view(len(x), INDEX_HEADS, INDEX)
        scores = torch.einsum("rh,rhv->rv", self.maps["index_weight"](x), (q @ key.T).relu())
        ranking = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True)
        return scores, ranking.indices[:, :TOP]


def rope(x, positions):
    """x [..., width] with its halves rotated by the positions' angles."""
    angles = positions[..., None] * 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    (a, b), (cos, sin) = x.chunk(2, -1), (angles.cos(), angles.sin())
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList([SparseAttention() for _ in range(LAYERS)])
        self.mlps = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in self.layers
            ]
        )

    def forward(self, tokens, positions, gather):
        x, index_loss = self.embed(tokens), 0.0
        for layer, mlp in zip(self.layers, self.mlps, strict=True):
            out, layer_loss = layer(rms_norm(x, (WIDTH,)), positions, gather)
            x, index_loss = x + out, index_loss + layer_loss
            x = x + mlp(rms_norm(x, (WIDTH,)))
        return self.head(x), index_loss


class Documents:
    """Documents of given lengths, each a walk through the vocabulary."""

    lengths = torch.randint(1, 120, (24,), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randint(-2, 3, (self.lengths[index],), generator=draw).cumsum(0) % VOCABULARY


def planned_gather(batch):
    """Returns a function that gathers the rows visible to this rank, and returns them with their mask."""

    def gather(*tensors):
        visible = ap.gather_visible(tensors, batch.handle)
        return visible.rows, visible.mask()

    return gather


def local_gather(documents):
    """Returns such a function for one process, which has all rows."""
    number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([*map(len, documents)]))
    mask = (number[:, None] == number).tril()
    return lambda *tensors: (tensors, mask)


def step(model, loss, index_loss, summed):
    """Runs one step of SGD on the model's loss and on the indexer's, whose gradients are separate. summed: whether the
    losses are shares of ranks, to be summed. Returns both losses."""
    loss.backward()
    index_loss.backward()
    losses = torch.stack([loss.detach(), index_loss.detach()])
    if summed:
        ap.sum_gradients(model)
        dist.all_reduce(losses)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
            parameter.grad = None
    return losses


def train():
    """Trains on all ranks and in one process; returns both losses of each step."""
    torch.manual_seed(0)
    model, reference = (Model().double() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    dataset, results = Documents(), []
    cluster = ap.Cluster(nodes=NODES, ranks_per_node=PER_NODE)
    loader = ap.PlannedLoader(dataset, cluster, MODEL, tokens_per_rank=128, recipe="mixed")
    for batch in loader:
        logits, index_loss = model(batch.tokens, batch.position_ids, planned_gather(batch))
        loss = ap.normalised_loss(logits, batch.labels, batch.valid_tokens)
        losses = step(model, loss, index_loss / batch.valid_tokens, summed=True)

        documents = [dataset[i] for i in batch.samples.tolist()]
        tokens = torch.cat(documents)
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        labels = torch.cat([torch.cat([document[1:], document.new_tensor([-100])]) for document in documents])
        logits, index_loss = reference(tokens, positions, local_gather(documents))
        loss = cross_entropy(logits, labels, reduction="sum") / batch.valid_tokens
        results.append((losses, step(reference, loss, index_loss / batch.valid_tokens, summed=False)))
    return results


def work(rank, folder):
    torch.set_num_threads(1)
    ranks = NODES * PER_NODE
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    results = train()
    for number, (losses, expected) in enumerate(results if rank == 0 else []):
        gap = (losses - expected).abs().max().item()
        loss, indexer = losses.tolist()
        print(f"step {number}: loss {loss:.6f}, indexer {indexer:.6f}; one process differs by {gap:.0e}")
        if gap > TOLERANCE:
            raise SystemExit("ranks and one process must agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=NODES * PER_NODE)
