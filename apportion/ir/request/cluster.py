"""The cluster: nodes, ranks, links, memory and speeds of the data x context group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, integers, load
from apportion.ir.isa import MAX_RANKS
from apportion.ir.structs import Amount, Count, Positive, check, mapping_of, to_data

#: limit on a cluster, which forecasts divide into tensor-parallel groups and stages; a plan has up to MAX_RANKS ranks
MAX_GPUS = 2**20


@dataclass(frozen=True)
class Cluster:
    """`nodes` x `ranks_per_node` ranks, node after node, without tensor parallelism.

    Bandwidths are GB/s (1e9 bytes) in each direction, memory in GiB. The defaults are one DGX H100: NVLink 900 GB/s for
    both directions together and eight 400 Gb/s NICs (NVIDIA's data sheets); the latencies are assumed. `speeds`:
    relative speed of each rank; None: all 1.0. A cluster has at most 2**20 ranks, a plan at most 65,535. Raises
    ConfigError.
    """

    nodes: Count = 1
    ranks_per_node: Count = 8
    intra_gbs: Positive = 450.0
    inter_gbs: Positive = 50.0  # per NIC
    nics_per_node: Count = 8
    intra_latency_us: Amount = 5.0
    inter_latency_us: Amount = 10.0
    memory_gib: Positive = 80.0
    speeds: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        check(self, "cluster")
        self.check_ranks(MAX_GPUS)
        if self.speeds is not None and len(self.speeds) != self.ranks:
            rule = f"must have one speed per rank ({self.ranks})"
            raise ConfigError("cluster.speeds", list(self.speeds), rule, "list 1.0 for a normal rank")

    def _repr_html_(self) -> str:
        """Notebook card: ranks, links, memory, and the speed of each rank if they differ."""
        from apportion.ir import cards

        rows = [
            ("ranks", f"{self.ranks:,}: {self.nodes:,} nodes of {self.ranks_per_node}"),
            ("links in a node", f"{self.intra_gbs:g} GB/s, {self.intra_latency_us:g} us"),
            (
                "between nodes",
                f"{self.nics_per_node} x {self.inter_gbs:g} GB/s, {self.inter_latency_us:g} us",
            ),
            ("memory per rank", f"{self.memory_gib:g} GiB"),
        ]
        speeds = cards.bars("speed of each rank, and the mean", np.array(self.speeds)) if self.speeds else ""
        return cards.card("Cluster", rows, speeds)

    def check_ranks(self, limit: int = MAX_RANKS) -> None:
        """Raises ConfigError if there are more than `limit` ranks, by default the limit of a plan."""
        if self.ranks > integer("most", limit):
            field, rule = "cluster.nodes x cluster.ranks_per_node", f"must be at most {limit}"
            raise ConfigError(field, self.ranks, rule, "use fewer ranks, or several plans")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def inter_gbs_per_rank(self) -> float:
        """GB/s between nodes per rank while all ranks of a node send: ranks may share a NIC, but none uses two."""
        return self.inter_gbs * min(1.0, self.nics_per_node / self.ranks_per_node)

    @overload
    def node_of(self, rank: int) -> int: ...
    @overload
    def node_of(self, rank: Ints) -> Ints: ...
    def node_of(self, rank: int | Ints) -> int | Ints:
        """The node of a rank, or of each rank of an array."""
        return rank // self.ranks_per_node

    @staticmethod
    def from_env(group: Any = None) -> Cluster:
        """The cluster that torchrun (WORLD_SIZE, LOCAL_WORLD_SIZE) or SLURM (SLURM_NTASKS with
        SLURM_NTASKS_PER_NODE or SLURM_NNODES) describes in the environment, with default links.

        group: the data x context group if it does not include all ranks: a list of global ranks, or an object with
        `size()`, such as a torch process group, whose ranks are assumed to be spread evenly over all nodes; if they are
        not, pass the list (`torch.distributed.get_process_group_ranks`). Raises ConfigError if neither set of variables
        is set, a rank is listed twice or ranks do not divide evenly.
        """
        world, local = _world(os.environ)
        if group is None:
            return Cluster(nodes=world // local, ranks_per_node=local)
        if callable(getattr(group, "size", None)):
            ranks, nodes = integer("group.size()", group.size(), 1, world), world // local
        else:
            members = _check_distinct(integers("group", group, 0, world - 1))
            ranks, nodes = len(members), len(np.unique(members // local))
            _check_even(members // local)
        nodes = min(nodes, ranks)
        return Cluster(nodes=nodes, ranks_per_node=_divide("group", ranks, nodes))

    @staticmethod
    def from_data(data: Any) -> Cluster:
        """Builds a cluster from plain data: a mapping of the fields above, all optional. Raises ConfigError."""
        return Cluster(**mapping_of(Cluster, "cluster", data))

    def to_data(self) -> dict[str, Any]:
        """Plain data with every field."""
        return to_data(self)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Loads a cluster from a JSON or YAML file."""
        return Cluster.from_data(load(path))


def _world(env: Mapping[str, str]) -> tuple[int, int]:
    """(ranks, ranks per node) from the launcher's variables."""
    if "WORLD_SIZE" in env:
        world = _variable(env, "WORLD_SIZE")
        local = _variable(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world
    elif "SLURM_NTASKS" in env:
        world = _variable(env, "SLURM_NTASKS")
        local = _slurm_local(env, world)
    else:
        raise ConfigError(
            "WORLD_SIZE",
            None,
            "neither torchrun's nor SLURM's variables are set",
            "pass nodes and ranks_per_node",
        )
    _divide("WORLD_SIZE", world, local)
    return world, local


def _slurm_local(env: Mapping[str, str], world: int) -> int:
    if "SLURM_NTASKS_PER_NODE" in env:
        return _variable(env, "SLURM_NTASKS_PER_NODE")
    nodes = _variable(env, "SLURM_NNODES") if "SLURM_NNODES" in env else 1
    return _divide("SLURM_NTASKS", world, nodes)


def _variable(env: Mapping[str, str], name: str) -> int:
    value = env[name].strip()
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ConfigError(name, env[name], "must be a whole number", "start the job with torchrun or srun")
    return integer(name, int(value), 1, MAX_RANKS)


def _divide(field: str, ranks: int, parts: int) -> int:
    if ranks % parts:
        raise ConfigError(
            field, ranks, f"must be a multiple of {parts}", "give every node the same number of ranks"
        )
    return ranks // parts


def _check_distinct(members: Ints) -> Ints:
    if not len(members) or len(np.unique(members)) != len(members):
        raise ConfigError(
            "group", members.tolist(), "must name at least one rank, without duplicates", "list global ranks"
        )
    return members


def _check_even(nodes: Sequence[int] | Ints) -> None:
    counts = np.unique(nodes, return_counts=True)[1]
    if len(set(counts.tolist())) > 1:
        raise ConfigError(
            "group",
            counts.tolist(),
            "must have the same number of ranks on each node",
            "choose equally many ranks on each of its nodes",
        )
