"""Rule 8 encodes a plan's tables again unless they are the very columns from which its parts were encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, plan as plan_batch
from apportion.ir.bytes import codec, table_bytes
from apportion.ir.isa import MOVE_COLUMNS
from apportion.ir.plan.tables import Layout, Move, Table, empty_table
from apportion.ir.verify import check

MODEL = Model(q_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture
def plan() -> Plan:
    return plan_batch(Batch.from_lengths([700, 300, 24]), Cluster(nodes=1, ranks_per_node=4), MODEL)


def has_known_parts(plan: Plan) -> bool:
    parts = plan.sections.parts
    return isinstance(parts, table_bytes.Parts) and parts.encodes(
        table_bytes.tables_of(plan.layouts, plan.programs, plan.moves, plan.recurrence)
    )


def rules(plan: Plan) -> set[str]:
    return {violation.rule for violation in check(plan)}


def with_column(plan: Plan, change: Callable[[np.ndarray], np.ndarray]) -> Plan:
    spans = plan.layouts["attention"].spans
    columns = {**spans.columns, "position": change(spans["position"])}
    return replace(plan, layouts={"attention": Layout("attention", Table.of(spans.ptr, columns))})


def test_a_sealed_plan_has_known_parts_and_is_read_only(plan: Plan) -> None:
    assert has_known_parts(plan)
    assert rules(plan) == set()
    with pytest.raises(ValueError, match="read-only"):
        plan.layouts["attention"].spans["position"][0] = 5


@pytest.mark.parametrize(("added", "violated"), [(0, set()), (1, {"digests"})])
def test_columns_in_other_memory_are_encoded_again(plan: Plan, added: int, violated: set[str]) -> None:
    copied = with_column(plan, lambda column: column + added)
    assert not has_known_parts(copied)
    assert violated <= rules(copied)
    assert violated or not rules(copied)


def test_columns_made_writable_again_are_detected(plan: Plan) -> None:
    spans = plan.layouts["attention"].spans
    spans.values.setflags(write=True)
    spans["position"][0] += 1
    assert not has_known_parts(plan)
    assert "digests" in rules(plan)


def test_parts_replaced_in_place_are_detected(plan: Plan) -> None:
    plan.sections.parts[0] = plan.sections.parts[1]
    assert not has_known_parts(plan)
    assert "digests" in rules(plan)


def test_tables_in_foreign_memory_never_have_known_parts(plan: Plan) -> None:
    spans = plan.layouts["attention"].spans
    memory = bytearray(spans.values.tobytes())
    values = np.frombuffer(memory, spans.values.dtype).reshape(spans.values.shape)
    layout = Layout("attention", replace(spans, values=values))
    sealed = codec.seal(replace(plan, layouts={"attention": layout}))
    assert not has_known_parts(sealed)
    assert rules(sealed) == set()
    memory[0] ^= 1
    assert "digests" in rules(sealed)


def test_a_decoded_plan_is_encoded_again(plan: Plan) -> None:
    again = Plan.decode(plan.encode())
    assert not isinstance(again.sections.parts, table_bytes.Parts)
    assert rules(again) == set()


def without_backward(plan: Plan) -> Plan:
    programs = {key: program for key, program in plan.programs.items() if key[1] == "forward"}
    return codec.seal(replace(plan, header=replace(plan.header, phases=("forward",)), programs=programs))


def test_programs_missing_from_the_bytes_or_the_plan_are_detected(plan: Plan) -> None:
    forward_only = without_backward(plan)
    assert "digests" in rules(replace(plan, sections=forward_only.sections))
    assert rules(replace(forward_only, sections=plan.sections)) == {"structure"}  # needs both phases


def test_moves_missing_from_the_bytes_are_detected(plan: Plan) -> None:
    changed = replace(plan, moves=(Move("attention", "attention", empty_table(MOVE_COLUMNS, 4)),))
    assert "digests" in rules(changed)
