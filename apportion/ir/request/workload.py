"""Workloads: lists of real or synthetic samples, and batches drawn from them.

The top-level key of a file determines its form; each row is a sample:

    lengths  [tokens, …]                            a document
    rows     [[…, tokens, …], …]                    a document; its length is in the column whose name in
                                                    `format` starts with tokens or est_tokens
             [[text, [image tokens, …], output], …] a text with images
    pairs    [[prompt, response], …]                a document of the total length
    groups   [[prompt, [answers]], …]               a shared question
    trees    [{"nodes": [[parent or -1, length]]}]  a tree
    turns    [[tokens, …], …]                       a document of the total length

Answers and nodes without tokens are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.fields import integer, integers, load, mapping, rows, sequence
from apportion.ir.masks import specs as masks
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.masks.spec import Mask
from apportion.ir.request.batch import Batch
from apportion.ir.request.lengths import length_values
from apportion.ir.request.sampling import find_overlong
from apportion.ir.request.sequences import Sequence

LONGEST = 524_288  # tokens of the longest log-normal document
_DRAWS = 1024  # random numbers per chunk


#: (field, row) -> the row's tokens, and its mask if the sample is structured
Reader = Callable[[str, Any], tuple[int, Mask | None]]


@dataclass(frozen=True, eq=False)
class Workload:
    """Samples: lengths int64 [n], and each sample's mask; None is a plain document, which may be cut."""

    lengths: Ints
    masks: tuple[Mask | None, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def cut_overlong(self, limit: int, overlong: str) -> Workload:
        """Cuts or refuses samples longer than `limit` tokens according to `overlong`; "drop" changes nothing. Raises
        CapacityError for refused samples, ConfigError for cutting a sample with its own mask."""
        is_overlong = find_overlong(self.lengths, limit, overlong)
        if overlong != "cut" or not is_overlong.any():
            return self
        if any(self.masks[i] is not None for i in np.flatnonzero(is_overlong)):
            rule = "a sample with its own mask cannot be cut"
            raise ConfigError("overlong", overlong, rule, "drop or refuse them")
        return Workload(np.minimum(self.lengths, limit), self.masks)

    def drop_overlong(self, limit: int, overlong: str) -> Workload:
        """Like `cut_overlong`, but drops samples that are still longer than `limit`. Raises the same errors."""
        result = self.cut_overlong(limit, overlong)
        return Workload(result.lengths[fits := result.lengths <= limit], tuple(compress(result.masks, fits)))


def read_workload(path: str | Path) -> Workload:
    """Reads the samples of a JSON or YAML workload file. Raises ConfigError."""
    return workload_from_data(load(path))


def read_lengths(path: str | Path, column: str | None = None) -> Workload:
    """The plain documents of a file or folder that `length_values` reads. Raises its errors, and ConfigError."""
    return _plain_workload(_non_empty(str(path), length_values(Path(path), column)), str(path))


def workload_from_data(data: Any) -> Workload:
    """Builds samples from the plain data of a workload file; keys other than the sample key describe the file."""
    data = mapping("workload", data)
    keys = [key for key in ("lengths", "rows", *_READERS) if key in data]
    if len(keys) != 1:
        rule = "must have one key that holds samples"
        names = ", ".join(("lengths", "rows", *_READERS))
        raise ConfigError("workload", sorted(data)[:16], rule, f"write one of {names}")
    (key,) = keys
    field = f"workload.{key}"
    samples = _non_empty(field, sequence(field, data[key]))
    if key in _READERS:
        return _structured_workload(field, samples, _READERS[key])
    return _plain_workload(samples, field) if key == "lengths" else _workload_of_rows(data, samples)


def sample(
    workload: Workload, tokens: int, max_sample: int, seed: int, overlong: str = "drop"
) -> tuple[Batch, int]:
    """Draws a batch of at most `tokens` tokens; returns it with the number of skipped samples.

    Samples are drawn with replacement by `numpy.random.Generator(PCG64(seed))` until they reach `tokens`. The
    last one, if it does not fit, is cut if it is a plain document, and dropped otherwise. Samples of more than
    `max_sample` tokens are skipped and counted, or treated according to `overlong`, see `find_overlong`. Raises
    CapacityError if nothing fits.
    """
    tokens = integer("tokens", tokens, 1, MAX_TOKENS)
    max_sample = integer("max_sample", max_sample, 1, MAX_TOKENS)
    seed = integer("seed", seed, 0)
    workload = workload.cut_overlong(max_sample, overlong)
    if workload.lengths.min() > max_sample:
        raise CapacityError(
            f"the shortest sample has {workload.lengths.min()} tokens, but only {max_sample} fit: use more ranks, more "
            "tokens per rank, or cut the samples"
        )
    indexes, skipped = _draw(workload.lengths, tokens, max_sample, seed)
    lengths, kept_indexes = _cut_last_sample(workload, indexes, tokens)
    if not len(lengths):
        raise CapacityError(f"the first sample drawn does not fit in {tokens} tokens and cannot be cut")
    return _batch(lengths, [workload.masks[i] for i in kept_indexes]), skipped


def lognormal_lengths(
    seed: int, tokens: int, median: float = 2048, sigma: float = 1.5, longest: int = LONGEST
) -> Ints:
    """int64 [n]: log-normal document lengths that add up to `tokens`, the last one cut; the benchmarks' workload.

    Lengths are `median * exp(sigma * z)`, rounded to the nearest integer and clipped to [1, longest], for z =
    `numpy.random.Generator(PCG64(seed)).standard_normal` in chunks of 1024.
    """
    rng = np.random.Generator(np.random.PCG64(integer("seed", seed, 0)))
    chunks, total = [], 0
    while total < integer("tokens", tokens, 1, MAX_TOKENS):
        lengths = np.rint(median * np.exp(sigma * rng.standard_normal(_DRAWS)))
        chunks.append(np.clip(lengths, 1, longest).astype(np.int64))
        total += int(chunks[-1].sum())
    return _fill(np.concatenate(chunks), tokens)


def _fill(lengths: Ints, tokens: int) -> Ints:
    """The leading `lengths`, up to the one that reaches `tokens`, which is cut so that they add up to it."""
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    result = lengths[: last + 1].copy()
    result[last] -= ends[last] - tokens
    return result


def _draw(lengths: Ints, tokens: int, max_sample: int, seed: int) -> tuple[Ints, int]:
    """(drawn indexes, up to the one that reaches `tokens`; number of skipped samples)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    parts, total, skipped = [np.zeros(0, np.int64)], 0, 0
    while total < tokens:
        indexes = rng.integers(0, len(lengths), _DRAWS)
        is_short = lengths[indexes] <= max_sample
        sums = total + np.cumsum(np.where(is_short, lengths[indexes], 0))
        count = min(int(np.searchsorted(sums, tokens)) + 1, _DRAWS)
        parts.append(indexes[:count][is_short[:count]])
        skipped += count - int(is_short[:count].sum())
        total = int(sums[count - 1])
    return np.concatenate(parts), skipped


def _cut_last_sample(workload: Workload, indexes: Ints, tokens: int) -> tuple[Ints, list[int]]:
    """(lengths, indexes) of the drawn samples, the last one cut or dropped if it exceeds `tokens`."""
    lengths, samples = workload.lengths[indexes], indexes.tolist()
    if lengths.sum() > tokens and workload.masks[samples[-1]] is not None:
        return lengths[:-1], samples[:-1]
    return _fill(lengths, tokens), samples


def _batch(lengths: Ints, specs: list[Mask | None]) -> Batch:
    if all(spec is None for spec in specs):
        return Batch.from_lengths(lengths)
    return Batch.from_sequences(
        Sequence(length, spec or masks.causal()) for length, spec in zip(lengths.tolist(), specs, strict=True)
    )


# ---- readers


def _plain_workload(lengths: Any, field: str = "lengths") -> Workload:
    array = integers(field, lengths, 1, MAX_TOKENS)
    return Workload(array, (None,) * len(array))


def _structured_workload(field: str, samples: Any, read: Reader) -> Workload:
    entries = [read(f"{field}[{i}]", row) for i, row in enumerate(samples)]
    return Workload(np.array([length for length, _ in entries], np.int64), tuple(spec for _, spec in entries))


def _workload_of_rows(data: Mapping[str, Any], samples: Any) -> Workload:
    if isinstance(samples[0], list) and len(samples[0]) == 3 and isinstance(samples[0][1], list):
        return _structured_workload("workload.rows", samples, _image_row)
    column = _token_column(data.get("format"))
    values = []
    for i, row in enumerate(samples):
        if not isinstance(row, list) or len(row) <= column:
            rule = f"must have at least {column + 1} columns, according to format"
            raise ConfigError(f"workload.rows[{i}]", row, rule, "correct the row or format")
        values.append(row[column])
    return _plain_workload(values, "workload.rows tokens")


def _token_column(layout: Any) -> int:
    names = [name.strip() for name in layout.strip("[]").split(",")] if isinstance(layout, str) else []
    for i, name in enumerate(names):
        if name.startswith(("tokens", "est_tokens")):
            return i
    rule = "must name a column that begins with tokens or est_tokens"
    raise ConfigError("workload.format", layout, rule, 'write "[bytes,tokens]"')


def _image_row(field: str, row: Any) -> tuple[int, Mask | None]:
    """[text, [image tokens, …], output]: the images are adjacent in the middle of the text."""
    if not isinstance(row, list) or len(row) != 3:
        raise ConfigError(field, row, "must be [text, [image tokens, ...], output]", "write three columns")
    text = integer(f"{field} text", row[0], 0, MAX_TOKENS)
    output = integer(f"{field} output", row[2], 0, MAX_TOKENS)
    edges = text // 2 + offsets(integers(f"{field} images", row[1], 1, MAX_TOKENS))
    spec = masks.image_spans(list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)))
    return _total(field, int(edges[-1]) - text // 2 + text + output), spec if spec.spans else None


def _sum(field: str, row: Any) -> tuple[int, Mask | None]:
    return integer(field, int(integers(field, row, 0, MAX_TOKENS).sum()), 1, MAX_TOKENS), None


def _group(field: str, row: Any) -> tuple[int, Mask | None]:
    if not isinstance(row, list) or len(row) != 2:
        raise ConfigError(field, row, "must be [prompt, [answers]]", "write [prompt, [answer, answer]]")
    prompt = integer(f"{field} prompt", row[0], 1, MAX_TOKENS)
    answers = [answer for answer in integers(f"{field} answers", row[1], 0, MAX_TOKENS).tolist() if answer]
    spec = masks.shared_question(prompt, answers) if answers else None
    return _total(field, prompt + sum(answers)), spec


def _tree(field: str, row: Any) -> tuple[int, Mask | None]:
    nodes = rows(f"{field}.nodes", mapping(field, row).get("nodes"), 2, "parent, length")
    spec = masks.tree(_non_empty_nodes(f"{field}.nodes", nodes))
    return _total(field, sum(length for _, length in spec.nodes)), spec


def _non_empty_nodes(field: str, nodes: list[list[Any]]) -> list[list[int]]:
    """The nodes with tokens; children of an empty node become children of its parent."""
    result: list[list[int]] = []
    number: list[int] = []  # each node's index in `result`, or that of its nearest kept ancestor
    for i, (parent, length) in enumerate(nodes):
        above = integer(f"{field}[{i}] parent", parent, -1, i - 1)
        number.append(number[above] if above >= 0 else -1)
        if integer(f"{field}[{i}] length", length, 0, MAX_TOKENS):
            result.append([number[-1], length])
            number[-1] = len(result) - 1
    return result


def _total(field: str, tokens: int) -> int:
    return integer(f"{field} tokens", tokens, 1, MAX_TOKENS)


def _non_empty(field: str, samples: Any) -> Any:
    if not samples:
        raise ConfigError(field, samples, "must not be empty", "list at least one sample")
    return samples


_READERS: Mapping[str, Reader] = MappingProxyType(
    {"pairs": _sum, "groups": _group, "trees": _tree, "turns": _sum}
)
