"""Handmade tables: offsets and columns that do not fit are refused before the core reads them."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.isa import TABLES
from apportion.ir.plan.tables import ProgramSet, Table, empty_programs, empty_table


@pytest.mark.parametrize(
    "ptr", [[], [0], [1, 2], [0, 3], [0, 1], [0, 3, 2], [-1, 2], [[0, 2]], [0, 2**62, 2]]
)
def test_offsets_must_ascend_from_zero_to_the_number_of_rows(ptr: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^ptr = .*must run from 0 to 2, the number of rows"):
        Table(np.array(ptr, np.int64), ("a",), np.zeros((1, 2), np.int64))


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2,), (0, 0)])
def test_each_name_must_have_a_column(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^values = .*with 2 columns"):
        Table(np.array([0, 2]), ("a", "b"), np.zeros(shape, np.int64))


def test_tables_of_a_program_must_have_the_same_ranks() -> None:
    tables = {**empty_programs(2).tables, "tasks": empty_table(tuple(TABLES["tasks"]), 1)}
    with pytest.raises(ConfigError, match=r"^tasks = 1: must have 2 ranks"):
        ProgramSet(tables)
