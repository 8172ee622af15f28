"""Decision records are short, numbered without gaps, have the same sections, and are all in the index."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs/decisions"
RECORDS = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")


def test_records_are_numbered_without_gaps_and_have_the_same_sections() -> None:
    for number, path in enumerate(RECORDS, start=1):
        text = path.read_text(encoding="utf-8")
        assert re.fullmatch(rf"{number:04}-[a-z0-9-]+\.md", path.name), path.name
        assert text.startswith(f"# {number:04}. "), path.name
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], (
            path.name
        )
        assert 10 <= len(text.splitlines()) <= 25, path.name


def test_every_record_is_in_the_index_under_its_title() -> None:
    titles = [path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in RECORDS]
    expected = [
        f"- [{title[:4]}]({path.name}) {title[6:]}" for path, title in zip(RECORDS, titles, strict=True)
    ]
    index = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in index if line.startswith("- ")] == expected
