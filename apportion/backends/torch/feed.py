"""Moves an encoder's rows to where a decoder reads them: one exchange between the layouts of two plans, differentiable.

Ranks exchange their spans of both plans; each rank then derives the moves of all ranks and verifies them.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from apportion.backends.torch.exchange import Exchange
from apportion.backends.torch.handle import PlanHandle
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.fields import instance, integer, integers
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.plan.moves import Feed
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.verify.feeds import verify_feed


class EncoderFeed:
    """Map from tokens of a decoder's plan to rows of an encoder's plan, and their transfer. Equal on all ranks.

    encoder, decoder: handles of plans for the same ranks. places: integers [n, 3]: first token in the decoder's batch,
    first row in the encoder's batch, number of tokens (each stands for `merge` rows); places do not overlap, and cover
    each row of the encoder once. Raises ConfigError; on first use, ExecutionError if
    ranks have different places."""

    def __init__(self, encoder: PlanHandle, decoder: PlanHandle, places: Ints, merge: int = 1) -> None:
        for name, handle in (("encoder", encoder), ("decoder", decoder)):
            instance(name, handle, PlanHandle, "pass the handle of its plan")
        self.encoder, self.decoder, self.merge = encoder, decoder, integer("merge", merge)
        encoder.feeds, self.device = True, torch.device("cpu")
        ranks = [(side.communicator.ranks, side.communicator.rank) for side in (encoder, decoder)]
        if ranks[0] != ranks[1]:
            rule = f"has {ranks[0][0]} ranks, the decoder's plan {ranks[1][0]}"
            raise ConfigError("encoder", encoder.name, rule, "plan both for the same cluster")
        columns = np.asarray(places)
        if columns.ndim != 2 or columns.shape[1] != 3:
            rule, remedy = "must be [n, 3]", "give first token, first row and tokens of each image"
            raise ConfigError("places.shape", columns.shape, rule, remedy)
        self.places = integers("places", columns.ravel(), 0).reshape(-1, 3)
        self.places = self.places[np.argsort(self.places[:, 0], kind="stable")]

    @cached_property
    def plan(self) -> Feed:
        """The moves of all ranks, verified; a collective the first time. Raises ExecutionError, ConfigError,
        VerifyError."""
        for handle in (self.encoder, self.decoder):
            handle.agree()
        spans = [_spans(handle) for handle in (self.encoder, self.decoder)]
        numbers = [crc32(self.places.tobytes()), self.merge, len(spans[0]), *spans[0], *spans[1]]
        gathered = self.decoder.communicator.all_gather(numbers, f"spans of plans {self.name}")
        if len({tuple(row[:2]) for row in gathered}) > 1:
            raise ExecutionError(
                f"ranks feed plan {self.name} at different places: pass the same places on all ranks"
            )
        encoder = _layout("encoder", [row[3 : 3 + row[2]] for row in gathered])
        decoder = _layout("decoder", [row[3 + row[2] :] for row in gathered])
        feed = Feed.of(encoder, decoder, self.places, self.merge)
        verify_feed(feed, encoder, decoder)
        return feed

    def to(self, device: torch.device | str) -> EncoderFeed:
        """The feed with `rows` on a device."""
        result = copy(self)
        result.device = torch.device(device)
        vars(result).pop("rows", None)
        return result

    @property
    def name(self) -> str:
        """The names of both plans, for errors."""
        return f"{self.decoder.name} from {self.encoder.name}"

    @cached_property
    def rows(self) -> Tensor:
        """int64 [n]: rows of the decoder on this rank that read rows of the encoder, ascending. A collective the first
        time."""
        columns = self.plan.targets.rank(self.decoder.communicator.rank).values.T.tolist()
        runs = [torch.arange(row, row + rows) for row, rows in columns]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *runs]).to(self.device)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange that moves the encoder's rows to `rows`: `merge` of them for each."""
        transport = self.decoder.communicator
        table = self.plan.move.table.rank(transport.rank)
        count = len(self.rows) * self.merge
        return Exchange.of(transport, f"rows fed to plan {self.name}", table, count)


def _spans(handle: PlanHandle) -> list[int]:
    spans = handle.slice.layout(handle.slice.header.home_layout).spans
    return [number for name in SPAN_COLUMNS[:3] for number in spans[name].tolist()]


def _layout(name: str, ranks: list[list[int]]) -> Layout:
    """The layout of the ranks' spans, each rank's as columns (row, token, length); without sequences or positions."""
    spans = [np.asarray(array, np.int64).reshape(3, -1) for array in ranks]
    columns = np.concatenate([*spans], axis=1)
    ptr = np.cumsum([0, *(array.shape[1] for array in spans)])
    return Layout(name, Table(ptr, SPAN_COLUMNS, np.concatenate([columns, np.zeros_like(columns[:2])])))
