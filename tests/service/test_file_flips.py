"""A few of the soak case's bits, and one in the schema, where SQLite's own message is no UTF-8."""

from pathlib import Path

import pytest

from apportion.service.errors import StoreError
from apportion.service.store import open_store
from tests.service import file_flips


def test_flipped_bits_of_files_are_never_served() -> None:
    found = file_flips.case(seed=7, flips=20)
    assert found["as before"] > found.get("refused", 0) > 0
    assert sum(found.values()) == 20 * (file_flips.PLANNED + file_flips.QUEUED)


def test_a_damaged_schema_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    open_store(folder).close()
    index = folder / "index.sqlite"
    data = index.read_bytes()
    assert b"WITHOUT ROWID" in data
    index.write_bytes(data.replace(b"WITHOUT ROWID", b"WITHOUT\xa0ROWID"))
    with pytest.raises(StoreError, match="it is damaged or no database: move it away"):
        open_store(folder)
