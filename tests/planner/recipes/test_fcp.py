"""The fcp recipe: guarantees of its plans on any batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

import apportion as ap
from apportion.ir.isa import OPERAND_COLUMNS
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.recipe.recipes import find_recipe, with_block
from apportion.planner.shard.blocks import _affordable
from apportion.planner.solvers.use import PartitionSolver
from tests.support.placements import MASKS, MODEL, problem


def recipe(block: Any = "auto", coalesce: int = 4, buffers: int = 3, reshuffle: bool = False) -> ap.Recipe:
    steps = {"shard": {"blocks": {"block": block}}, "place": {"lpt": {}}, "reshuffle": reshuffle}
    return ap.Recipe("fcp", steps | {"schedule": {"matchings": {"coalesce": coalesce, "buffers": buffers}}})


def cluster(ranks: int, **fields: object) -> ap.Cluster:
    return ap.Cluster(nodes=1, ranks_per_node=ranks, **fields)


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
@example([1], "causal", 8, 64, 4, 3, False)
@example([1] * 1000, "causal", 8, "auto", 4, 3, True)
@example([4097], "causal", 8, 64, 4, 3, True)
@example([5, 4096, 1, 1, 1], "causal", 8, "auto", 4, 3, False)
@example([300] * 3, "causal", 8, "auto", 4, 3, True)
@example([2049, 2047, 1], "causal", 8, 64, 4, 3, False)
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


@pytest.mark.parametrize(
    ("lengths", "homes", "ranks"),
    [
        ([40, 8, 8, 60], [[1], None, [0, 2], [2]], 3),
        ([32768] * 7 + [8192, 24576], [None] * 8 + [[0]], 8),
        ([100_000] + [200] * 20, [None] + [[1]] * 20, 4),
    ],
    ids=["loose", "nearly full", "many"],
)
def test_sequences_stay_on_their_home_ranks(lengths: list[int], homes: Any, ranks: int) -> None:
    batch = ap.Batch.from_lengths(lengths, home_ranks=homes)
    policy = ap.Policy(recipe(8 if ranks == 3 else "auto"), token_cap=100 if ranks == 3 else None)
    spans = ap.plan(batch, cluster(ranks), MODEL, policy=policy).layout("attention").spans
    for sequence, allowed in enumerate(homes):
        assert allowed is None or set(spans.rank_of_row()[spans["sequence"] == sequence]) <= set(allowed)


@pytest.mark.parametrize(
    ("lengths", "ranks", "policy", "message"),
    [
        ([100, 100], 2, {"recipe": recipe(8)}, r"200 tokens have home_ranks \(0,\)"),
        ([100], 2, {"token_cap": 49}, "raise token_cap to at least 50"),
        ([512, 8], 4, {"recipe": recipe(256), "tolerance": 0.01}, r"above the tolerance 0\.01"),
        ([4096], 4, {"recipe": recipe(512), "memory_cap_gib": 1e-3}, "work rows"),
        ([2_000_000_000], 8, {}, r"250000000 tokens, .* need .* GiB of home rows"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_numbers(
    lengths: Any, ranks: int, policy: Any, message: str
) -> None:
    batch = ap.Batch.from_lengths(lengths, home_ranks=[[0], [0]] if "home_ranks" in message else None)
    model = ap.Model() if lengths[0] > 10**6 else MODEL
    with pytest.raises(ap.CapacityError, match=message):
        ap.plan(batch, cluster(ranks), model, policy=ap.Policy(**{"recipe": recipe(), **policy}))


def test_recipe_by_name_mapping_and_object() -> None:
    fcp = find_recipe("fcp")
    assert find_recipe(fcp) is fcp
    assert find_recipe(fcp.to_data()) == fcp
    assert with_block(fcp, 512).step("shard").params["block"] == 512
    with pytest.raises(ap.UnknownNameError, match="fcp"):
        find_recipe("fpc")


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


@pytest.mark.parametrize(
    ("shares", "limit"), [((1 / 3, 1 / 3), None), ((0.2,) * 4, None), ((0.4, 0.33), None), ((0.9,), "tasks")]
)
def test_auto_balances_a_few_giants_or_explains_why_not(shares: tuple[float, ...], limit: str | None) -> None:
    """If smaller blocks would give too many tasks, skipped steps are tried too."""
    total = 64 * 32768
    lengths = [int(share * total) for share in shares]
    made = problem([*lengths, total - sum(lengths)], 64, nodes=8)
    plan = ap.plan(made.batch, made.cluster, MODEL, recipe="fcp", verify=False)
    assert plan.report["termination"]["limit"] == limit
    assert (plan.report["imbalance"]["compute"] <= 0.01) is (limit is None)
    assert plan.report["imbalance"]["compute"] < 0.02
    assert _affordable(made, plan.report["block_tokens"])


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
            used = {0}
            for table, columns in OPERAND_COLUMNS.items():
                for column in columns:
                    used.update(program[table][column].tolist())
            assert len(program["operands"]) - len(used) <= 2
