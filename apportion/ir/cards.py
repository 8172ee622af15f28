"""HTML cards of plans, batches, masks and results for notebooks: a small picture and the figures.

All text is escaped, and a card takes a few kilobytes regardless of its content. Colours follow the notebook's theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints

BARS = 96
GRID = 64
_BLUE, _GREY = "#4477aa", "#8b97a3"


def card(title: str, rows: Iterable[tuple[str, str]], picture: str = "") -> str:
    """HTML card with a title, rows of (name, value) and a picture next to them. picture: an SVG from this module."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return (
        f"<div style='display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start'><div><b>{escape(title)}</b>"
        f"<table>{cells}</table></div>{picture}</div>"
    )


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML table with a heading for each column; all columns but the first are numeric."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<b>{escape(title)}</b><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(title: str, values: Ints | Floats) -> str:
    """SVG bar chart with a line at the mean; beyond `BARS` values, each bar is the maximum of a group of neighbours."""
    array = np.asarray(values, np.float64)
    step = max(1, -(-len(array) // BARS))
    maxima = [float(array[i : i + step].max()) for i in range(0, len(array), step)]
    highest = max([*maxima, 1e-300])
    width = 288 / max(len(maxima), 1)
    rects = "".join(
        f"<rect x='{i * width:.2f}' y='{90 - 80 * maximum / highest:.2f}' width='{width * 0.86:.2f}' "
        f"height='{80 * maximum / highest:.2f}'/>"
        for i, maximum in enumerate(maxima)
    )
    mean = 90 - 80 * float(array.mean() if len(array) else 0.0) / highest
    line = f"<path d='M0 {mean:.2f}H288' stroke='currentColor' stroke-dasharray='3 3'/>"
    return _svg(title, 288, 96, f"<g fill='{_BLUE}'>{rects}</g>{line}")


def cells(title: str, mask: Bools) -> str:
    """SVG of a mask. mask: bool [queries, keys], at most `GRID` of each."""
    side = 160 / max(len(mask), 1)
    path = "".join(
        f"M{start * side:.2f} {row * side:.2f}h{(stop - start) * side:.2f}v{side:.2f}h{(start - stop) * side:.2f}z"
        for row, line in enumerate(mask)
        for start, stop in _spans(line)
    )
    frame = f"<rect x='.5' y='.5' width='160' height='160' fill='none' stroke='{_GREY}'/>"
    return _svg(title, 161, 161, f"<path d='{path}' fill='{_BLUE}'/>{frame}")


def _spans(line: Bools) -> list[tuple[int, int]]:
    """(first, end) of each run of True values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def sample_mask(bands: Ints, length: int) -> Bools:
    """bool [side, side]: the mask of bands sampled at evenly spaced tokens of a sequence. bands: int64 [n, 6], as masks
    produce them."""
    side = min(length, GRID)
    tokens = (np.arange(side) * length + length // 2) // side
    query, key = tokens[:, None], tokens[None, :]
    mask = np.zeros((side, side), bool)
    for q0, q1, k0, k1, dmin, dmax in bands.tolist():
        in_rect = (query >= q0) & (query < q1) & (key >= k0) & (key < k1)
        mask |= in_rect & (query - key >= dmin) & (query - key <= dmax)
    return mask


def _svg(title: str, width: int, height: int, content: str) -> str:
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    name = escape(title)
    return f"<svg role='img' aria-label='{name}' {size}><title>{name}</title>{content}</svg>"
