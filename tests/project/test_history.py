"""The picture of planning times: a line a recipe, from commit to commit."""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree import ElementTree

from benchmarks.history import PICTURE, Point, drawn

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_for_each_recipe_and_a_mark_for_each_median() -> None:
    found = [
        Point(datetime(2026, 1, day, tzinfo=UTC), "abc", recipe, ranks, float(10 * day))
        for day in (1, 3)
        for recipe in ("fcp", "a<b")
        for ranks in (8, 1024)
    ]
    root = ElementTree.fromstring(drawn(found))
    texts = [item.text for item in root.iter(f"{SVG}text")]
    assert {"fcp", "a<b", "8 ranks", "1,024 ranks", "10", "100", "2026-01-01", "2026-01-03"} <= set(texts)
    marks = [item for item in root.iter(f"{SVG}rect") if item.get("width") == "4"]
    assert len(marks) == len(found)
    assert drawn(found) == drawn(found)


def test_one_median_is_a_mark_without_a_line() -> None:
    root = ElementTree.fromstring(drawn([Point(datetime(2026, 1, 1, tzinfo=UTC), "abc", "fcp", 64, 7.0)]))
    assert len([item for item in root.iter(f"{SVG}rect") if item.get("width") == "4"]) == 1


def test_the_committed_picture_is_one() -> None:
    assert ElementTree.fromstring(PICTURE.read_text()).tag == f"{SVG}svg"
