"""What a migrated share of attention costs, and how finely communication lets documents be cut (DistCA, Appendices A
and B), as printed and corrected.

All sizes are bytes a token, all lengths tokens. `size_q` holds whatever goes with a query row: Q on its way out and, by
default of the place pass, O on its way back; `size_kv` holds K and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice, number

Form = Literal["corrected", "paper"]
FORMS = ("corrected", "paper")


@dataclass(frozen=True)
class Cut:
    """A share of an item: n_q query rows (of the head half of a head-tail item), the last of which sees n_kv keys, and
    the bytes that go for it."""

    n_q: float
    n_kv: float
    bytes: float


# ------------------------------------------------------------------------------------------------ Appendix A


def context_independent_flops(hidden: int, kv_hidden: int, ffn: int) -> int:
    """FLOPs of a token's linear layers, forward, one layer: Q, O, K + V as one matrix of kv_hidden, and a gated FFN."""
    return 2 * hidden * (2 * hidden + kv_hidden + 3 * ffn)


def most_shards(layer_s: float, bandwidth: float, size_q: float, size_kv: float) -> int:
    """The most even shards of a document whose communication hides behind its linear layers (Appendix A).

    l tokens in s shards send l * size_q + (s + 1) / 2 * l * size_kv bytes, and have l * layer_s seconds for it:
    s <= 2 (layer_s * bandwidth - size_q) / size_kv - 1. At least 1: an uncut document sends nothing.

    layer_s: seconds of a token's linear layers; bandwidth: bytes a second; size_q, size_kv: bytes a token.

    The printed example (34B: layer_s 2.796e-6, size_q 16 KiB) ends at 31. Its numbers give that only with K and V both
    counted (size_kv 8 KiB) and 50 GiB/s (50 * 2**30); as it writes them (4 KiB, 50e9) the same formula gives 59, and
    29 with 8 KiB and 50e9.
    """
    for name, value in (("layer_s", layer_s), ("bandwidth", bandwidth), ("size_kv", size_kv)):
        number(f"most_shards.{name}", value, above=True)
    return max(1, math.floor(2 * (layer_s * bandwidth - size_q) / size_kv - 1))


# ------------------------------------------------------------------------------------------------ Appendix B


def range_cut(
    alpha: float, l_q: float, l_kv: float, size_q: float, size_kv: float, form: Form = "corrected"
) -> Cut:
    """The cheapest contiguous share `alpha` of an item of l_q query rows that end at key l_kv, causal.

    n_q rows that end at key n_kv have n_q (2 n_kv - n_q) / 2 pairs, so n_kv follows from n_q; bytes are least at
    n_q = sqrt(alpha * beta * l_q (2 l_kv - l_q) / (beta + 2)), beta = size_kv / size_q, or at the end of what the item
    has. Its first rows (fewest keys) are n_q_max of them, its last rows n_q_min.

    paper: n_q_max = sqrt((l_q - l_kv)^2 + alpha * l_q (2 l_kv - l_q)) as printed, and no n_q_min. It lacks + (l_q -
    l_kv): a whole item (alpha 1) would have l_kv rows, not l_q.
    """
    _check(alpha, form)
    rows, bytes_ = _range_rows(alpha, l_q, l_kv, size_q, size_kv, form == "paper")
    return Cut(rows, rows / 2 + alpha * l_q * (2 * l_kv - l_q) / (2 * rows), bytes_)


def head_tail_cut(
    alpha: float,
    l_q: float,
    l_kv: float,
    l_doc: float,
    size_q: float,
    size_kv: float,
    form: Form = "corrected",
) -> Cut:
    """The cheapest share `alpha` of a head-tail item: its head has rows [l_kv - l_q, l_kv) of a document of l_doc
    tokens, its tail their mirror images.

    corrected: a row and its mirror image see l_doc + 1 keys together, so work is linear: n_q = alpha * l_q head rows
    and as many of the tail, 2 n_q size_q bytes of queries. Head row i needs the keys before it, its image l_doc - i of
    them, so the innermost rows are the cheapest: i = l_kv - n_q.

    paper: the head's triangle alone is taken for the work (n_q_min = l_kv - sqrt(l_kv^2 - alpha (2 l_kv - l_q) l_q)
    rows) and query bytes are counted once. It moves less work than asked for; both forms agree on n_q at alpha 1.
    """
    _check(alpha, form)
    rows, bytes_ = _head_tail_rows(alpha, l_q, l_kv, l_doc, size_q, size_kv, form == "paper")
    return Cut(rows, l_kv, bytes_)


def _check(alpha: float, form: str) -> None:
    choice("form", form, FORMS)
    if not 0 < alpha <= 1:
        raise ConfigError("alpha", alpha, "must be in (0, 1]", "give the share of the item's work that moves")


def _range_rows(
    alpha: float, l_q: float, l_kv: float, size_q: float, size_kv: float, paper: bool
) -> tuple[float, float]:
    """(query rows, bytes) of `range_cut`."""
    beta, double = size_kv / size_q, alpha * l_q * (2 * l_kv - l_q)
    least = math.sqrt(beta * double / (beta + 2))
    most = math.sqrt((l_q - l_kv) ** 2 + double)
    if paper:
        rows = most if least > l_q or least / 2 + double / (2 * least) < least + l_kv - l_q else least
    else:
        fewest = l_kv - math.sqrt(max(l_kv * l_kv - double, 0.0))
        rows = min(max(least, fewest), most + l_q - l_kv)
    return rows, size_q * (rows * (1 + beta / 2) + beta * double / (2 * rows))


def _head_tail_rows(
    alpha: float, l_q: float, l_kv: float, l_doc: float, size_q: float, size_kv: float, paper: bool
) -> tuple[float, float]:
    """(rows of the head half, bytes) of `head_tail_cut`."""
    if not paper:
        rows = alpha * l_q
        return rows, 2 * rows * size_q + (l_doc - (l_kv - rows)) * size_kv
    beta, double = size_kv / size_q, alpha * l_q * (2 * l_kv - l_q)
    rows = l_kv - math.sqrt(max(l_kv * l_kv - double, 0.0))
    return rows, l_doc * size_kv + size_q / 2 * (rows * (2 + beta) - beta * double / rows)
