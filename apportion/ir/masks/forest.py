"""Folds samples with common prefixes into trees: a compressed trie over token ids (Morrison, "PATRICIA", JACM 1968).

    samples        [5 6 7 8 9]   [5 6 7 3]   [5 6 4]

    nodes              [5 6]             tokens        5 6  7  8 9  3  4
                       ╱   ╲             position_ids  0 1  2  3 4  3  2
                     [7]   [4]           weights       3 3  2  1 1  1  1
                     ╱ ╲                 rows          0 1  2  3 4 │ 0 1  2  5 │ 0 1  6
                 [8 9] [3]

Branches of a node differ in their first token, so the node's last token has a different label in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Ints, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.fields import MAX_COUNT, integer, integers
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import expand_runs
from apportion.ir.masks.structures import Tree

ROOT = -1
_ID, _ID_BYTES = ">u4", 4  # big endian: bytes compare like the numbers


class Saving(NamedTuple):
    """Tokens and attention pairs before and after folding. pairs: (query, key) pairs of causal attention."""

    tokens: int  # all samples, unfolded
    folded_tokens: int
    pairs: int
    folded_pairs: int


@dataclass(frozen=True, eq=False)
class Forest:
    """Folded samples. Also a dataset for a loader: item i has the tokens of tree i; pass `lengths` and `masks` with it.

    The trees are concatenated; a flat row is one of their tokens. tokens: int64 [flat rows], ids. rows: int64 [tokens
    of all samples]: the flat row of each, sample after sample; sample s has rows[starts[s] : starts[s + 1]]. trees:
    int64 [trees + 1], first flat row of each tree; tree_of: int64 [samples]. masks: one per tree.
    """

    tokens: Ints
    rows: Ints
    starts: Ints
    trees: Ints
    tree_of: Ints
    masks: tuple[Tree, ...]

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, tree: int) -> Ints:
        index = range(len(self))[tree]
        return self.tokens[self.trees[index] : self.trees[index + 1]]

    @property
    def samples(self) -> int:
        """The number of folded samples."""
        return len(self.tree_of)

    @property
    def lengths(self) -> Ints:
        """Tokens of each tree, int64 [trees]."""
        return np.diff(self.trees)

    @cached_property
    def position_ids(self) -> Ints:
        """The position of each flat row within its samples, int64 [flat rows]."""
        pairs = zip(self.masks, self.lengths.tolist(), strict=True)
        return np.concatenate([expand_runs(*mask.runs(length), length) for mask, length in pairs])

    @cached_property
    def weights(self) -> Ints:
        """The number of samples that contain each flat row, int64 [flat rows]."""
        return np.bincount(self.rows, minlength=len(self.tokens))

    @cached_property
    def saving(self) -> Saving:
        """Tokens and pairs before and after folding: a token attends to its path from the root, itself included."""
        lengths = np.diff(self.starts)
        pairs = int((lengths * (lengths + 1) // 2).sum())
        return Saving(len(self.rows), len(self.tokens), pairs, int((self.position_ids + 1).sum()))


def fold(samples: Sequence[ArrayLike], groups: ArrayLike | None = None, min_length: int = 1) -> Forest:
    """Folds `samples` into trees, in which common prefixes are stored once.

    samples: token ids of each, in [0, 2**31); at least one sample, none empty. groups: integers [samples]; samples of
    different groups share nothing, even with a common prefix (a system prompt, say), so that a loader may put them into
    different microbatches. min_length: shorter shared runs are repeated in each branch, since short nodes make small
    attention tiles.

    Trees, and branches of a node, are in the order of their first samples; nodes are stored depth first, so a node's
    first branch follows it. Equal samples end at the same node. Raises ConfigError.
    """
    minimum, keys = integer("min_length", min_length), _keys(samples)
    order, prefix_lengths = _neighbours(keys, _groups(groups, len(keys)))
    lengths = [len(key) // _ID_BYTES for key in keys]
    return _forest(_merge_small_nodes(_trie(order, prefix_lengths, lengths), lengths, minimum), keys, lengths)


class _Nodes(NamedTuple):
    """Trie nodes. For each node: parent, or ROOT, and depth, the number of tokens from the root to the node's end. For
    each sample: end, its last node."""

    parent: list[int]
    depth: list[int]
    end: list[int]

    def add(self, parent: int, depth: int) -> int:
        self.parent.append(parent)
        self.depth.append(depth)
        return len(self.parent) - 1

    def start(self, node: int) -> int:
        """The number of tokens before the node."""
        return self.depth[self.parent[node]] if self.parent[node] != ROOT else 0

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


def _keys(samples: Sequence[ArrayLike]) -> list[bytes]:
    """The token ids of each sample as bytes that sort like the ids."""
    if not len(samples):
        raise ConfigError("samples", [], "there is nothing to fold", "give at least one sample")
    keys = [_key(f"samples[{i}]", ids) for i, ids in enumerate(samples)]
    integer("tokens of all samples", sum(map(len, keys)) // _ID_BYTES, 1, MAX_TOKENS)
    return keys


def _key(field: str, ids: Any) -> bytes:
    array = integers(field, ids if isinstance(ids, list | tuple) else np.asarray(ids), 0, MAX_COUNT)
    if not len(array):
        raise ConfigError(field, [], "a sample must have at least one token", "leave it out")
    return array.astype(_ID).tobytes()


def _groups(groups: ArrayLike | None, samples: int) -> list[int]:
    if groups is None:
        return [0] * samples
    array = integers("groups", groups if isinstance(groups, list | tuple) else np.asarray(groups), -MAX_COUNT)
    if len(array) != samples:
        rule = f"there must be one for each of the {samples} samples"
        raise ConfigError("groups", f"{len(array)} groups", rule, "give the group of each sample")
    return list(array.tolist())


def _neighbours(keys: list[bytes], groups: list[int]) -> tuple[list[int], list[int]]:
    """(samples in lexicographic order, group by group; length of the prefix that each shares with the previous one)."""
    order = sorted(range(len(keys)), key=lambda i: (groups[i], keys[i]))
    prefix_lengths = [0]
    for previous, after in pairwise(order):
        same_group = groups[previous] == groups[after]
        prefix_lengths.append(_common_prefix_length(keys[previous], keys[after]) if same_group else 0)
    return order, prefix_lengths


def _common_prefix_length(a: bytes, b: bytes) -> int:
    """The length of the common prefix, in tokens."""
    limit = min(len(a), len(b)) // _ID_BYTES
    mismatch = np.frombuffer(a, np.uint32, limit) != np.frombuffer(b, np.uint32, limit)
    first = int(mismatch.argmax())
    return first if mismatch[first] else limit


def _trie(order: list[int], prefix_lengths: list[int], lengths: list[int]) -> _Nodes:
    """Builds the trie sample by sample in lexicographic order: the longest prefix shared with any earlier sample is
    shared with the previous one, whose path is a stack."""
    nodes = _Nodes([], [], [0] * len(order))
    path: list[int] = []
    for sample, common in zip(order, prefix_lengths, strict=True):
        child = ROOT
        while path and nodes.depth[path[-1]] > common:
            child = path.pop()
        # the paths diverge inside `child`, which is split there
        if common > (nodes.depth[path[-1]] if path else 0):
            path.append(nodes.add(nodes.parent[child], common))
            nodes.parent[child] = path[-1]
        if not path or nodes.depth[path[-1]] < lengths[sample]:
            path.append(nodes.add(path[-1] if path else ROOT, lengths[sample]))
        nodes.end[sample] = path[-1]
    return nodes


def _merge_small_nodes(nodes: _Nodes, lengths: list[int], minimum: int) -> _Nodes:
    """Merges, in place, nodes that several samples share but that have fewer than `minimum` tokens into their
    branches."""
    node_order = sorted(range(len(nodes.depth)), key=nodes.depth.__getitem__)
    counts = _sample_counts(nodes, node_order)
    anchor = {ROOT: ROOT}  # for each node: itself, or its nearest ancestor that is kept
    for node in node_order:
        nodes.parent[node] = anchor[nodes.parent[node]]
        is_dropped = counts[node] > 1 and nodes.depth[node] - nodes.start(node) < minimum
        anchor[node] = nodes.parent[node] if is_dropped else node
    for sample, node in enumerate(nodes.end):
        if anchor[node] != node:
            nodes.end[sample] = nodes.add(anchor[node], lengths[sample])
    return nodes


def _sample_counts(nodes: _Nodes, node_order: list[int]) -> Counter[int]:
    """The number of samples that pass through each node."""
    counts = Counter(nodes.end)
    for node in reversed(node_order):
        counts[nodes.parent[node]] += counts[node]
    return counts


def _forest(nodes: _Nodes, keys: list[bytes], lengths: list[int]) -> Forest:
    """Lays the nodes out depth first; each takes its tokens from any sample that passes through it."""
    paths = [nodes.path(end) for end in nodes.end]
    order = _depth_first(paths)
    spans = [slice(nodes.start(node), nodes.depth[node]) for node in order]
    sizes = np.array([span.stop - span.start for span in spans], np.int64)
    edges = offsets(sizes).tolist()
    row_of = dict(zip(order, pairwise(edges), strict=True))
    rows = np.concatenate([np.arange(*row_of[node]) for path in paths for node in path])
    holder = {node: np.frombuffer(key, _ID) for path, key in zip(paths, keys, strict=True) for node in path}
    parents = _parents(nodes, order)
    trees = np.append(np.array(edges[:-1])[parents == ROOT], edges[-1])
    starts = offsets(lengths)
    parts = (holder[node][span] for node, span in zip(order, spans, strict=True))
    tokens = np.concatenate(list(parts), dtype=np.int64)
    tree_of = np.searchsorted(trees, rows[starts[:-1]], side="right") - 1
    return Forest(tokens, rows, starts, trees, tree_of, _masks(parents, sizes))


def _parents(nodes: _Nodes, order: list[int]) -> Ints:
    """The position in `order` of each node's parent, or ROOT."""
    index = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    return np.array([index[nodes.parent[node]] for node in order], np.int64)


def _depth_first(paths: list[list[int]]) -> list[int]:
    """The nodes of all paths, depth first: siblings, and roots, in the order of the first path through them."""
    branches: dict[int, dict[int, None]] = {}
    for path in paths:
        for parent, node in pairwise([ROOT, *path]):
            branches.setdefault(parent, {})[node] = None
    order, stack = [], list(branches[ROOT])[::-1]
    while stack:
        order.append(stack.pop())
        stack += list(branches.get(order[-1], ()))[::-1]
    return order


def _masks(parents: Ints, sizes: Ints) -> tuple[Tree, ...]:
    trees = []
    for first, stop in pairwise([*np.flatnonzero(parents == ROOT).tolist(), len(parents)]):
        local_parents = np.maximum(parents[first:stop] - first, ROOT)
        trees.append(Tree(tuple(zip(local_parents.tolist(), sizes[first:stop].tolist(), strict=True))))
    return tuple(trees)
