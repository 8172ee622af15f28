"""The notebook of the examples runs unchanged, and its outputs are stored in it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_runs_and_shows_cards_and_tables() -> None:
    held = nbformat.read(NOTEBOOK, as_version=4)
    shown = [cell for cell in held.cells if cell.cell_type == "code" and cell.outputs]
    assert len(shown) >= 7
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources=where).execute()
    for before, after in zip(held.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            assert [output_kind(output) for output in before.outputs] == [
                output_kind(output) for output in after.outputs
            ]
    assert NOTEBOOK.stat().st_size < 100_000


def output_kind(output: nbformat.NotebookNode) -> tuple[str, ...]:
    return (output.output_type, *sorted(output.get("data", ())))
