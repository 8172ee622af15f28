"""Sparse attention as in DeepSeek-V3.2, on rows that a plan gathers: compares losses on four processes and on one.

An indexer scores the earlier tokens of each query and keeps the best TOP; attention sees only their latents (MLA), in
plain torch. The indexer learns from attention's weights on its choice. The plan has the mask, "causal within
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
        scores, best = self.choose(x.detach(), gather)
        seen = mask.gather(1, best)
        latent, rotated = latent[best], rotated[best]  # [rows, TOP, ...]
        nope = torch.einsum("rhn,hnl->rhl", q[..., :NOPE], self.key_up)
        turned = rope(q[..., NOPE:], positions[:, None])
        logits = torch.einsum("rhl,rkl->rhk", nope, latent) + torch.einsum("rhd,rkd->rhk", turned, rotated)
        weights = (logits / (NOPE + ROPE) ** 0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("rhk,rkl,hlv->rhv", weights, latent, self.value_up)
        wanted = weights.detach().mean(1)
        found = scores.gather(1, best).masked_fill(~seen, torch.finfo(scores.dtype).min).log_softmax(-1)
        return self.maps["out"](out.flatten(1)), kl_div(found, wanted, reduction="sum")

    def choose(self, x, gather):
        """The indexer's scores [rows, visible], and the TOP rows of each query. Visible rows are in token order for
        every placement, so a stable sort breaks ties the same way."""
        (key,), mask = gather(self.maps["index_k"](x))
        q = self.maps["index_q"](x).view(len(x), INDEX_HEADS, INDEX)
        scores = torch.einsum("rh,rhv->rv", self.maps["index_weight"](x), (q @ key.T).relu())
        ordered = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True)
        return scores, ordered.indices[:, :TOP]


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
        x, away = self.embed(tokens), 0.0
        for layer, mlp in zip(self.layers, self.mlps, strict=True):
            out, own = layer(rms_norm(x, (WIDTH,)), positions, gather)
            x, away = x + out, away + own
            x = x + mlp(rms_norm(x, (WIDTH,)))
        return self.head(x), away


class Documents:
    """Documents of given lengths, each a walk through the vocabulary."""

    lengths = torch.randint(1, 120, (24,), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randint(-2, 3, (self.lengths[index],), generator=draw).cumsum(0) % VOCABULARY


def planned(batch):
    """The gather of a batch: rows of all ranks, and the ranges that each query may see."""

    def gather(*tensors):
        found = ap.gather_visible(tensors, batch.handle)
        return found.rows, found.mask()

    return gather


def alone(documents):
    """The gather of one process that has all rows."""
    number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([*map(len, documents)]))
    mask = (number[:, None] == number).tril()
    return lambda *tensors: (tensors, mask)


def step(model, loss, away, summed):
    """Runs one step of SGD on the model's loss and on the indexer's, whose gradients are separate. summed: whether they
    are shares of ranks. Returns both, over all ranks."""
    loss.backward()
    away.backward()
    losses = torch.stack([loss.detach(), away.detach()])
    if summed:
        ap.sum_gradients(model)
        dist.all_reduce(losses)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
            parameter.grad = None
    return losses


def train():
    """The losses of each step, on all ranks and in one process."""
    torch.manual_seed(0)
    model, whole = (Model().double() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    dataset, told = Documents(), []
    cluster = ap.Cluster(nodes=NODES, ranks_per_node=PER_NODE)
    loader = ap.PlannedLoader(dataset, cluster, MODEL, tokens_per_rank=128, recipe="mixed")
    for batch in loader:
        logits, away = model(batch.tokens, batch.position_ids, planned(batch))
        loss = ap.normalised_loss(logits, batch.labels, batch.valid_tokens)
        found = step(model, loss, away / batch.valid_tokens, summed=True)

        documents = [dataset[i] for i in batch.samples.tolist()]
        tokens = torch.cat(documents)
        positions = torch.cat([torch.arange(len(one)) for one in documents])
        labels = torch.cat([torch.cat([one[1:], one.new_tensor([-100])]) for one in documents])
        logits, away = whole(tokens, positions, alone(documents))
        loss = cross_entropy(logits, labels, reduction="sum") / batch.valid_tokens
        told.append((found, step(whole, loss, away / batch.valid_tokens, summed=False)))
    return told


def work(rank, folder):
    torch.set_num_threads(1)
    ranks = NODES * PER_NODE
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    told = train()
    for number, (found, expected) in enumerate(told if rank == 0 else []):
        apart = (found - expected).abs().max().item()
        loss, indexer = found.tolist()
        print(f"step {number}: loss {loss:.6f}, indexer {indexer:.6f}; one process is {apart:.0e} apart")
        if apart > TOLERANCE:
            raise SystemExit("ranks and one process must agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=NODES * PER_NODE)
