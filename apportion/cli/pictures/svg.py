"""SVG as text. Text is escaped, and coordinates are rounded, so equal pictures have equal bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import numpy as np

from apportion.ir.arrays import Ints

NOBODY = -1
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, PALE, LINE = "#1f2328", "#59636e", "#d1d9e0"

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# hues that most people can distinguish, of similar lightness (after Okabe and Ito, 2008, and Tableau's ten)
_FEW = ("#4477aa", "#ee7733", "#228833", "#cc3377", "#66b3dd", "#ccaa22", "#884488", "#9a6a4a")
_TURN = 0.381966  # the golden angle, as a fraction of a circle: no two of the first hues come close
_TONES = ((62, 52), (48, 36), (70, 72))  # saturation and lightness in percent, in turn


def escaped(value: object) -> str:
    """The text, escaped for XML."""
    return escape(_NOT_XML.sub("\ufffd", str(value)))


def colour(index: int, count: int) -> str:
    """The colour of an item, as distinguishable as possible among `count` colours."""
    if count <= len(_FEW):
        return _FEW[index]
    saturation, lightness = _TONES[index % len(_TONES)]
    return f"hsl({round(360 * (index * _TURN % 1))},{saturation}%,{lightness}%)"


def text(x: float, y: float, value: object, size: int = 12, anchor: str = "start", rest: str = "") -> str:
    """A line of text whose baseline is at y. rest: further attributes."""
    attributes = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {attributes}{' ' * bool(rest)}{rest}>{escaped(value)}</text>"


def rect(x: float, y: float, width: float, height: float, fill: str, rest: str = "") -> str:
    """A rectangle. rest: further attributes."""
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {shape} fill="{fill}"{" " * bool(rest)}{rest}/>'


def lines(ends: Sequence[tuple[float, float, float, float]], stroke: str = LINE) -> str:
    """Straight lines (x0, y0, x1, y1)."""
    path = "".join(f"M{x0:g} {y0:g}L{x1:g} {y1:g}" for x0, y0, x1, y1 in ends)
    return f'<path d="{path}" fill="none" stroke="{stroke}"/>'


def raster(owners: Ints, fills: dict[int, str], across: Ints, down: Ints) -> str:
    """Cells [rows, columns] as one path per fill; owners without a fill stay empty. across, down: starts of columns and
    rows, and the end of the last: int64 [columns + 1], [rows + 1], in tenths of a pixel.

    Adjacent cells of one owner in a row are merged into a rectangle, and so are equal rectangles of adjacent rows.
    """
    x, y = across.tolist(), down.tolist()
    paths: dict[int, list[str]] = {owner: [] for owner in fills}
    for owner, row, rows, start, columns in _boxes(owners):
        if owner in paths:
            width, height = x[start + columns] - x[start], y[row + rows] - y[row]
            paths[owner].append(f"M{x[start]} {y[row]}h{width}v{height}h-{width}z")
    elements = (f'<path fill="{fills[owner]}" d="{"".join(path)}"/>' for owner, path in paths.items() if path)
    return f'<g transform="scale(.1)" shape-rendering="crispEdges">{"".join(elements)}</g>'


def _boxes(owners: Ints) -> list[tuple[int, int, int, int, int]]:
    """(owner, first row, rows, first column, columns) of rectangles that cover all cells but NOBODY's."""
    boxes: list[tuple[int, int, int, int, int]] = []
    growing: dict[tuple[int, int, int], int] = {}  # (owner, column, columns) -> first row
    for row in range(len(owners) + 1):
        runs = _runs(owners[row]) if row < len(owners) else []
        open_runs = {run: growing.get(run, row) for run in runs}
        closed_runs = ((run, first) for run, first in growing.items() if run not in open_runs)
        boxes += [(owner, first, row - first, column, width) for (owner, column, width), first in closed_runs]
        growing = open_runs
    return boxes


def _runs(row: Ints) -> list[tuple[int, int, int]]:
    edges = np.flatnonzero(np.diff(row)) + 1
    starts, ends = np.append(0, edges), np.append(edges, len(row))
    runs = zip(row[starts].tolist(), starts.tolist(), (ends - starts).tolist(), strict=True)
    return [run for run in runs if run[0] != NOBODY]


def document(width: float, height: float, title: str, description: str, parts: Sequence[str]) -> str:
    """A self-contained SVG file, with a title and a description for screen readers."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-labelledby="title desc" font-family="{FONT}" fill="{INK}">'
    )
    metadata = f'<title id="title">{escaped(title)}</title>\n<desc id="desc">{escaped(description)}</desc>'
    return "\n".join([head, metadata, rect(0, 0, width, height, "#ffffff"), *parts, "</svg>", ""])
