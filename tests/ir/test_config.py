"""Cluster, model, recipe and policy: defaults, plain data, schemas, and errors that name the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Batch, Cluster, ConfigError, Model, Sequence, UnknownNameError, masks
from apportion.ir.request.policy import Policy, Recipe, Step
from apportion.ir.tensors import Tensor
from tests.support.formats import SCHEMAS, schema_accepts
from tests.support.hostile import check_refusal, junk

FCP = {
    "shard": {"blocks": {"block": "auto", "zigzag": True}},
    "place": {"lpt": {}},
    "schedule": {"matchings": {"coalesce": 4, "buffers": 3}},
    "reshuffle": False,
}
NAN, INFINITE = float("nan"), float("inf")


# ---- cluster


def test_cluster_defaults_and_nodes() -> None:
    cluster = Cluster(nodes=2, ranks_per_node=4)
    assert cluster.ranks == 8
    assert [cluster.node_of(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert cluster.node_of(np.array([3, 4])).tolist() == [0, 1]
    assert cluster.speeds is None


def test_cluster_data_and_files(tmp_path: Path) -> None:
    cluster = Cluster(nodes=1, ranks_per_node=2, speeds=(1.0, 0.5))
    assert Cluster.from_data(json.loads(json.dumps(cluster.to_data()))) == cluster
    (tmp_path / "c.yaml").write_text("{nodes: 1, ranks_per_node: 2, speeds: [1, 0.5]}")
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    assert schema_accepts("cluster", cluster.to_data())
    assert schema_accepts("cluster", {})


WRONG_CLUSTERS = [
    ({"nodes": 0}, "cluster.nodes"),
    ({"nodes": "2"}, "cluster.nodes"),
    ({"ranks_per_node": []}, "cluster.ranks_per_node"),
    ({"nodes": 65535, "ranks_per_node": 17}, "cluster.nodes x cluster.ranks_per_node"),
    ({"nodes": 10**40}, "cluster.nodes"),
    ({"intra_gbs": NAN}, "cluster.intra_gbs"),
    ({"inter_gbs": 10**400}, "cluster.inter_gbs"),
    ({"inter_gbs": 0}, "cluster.inter_gbs"),
    ({"memory_gib": -1}, "cluster.memory_gib"),
    ({"intra_latency_us": -0.1}, "cluster.intra_latency_us"),
    ({"speeds": [1.0]}, "cluster.speeds"),
    ({"speeds": 1.0}, "cluster.speeds"),
    ({"ranks_per_node": 2, "speeds": [1.0, 0]}, "cluster.speeds[1]"),
    ({"node": 1}, "cluster.node"),
]


def test_a_cluster_above_the_size_limit_is_refused() -> None:
    """The limit applies to plans; a forecast may divide larger clusters."""
    Cluster(nodes=65_535, ranks_per_node=1).check_ranks()
    with pytest.raises(ConfigError, match=r"nodes x cluster\.ranks_per_node = 65536: must be at most 65535"):
        Cluster(nodes=8192, ranks_per_node=8).check_ranks()


def test_an_error_has_field_value_rule_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.from_data({"noodes": 2})
    assert str(caught.value).startswith("cluster.noodes = 2: unknown field; did you mean nodes?")


TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def group(size: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size)


LAUNCHERS = [
    ({**TWO_NODES, "SLURM_NTASKS": "2"}, None, (2, 8)),
    ({"WORLD_SIZE": "4"}, None, (1, 4)),
    ({"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "4"}, None, (4, 4)),
    ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}, None, (2, 8)),
    ({"SLURM_NTASKS": "3"}, None, (1, 3)),
    (TWO_NODES, group(16), (2, 8)),
    (TWO_NODES, group(8), (2, 4)),
    (TWO_NODES, group(1), (1, 1)),
    (TWO_NODES, range(8, 16), (1, 8)),
    (TWO_NODES, [0, 4, 8, 12], (2, 2)),
    (TWO_NODES, np.array([1, 9]), (2, 1)),
]
Launcher = Callable[[dict[str, str]], None]
VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Sets the given variables of launchers and unsets all others."""

    def set_only(variables: dict[str, str]) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.mark.parametrize(("variables", "group", "shape"), LAUNCHERS)
def test_from_env(launcher: Launcher, variables: dict[str, str], group: Any, shape: tuple[int, int]) -> None:
    launcher(variables)
    cluster = Cluster.from_env(group)
    assert (cluster.nodes, cluster.ranks_per_node) == shape


@pytest.mark.parametrize(
    ("variables", "group", "field"),
    [
        ({}, None, "WORLD_SIZE"),
        ({"WORLD_SIZE": "x"}, None, "WORLD_SIZE"),
        ({"WORLD_SIZE": "65536"}, None, "WORLD_SIZE"),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, None, "WORLD_SIZE"),
        ({"SLURM_NTASKS": "9", "SLURM_NNODES": "2"}, None, "SLURM_NTASKS"),
        (TWO_NODES, group(17), "group.size()"),
        (TWO_NODES, group(3), "group"),
        (TWO_NODES, [0, 1, 8], "group"),
        (TWO_NODES, [16], "group[0]"),
        (TWO_NODES, [0, 8, 0, 8], "group"),
        (TWO_NODES, [], "group"),
    ],
)
def test_errors_of_launcher_variables_name_the_variable(
    launcher: Launcher, variables: dict[str, str], group: Any, field: str
) -> None:
    launcher(variables)
    with pytest.raises(ConfigError) as caught:
        Cluster.from_env(group)
    assert caught.value.field == field


# ---- model


def test_model_row_bytes() -> None:
    model = Model(q_heads=8, kv_heads=2, head_dim=16, v_head_dim=12, dtype="bf16", hidden=100)
    expected = {
        Tensor.NONE: 0,
        Tensor.X: 200,
        Tensor.Q: 8 * 16 * 2,
        Tensor.KV: 2 * 28 * 2,
        Tensor.O: 8 * 13 * 4,
    }
    expected |= {Tensor.DX: 400, Tensor.DQ: 8 * 16 * 4, Tensor.DKV: 2 * 28 * 4, Tensor.DO: 8 * 12 * 2}
    expected[Tensor.DELTA] = 8 * 2 * 4
    assert {tensor: model.row_bytes(tensor) for tensor in Tensor} == expected
    assert model.row_bytes(Tensor.Q, heads=1) == 32
    assert model.row_bytes(Tensor.KV, heads=1) == 56
    assert Model(dtype="fp64").row_bytes(Tensor.O, heads=1) == 129 * 8


def test_model_layers_and_data(tmp_path: Path) -> None:
    model = Model(layers={"global": 4, "local": 20})
    assert (model.layers_of("local"), Model().layers_of("anything"), Model().v_head_dim) == (20, 32, 128)
    with pytest.raises(UnknownNameError, match="did you mean global"):
        model.layers_of("globel")
    assert Model.from_data(json.loads(json.dumps(model.to_data()))) == model
    (tmp_path / "m.json").write_text(json.dumps(model.to_data()))
    assert Model.load(tmp_path / "m.json") == model
    assert schema_accepts("model", model.to_data())
    assert schema_accepts("model", {"layers": 3})


WRONG_MODELS = [
    ({"q_heads": 0}, "model.q_heads"),
    ({"q_heads": 12}, "model.q_heads"),
    ({"kv_heads": -8}, "model.kv_heads"),
    ({"head_dim": 65537}, "model.head_dim"),
    ({"v_head_dim": 0}, "model.v_head_dim"),
    ({"hidden": NAN}, "model.hidden"),
    ({"ffn": 10**30}, "model.ffn"),
    ({"dtype": "bfloat16"}, "model.dtype"),
    ({"sent_gradients": "bf16"}, "model.sent_gradients"),
    ({"layers": 0}, "model.layers"),
    ({"layers": {}}, "model.layers"),
    ({"layers": {"global": 0}}, "model.layers.global"),
    ({"layers": {"": 1}}, "model.layers"),
    ({"layers": {3: 1}}, "model.layers"),
    ({"heads": 32}, "model.heads"),
]


# ---- recipe and policy


def test_recipe_keeps_its_steps_in_order(tmp_path: Path) -> None:
    recipe = Recipe("fcp", FCP)
    assert [step.step for step in recipe] == list(FCP)
    assert recipe.step("shard") == Step("shard", "blocks", {"block": "auto", "zigzag": True})
    assert recipe.step("reshuffle") == Step("reshuffle", "off")
    assert recipe.step("route") is None
    assert recipe.to_data() == {"name": "fcp", "steps": FCP}
    assert Recipe.from_data(json.loads(json.dumps(recipe.to_data()))) == recipe
    assert Recipe("fcp", recipe.steps) == recipe
    (tmp_path / "r.yaml").write_text("name: fcp\nsteps:\n  place: {lpt: }\n  reshuffle: off\n")
    assert Recipe.load(tmp_path / "r.yaml").to_data()["steps"] == {"place": {"lpt": {}}, "reshuffle": False}


def test_policy_data() -> None:
    policy = Policy(Recipe("fcp", FCP), token_cap=4096, tolerance=0.05, seed=7)
    assert Policy.from_data(json.loads(json.dumps(policy.to_data()))) == policy
    assert schema_accepts("policy", policy.to_data())
    assert schema_accepts("recipe", policy.recipe.to_data())


WRONG_RECIPES = [
    ({"name": "fcp"}, "recipe.steps"),
    ({"name": "f c p", "steps": {}}, "recipe.name"),
    ({"name": "x", "steps": []}, "recipe.steps"),
    ({"name": "x", "steps": {"place": "lpt"}}, "recipe.place"),
    ({"name": "x", "steps": {"place": {"lpt": {}, "other": {}}}}, "recipe.place"),
    ({"name": "x", "steps": {"place": {"lpt": 3}}}, "recipe.place.lpt"),
    ({"name": "x", "steps": {"place": {"lpt": {"cap": NAN}}}}, "recipe.place.lpt.cap"),
    ({"name": "x", "steps": {"place": {"lpt": {"cap": object()}}}}, "recipe.place.lpt.cap"),
    ({"name": "x", "steps": {"place": {"lpt": {"cap": [2**70]}}}}, "recipe.place.lpt.cap[0]"),
    ({"name": "x", "steps": {"place": {"l t": {}}}}, "recipe.place"),
    ({"name": "x", "steps": {"a/b": {"lpt": {}}}}, "recipe.steps"),
    ({"name": "x", "steps": {}, "pass": 1}, "recipe.pass"),
]


WRONG_POLICIES = [
    ({"token_cap": 0}, "policy.token_cap"),
    ({"memory_cap_gib": 0}, "policy.memory_cap_gib"),
    ({"tolerance": -0.01}, "policy.tolerance"),
    ({"seed": -1}, "policy.seed"),
    ({"objective": "speed"}, "policy.objective"),
    ({"budget": 0}, "policy.budget"),
    ({"recipe": "fcp"}, "recipe"),
    ({"cap": 1}, "policy.cap"),
]


WRONG = {Cluster: WRONG_CLUSTERS, Model: WRONG_MODELS, Recipe: WRONG_RECIPES, Policy: WRONG_POLICIES}


@pytest.mark.parametrize(
    ("form", "data", "field"), [(form, *row) for form, rows in WRONG.items() for row in rows]
)
def test_errors_name_the_field(form: Any, data: dict, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        form.from_data({"recipe": {"name": "fcp", "steps": {}}, **data} if form is Policy else data)
    assert caught.value.field == field


def test_a_policy_needs_a_recipe() -> None:
    with pytest.raises(ConfigError, match="missing field"):
        Policy.from_data({})
    with pytest.raises(ConfigError, match="must be a Recipe"):
        Policy({"name": "fcp"})


# ---- schemas


PACKED = masks.documents([2, 2], masks.image_spans([[0, 1]], masks.sliding_window(2)))
BATCHES = [
    {"lengths": [8, 4]},
    {"lengths": [8], "mask": {"causal": {}}, "home_ranks": [[0, 3]]},
    {"sequences": [{"length": 8192, "mask": {"causal": {}}}]},
    {"lengths": [4], "mask": {"slices": {"slices": [[0, 2, 0, 4, "FULL"], [2, 4, 0, 4, 1]]}}},
    {
        "sequences": [
            {"length": 3, "mask": {"a": {"causal": {}}, "b": {"full": None}}, "positions": [0, 1, 2]}
        ]
    },
    Batch.from_sequences(
        [
            Sequence(4, {"a": PACKED, "b": masks.slices([[0, 4, 0, 4, 3]])}, labels=[1, -1, 3, -1]),
            Sequence(6, {"a": masks.tree([[-1, 4], [0, 2]]), "b": masks.bands([[0, 4, 0, 4, -3, 2]])}),
        ]
    ).to_data(),
]
WRONG_BATCHES = [
    {},
    {"lengths": []},
    {"lengths": [0]},
    {"lengths": [2], "sequences": []},
    {"lengths": [2], "mask": {"cousal": {}}},
    {"lengths": [2], "mask": {"sliding_window": {"window": 0}}},
    {"lengths": [2], "mask": {"a": {"full": {"causal": {}}}}},
    {"sequences": [{"mask": {"causal": {}}}]},
    {"sequences": [{"length": 2, "mask": {"tree": {"nodes": [[-1]]}}}]},
    {"lengths": [2], "mask": {"slices": {"slices": [[0, 2, 0, 2, "causal"]]}}},
    {"lengths": [2], "mask": {"slices": {"slices": [[0, 2, 0, 2, 4]]}}},
    {"lengths": [2], "mask": {"slices": {"slices": [["FULL", 2, 0, 2, 0]]}}},
    {"lengths": [2], "mask": "causal"},
]


@pytest.mark.parametrize("data", BATCHES)
def test_the_batch_schema_accepts_valid_batches(data: dict) -> None:
    Batch.from_data(data)
    assert schema_accepts("batch", data)


@pytest.mark.parametrize("data", WRONG_BATCHES)
def test_the_batch_schema_refuses_invalid_batches(data: dict) -> None:
    with pytest.raises(ConfigError):
        Batch.from_data(data)
    assert not schema_accepts("batch", data)


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        *(("cluster", data) for data, _ in WRONG_CLUSTERS if len(data) == 1 and data.get("speeds") != [1.0]),  # type: ignore[attr-defined]
        *(("model", data) for data, _ in WRONG_MODELS if data not in ({"q_heads": 12}, {"layers": {3: 1}})),
        *(("recipe", data) for data, _ in WRONG_RECIPES if "cap" not in str(data)),
        *(("policy", {"recipe": {"name": "fcp", "steps": {}}, **data}) for data, _ in WRONG_POLICIES),  # type: ignore[dict-item]
    ],
)
def test_the_schemas_refuse_data_that_the_code_refuses(schema: str, data: dict) -> None:
    """Only the code checks NaN, integral floats and sums over several fields, which a JSON Schema cannot express."""
    numbers = [value for value in data.values() if isinstance(value, float)]
    if all(value == value and abs(value) < INFINITE and value % 1 for value in numbers):
        assert not schema_accepts(schema, data)


def test_every_mask_has_a_schema() -> None:
    schema = json.loads((SCHEMAS / "batch.schema.json").read_text())
    assert set(schema["$defs"]["mask"]["properties"]) == set(masks.SPECS)


# ---- all config objects


def test_config_objects_hash_compare_and_copy() -> None:
    for item in (Cluster(), Model(layers={"a": 1}), Policy(Recipe("fcp", FCP))):
        assert copy.deepcopy(item) == item
        assert hash(item) == hash(type(item).from_data(item.to_data()))


@pytest.mark.parametrize("form", [Cluster, Model, Recipe, Policy])
def test_hostile_data_raises_only_typed_errors(form: type[Any]) -> None:
    names = sorted(form.__dataclass_fields__)

    @settings(max_examples=80, derandomize=True, deadline=None, database=None)
    @given(st.dictionaries(st.sampled_from(names), junk, max_size=4) | junk)
    def check(data: Any) -> None:
        check_refusal(lambda: form.from_data(data))

    check()
