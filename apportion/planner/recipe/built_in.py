"""The built-in recipes by name, with one-line descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apportion.ir.request.policy import Recipe


@dataclass(frozen=True)
class RecipeEntry:
    """A recipe with its description: summary, source, and requirements ("": none)."""

    recipe: Recipe
    summary: str
    paper: str
    section: str = ""
    needs: str = ""

    @property
    def name(self) -> str:
        return self.recipe.name


def _entry(
    name: str, summary: str, paper: str, section: str = "", needs: str = "", **steps: Any
) -> RecipeEntry:
    return RecipeEntry(Recipe(name, steps), summary, paper, section, needs)


_GROUPS = "query heads that the degree divides"

#: by default the attention layout is the loader's own: `reshuffle: true` moves rows inside the program
_ENTRIES = (
    _entry(
        "fcp",
        "blocks, longest processing time first under a token cap, documents on few nodes, in congestion-free rounds",
        "FCP",
        "3, 4",
        shard={"blocks": {"block": "auto", "zigzag": True, "solver": "lpt_near"}},
        place={"lpt": {"solver": "lpt_near"}},
        route={"node": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 3}},
        reshuffle=False,
    ),
    _entry(
        "fcp_paper",
        "FCP as printed: blocks on any node, every tile straight to each rank that needs it",
        "FCP",
        "3, 4",
        shard={"blocks": {"block": "auto", "zigzag": True}},
        place={"lpt": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 3}},
        reshuffle=False,
    ),
    _entry(
        "magi",
        "the token axis in equal chunks, the heaviest first to the lightest rank, equally many on each",
        "MagiAttention's dispatch (SandAI, 2025), with our rounds",
        shard={"chunks": {"size": 4096}},
        place={"lpt": {}},
        route={"node": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 3}},
    ),
    _entry(
        "ring",
        "every sequence cut zig-zag over all ranks, KV passed around the ring",
        "Ring Attention (Liu et al., 2023); zig-zag as in TransformerEngine",
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "allgather",
        "every sequence cut zig-zag over all ranks, KV gathered at once",
        "Llama 3 (2024)",
        "3.3.2",
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        route={"node": {}},
        schedule={"gather": {"whole": True}},
    ),
    _entry(
        "ulysses",
        "whole sequences in groups of ranks that split heads, all-to-all in and out",
        "DeepSpeed-Ulysses (Jacobs et al., 2023)",
        "3",
        _GROUPS,
        inner={"ulysses": {"degree": "auto"}},
        shard={"sequences": {}},
        place={"whole": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "usp",
        "a ring over nodes, heads split inside a node",
        "USP (Fang and Zhao, 2024)",
        "3",
        _GROUPS,
        inner={"ulysses": {"degree": "node"}},
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "loongtrain",
        "heads split inside half a node, a ring in every node and a ring of these rings",
        "LoongTrain (Gu et al., 2024)",
        "4",
        _GROUPS,
        inner={"ulysses": {"degree": "half_node"}},
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks", "window": "node"}},
    ),
    _entry(
        "hybrid_dp",
        "as many ranks for a sequence as its length asks for, a ring in each group",
        "ByteScale (Ge et al., 2025); Zeppelin's baseline Hybrid DP",
        "Zeppelin 5",
        shard={"sequences": {}},
        place={"hybrid_dp": {}},
        schedule={"ring": {"over": "holders"}},
    ),
    _entry(
        "megatron_hybrid",
        "a power of two of ranks for each sequence, groups of one size after another",
        "Megatron-Core, hybrid context parallelism",
        shard={"sequences": {}},
        place={"megatron_hybrid": {}},
        schedule={"ring": {"over": "holders", "turns": True}},
    ),
    _entry(
        "wlb",
        "cut per sequence or per document, whichever is predicted faster; variable-length packing of microbatches",
        "WLB-LLM (Wang et al., 2025)",
        "as described in DistCA 3.2 and 7",
        pack={"wlb": {}},
        shard={"sequences": {}},
        place={"wlb": {"shard": "auto"}},
        route={"node": {}},
        schedule={"gather": {"whole": True}},
    ),
    _entry(
        "flexsp",
        "groups of unequal size, each with a share of the sequences, heads split inside a group",
        "FlexSP (Wang et al., 2025)",
        "4",
        f"{_GROUPS}; pip install '.[solvers]'",
        shard={"sequences": {}},
        place={"flexsp": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "distca",
        "equal tokens in order, attention sent to other ranks where that costs the fewest bytes a pair",
        "DistCA",
        "4, A, B; on many ranks tasks take parts of their rows' keys: 8",
        shard={"sequences": {}},
        place={"distca": {"kv_ranges": "auto"}},
        route={"node": {}},
        schedule={"gather": {"local": "first"}},
    ),
    _entry(
        "distca_paper",
        "DistCA as published: tasks with all keys of their rows, one-sided tolerance, keys charged even where they are",
        "DistCA",
        "4, A, B",
        shard={"sequences": {}},
        place={"distca": {"form": "paper", "two_sided": False, "o_bytes": False, "kv_free": False}},
        schedule={"gather": {"local": "first"}},
    ),
    _entry(
        "dcp",
        "blocks and their computation placed by hypergraph partitioning, nodes before ranks, in divisions that overlap",
        "DCP",
        "4, 5",
        "solver mtkahypar needs pip install '.[solvers]'",
        shard={"blocks": {"block": 1024, "zigzag": False}},
        place={"dcp": {"solver": "greedy", "divisions": 4}},
        route={"node": {}},
        schedule={"divisions": {"count": 4}},
    ),
    _entry(
        "upipe",
        "heads of a group in stages of as many as ranks, projected stage by stage into rows that are used again",
        "UPipe",
        "3.3, 4.1",
        _GROUPS,
        inner={"upipe": {"degree": "auto", "heads": "auto", "project": True}},
        shard={"sequences": {}},
        place={"whole": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "upipe_ring",
        "upipe inside a node, a ring of KV across nodes",
        "UPipe",
        "5.2.1",
        _GROUPS,
        inner={"upipe": {"degree": "node", "project": True}},
        shard={"sequences": {}},
        place={"zigzag": {"over": "sequence"}},
        schedule={"ring": {"over": "ranks"}},
    ),
    _entry(
        "zeppelin",
        "sequences by zones: whole on a rank, rings inside a node, rings over nodes; tokens evened for linear layers",
        "Zeppelin",
        "3",
        shard={"sequences": {}},
        place={"zeppelin": {}},
        schedule={"queues": {}},
        remap={"flow": {}},
    ),
    _entry(
        "blend",
        "the densest and the sparsest documents mixed on each rank: equal tokens and equal work at once",
        "ours",
        shard={"sequences": {}},
        place={"blend": {}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 4}},
    ),
    _entry(
        "mixed",
        "short sequences whole on one rank with all heads; others split by heads in a node, and cut between nodes",
        "ours",
        "",
        _GROUPS,
        inner={"ulysses": {"degree": "node", "lone": "auto", "kinds": "auto"}},
        shard={"sequences": {}},
        place={"blend": {"weigh": "time", "align": 128}},
        schedule={"matchings": {"coalesce": "auto", "buffers": 16}},
    ),
    _entry(
        "contiguous",
        "no planning: the token axis in equal shares, the KV that is missing gathered",
        "the floor to compare with",
        shard={"sequences": {}},
        place={"contiguous": {}},
        schedule={"gather": {}},
    ),
    _entry(
        "auto",
        "several recipes and variations of the best, compared by the simulator",
        "ours",
        search={"portfolio": {}},
    ),
)

BUILT_IN: Mapping[str, RecipeEntry] = {entry.name: entry for entry in _ENTRIES}
