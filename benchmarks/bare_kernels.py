"""Attention kernels without a plan, on causal documents: the upper bound for planned attention on one GPU.

    sdpa    scaled_dot_product_attention, document by document
    varlen  flash attention, all documents in one call
    flex    FlexAttention with a document mask, compiled

Run: python -m benchmarks.bare_kernels [--tokens 32768] [--repeats 30] [--seed 0]

Prints device milliseconds, for comparison with `apportion bench attention --ranks 1`. Each kernel is built for the
lengths of a batch and takes q [T, Hq, D], k [T, Hk, D], v [T, Hk, D] in token order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from apportion.backends.torch.engines import activate_newest_flash
from apportion.bench import BenchJob, Source, cluster_of, plan_unverified
from apportion.ir.request.model import Model
from apportion.trainer.measure.bench import Attention, RankTensors, best, on_gpu, on_host
from benchmarks.targets import TOKENS


def sdpa(lengths: Sequence[int], device: torch.device) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(torch.split(rows, list(lengths)) for rows in (q, k, v)), strict=True)
        return torch.cat([_document(*part) for part in parts])

    return attention


def _document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    return _rows(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def varlen(lengths: Sequence[int], device: torch.device) -> Attention:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    bounds = ends, ends, max(lengths), max(lengths)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Sequence[Tensor] = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, True, False)
        return result[0]

    return attention


def flex(lengths: Sequence[int], device: torch.device) -> Attention:
    document = torch.repeat_interleave(torch.tensor(lengths, device=device))

    def is_visible(batch: Any, head: Any, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    tokens = sum(lengths)
    mask = torch.compile(create_block_mask)(is_visible, None, None, tokens, tokens, device)
    compiled = torch.compile(flex_attention)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        return _rows(compiled(q, k, v, block_mask=mask, enable_gqa=True))

    return attention


KERNELS: Mapping[str, Callable[[Sequence[int], torch.device], Attention]] = MappingProxyType(
    {"sdpa": sdpa, "varlen": varlen, "flex": flex}
)


def _heads_first(tensor: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _rows(tensor: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D]."""
    return tensor[0].transpose(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention kernels without a plan.")
    for name, default in (("--tokens", TOKENS), ("--repeats", 30), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, _ = Source().batch(args.tokens, args.seed)
    header = plan_unverified(BenchJob(batch, cluster_of(1), Model(), "fcp", args.seed)).header
    activate_newest_flash(device)  # the newest FlashAttention, like engine `flash`
    for name, make in KERNELS.items():
        rows = RankTensors.of(header, batch.tokens, device, is_random=True)
        try:
            kernel = make(batch.lengths.tolist(), device)
            timings = best(kernel, rows, on_gpu if device.type == "cuda" else on_host, args.repeats)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
            continue
        print(name, *(f"{phase} {timing.device:.3f} ms" for phase, timing in timings.items()))


if __name__ == "__main__":
    main()
