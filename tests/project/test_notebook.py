"""The example notebook prints the outputs that it stores; `python -m tests.project.test_notebook` stores new ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_prints_its_stored_cards_and_tables() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert len([cell for cell in stored.cells if cell.cell_type == "code" and cell.outputs]) >= 7
    for before, after in zip(stored.cells, executed().cells, strict=True):
        if before.cell_type == "code":
            assert untimed(after.outputs) == untimed(before.outputs)
    assert NOTEBOOK.stat().st_size < 100_000


def executed() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=where, record_timing=False
    )
    client.execute()
    return notebook


def untimed(outputs: list[nbformat.NotebookNode]) -> str:
    """The outputs without the comparison's last column, planning times."""
    return re.sub(r"<td>[\d.]+</td></tr>", "</tr>", json.dumps(outputs, sort_keys=True))


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
