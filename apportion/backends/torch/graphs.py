"""Walks over autograd's graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_IDENTITIES = ("_DDPSinkBackward",)  # of several tensors, each by itself


def nodes(begin: Iterable[Any], ends: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Each node once, from those where graphs begin, not beyond those where `ends`."""
    pending, seen = [(node, 0) for node in begin], set[Any]()
    while pending:
        node, output = pending.pop()
        single = node is not None and node.name() in _IDENTITIES
        if node is None or (place := (node, single and output)) in seen:
            continue
        seen.add(place)
        yield node
        if not ends(node):
            pending += node.next_functions[output : output + 1] if single else node.next_functions
