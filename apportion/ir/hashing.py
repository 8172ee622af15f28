"""BLAKE2b digests and the hash tree over a plan's parts.

      root          A slice of rank 2 carries part 2, the hashes of part 3 and of (0, 1), and the digests
     /    \\         of the plan's other sections: enough to recompute the plan's id.
   ·        ·
  / \\      / \\       leaf = H(00 · part), inner node = H(01 · left · right); an odd last node moves up
p0   p1   p2   p3    as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from apportion.ir.errors import DecodeError
from apportion.ir.isa import FORMAT

SIZE = 32


def digest(data: bytes) -> bytes:
    """32-byte BLAKE2b digest."""
    return blake2b(data, digest_size=SIZE).digest()


def leaf(part: bytes) -> bytes:
    """Hash of the leaf for one part."""
    state = blake2b(b"\0", digest_size=SIZE)
    state.update(part)
    return state.digest()


def tree(leaves: list[bytes]) -> list[list[bytes]]:
    """Levels of the tree, from the leaves to the root."""
    levels = [leaves]
    while len(levels[-1]) > 1:
        levels.append(_level_above(levels[-1]))
    return levels


def _level_above(nodes: list[bytes]) -> list[bytes]:
    pairs = [digest(b"\1" + left + right) for left, right in zip(nodes[::2], nodes[1::2], strict=False)]
    return pairs + nodes[len(pairs) * 2 :]


def path(levels: list[list[bytes]], rank: int) -> list[bytes]:
    """Sibling hashes on the path from a rank's leaf to the root."""
    siblings = [(level, (rank >> height) ^ 1) for height, level in enumerate(levels)]
    return [level[index] for level, index in siblings if index < len(level)]


def climb(node: bytes, rank: int, ranks: int, siblings: Sequence[bytes]) -> bytes:
    """Computes the root from a leaf and its path. Raises DecodeError if the path has the wrong length."""
    rest = list(siblings)
    while ranks > 1:
        if rank ^ 1 < ranks:
            if not rest:
                raise DecodeError("slice: the hash path is too short")
            sibling = rest.pop(0)
            node = digest(b"\1" + sibling + node if rank & 1 else b"\1" + node + sibling)
        rank, ranks = rank >> 1, (ranks + 1) >> 1
    if rest:
        raise DecodeError("slice: the hash path is too long")
    return node


def plan_id(digests: Iterable[bytes], root: bytes) -> bytes:
    """Computes the plan's id from the digests of header, request, layouts, moves and report, and the root over the
    parts."""
    return digest(b"".join([FORMAT.encode(), b"\0", *digests, root]))
