"""The compiled core: array arguments and names of its functions, its codes, and its sorting compared with numpy's."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, strategies as st

import apportion._core as core
from apportion._core import sorting, stages
from apportion.ir.isa import ALL_TO_ALL, FIRST_DKV, FIRST_DQ, OPERAND_COLUMNS, RESULTS, TABLES, Op
from apportion.ir.tensors import HEADLESS, KV_SIDE, PARTIALS, Space, Tensor

STUBS = Path(core.__file__).parent / "_core"


def test_every_function_has_a_stub_and_every_stub_a_function() -> None:
    areas = {name: item for name, item in vars(core).items() if isinstance(item, ModuleType)}
    assert areas.keys() == {path.stem for path in STUBS.glob("*.pyi")} - {"__init__"}
    for name, area in areas.items():
        body = ast.parse((STUBS / f"{name}.pyi").read_text(encoding="utf-8")).body
        stub_names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        stub_names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
        assert stub_names == {item for item in vars(area) if not item.startswith("__")}, name


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ([1, 2], "must be a numpy array"),
        (np.zeros(3), "int64, not ndarray of float64"),
        (np.zeros(3, np.int32), "int64, not ndarray of int32"),
        (np.zeros((2, 2), np.int64), "of one dimension"),
        (np.zeros(6, np.int64)[::2], "contiguous"),
        (np.zeros(3, ">i8"), "int64, not ndarray of >i8"),
    ],
)
def test_arrays_are_never_converted_silently(keys: object, rule: str) -> None:
    with pytest.raises(TypeError, match=rf"^keys: .*{rule}"):
        sorting.stable_order(keys)


def test_a_read_only_array_is_not_written() -> None:
    stage, item = np.zeros(1, np.int32), np.zeros(1, np.int64)
    stage.setflags(write=False)
    with pytest.raises(TypeError, match=r"^stage: must be a numpy array, writable"):
        stages.fill(stage, item, item, item, 1, (np.ones(1), item, 0), item)


@pytest.mark.skipif(not core.checked, reason="only the sanitizer build checks indexes")
def test_an_index_out_of_bounds_is_an_error() -> None:
    with pytest.raises(IndexError, match="index 8 of 4"):
        sorting.counting_order(np.array([7]), 3)


numbers = st.one_of(st.integers(0, 3), st.integers(-(2**40), 2**40), st.integers(-(2**63), 2**63 - 1))


@given(st.lists(numbers, max_size=30), st.sampled_from([1, 40, 300]))
def test_sort_orders_equal_numpys(values: list[int], times: int) -> None:
    keys = np.array(values * times, np.int64)
    expected = np.argsort(keys, kind="stable")
    assert np.array_equal(sorting.stable_order(keys), expected)
    unique, number = sorting.unique_inverse(keys)
    assert unique.tolist() == sorted(set(values))
    assert np.array_equal(unique[number], keys)
    for kind in (np.int32, np.int64):
        small = (keys % 5).astype(kind)
        assert np.array_equal(sorting.counting_order(small, 5), np.argsort(small, kind="stable"))


def test_codes_in_the_core_equal_the_instruction_set() -> None:
    text = (Path(core.__file__).parents[1] / "core/ir/isa.hpp").read_text(encoding="utf-8")
    for enum in (Op, Tensor, Space):
        body = re.search(rf"enum class {enum.__name__} [^{{]*{{([^}}]*)}}", text).group(1)
        names = body.replace(" = 1", "")
        assert [item.strip() for item in names.split(",") if item.strip()] == [item.name for item in enum]
        assert [*map(int, enum)] == [*range(min(enum), max(enum) + 1)]
    for name, tensors in (("PARTIALS", PARTIALS), ("KV_SIDE", KV_SIDE), ("HEADLESS", HEADLESS)):
        core_names = re.findall(r"Tensor::(\w+)", re.search(rf"Tensors {name} = ([^;]*);", text).group(1))
        assert {Tensor[item] for item in core_names} == set(tensors)
    assert f"ALL_TO_ALL = {ALL_TO_ALL}, RESULTS = {RESULTS};" in text
    assert f"FIRST_DQ = {FIRST_DQ}, FIRST_DKV = {FIRST_DKV};" in text


def test_lists_and_operand_columns_equal_the_instruction_set() -> None:
    text = (Path(core.__file__).parents[1] / "core/ir/programs.hpp").read_text(encoding="utf-8")
    cases = dict(re.findall(r"case Op::(\w+):\s+return (\w+);", text))
    names = {None: "NO_LIST", **{name: name.upper() for name in OPERAND_COLUMNS}}
    assert {op.name: cases.get(op.name, "ROWOPS") for op in Op} == {op.name: names[op.rule.list] for op in Op}
    ranges = re.search(r"OPERAND_COLUMNS\[NO_LIST\] = {(.*)};", text).group(1)
    for (name, columns), (first, end) in zip(
        OPERAND_COLUMNS.items(), re.findall(r"{(\d+), (\d+)}", ranges), strict=True
    ):
        assert TABLES[name][int(first) : int(end)] == columns
