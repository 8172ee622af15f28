"""Recipes: each equals dense attention on every mask, and moves rows as its strategy prescribes.

Every strategy x mask x number of ranks from 1 to 8 is planned and run forward and backward, with four masks in a batch;
and every strategy x mask alone in its batch, on alternating numbers of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import ALL_TO_ALL, RESULTS, Op
from apportion.ir.masks import specs as masks
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe, Step
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner.recipe import built_in
from apportion.planner.recipe.recipes import entries, find_recipe, passes_of
from apportion.planner.recipe.registry import build
from tests.planner.recipes.test_upipe import compare_block
from tests.support.matrix import LAYERS, SEQUENCES, batch_of, compare
from tests.support.sparse import marked, sparse
from tests.support.strategies import BLOCKS, MATCHINGS, SHORT, STRATEGIES, WIDE, cluster, is_uncapped, steps

#: heads of every recipe: MHA, GQA 2, 4 and 8
HEADS = [*LAYERS, (8, 4, 4, 6, False, None)]
MASKS = list(SEQUENCES)
MATRIX = STRATEGIES | WIDE
PROJECTED = {"upipe_projected": steps("upipe_ring", **SHORT)}
TURNS = {name: turn for turn, name in enumerate(MATRIX)}


def layer_of(name: str, turn: int) -> tuple:
    """Picks a layer; wide stages need four heads."""
    heads = HEADS[1:] if name in WIDE else HEADS
    return heads[turn % len(heads)]


def model_of(layer: tuple) -> Model:
    heads, kv_heads, width, v_width, _, _ = layer
    return Model(heads, kv_heads, width, v_width, dtype="fp64", layers=1)


def planned(name: str, batch: Batch, layer: tuple, ranks: int) -> Plan:
    """Plans under a loose cap, since blocks of five tokens on many ranks cannot keep 1.02 x the mean."""
    recipe = Recipe(name, (MATRIX | PROJECTED)[name])
    own = is_uncapped(recipe)
    policy = Policy(recipe, token_cap=None if own else batch.tokens)
    return ap.plan(batch, cluster(ranks), model_of(layer), policy=policy)


def refuses(name: str, ranks: int) -> bool:
    return ranks % 2 == 1 and "inner" in name


def mask_batches(ranks: int) -> list[list[str]]:
    """All masks in batches of four, combined differently for each number of ranks."""
    shuffled = [MASKS[i] for i in np.random.default_rng(ranks).permutation(len(MASKS))]
    return [shuffled[at : at + 4] for at in range(0, len(shuffled), 4)]


@pytest.mark.parametrize("ranks", marked(range(1, 9), (3,)))
@pytest.mark.parametrize("name", sparse(list(MATRIX), 2))
def test_every_strategy_with_every_mask_equals_dense_attention(name: str, ranks: int) -> None:
    """The full matrix, forward and backward, four masks per plan, with alternating heads."""
    if refuses(name, ranks):
        with pytest.raises(ap.ConfigError, match=r"recipe\.inner\.ulysses\.degree"):
            planned(name, batch_of("causal"), LAYERS[0], ranks)
        return
    for turn, masks_ in enumerate(mask_batches(ranks)):
        layer = layer_of(name, turn + ranks + TURNS[name])
        compare(planned(name, batch_of(*masks_), layer, ranks), "default", layer, ranks)


@pytest.mark.parametrize("mask", sparse(MASKS, 8))
def test_one_sequence_of_every_mask_in_every_strategy(mask: str) -> None:
    """Tries each pair on one number of ranks, and each strategy and mask on all numbers from 1 to 8."""
    for name, turn in TURNS.items():
        ranks = 1 + (MASKS.index(mask) + 3 * turn) % 8
        layer = layer_of(name, turn + MASKS.index(mask) // 4)
        compare(planned(name, batch_of(mask), layer, ranks + refuses(name, ranks)), "default", layer, turn)


@pytest.mark.parametrize("ranks", marked(range(1, 9), (5,)))
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("upipe", {}),
        ("upipe_ring", SHORT),
        ("upipe_ring", SHORT | {"inner": {"ahead": 1}}),
        ("upipe_ring", SHORT | {"inner": {"hold": True}}),
    ],
    ids=str,
)
def test_the_built_in_upipe_recipe_projects_hidden_states(name: str, changed: dict, ranks: int) -> None:
    """With `project`, on every mask; also compares the gradients of the weights."""
    recipe = Recipe(name, steps(name, **changed))
    model = Model(2 * ranks, 2 if ranks % 2 == 0 else ranks, 4, 6, dtype="fp64", hidden=5, layers=1)
    for masks_ in mask_batches(ranks):
        compare_block(ap.plan(batch_of(*masks_), cluster(ranks), model, recipe))


def test_every_built_in_recipe_is_among_the_strategies_with_its_own_passes() -> None:
    for name in built_in.BUILT_IN:
        entry = entries()[name]
        assert entry.recipe.name == name
        assert entry.summary
        assert entry.paper
        passes = [(step.step, step.name) for step in find_recipe(name)]
        assert [(step.step, step.name) for step in Recipe(name, STRATEGIES[name])] == passes


@pytest.mark.parametrize("name", sparse(list(STRATEGIES), 3))
def test_sequences_of_one_token_and_ranks_without_any(name: str) -> None:
    for lengths in ([1], [1, 1, 1], [16, 1], [2, 1, 1, 9]):
        compare(planned(name, Batch.from_lengths(lengths), LAYERS[1], 6), "default", LAYERS[1], 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_kinds_share_a_layout(name: str) -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(5)}
    plan = planned(name, Batch.from_lengths([40, 9, 1], kinds), LAYERS[2], 4)
    for kind in kinds:
        compare(plan, kind, LAYERS[2], 3)


@pytest.mark.parametrize("name", [*STRATEGIES, *PROJECTED])
def test_reports_have_the_bytes_of_the_programs_and_no_gap_below_one(name: str) -> None:
    plan = planned(name, batch_of("causal", "window", "full"), LAYERS[1], 4)
    sent, between = 0, 0
    for programs in plan.programs.values():
        size, is_inter_node = transfers(plan, programs)
        sent, between = sent + int(size.sum()), between + int(size[is_inter_node].sum())
    assert plan.report["bytes"]["total"] == sent
    assert plan.report["bytes"]["inter_node"] == between
    gaps = [bound["gap"] for bound in plan.report["bounds"].values() if bound["gap"] is not None]
    assert min(gaps) >= 1


def transfers(plan: Plan, programs: ProgramSet) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of every send, and whether it leaves its node."""
    table, operands, model = programs["transfers"], programs["operands"], plan.request.model
    rank = table.rank_of_row()
    at = operands.ptr[rank] + table["operand"]
    sets = (None, *(len(heads) for heads in plan.header.head_sets))
    size = np.array(
        [
            rows * model.row_bytes(Tensor(tensor), sets[heads])
            for tensor, rows, heads in zip(
                operands["tensor"][at], operands["rows"][at], operands["heads"][at], strict=True
            )
        ],
        np.int64,
    )
    node = plan.request.cluster.node_of
    sends = table["send"] == 1
    return size[sends], (node(rank) != node(table["peer"]))[sends]


# ---------------------------------------------------------------------------------------------- transfers


def pairs(plan: Plan, phase: str) -> set[tuple[int, int]]:
    """(sender, receiver) of all transfers of a phase."""
    table = plan.programs["default", phase]["transfers"]
    sends = np.asarray(table["send"]) == 1
    return set(zip(table.rank_of_row()[sends].tolist(), table["peer"][sends].tolist(), strict=True))


def test_a_ring_sends_only_to_its_neighbours() -> None:
    plan = planned("ring", Batch.from_lengths([64]), LAYERS[0], 4)
    assert pairs(plan, "forward") == {(rank, (rank + 1) % 4) for rank in range(4)}
    assert pairs(plan, "backward") == {(rank, (rank + 1) % 4) for rank in range(4)}
    fetch = plan.report["exchanges"][0]
    assert (fetch["name"], fetch["rounds"], fetch["slots"]) == ("fetch", 3, 3)
    # no other rank needs the last chunk, on rank 0
    assert fetch["bytes"] == 3 * (64 - 8) * plan.request.model.row_bytes(Tensor.KV)


def test_a_tree_goes_on_in_rank_order_from_the_home() -> None:
    steps = {"shard": {"sequences": {}}, "place": {"contiguous": {}}, "schedule": {"matchings": {}}}
    recipe = Recipe("mine", steps | {"route": {"tree": {"fanout": 1}}})
    plan = ap.plan(Batch.from_lengths([64], masks.full()), Cluster(1, 4), model_of(LAYERS[0]), recipe)
    assert pairs(plan, "forward") == {(rank, (rank + 1) % 4) for rank in range(4)}


def test_usp_crosses_nodes_on_its_own_rail() -> None:
    plan = ap.plan(
        Batch.from_lengths([64, 32]),
        Cluster(nodes=3, ranks_per_node=2),
        model_of(LAYERS[0]),
        Recipe("usp", STRATEGIES["usp"]),
    )
    crossing = {(a, b) for a, b in pairs(plan, "forward") if a // 2 != b // 2}
    assert crossing == {(rank, (rank + 2) % 6) for rank in range(6)}


def test_ulysses_is_one_all_to_all_in_and_one_out() -> None:
    plan = ap.plan(Batch.from_lengths([24, 8]), cluster(4), Model(8, 4, 4, dtype="fp64", layers=1), "ulysses")
    for phase in PHASES:
        programs = plan.programs["default", phase]
        for rank in range(4):
            launches = programs.rank(rank)["instructions"]
            modes = launches["mode"][launches["op"] == Op.LAUNCH]
            assert modes.tolist() == [ALL_TO_ALL, ALL_TO_ALL | RESULTS]
    assert plan.report["imbalance"] == {"compute": 0.0, "tokens": 0.0}


@pytest.mark.parametrize(
    ("name", "lengths", "machine"),
    [("ulysses", [24, 24, 8, 40], cluster(8)), ("usp", [96], Cluster(1, 4))],
    ids=["ulysses", "usp"],
)
def test_the_largest_possible_degree_is_taken(name: str, lengths: Any, machine: Cluster) -> None:
    plan = ap.plan(Batch.from_lengths(lengths), machine, Model(6, 2, 4, dtype="fp64", layers=1), name)
    assert plan.header.head_sets == ((0, 1, 2), (0,), (3, 4, 5), (1,))


def test_a_tile_crosses_to_a_node_once() -> None:
    batch = Batch.from_lengths([600])
    spread = Cluster(nodes=3, ranks_per_node=4)
    model = Model(2, 2, 4, dtype="fp64", layers=1)

    def inter_node(route: str) -> int:
        recipe = Recipe(route, {**BLOCKS, **MATCHINGS, "route": {route: {}}})
        policy = Policy(recipe, token_cap=100)
        return ap.plan(batch, spread, model, policy=policy).report["bytes"]["inter_node"]

    assert inter_node("node") < 0.5 * inter_node("star")


# ---------------------------------------------------------------------------------------------- refusals

WRONG: list[tuple[str, dict[str, list[Any]]]] = [
    ("pack.sequential", {"microbatches": [0, "few", True], "tokens_per_rank": [0, 1.5]}),
    ("pack.balanced", {"microbatches": [0, "few", True], "tokens_per_rank": [0, 1.5]}),
    ("pack.wlb", {"microbatches": [0, "few", True], "tokens_per_rank": [0, 1.5], "defer": [1]}),
    ("inner.ulysses", {"degree": [0], "lone": [-0.1, 1.5, "all"]}),
    ("inner.upipe", {"heads": [0], "keep": [0, True], "order": ["random"], "project": [1], "degree": [0]}),
    ("inner.upipe", {"ahead": [2], "hold": [None]}),
    ("shard.blocks", {"block": [0]}),
    ("place.zigzag", {"over": ["rank"]}),
    ("place.wlb", {"shard": ["chunk"]}),
    ("place.hybrid_dp", {"capacity": [0, True]}),
    ("place.megatron_hybrid", {"capacity": [1.5]}),
    ("place.blend", {"head": [1.5, True, "all"], "grain": [-1, 2.5]}),
    ("place.distca", {"tolerance": [-0.1], "granularity": [0], "threshold": [-1], "send_bytes": [1.5]}),
    ("place.distca", {"form": ["printed"], "kv_free": [1], "head_tail": ["some"]}),
    ("place.flexsp", {"capacity": [-1]}),
    ("place.zeppelin", {"cap": ["none"], "capacity": [0], "parts": [0], "inter_tokens": [-1]}),
    ("place.dcp", {"head_groups": [0, "q"], "divisions": [0], "tries": [4], "epsilon_tokens": [[0.1, -1]]}),
    ("place.dcp", {"epsilon_compute": [0.1]}),
    ("route.tree", {"fanout": [0]}),
    ("schedule.matchings", {"buffers": [True]}),
    ("schedule.ring", {"over": ["nodes"], "turns": [1], "window": [0, True, "rack"]}),
    ("schedule.gather", {"local": ["no"]}),
    ("schedule.queues", {"proxies": [0]}),
    ("schedule.divisions", {"buffers": [0]}),
]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, name, value) for path, wrong in WRONG for name in wrong for value in wrong[name]],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(path: str, name: str, value: Any) -> None:
    with pytest.raises(ap.UnknownNameError if value in ("printed", "some") else ap.ConfigError) as caught:
        build(Step(*path.split("."), {name: value}))
    assert caught.value.field == f"recipe.{path}.{name}"


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [
        (BLOCKS | {"schedule": {"ring": {}}, "route": {"node": {}}}, r"route = "),
        (BLOCKS | MATCHINGS | {"inner": {"ulysses": {"degree": 3}}}, r"inner\.ulysses\.degree = "),
        (BLOCKS | MATCHINGS | {"inner": {"ulysses": {"size": 2}}}, r"inner\.ulysses = 'size'"),
        (BLOCKS | MATCHINGS | {"inner": {"upipe": {"lone": "auto"}}}, r"inner\.upipe\.lone = "),
        (BLOCKS | MATCHINGS | {"inner": {"upipe": {"kinds": "auto"}}}, r"inner\.upipe\.kinds = "),
        (BLOCKS | MATCHINGS | {"shard": {"rows": {}}}, r"shard = 'rows'"),
        (
            BLOCKS | MATCHINGS | {"place": {"distca": {"form": "paper", "head_tail": "none"}}},
            r".*distca\.form",
        ),
        (BLOCKS | MATCHINGS | {"cook": {"x": {}}}, r"steps = .*cook"),
        ({"place": {"lpt": {}}} | MATCHINGS, r"steps = .*shard"),
    ],
)
def test_recipes_that_no_plan_can_follow_name_their_field(recipe: dict, pattern: str) -> None:
    with pytest.raises(ap.ConfigError, match=rf"^recipe\.{pattern}"):
        ap.plan(Batch.from_lengths([64]), cluster(4), model_of(LAYERS[1]), Recipe("mine", recipe))


def test_home_ranks_cannot_be_kept_where_groups_share_tokens() -> None:
    batch = Batch.from_lengths([16, 16], home_ranks=[(0,), (1,)])
    with pytest.raises(ap.ConfigError, match=r"batch\.home_ranks"):
        ap.plan(batch, cluster(4), model_of(LAYERS[1]), Recipe("mine", STRATEGIES["inner"]))


def test_a_strategy_without_a_cap_records_its_own_and_obeys_an_explicit_one() -> None:
    batch, model = Batch.from_lengths([60, 4]), model_of(LAYERS[0])
    plan = ap.plan(batch, cluster(4), model, "ulysses")
    assert plan.request.policy.token_cap == plan.layout("attention").rows_per_rank.max()
    with pytest.raises(ap.CapacityError, match=r"(?=.*token_cap).*each rank here is a group of 2"):
        ap.plan(batch, cluster(4), model, policy=Policy(find_recipe("ulysses"), token_cap=20))


def test_groups_of_several_sizes_share_kv_heads_across_a_reshuffle() -> None:
    batch, model = Batch.from_lengths([500, *[50] * 12]), Model(8, 2, 4, dtype="fp64", layers=1)
    recipe = Recipe("mine", STRATEGIES["flexsp_reshuffled"])
    plan = ap.plan(batch, Cluster(nodes=2, ranks_per_node=4), model, recipe)
    assert len({len(heads) for heads in plan.header.head_sets}) > 1
    compare(plan, "default", (8, 2, 4, 4, False, None), 0)


def test_hardware_by_name_is_in_the_request() -> None:
    batch, model = Batch.from_lengths([64]), model_of(LAYERS[0])
    plan = ap.plan(batch, cluster(2), model, "wlb", hardware="h20")
    assert plan.request.hardware == ap.Hardware.load("h20").digest()
    assert ap.simulate(plan, "h20").forward_ms > 0
    with pytest.raises(ap.ConfigError, match="hardware"):
        ap.plan(batch, cluster(2), model, hardware=5)


def test_recipes_with_equal_numbers_of_other_types_are_distinct() -> None:
    """Passes are cached by recipe; 1, 1.0 and true are equal keys, but only 1 is a count."""
    steps = BLOCKS | {"place": {"lpt": {}}}
    passes_of(Recipe("mine", steps | {"schedule": {"matchings": {"buffers": 1}}}))
    for wrong in (True, 1.0):
        with pytest.raises(ap.ConfigError, match=r"recipe\.schedule\.matchings\.buffers"):
            passes_of(Recipe("mine", steps | {"schedule": {"matchings": {"buffers": wrong}}}))


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ({"lpt": {"solver": "\ud800"}}, "must be text in UTF-8"),
        ({"lpt": {"solver": {"lpt": {"steps": 7}}}}, "ends by itself, without limits"),
        ({"lpt": {"solver": {"ilp": {"nodes": 7}}}}, "has the limits steps, gap"),
        ({"lpt": {"solver": {"ilp": {"steps": True}}}}, "must be an integer of at least 0 or null"),
        ({"lpt": {"solver": {"ilp": {}, "lpt": {}}}}, "must be a partition solver"),
        ({"lpt": {"solver": []}}, "must be a partition solver"),
    ],
)
def test_a_wrong_solver_is_refused_by_name(place: Any, fault: str) -> None:
    with pytest.raises(ap.ConfigError, match=fault):
        find_recipe({"name": "mine", "steps": BLOCKS | MATCHINGS | {"place": place}})


def test_names_may_be_of_a_subclass_of_str() -> None:
    recipe = {"name": "mine", "steps": BLOCKS | MATCHINGS | {"place": {"lpt": {"solver": np.str_("lpt")}}}}
    assert passes_of(find_recipe(recipe)).place.solver.name == "lpt"  # type: ignore[attr-defined]


def test_a_repeated_step_or_key_is_refused(tmp_path: Path) -> None:
    twice = tuple(Step("place", name, {}) for name in ("lpt", "contiguous"))
    with pytest.raises(ap.ConfigError, match="occurs twice"):
        Recipe("mine", twice)
    for name, text in (("a.yaml", "name: a\nname: b\n"), ("a.json", '{"name": "a", "name": "b"}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ap.ConfigError, match="'name' occurs twice"):
            Recipe.load(tmp_path / name)


def test_editing_the_data_of_a_built_in_recipe_does_not_change_it() -> None:
    find_recipe("fcp").step("shard").params["block"] = 128  # type: ignore[index]
    assert find_recipe("fcp").step("shard").params["block"] == "auto"


@pytest.mark.parametrize(
    ("lengths", "speeds"), [([213, 143, 269, 229, 102], None), ([152, 274, 380, 260, 336], (1.0, 0.5, 2.0))]
)
def test_an_exact_solver_places_no_worse_than_lpt(lengths: list[int], speeds: Any) -> None:
    steps = {"shard": {"blocks": {"block": 64}}} | MATCHINGS
    makespans = []
    for solver in ("ilp", "lpt"):
        recipe = {"name": "mine", "steps": steps | {"place": {"lpt": {"solver": solver}}}}
        plan = ap.plan(Batch.from_lengths(lengths), Cluster(1, 3, speeds=speeds), Model(), recipe=recipe)
        makespans.append(plan.report["bounds"]["makespan"]["value"])
    assert makespans[0] <= makespans[1]
