"""The fcp recipe: guarantees of its plans on any batch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe, passes_of, with_block
from apportion.planner.shard.blocks import _affordable
from apportion.planner.solvers.use import PartitionSolver
from tests.support.placements import MASKS, MODEL


def recipe(
    block: int | str = "auto", coalesce: int = 4, buffers: int = 3, reshuffle: bool = False
) -> ap.Recipe:
    return ap.Recipe(
        "fcp",
        {
            "shard": {"blocks": {"block": block}},
            "place": {"lpt": {}},
            "schedule": {"matchings": {"coalesce": coalesce, "buffers": buffers}},
            "reshuffle": reshuffle,
        },
    )


def cluster(ranks: int, **fields: object) -> ap.Cluster:
    return ap.Cluster(nodes=1, ranks_per_node=ranks, **fields)


def tokens_on(plan: ap.Plan, rank: int) -> set[int]:
    return set(plan.layout("attention").tokens(rank).tolist())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    mask=st.sampled_from(sorted(MASKS)),
    ranks=st.integers(1, 9),
    block=st.sampled_from([1, 5, 16, "auto"]),
    coalesce=st.integers(1, 4),
    buffers=st.integers(1, 3),
    reshuffle=st.booleans(),
)
def test_every_plan_verifies_and_is_balanced(
    lengths: list[int], mask: str, ranks: int, block: str | int, coalesce: int, buffers: int, reshuffle: bool
) -> None:
    batch = ap.Batch.from_lengths(lengths, mask=MASKS[mask])
    made = recipe(block, coalesce, buffers, reshuffle)
    plan = ap.plan(batch, cluster(ranks), MODEL, recipe=made, verify=False)
    ap.verify(plan)
    report = plan.report
    assert report["slots"] == report["max_degree"]
    assert report["rounds"] == sum(-(-e["slots"] // coalesce) for e in report["exchanges"])
    cap = max(102 * batch.tokens // (100 * ranks), -(-batch.tokens // ranks))
    assert plan.layout("attention").rows_per_rank.max() <= cap
    assert report["imbalance"]["compute"] + 1 >= report["imbalance_bound"] - 1e-9
    assert ap.Plan.decode(plan.encode()) == plan


@pytest.mark.parametrize(
    "lengths",
    [[1], [1] * 1000, [4097], [5, 4096, 1, 1, 1], [300] * 3, [2049, 2047, 1]],
    ids=[
        "one token",
        "a thousand tiny",
        "one giant",
        "tails",
        "fewer documents than ranks",
        "around a block",
    ],
)
@pytest.mark.parametrize("block", [64, "auto"])
@pytest.mark.parametrize("reshuffle", [False, True])
def test_awkward_lengths(lengths: list[int], block: str | int, reshuffle: bool) -> None:
    plan = ap.plan(
        ap.Batch.from_lengths(lengths), cluster(8), MODEL, recipe=recipe(block, reshuffle=reshuffle)
    )
    tokens = np.concatenate([plan.layout("attention").tokens(rank) for rank in range(8)])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))


def test_reshuffling_only_adds_its_own_bytes() -> None:
    batch = ap.Batch.from_lengths([200, 90])
    home, moved = (ap.plan(batch, cluster(4), MODEL, recipe(16, reshuffle=value)) for value in (False, True))
    assert home.header.home_layout == "attention"
    assert moved.header.home_layout == "loader"
    assert [set(plan.layouts) for plan in (home, moved)] == [{"attention"}, {"attention", "loader"}]
    fetched = [sorted(e["bytes"] for e in plan.report["exchanges"]) for plan in (home, moved)]
    assert len(fetched[0]) == 3  # keys, and their gradients back
    assert [size for size in fetched[1] if size in fetched[0]] == fetched[0]


def test_auto_at_least_halves_the_heaviest_piece() -> None:
    batch = ap.Batch.from_lengths(lognormal_lengths(1, 64 * 4096))
    plan = ap.plan(batch, ap.Cluster(nodes=8, ranks_per_node=8), MODEL, recipe=recipe("auto"))
    assert plan.report["heaviest_piece_over_mean"] <= 0.5
    assert plan.report["imbalance"]["compute"] <= 0.01
    assert plan.report["imbalance"]["tokens"] <= 0.02


def test_fixed_blocks_are_nearly_as_even_as_their_bound() -> None:
    batch = ap.Batch.from_lengths(lognormal_lengths(2, 64 * 32768))
    plan = ap.plan(batch, ap.Cluster(nodes=8, ranks_per_node=8), MODEL, recipe=recipe(2048))
    assert 1 + plan.report["imbalance"]["compute"] <= 1.03 * plan.report["imbalance_bound"]


def test_a_slow_rank_computes_less() -> None:
    batch = ap.Batch.from_lengths([256] * 64)
    policy = ap.Policy(recipe(32), token_cap=8192)
    plan = ap.plan(batch, cluster(4, speeds=(1.0, 1.0, 1.0, 0.5)), MODEL, policy=policy)
    rows = plan.layout("attention").rows_per_rank
    assert rows[3] * 1.8 <= rows[0]


def test_sequences_stay_on_their_home_ranks() -> None:
    batch = ap.Batch.from_lengths([40, 8, 8, 60], home_ranks=[[1], None, [0, 2], [2]])
    plan = ap.plan(batch, cluster(3), MODEL, policy=ap.Policy(recipe(8), token_cap=100))
    assert set(range(40)) <= tokens_on(plan, 1)
    assert set(range(56, 116)) <= tokens_on(plan, 2)
    assert set(range(48, 56)) <= tokens_on(plan, 0) | tokens_on(plan, 2)


def test_home_ranks_that_are_full_are_an_error_with_numbers() -> None:
    batch = ap.Batch.from_lengths([100, 100], home_ranks=[[0], [0]])
    with pytest.raises(ap.CapacityError, match=r"200 tokens have home_ranks \(0,\)"):
        ap.plan(batch, cluster(2), MODEL, recipe=recipe(8))


def test_a_batch_beyond_the_token_cap_is_an_error_with_numbers() -> None:
    with pytest.raises(ap.CapacityError, match="raise token_cap to at least 50"):
        ap.plan(ap.Batch.from_lengths([100]), cluster(2), MODEL, policy=ap.Policy(recipe(), token_cap=49))


def test_a_tolerance_that_cannot_be_met_is_an_error_with_numbers() -> None:
    batch = ap.Batch.from_lengths([512, 8])
    with pytest.raises(ap.CapacityError, match=r"above the tolerance 0\.01"):
        ap.plan(batch, cluster(4), MODEL, policy=ap.Policy(recipe(256), tolerance=0.01))


def test_work_rows_above_the_memory_cap_are_an_error_with_numbers() -> None:
    with pytest.raises(ap.CapacityError, match="work rows"):
        ap.plan(
            ap.Batch.from_lengths([4096]),
            cluster(4),
            MODEL,
            policy=ap.Policy(recipe(512), memory_cap_gib=1e-3),
        )


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ({"shard": {"blocks": {"block": 0}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}, "block"),
        ({"shard": {"blocks": {"size": 4}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}, "size"),
        ({"shard": {"rows": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}, "rows"),
        ({"place": {"lpt": {}}, "schedule": {"matchings": {}}}, "shard"),
        (
            {"shard": {"blocks": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {"buffers": True}}},
            "buffers",
        ),
        (
            {"shard": {"blocks": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}, "cook": {"x": {}}},
            "cook",
        ),
    ],
)
def test_wrong_recipes_are_named(steps: dict[str, dict[str, dict[Any, Any]]], name: str) -> None:
    with pytest.raises(ap.ConfigError, match=name):
        passes_of(ap.Recipe("mine", steps))


def test_recipe_by_name_mapping_and_object() -> None:
    fcp = find_recipe("fcp")
    assert find_recipe(fcp) is fcp
    assert find_recipe(fcp.to_data()) == fcp
    assert with_block(fcp, 512).step("shard").params["block"] == 512
    with pytest.raises(ap.UnknownNameError, match="fcp"):
        find_recipe("fpc")


def test_several_kinds_share_one_layout() -> None:
    masks = {"global": ap.masks.causal(), "local": ap.masks.sliding_window(16)}
    batch = ap.Batch.from_lengths([200, 30, 7], mask=masks)
    model = ap.Model(q_heads=4, kv_heads=2, head_dim=8, hidden=32, ffn=64, layers={"global": 1, "local": 5})
    plan = ap.plan(batch, cluster(4), model, recipe="fcp")
    assert plan.header.kinds == ("global", "local")
    assert set(plan.programs) == {(kind, phase) for kind in masks for phase in ("forward", "backward")}


PROGRAM = """
import sys
import apportion as ap
batch = ap.Batch.from_lengths([700, 90, 3, 3, 1, 450, 20], mask=ap.masks.sliding_window(130))
plan = ap.plan(batch, ap.Cluster(nodes=1, ranks_per_node=5), ap.Model(), recipe=sys.argv[1])
print(plan.id.hex())
"""


@pytest.mark.slow
def test_bytes_do_not_depend_on_hash_seeds() -> None:
    ids = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, "fcp"],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("lengths", "ranks", "smallest"),
    [([1201, 640, 150, 56, 1], 3, 16), ([6144], 4, 128), ([100_000] * 3, 8, 256)],
)
def test_auto_cuts_no_finer_than_balance_needs(lengths: list[int], ranks: int, smallest: int) -> None:
    plan = ap.plan(ap.Batch.from_lengths(lengths), cluster(ranks), MODEL, recipe="fcp")
    assert plan.report["block_tokens"] >= smallest
    assert plan.report["heaviest_piece_over_mean"] <= 0.5
    assert plan.report["imbalance"]["compute"] <= 0.05


def test_auto_reuses_the_placement_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, solve = [], PartitionSolver.__call__
    monkeypatch.setattr(
        PartitionSolver, "__call__", lambda self, case: cases.append(case) or solve(self, case)
    )
    ap.plan(ap.Batch.from_lengths([100_000] * 3), cluster(8), MODEL, recipe="fcp")
    assert len({len(case.weights) for case in cases}) == len(cases)  # once for each block size that was tried


TOTAL = 64 * 32768


@pytest.mark.parametrize(
    ("shares", "limit"), [((1 / 3, 1 / 3), None), ((0.2,) * 4, None), ((0.4, 0.33), None), ((0.9,), "tasks")]
)
def test_auto_balances_a_few_giants_or_explains_why_not(shares: tuple[float, ...], limit: str | None) -> None:
    """If smaller blocks would give too many tasks, skipped steps are tried too."""
    lengths = [int(share * TOTAL) for share in shares]
    batch = ap.Batch.from_lengths([*lengths, TOTAL - sum(lengths)])
    plan = ap.plan(batch, ap.Cluster(nodes=8, ranks_per_node=8), MODEL, recipe="fcp", verify=False)
    assert plan.report["termination"]["limit"] == limit
    assert (plan.report["imbalance"]["compute"] <= 0.01) is (limit is None)
    assert plan.report["imbalance"]["compute"] < 0.02
    assert _affordable(plan_problem(batch), plan.report["block_tokens"])


def plan_problem(batch: Batch) -> Problem:
    return Problem(batch, ap.Cluster(nodes=8, ranks_per_node=8), MODEL, ap.Policy(find_recipe("fcp")))


@pytest.mark.parametrize(
    ("lengths", "homes", "ranks"),
    [([32768] * 7 + [8192, 24576], [None] * 8 + [[0]], 8), ([100_000] + [200] * 20, [None] + [[1]] * 20, 4)],
)
def test_pieces_restricted_to_few_ranks_find_room(
    lengths: list[int], homes: list[list[int] | None], ranks: int
) -> None:
    batch = ap.Batch.from_lengths(lengths, home_ranks=homes)
    plan = ap.plan(batch, cluster(ranks), MODEL, recipe="fcp")
    for sequence, allowed in enumerate(homes):
        if allowed:
            start = int(batch.starts[sequence])
            assert set(range(start, start + lengths[sequence])) <= tokens_on(plan, allowed[0])


def test_a_sequence_larger_than_memory_is_refused_before_planning() -> None:
    with pytest.raises(ap.CapacityError, match=r"250000000 tokens, .* need .* GiB of home rows"):
        ap.plan(ap.Batch.from_lengths([2_000_000_000]), cluster(8), ap.Model(), recipe="fcp")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([1, 2], cluster(1), MODEL), "batch"),
        ((ap.Batch.from_lengths([4]), 4, MODEL), "cluster"),
        ((ap.Batch.from_lengths([4]), cluster(1), None), "model"),
    ],
)
def test_wrong_types_are_named(
    arguments: tuple[list[int] | Batch, Cluster | int, Model | None], name: str
) -> None:
    with pytest.raises(ap.ConfigError, match=f"^{name} = "):
        ap.plan(*arguments)


@pytest.mark.parametrize("given", [{"recipe": "fcp"}, {"seed": 3}])
def test_a_policy_brings_its_own_recipe_and_seed(given: dict[str, int | str]) -> None:
    batch, policy = ap.Batch.from_lengths([64]), ap.Policy(recipe(8), seed=5)
    with pytest.raises(ap.ConfigError, match="set it in the policy"):
        ap.plan(batch, cluster(2), MODEL, policy=policy, **given)
    assert ap.plan(batch, cluster(2), MODEL, policy=policy).header.seed == 5


def test_every_operand_is_used() -> None:
    """Except at most two: an operand that names all rows of a rank may be unused for one of several tensors."""
    plan = ap.plan(ap.Batch.from_lengths([4096, 700, 33]), cluster(4), MODEL, recipe="fcp")
    for programs in plan.programs.values():
        for rank in range(4):
            program = programs.rank(rank)
            used = {0, *program["transfers"]["operand"].tolist()}
            for table, columns in {
                "tasks": "q kv o",
                "grads": "q kv do delta dq dkv",
                "rowops": "a b c d",
            }.items():
                for column in columns.split():
                    used.update(program[table][column].tolist())
            assert len(program["operands"]) - len(used) <= 2
