"""Congestion between nodes: slowdown factors of transfers, which depend on the simultaneous messages of a round.

    k NICs send to the receiver's NIC in the round    1 + incast * min(k - 1, incast_peers) times as long
    one sender, whose NIC has no other receiver       1 / one_peer times as long
    a small message                                   1 / its share of the rate, if `message_rates` are known

Figures missing from the hardware file have no effect. A round is posted as a whole and its messages share the network;
overlapping rounds on two channels do not affect each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.request.figures import MessageRates
from apportion.ir.request.hardware import Hardware


@dataclass(frozen=True)
class Congestion:
    """Congestion figures of a hardware file, see `Hardware`. peers: `incast_peers`, infinite by default."""

    incast: float = 0.0
    peers: float = np.inf
    one_peer: float = 1.0
    rates: MessageRates | None = None

    @staticmethod
    def of(hardware: Hardware) -> Congestion | None:
        """The hardware's congestion, or None if every transfer takes bytes / rate."""
        by_name = {"incast": hardware.incast, "peers": hardware.incast_peers, "one_peer": hardware.one_peer}
        figures = {name: figure.value for name, figure in by_name.items() if figure is not None}
        result = Congestion(**figures, rates=hardware.message_rates)
        return result if result.incast > 0 or result.one_peer < 1 or result.rates is not None else None

    def factors(self, round_: Ints, out_port: Ints, in_port: Ints, message: Ints, sent_bytes: Ints) -> Floats:
        """float64 [transfers]: slowdown of each transfer relative to bytes over rate.

        Arguments: int64 [transfers] each, only transfers between nodes: round, NICs of sender and receiver, message
        number from 0, bytes.
        """
        senders = _opposite_ports(round_, in_port, out_port)
        receivers = _opposite_ports(round_, out_port, in_port)
        factor = 1.0 + self.incast * np.minimum(senders - 1, self.peers)
        factor[(senders == 1) & (receivers == 1)] = 1.0 / self.one_peer
        if self.rates is not None:
            factor /= self.rates.of(np.bincount(message, sent_bytes)[message])
        return factor


def _opposite_ports(round_: Ints, port: Ints, other: Ints) -> Ints:
    """int64 [transfers]: number of distinct opposite ports of the transfers with the same round and port."""
    span = 1 + int(max(port.max(initial=0), other.max(initial=0)))
    keys, index = np.unique(round_ * span + port, return_inverse=True)
    pairs = np.unique(index * span + other)
    counts: Ints = np.bincount(pairs // span, minlength=len(keys))[index]
    return counts


class Network(NamedTuple):
    """Inter-node network in the core's form. sent: int64 [tensors], bytes per row and head; first: number of the first
    rank; byte_us, round_us: microseconds per byte and per additional round; others as in `Congestion`."""

    sent: Ints
    first: int
    ranks_per_node: int
    nics_per_node: int
    byte_us: float
    round_us: float
    incast: float
    peers: float
    one_peer: float
