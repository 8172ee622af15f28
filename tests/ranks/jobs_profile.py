"""Rank pool jobs that measure links and kernels; they take and return plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from apportion import Communicator, Model
from apportion.backends.torch.profile.clock import Runs
from apportion.backends.torch.profile.device import ProfileScope, profile
from apportion.backends.torch.profile.links import Line, Links, profile_links
from apportion.backends.torch.profile.peers import Pattern, PatternShares
from apportion.ir.tensors import Tensor as Name


def links(comm: Communicator, sizes: tuple[int, ...], node: int | None) -> dict[str, Any]:
    """Measures links; returns them as plain data."""
    return asdict(profile_links(comm._groups[0], node, sizes, runs=2))


def from_data(data: dict[str, Any]) -> Links:
    """The links from plain data."""
    lines = {name: data[name] and Line(**data[name]) for name in ("intra", "inter")}
    sweep = [PatternShares(Pattern(**one["pattern"]), tuple(one["shares"])) for one in data["sweep"]]
    return Links(**data | lines | {"sweep": tuple(sweep)})


def lone_task(comm: Communicator) -> list[float]:
    """The largest errors of O, dQ, dK and dV of one task whose queries see keys up to 25 rows back and 3 ahead."""
    from apportion.backends.torch.profile.lone_task import lone_task

    rows, keys, generator = 40, 24, torch.Generator().manual_seed(0)
    q, do = (torch.randn(rows, 4, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(keys, 2, 16, generator=generator) for _ in range(2))
    diagonal = torch.arange(rows)[:, None] - torch.arange(keys)
    visible = (diagonal >= -3) & (diagonal <= 25)  # all rows see a key
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    heads_first = (tensor.transpose(0, 1) for tensor in leaves)
    out = scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=True).transpose(0, 1)
    grads = torch.autograd.grad(out, leaves, do.double())

    runs = lone_task(q, k, v, do, -3, 25)
    forward, backward = (run.__self__ for run in runs)  # type: ignore[attr-defined]
    o, lse = forward.memory.home_arrays(Name.O)
    o.zero_(), lse.fill_(float("-inf"))
    runs[0]()
    o, lse = forward.output(torch.float32)
    (delta,) = backward.memory.home_arrays(Name.DELTA)
    delta.copy_(torch.stack([lse, (o * do).sum(-1)], -1))
    for sums in (Name.DQ, Name.DKV):
        backward.memory.home_arrays(sums)[0].zero_()
    runs[1]()
    dq, dk, dv = backward.input_gradients(torch.float32)
    pairs = ((o, out), (dq, grads[0]), (dk[:keys], grads[1]), (dv[:keys], grads[2]))
    return [float((actual - expected).abs().max()) for actual, expected in pairs]


def stage_profile(comm: Communicator) -> tuple[Any, str]:
    """The backward grid of a small profile of the stage engine, and its engine."""
    model = Model(2, 1, 16, dtype="fp32", hidden=32, ffn=32)
    effort = ProfileScope((16, 32), model, sweeps=1, runs=Runs(1, 1), tokens=16, vocab=16)
    found = profile(device="cpu", effort=effort, engine="stage")
    return found.backward.full, found.engine
