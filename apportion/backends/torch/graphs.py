"""Traversal of autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_IDENTITIES = ("_DDPSinkBackward",)  # nodes that pass several tensors through independently


def nodes(roots: Iterable[Any], ends: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Yields each node that is reachable from `roots` once; does not go beyond nodes for which `ends` is true."""
    pending, seen = [(node, 0) for node in roots], set[Any]()
    while pending:
        node, output = pending.pop()
        single = node is not None and node.name() in _IDENTITIES
        if node is None or (key := (node, single and output)) in seen:
            continue
        seen.add(key)
        yield node
        if not ends(node):
            pending += node.next_functions[output : output + 1] if single else node.next_functions
