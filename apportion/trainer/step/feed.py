"""Rows of an encoder for the tokens of a decoder that stand for them: `move_rows`."""

from __future__ import annotations

from torch import Tensor

from apportion.backends.torch.feed import EncoderFeed as EncoderFeed
from apportion.ir.errors import ExecutionError
from apportion.ir.fields import instance
from apportion.trainer.step import wiring


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
