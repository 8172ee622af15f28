"""The walk of the verifier: it accepts plans of recipes and no mutant that computes something else, and gives equal
results in ranges and with threads. `python -m tests.checks.fuzz_judge` tries many more mutants."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion._core import verify as core
from apportion.ir.isa import Op
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import Tensor
from apportion.ir.verify import check
from apportion.ir.verify.attended import Tasks
from apportion.ir.verify.subject import Subject
from apportion.ir.verify.walk import judge
from apportion.planner.recipe.recipes import find_recipe
from tests.checks import fuzz_judge
from tests.support.parse import parse
from tests.support.sparse import sparse

# rank 0 sends zeros; rank 1 adds its tokens to them, with the two halves exchanged
ZEROS = """apportion.plan 3.0
request {
  "batch": {"sequences": [{"length": 8}, {"length": 8}]},
  "cluster": {"nodes": 1, "ranks_per_node": 2},
  "model": {"q_heads": 1, "kv_heads": 1, "head_dim": 4, "dtype": "fp64"},
  "policy": {"recipe": {"name": "by_hand", "steps": {}}, "token_cap": 8}
}

rank 0
layout attention: row=0 token=0 length=8 sequence=0 position=0
program default forward
  clear O.work[0:8)
  launch 0: send O.work[0:8) to 1
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  finish O.home[0:8)
program default backward
  BACKWARD

rank 1
layout attention: row=0 token=8 length=8 sequence=1 position=0
program default forward
  launch 0: receive O.work[0:8) from 0
  wait 0
  attend Q.home[4:8) KV.home[0:8) -> O.work[0:4) [-4,3]
  attend Q.home[0:4) KV.home[0:4) -> O.work[4:8) causal
  merge O.work[0:4) -> O.home[4:8) first
  merge O.work[4:8) -> O.home[0:4) first
  finish O.home[0:8)
program default backward
  BACKWARD
"""
BACKWARD = """delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal \
first_dq first_dkv"""

PLANS = list(fuzz_judge.plans())


def test_plans_of_recipes_are_accepted() -> None:
    for name, plan in PLANS:
        assert check(plan) == (), (name, plan.header.ranks, plan.request.cluster.nodes)


@pytest.mark.parametrize("threads", [2, 3, 99])
def test_threads_give_the_same_tasks(threads: int) -> None:
    """Ranges of ranks that are walked in parallel lead to the same tasks in the same order."""
    for name, plan in PLANS:
        single, several = Subject(plan), Subject(plan, threads)
        assert single.holds, name
        assert several.holds, name
        for program, other in zip(single.programs, several.programs, strict=True):
            expected, actual = single.tasks(program), several.tasks(other)
            assert np.array_equal(expected.bands, actual.bands), name
            assert np.array_equal(expected.heads, actual.heads), name


def test_threads_find_the_same_faults() -> None:
    rng = random.Random(5)
    for _, plan in PLANS[::4]:
        mutant = fuzz_judge.mutate(rng, plan)[1]
        assert check(mutant, threads=3) == check(mutant)


@pytest.fixture
def rewalks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shortens ranges, so that they are settled in turn as in long plans; records how many each judge walks again."""
    found: list[int] = []

    def record_rewalk(*args: Any) -> tuple[core.Verdict, int]:
        verdict, again = core.judge(*args)
        found.append(again)
        return verdict, again

    monkeypatch.setattr(judge, "_LONGEST", 300)
    monkeypatch.setattr(judge, "core", SimpleNamespace(**{**vars(core), "judge": record_rewalk}))
    return found


@pytest.mark.parametrize("threads", sparse([1, 2], 2))
def test_ranges_settled_in_turn_give_the_same_tasks(threads: int, rewalks: list[int]) -> None:
    """Ranges that depend on later ranks list their bands after them, so the bands of each head are compared sorted."""
    for name, plan in PLANS:
        subject = Subject(plan, threads)
        assert subject.holds, name
        assert check(plan, threads) == (), name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(judge, "_LONGEST", 2**21)
            whole = Subject(plan)
            assert whole.holds, name
        for program, other in zip(subject.programs, whole.programs, strict=True):
            assert bands_by_head(subject.tasks(program)) == bands_by_head(whole.tasks(other)), name
    assert any(rewalks)
    assert not all(rewalks)


def bands_by_head(tasks: Tasks) -> list[tuple[int, ...]]:
    """(head, band) of all bands of all heads, sorted."""
    assert tasks.multiplicities is not None
    return sorted(
        (head, *band)
        for band, number in zip(tasks.bands.T.tolist(), tasks.heads.tolist(), strict=True)
        for head, times in enumerate(tasks.multiplicities[number].tolist())
        for _ in range(times)
    )


@pytest.mark.parametrize("threads", sparse([1, 2], 2))
def test_mutants_are_refused_equally_if_ranges_are_settled_in_turn(threads: int, rewalks: list[int]) -> None:
    rng, accepted = random.Random(11), 0
    for plan in dict(PLANS).values():  # the largest of each recipe
        for _ in range(20):
            mutant = fuzz_judge.repaired(fuzz_judge.mutate(rng, plan)[1])
            found = check(mutant, threads)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(judge, "_LONGEST", 2**21)
                assert check(mutant) == found
            accepted += not found
    assert accepted
    assert any(rewalks)
    assert not all(rewalks)


@pytest.mark.parametrize("name", ["mixed", "upipe_ring"])
def test_tiles_of_several_runs_are_sent_on(name: str) -> None:
    batch = ap.Batch.from_lengths((900, 300, 2100, 64, 1500, 7000, 700, 128))
    model = ap.Model(8, 8, 16, hidden=128, layers=1)
    assert check(ap.plan(batch, ap.Cluster(2, 4), model, name, verify=False)) == ()


@pytest.mark.parametrize(
    ("recipe", "tokens", "band"),
    [
        ("hybrid_dp", 40, (31, 33, 0, 39, -3, 28)),
        ("zeppelin", 40, (3, 29, 0, 33, -3, 22)),
        ("megatron_hybrid", 17, (6, 13, 0, 14, -3, 34)),
    ],
)
def test_zeros_after_a_tile_of_several_runs_are_sent_on(recipe: str, tokens: int, band: Any) -> None:
    """The judge must find the end of the tile to distinguish the zeros from the tile's rows."""
    steps = {**find_recipe(recipe).to_data()["steps"], "reshuffle": True}
    batch, model = ap.Batch.from_lengths([tokens], ap.masks.bands([band])), ap.Model(1, 1, 1, dtype="fp64")
    policy = ap.Policy(ap.Recipe("reshuffled", steps))
    plan = ap.plan(batch, ap.Cluster(1, 4), model, policy=policy, verify=False)
    assert Subject(plan).holds


def test_tokens_are_added_to_rows_of_zeros_in_any_order() -> None:
    text = ZEROS.replace("BACKWARD", BACKWARD)
    assert check(parse(text)) == ()
    twice = check(parse(text.replace("O.work[4:8)", "O.work[0:4)")))[0].message
    assert "adds tokens [8, 12) to O work rows [0, 4), which hold tokens [12, 16)" in twice


def test_tables_are_walked_where_lowering_wrote_them() -> None:
    """Nothing that lowering writes is copied or widened before the walk, which reads the same memory; so verification
    allocates almost nothing."""
    batch, model = ap.Batch.from_lengths([4096, 700, 30]), ap.Model(q_heads=8, kv_heads=8, head_dim=64)
    plan = ap.plan(batch, ap.Cluster(nodes=2, ranks_per_node=4), model, "fcp", verify=False)
    check(plan)
    tracemalloc.start()
    assert not check(plan)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tables = {**plan.programs["default", "backward"].tables}
    assert allocated < sum(table.values.nbytes for table in tables.values()) / 10
    for name in ("operands", "instructions", "transfers", "grads", "rowops"):
        assert tables[name].values.dtype == np.int32


def test_an_instruction_of_another_phase_is_refused_even_without_rows() -> None:
    batch, model = ap.Batch.from_lengths([64]), ap.Model(1, 1, 2, layers=1)
    plan = ap.plan(batch, ap.Cluster(1, 2), model, "fcp", verify=False)
    tables = dict(plan.programs["default", "forward"].tables)
    table = tables["instructions"]
    added = np.insert(table.values, 0, [int(Op.PROJECT_GRAD), 0, 0, 0, 0], axis=1)
    tables["instructions"] = Table(table.ptr + (np.arange(len(table.ptr)) > 0), table.names, added)
    programs = {**plan.programs, ("default", "forward"): ProgramSet(tables)}
    found = check(replace(plan, programs=programs, sections=None))
    assert [(fault.rule, fault.rank) for fault in found if fault.rule != "digests"] == [("operands", 0)]


def test_more_heads_than_a_word_has_bits_are_supported() -> None:
    """Each of 64 ranks computes one head; a late rank that omits its head is found."""
    batch, model = ap.Batch.from_lengths([200, 57]), ap.Model(64, 64, 2, layers=1)
    plan = ap.plan(batch, ap.Cluster(8, 8), model, "ulysses")
    assert len(plan.header.head_sets) >= 64
    program = plan.programs["default", "forward"]
    operands = program["operands"]
    heads = np.array(operands["heads"], np.int64)
    last = len(heads) - 1 - int(np.argmax((operands["tensor"] == Tensor.O)[::-1] & (heads[::-1] > 0)))
    heads[last] += 1 if heads[last] == 1 else -1
    table = Table.of(operands.ptr, {**operands.columns, "heads": heads})
    changed = {**plan.programs, ("default", "forward"): ProgramSet({**program.tables, "operands": table})}
    assert {fault.rank for fault in check(replace(plan, programs=changed, sections=None))} - {None}


def test_a_program_without_tasks_is_judged_next_to_one_with_tasks() -> None:
    """In backward, no head has a list of tasks, although forward has lists."""
    kinds = {"a": ap.masks.causal(), "b": ap.masks.bands([])}
    batch = ap.Batch.from_lengths([64, 40], kinds)
    plan = ap.plan(batch, ap.Cluster(1, 2), ap.Model(4, 2, 8, layers=1), "ring")
    programs = {**plan.programs, ("a", "backward"): plan.programs["b", "backward"]}
    broken = replace(plan, programs=programs, sections=None)
    assert not Subject(broken).holds
    found = {(fault.rule, fault.kind, fault.phase) for fault in check(broken)}
    assert found == {("coverage", "a", "backward"), ("heads", "a", "backward")}


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_an_accepted_mutant_computes_the_same(seed: int) -> None:
    result = fuzz_judge.fuzz(PLANS, 120, seed)
    assert result.missed == []
    assert result.refused.total() > result.count // 2
    assert result.accepted > result.count // 40


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_a_fault_is_described_by_operand_and_rank(seed: int) -> None:
    """Every fault that stops the walk has a specific message, and faults of rows name their rank."""
    rng = random.Random(seed)
    for _, plan in PLANS:
        for _ in range(8):
            for fault in check(fuzz_judge.repaired(fuzz_judge.mutate(rng, plan)[1])):
                assert "a form that the verifier does not support" not in fault.message, fault
                assert "cannot trace" not in fault.message, fault
                assert fault.rule not in ("operands", "dataflow", "delivery") or fault.rank is not None, fault
