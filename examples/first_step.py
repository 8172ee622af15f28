"""Trains a small model on planned batches: python examples/first_step.py, or on several processes
torchrun --nproc-per-node 4 examples/first_step.py. The losses are the same."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import apportion as ap


class Net(nn.Module):
    """One layer of causal attention, with 4 query heads and 2 KV heads of dimension 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.qkv, self.out = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, tokens, position_ids, attention):
        hidden = self.embed(tokens)
        q, k, v = self.qkv(hidden).view(-1, 8, 16).split((4, 2, 2), dim=1)
        return self.head(hidden + self.out(attention(q, k, v).flatten(1)))


if "RANK" in os.environ:
    dist.init_process_group("gloo")
ranks = dist.get_world_size() if dist.is_initialized() else 1
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
documents = [torch.arange(length) % 64 for length in (300, 40, 9, 150, 25, 60, 200, 33, 120, 90)]
model = ap.Model(q_heads=4, kv_heads=2, head_dim=16, dtype="fp32", layers=1)
loader = ap.PlannedLoader(
    documents, ap.Cluster(1, ranks), model, 512 // ranks, source="local", lengths=[*map(len, documents)]
)
for step, b in enumerate(loader):
    logits = net(b.tokens, b.position_ids, partial(ap.planned_attention, handle=b.handle))
    loss = ap.normalised_loss(logits, b.labels, b.valid_tokens)  # this rank's share of the mean
    loss.backward()
    ap.sum_gradients(net)
    optimizer.step()
    optimizer.zero_grad()
    share = loss.detach()
    if ranks > 1:
        dist.all_reduce(share)
    if ranks == 1 or dist.get_rank() == 0:
        print(f"step {step}: loss {share:.4f} over {int(b.valid_tokens)} predicted tokens")
if dist.is_initialized():
    dist.destroy_process_group()
