"""The example notebook runs unchanged and stores its outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_runs_and_shows_cards_and_tables() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    cells_with_output = [cell for cell in stored.cells if cell.cell_type == "code" and cell.outputs]
    assert len(cells_with_output) >= 7
    rerun = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(rerun, timeout=300, kernel_name="python3", resources=where).execute()
    for before, after in zip(stored.cells, rerun.cells, strict=True):
        if before.cell_type == "code":
            assert [output_kind(output) for output in before.outputs] == [
                output_kind(output) for output in after.outputs
            ]
    assert NOTEBOOK.stat().st_size < 100_000


def output_kind(output: nbformat.NotebookNode) -> tuple[str, ...]:
    return (output.output_type, *sorted(output.get("data", ())))
