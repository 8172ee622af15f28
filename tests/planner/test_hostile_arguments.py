"""Every public function by its signature: an argument means what the plain Python value means, or is named in an error.

Values of another type, size or form go into each parameter in turn. Only ApportionErrors are raised, nothing warns, and
no value is accepted as one of another type: no bool as a number, no bytes as a list.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, get_origin

import numpy as np
import pytest

import apportion as ap
from apportion.ir.errors import ApportionError

BATCH, CLUSTER, MODEL = ap.Batch.from_lengths([8, 9]), ap.Cluster(1, 2), ap.Model(4, 2, 8, layers=1)
STEPS = {"shard": {"blocks": {"block": 16}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}
RECIPE = ap.Recipe("mine", STEPS)
POLICY = ap.Policy(RECIPE)
PLAN = ap.plan(BATCH, CLUSTER, MODEL, "ring")
ITERATION = ap.plan_iteration(BATCH, CLUSTER, MODEL, "ring")
TABLE = ap.tick_table(2, 4)
LAYOUT = PLAN.layout("attention")
TICKS = {"table": TABLE, "tick": 1, "microbatches": [BATCH] * 4}
REQUEST = {"batch": BATCH, "cluster": CLUSTER, "model": MODEL}
BATCHES = {"batches": BATCH, "cluster": CLUSTER, "model": MODEL}


def sequence(**arguments: Any) -> ap.Batch:
    return ap.Batch.from_sequences([ap.Sequence(**arguments)])


sequence.__signature__ = inspect.signature(ap.Sequence)  # type: ignore[attr-defined]

#: functions with valid arguments
CALLS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Cluster": (ap.Cluster, {"nodes": 1, "ranks_per_node": 2}),
    "Cluster.check_ranks": (CLUSTER.check_ranks, {}),
    "Cluster.from_data": (ap.Cluster.from_data, {"data": {}}),
    "Model": (ap.Model, {"q_heads": 4, "kv_heads": 4}),
    "Model.layers_of": (MODEL.layers_of, {"kind": "default"}),
    "Model.from_data": (ap.Model.from_data, {"data": {}}),
    "Policy": (ap.Policy, {"recipe": RECIPE}),
    "Policy.from_data": (ap.Policy.from_data, {"data": POLICY.to_data()}),
    "Recipe": (ap.Recipe, {"name": "mine", "steps": {}}),
    "Recipe.from_data": (ap.Recipe.from_data, {"data": RECIPE.to_data()}),
    "Job": (ap.Job, {"cluster": CLUSTER, "model": MODEL, "policy": POLICY, "tokens_per_rank": 64}),
    "Hardware.load": (ap.Hardware.load, {"source": "h100"}),
    "Hardware.named": (ap.Hardware.named, {"hardware": None}),
    "Sequence": (sequence, {"length": 4}),
    "Batch.from_lengths": (ap.Batch.from_lengths, {"lengths": [4, 5]}),
    "Batch.from_cu_seqlens": (ap.Batch.from_cu_seqlens, {"cu_seqlens": [0, 4]}),
    "Batch.from_slices": (ap.Batch.from_slices, {"tokens": 4, "slices": [[0, 4, 0, 4, 1]]}),
    "Batch.from_sequences": (ap.Batch.from_sequences, {"sequences": [ap.Sequence(4)]}),
    "Batch.from_data": (ap.Batch.from_data, {"data": {"lengths": [4]}}),
    "Batch.take": (BATCH.take, {"indexes": [1]}),
    "Batch.bands": (BATCH.bands, {"kind": "default"}),
    "Batch.diagonals": (BATCH.diagonals, {"kind": "default"}),
    "Batch.area": (BATCH.area, {"kind": "default"}),
    "Batch.to_slices": (BATCH.to_slices, {"kind": "default"}),
    "Batch.position_at": (BATCH.position_at, {"tokens": [1, 2]}),
    "Batch.labels": (BATCH.labels, {"first": 1, "stop": 4}),
    "masks.from_data": (ap.masks.from_data, {"data": {"causal": {}}}),
    "masks.bands": (ap.masks.bands, {"rows": [[0, 1, 0, 1, 0, 0]]}),
    "masks.slices": (ap.masks.slices, {"rows": [[0, 1, 0, 1, 0]]}),
    "masks.block_causal": (ap.masks.block_causal, {"chunk": 2}),
    "masks.causal_blockwise": (ap.masks.causal_blockwise, {"block": 2, "local": 1}),
    "masks.chunked": (ap.masks.chunked, {"chunk": 1}),
    "masks.documents": (ap.masks.documents, {"lengths": [1]}),
    "masks.image_spans": (ap.masks.image_spans, {"spans": [[0, 1]]}),
    "masks.prefix_lm": (ap.masks.prefix_lm, {"prefix": 1}),
    "masks.shared_question": (ap.masks.shared_question, {"prompt": 1, "answers": [1]}),
    "masks.sink_window": (ap.masks.sink_window, {"sink": 1, "window": 1}),
    "masks.sliding_window": (ap.masks.sliding_window, {"window": 1}),
    "masks.tree": (ap.masks.tree, {"nodes": [[-1, 1]]}),
    "plan": (ap.plan, REQUEST | {"recipe": "ring"}),
    "plan_iteration": (ap.plan_iteration, REQUEST | {"recipe": "ring"}),
    "verify": (ap.verify, {"plan": PLAN}),
    "Plan.decode": (ap.Plan.decode, {"data": PLAN.encode()}),
    "Plan.for_rank": (PLAN.for_rank, {"rank": 1}),
    "Plan.text": (PLAN.text, {"rank": 1}),
    "Plan.layout": (PLAN.layout, {"name": "attention"}),
    "Plan.program": (PLAN.program, {"rank": 1, "kind": "default", "phase": "forward"}),
    "Slice.decode": (ap.Slice.decode, {"data": PLAN.for_rank(0).encode()}),
    "Layout.tokens": (LAYOUT.tokens, {"rank": 1}),
    "Layout.position_ids": (LAYOUT.position_ids, {"rank": 1}),
    "Layout.to_cu_seqlens": (LAYOUT.to_cu_seqlens, {"rank": 1}),
    "IterationPlan.decode": (ap.IterationPlan.decode, {"data": ITERATION.encode()}),
    "IterationPlan.for_rank": (ITERATION.for_rank, {"rank": 1}),
    "IterationPlan.slice_for": (ITERATION.slice_for, {"rank": 1}),
    "recipe_parallelisms": (ap.recipe_parallelisms, {"recipes": ["ring"]}),
    "static_grids": (ap.static_grids, {"cluster": CLUSTER, "recipes": ["ring"]}),
    "Degrees": (ap.Degrees, {}),
    "Parallelism": (ap.Parallelism, {"recipe": RECIPE}),
    "Training": (ap.Training, {}),
    "Training.from_data": (ap.Training.from_data, {"data": {}}),
    "forecast": (ap.forecast, BATCHES | {"parallelisms": ap.recipe_parallelisms(["ring"])}),
    "compare": (ap.compare, BATCHES | {"recipes": ["ring"]}),
    "simulate": (ap.simulate, {"plan": PLAN}),
    "simulate_pair": (ap.simulate_pair, {"ping": PLAN, "pong": PLAN}),
    "tick_table": (ap.tick_table, {"stages": 2, "microbatches": 4}),
    "tick_batch": (ap.tick_batch, TICKS | {"replicas": 1}),
    "plan_tick": (ap.plan_tick, TICKS | {"cluster": CLUSTER, "model": MODEL}),
}

ITERATOR = object()  # stands for a fresh iterator over [2, 2]
TEXTS: list[Any] = ["", "55", "\ud800", "x" * 10**5, np.str_("default")]
RAW: list[Any] = [b"55", bytearray(b"5"), memoryview(b"12"), np.bytes_(b"1")]
NUMBERS: list[Any] = [
    *(None, True, np.True_, 0, -1, 2**31, 2**63, 2**64, 10**400, 1.0, 1.5, -0.0),
    *(float("nan"), float("inf"), 1e308, 1e-308, 5e-324),
    *(np.int8(2), np.uint8(2), np.uint64(2**64 - 1), np.float32(2), np.float64(1.5), np.float32("nan")),
    *(np.longdouble(2), np.array(2), np.array(2.0), np.array(True), Decimal(2), Fraction(2), 2j),
    *(np.datetime64(1, "s"), np.timedelta64(5, "ns")),
]
LISTS: list[Any] = [
    *([], (), range(1, 3), [[1]], [None], [True], [1.5], ["a"], [b"a"], [[0, 1]], ((0, 1),), ITERATOR),
    *([np.int8(1), np.int64(1)], [np.float32(1), 1], [float("nan"), 1.0], [1e308, 1e308], [1e-308, 1.0]),
    *([10**400], np.array([2]), np.array([2, 2]), np.array([2.0, 2.0]), np.array([1, 1], np.uint8)),
    *(np.array([True, False]), np.array([], int), np.array([]), np.zeros((2, 2), int), np.array(["a"])),
    *(np.array([1, None], object), np.array("x"), {}, {"a": 1}, {1: 2}, set(), {3, 4}, frozenset({2})),
]
OTHERS: list[Any] = [object(), int, len]
VALUES = [*TEXTS, *RAW, *NUMBERS, *LISTS, *OTHERS]
SKIPPED = {"progress", "timings", "field", "depth"}  # callables, outputs, and arguments used only in errors
#: words of annotations, and the plain types that they allow
ALLOWED = {
    **dict.fromkeys(("int", "Count", "Bytes"), (int,)),
    **dict.fromkeys(("Sequence", "Iterable", "tuple"), (list, tuple, range)),
    **dict.fromkeys(("Mapping", "Any"), (dict,)),
    **dict.fromkeys(("str", "Literal"), (str,)),
    **dict.fromkeys(("None", "Mask"), (type(None),)),  # the default mask is causal
    "float": (int, float),
    "bool": (bool,),
    "bytes": (bytes, bytearray, memoryview),
    "ArrayLike": (int, list, tuple, range),
}


def plain(value: Any) -> Any:
    """The plain Python value equal to an argument."""
    if value is ITERATOR:
        return [2, 2]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
        return float(value) if value.dtype.kind == "f" else value.item()
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The result in a comparable form, or the error that is raised."""
    fresh = {name: iter([2, 2]) if value is ITERATOR else value for name, value in arguments.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return comparable_form(function(**fresh))
        except ApportionError as error:
            return error


def comparable_form(found: Any) -> Any:
    for form in ("encode", "to_data"):
        if hasattr(found, form) and not isinstance(found, str):
            return getattr(found, form)()
    return repr(found)


def is_allowed(annotation: str, value: Any) -> bool:
    """True if a parameter with such an annotation may take a plain value."""
    words = {*annotation.replace("[", " ").replace("]", " ").split(), *annotation.split("[")}
    kinds = tuple(kind for word, allowed in ALLOWED.items() if word in words for kind in allowed)
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def without_annotated(annotation: str, function: Any) -> str:
    """The annotation reduced to its type."""
    names = vars(sys.modules[function.__module__])
    text = re.sub(r"Annotated\[(\w+),[^]]*\]", r"\1", annotation)

    def reduced(word: re.Match[str]) -> str:
        alias = names.get(word[0])
        return str(alias.__origin__.__name__) if get_origin(alias) is Annotated else word[0]

    return re.sub(r"\w+", reduced, text)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_mean_the_same_as_plain_values(name: str) -> None:
    function, arguments = CALLS[name]
    assert not isinstance(outcome(function, arguments), ApportionError)
    for parameter, declared in inspect.signature(function).parameters.items():
        for value in VALUES if parameter not in SKIPPED else ():
            found = outcome(function, {**arguments, parameter: value})
            where = f"{parameter} = {value!r:.60}"
            if isinstance(found, ApportionError):
                assert len(str(found)) < 2000, where
                assert str(found), where
                continue
            assert is_allowed(without_annotated(str(declared.annotation), function), plain(value)), where
            same = outcome(function, {**arguments, parameter: plain(value)})
            assert repr(same) == repr(found), where
