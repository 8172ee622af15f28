"""Sensitivity scenarios: the same plan priced with varied hardware figures.

    plan, hardware, cluster ──apply(scenario, …)──► another hardware, another cluster ──simulate──► times of the plan

Half of a hardware file's figures are assumed, and networks are shared. A ranking of recipes that changes under
another scenario is not reliable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from apportion.ir.fields import amount, keep, name, number
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.figures import LEAST, Figure, Grid, Rows
from apportion.ir.request.hardware import Hardware
from apportion.ir.structs import MAX_TEXT

#: kernels have 124 of an H100's 132 multiprocessors during transfers: FCP (section 6.1) reserves 6 and 8 for
#: communication, and MagiAttention ("How to Ensure Kernels Actually Overlapped") finds 4 to 8 enough for all-to-all-v
SET_ASIDE = round(8 / (132 - 8), 3)
#: assumed slowdown per additional sender (at most seven) to a receiver's NIC in a round; of .085, .17, .34, the first
#: fits MagiAttention best, the second FCP's Table 2, the third Zeppelin's Figure 11 (docs/papers.md)
INCAST, INCAST_PEERS = 0.17, 7
#: share of a NIC's rate that a single peer gets: assumed, as a pair of ranks uses only some of the NIC's channels
ONE_PEER = 0.65


@dataclass(frozen=True)
class Scenario:
    """bandwidth, latency: factors on rates and latencies of links, inside and between nodes. compute: a factor on times
    of attention kernels and linear layers, above 1 for slower. contention, incast: lower limits on the hardware's
    figures; one_peer: an upper limit (see `Hardware`). experts: a factor on the excess of the fullest expert rank
    over the mean, in forecasts. Raises ConfigError."""

    name: str
    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    contention: float = 0.0
    incast: float = 0.0
    one_peer: float = 1.0
    experts: float = 1.0

    def __post_init__(self) -> None:
        name("scenario.name", self.name)
        for field in ("bandwidth", "latency", "compute"):
            keep(self, f"scenario.{field}", number, 0.0, True)
        for field in ("contention", "incast", "experts"):
            keep(self, f"scenario.{field}", number)
        keep(self, "scenario.one_peer", amount, LEAST, 1.0)


SCENARIOS = (
    Scenario("nominal"),
    Scenario("half-bandwidth", bandwidth=0.5),
    Scenario("latency-x4", latency=4.0),
    Scenario("slow-kernels", compute=1.1),
    Scenario("contention", contention=SET_ASIDE),
    Scenario("incast", incast=INCAST),
    Scenario("one-peer", one_peer=ONE_PEER),
    Scenario("all", 0.5, 4.0, 1.1, SET_ASIDE, INCAST, ONE_PEER),
)


def apply(scenario: Scenario, hardware: Hardware, cluster: Cluster) -> tuple[Hardware, Cluster]:
    """Applies the scenario; returns the same objects if it changes nothing. Changed figures are marked as assumed.

    Raises ConfigError if a figure leaves its range.
    """
    rates, latencies = ("intra_gbs", "inter_gbs"), ("intra_latency_us", "inter_latency_us")
    factors = dict.fromkeys(rates, scenario.bandwidth) | dict.fromkeys(latencies, scenario.latency)
    factors = {field: factor for field, factor in factors.items() if factor != 1.0}
    links = {field: getattr(cluster, field) * factor for field, factor in factors.items()}
    return _hardware(scenario, hardware, factors), replace(cluster, **links) if links else cluster


def _hardware(scenario: Scenario, hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    figures = hardware.figures()
    factors = dict(factors)
    if scenario.compute != 1.0:
        factors["linear_tflops"] = 1.0 / scenario.compute
    changed: dict[str, Any] = {
        field: _scale(figures[field], factor, scenario.name) for field, factor in factors.items()
    }
    source = f"scenario {scenario.name}"
    if scenario.contention > hardware.contention.value:
        changed["contention"] = Figure(scenario.contention, source, True)
    if scenario.incast > _value(hardware.incast, 0.0):
        changed["incast"] = Figure(scenario.incast, source, True)
        changed["incast_peers"] = hardware.incast_peers or Figure(INCAST_PEERS, source, True)
    if scenario.one_peer < _value(hardware.one_peer, 1.0):
        changed["one_peer"] = Figure(scenario.one_peer, source, True)
    if not changed:
        return hardware
    forward, backward = (_slow_down(grid, scenario) for grid in (hardware.forward, hardware.backward))
    name = f"{hardware.name}-{scenario.name}"[:64]
    result = replace(hardware, name=name, forward=forward, backward=backward, **changed)
    return Hardware.from_data(result.to_data())


def _value(figure: Figure | None, default: float) -> float:
    return default if figure is None else figure.value


def _slow_down(grid: Grid, scenario: Scenario) -> Grid:
    if scenario.compute == 1.0:
        return grid
    full, causal = (_times(times, scenario.compute) for times in (grid.full, grid.causal))
    tile_us, source = grid.tile_us * scenario.compute, _source(scenario.compute, grid.source, scenario.name)
    return replace(grid, full=full, causal=causal, tile_us=tile_us, source=source, assumed=True)


def _times(rows: Rows, factor: float) -> Rows:
    return tuple(tuple(time * factor for time in row) for row in rows)


def _scale(figure: Figure, factor: float, scenario: str) -> Figure:
    return Figure(figure.value * factor, _source(factor, figure.source, scenario), True)


def _source(factor: float, source: str, scenario: str) -> str:
    return f"scenario {scenario}: {factor:g} of: {source}"[:MAX_TEXT]
