"""Rows that layers of their own move: `gather_visible` for an attention kernel, `move_rows` for an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from apportion.backends.torch.feed import EncoderFeed as EncoderFeed
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.visible import Visible as Visible, gather
from apportion.ir.errors import ExecutionError
from apportion.ir.fields import instance
from apportion.trainer.step import wiring


def gather_visible(x: Tensor | Sequence[Tensor], handle: PlanHandle, kind: str | None = None) -> Visible:
    """Gathers the rows of all ranks that this rank's queries may see under the kind's mask, for attention that selects
    among them at run time; a collective: ranks without tokens call it too.

    x [rows, ...]: keys, latents or indexer inputs, of any dtype and width: this rank's rows in the plan's home layout;
    or several such tensors, which are sent together. Queries are not moved. kind: attention kind, optional if the plan
    has only one. Returns `Visible`, whose rows are differentiable in x once: gradients of all ranks are sent back and
    summed along the rows' paths, in float32 (float64 for float64). On every rank the loss must depend on them.

    Raises ConfigError if the plan splits heads or moves queries of the kind, UnknownNameError for a kind that it does
    not have, ExecutionError for a different number of rows, and if ranks make different calls.
    """
    wiring.watch.require_all_rows("gather_visible")
    instance("handle", handle, PlanHandle, "pass batch.handle")
    tensors = (x,) if isinstance(x, Tensor) else tuple(x)
    if not tensors:
        raise ExecutionError("there is nothing to gather: pass one or more tensors")
    wiring.watch.record_attention(handle)
    result: Visible = gather(handle, handle.kind(kind), tensors)
    return replace(result, rows=result.rows[0]) if isinstance(x, Tensor) else result


def move_rows(x: Tensor, feed: EncoderFeed) -> Tensor:
    """Moves the encoder's rows to the tokens of this rank that stand for them, in the order of `feed.rows`; every rank
    calls it, including ranks without images.

    x [rows, ...]: this rank's rows of the encoder, in its plan's home layout, with padding. Returns [n * merge, ...]:
    the `merge` rows of each of the n tokens in order, ready to be merged. Differentiable in x once:
    gradients return to the ranks of the encoder's rows. On every rank the loss must depend on the result. Raises
    ConfigError, and ExecutionError for a different number of rows and if ranks make different calls.
    """
    wiring.watch.require_all_rows("move_rows")
    instance("feed", feed, EncoderFeed, "pass batch.feed")
    if len(x) != feed.encoder.padded_rows:
        raise ExecutionError(f"this rank holds {feed.encoder.padded_rows} rows of the encoder, got {len(x)}")
    feed.decoder.fed = True
    return feed.exchange(x)
