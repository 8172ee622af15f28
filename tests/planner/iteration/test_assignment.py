"""The compact form: small, and refused by a typed error whatever its bytes."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest

from apportion.ir.bytes import wire
from apportion.ir.bytes.job import Job
from apportion.ir.errors import CapacityError, ConfigError, DecodeError, VersionError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.planner.iteration import assignment as compact, cell_counts, jobs
from apportion.planner.iteration.jobs import lower_job, plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.tasks.cells import cut_cells
from tests.support.strategies import STRATEGIES, WIDE, cluster

MODEL = Model(q_heads=4, kv_heads=2, head_dim=16, layers=2)
LENGTHS = [33, 20, 7, 1]
NAMES = [*STRATEGIES, *WIDE]
REFUSALS = (DecodeError, ConfigError, CapacityError)


@cache
def assignment(name: str) -> bytes:
    recipe = Recipe(name, {**STRATEGIES, **WIDE}[name])
    asked = Job(cluster(4), MODEL, Policy(recipe), 64, 2)
    found = plan_job(asked, (Batch.from_lengths(LENGTHS),), verify=False).assignment
    assert found is not None
    return found


def outermost(data: bytes) -> compact._AssignmentWire:
    return msgspec.msgpack.decode(data, type=compact._AssignmentWire)


def opened(data: bytes) -> compact._ChoicesWire:
    raw = zlib.decompress(msgspec.msgpack.decode(data)["choices"])
    return compact._decode_choices(raw)


def closed(data: bytes, choices: compact._ChoicesWire | bytes) -> bytes:
    """The assignment with other choices."""
    raw = choices if isinstance(choices, bytes) else wire.encode_struct(choices)
    return wire.encode_struct(msgspec.structs.replace(outermost(data), choices=zlib.compress(raw)))


# ---------------------------------------------------------------------------------------------- mutations


def flip(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, or some lost."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed) if rng.random() < 0.8 else bytes(changed[: rng.randrange(len(changed))])


def flip_choices(rng: random.Random, data: bytes) -> bytes:
    return closed(data, flip(rng, zlib.decompress(msgspec.msgpack.decode(data)["choices"])))


def flip_request(rng: random.Random, data: bytes) -> bytes:
    found = outermost(data)
    request = zlib.compress(flip(rng, zlib.decompress(found.request)))
    return wire.encode_struct(msgspec.structs.replace(found, request=request))


def flip_column(rng: random.Random, data: bytes) -> bytes:
    choices = opened(data)
    choice = choices.microbatches[0]
    cells = [(choice, "blocks"), (choice, "groups"), *((told, "columns") for told in choice.executions)]
    held, name = rng.choice([(held, name) for held, name in cells if getattr(held, name)])
    setattr(held, name, flip(rng, getattr(held, name)))
    return closed(data, choices)


def other_blocks(rng: random.Random, data: bytes) -> bytes:
    """Blocks and homes that could be: only the id tells that they were not chosen."""
    choices = opened(data)
    place_anew(rng, choices.microbatches[0], rng.choice((2, 4)))
    return closed(data, choices)


def place_anew(rng: random.Random, choice: compact.Choice, ranks: int) -> None:
    tokens = sum(LENGTHS)
    count = rng.randrange(1, tokens)
    starts = np.array([0, *sorted(rng.sample(range(1, tokens), count - 1)), tokens])
    home = np.array([rng.randrange(ranks) for _ in range(count)])
    zero = np.zeros(count, np.int64)
    choice.blocks = compact._cell(length=np.diff(starts), home=np.diff(home, prepend=0), weight=zero)
    if not choice.executions or rng.random() < 0.2:
        return
    cells = cut_cells(Batch.from_lengths(LENGTHS).bands("default"), starts)
    rank = np.array([rng.randrange(ranks) for _ in range(len(cells))]) - home[cells.q]
    executed = compact.ExecutionWire(compact._cell(rank=rank), False)
    choice.executions = [executed, compact.ExecutionWire([], False)]


def other_numbers(rng: random.Random, data: bytes) -> bytes:
    choices = opened(data)
    choice, value = choices.microbatches[0], rng.choice((0, 1, 2, 4, 3, -1, 2**40, 2**63))
    name = rng.choice(("block_tokens", "heaviest", "head_groups", "bound", "search", "groups"))
    if name == "search":
        recipe = Recipe("x", STRATEGIES[rng.choice(list(STRATEGIES))])
        choice.search = wire.encode_section({"recipe": recipe.to_data(), "stopped": None})
    elif name == "groups":
        choice.groups = compact._cell(size=np.array([rng.randrange(4) for _ in range(rng.randrange(1, 4))]))
    else:
        setattr(choice, name, float("nan") if name == "bound" else value)
    return closed(data, choices)


def other_recipe(rng: random.Random, _: bytes) -> bytes:
    """A search found something else: another recipe, with groups of ranks that its placement never makes."""
    data, steps = assignment("auto"), rng.choice(list(STRATEGIES.values()))
    choices = opened(data)
    choice = choices.microbatches[0]
    choice.search = wire.encode_section({"recipe": Recipe("x", steps).to_data(), "stopped": None})
    sizes = rng.choice(((1, 3), (2, 2), (1, 1, 2), (4,)))
    choice.groups = compact._cell(size=np.array(sizes))
    place_anew(rng, choice, len(sizes))
    return closed(data, choices)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip,
    flip_choices,
    flip_request,
    flip_column,
    other_blocks,
    other_numbers,
    other_recipe,
)


def hostile_assignment(seed: int) -> str | None:
    """Lowers a changed assignment; the name of the error, None where the change left the plan as it was."""
    rng = random.Random(seed)
    data = assignment(rng.choice(NAMES))
    try:
        lower_job(rng.choice(MUTATIONS)(rng, data))
    except REFUSALS as error:
        return type(error).__name__
    return None


def test_changed_assignments_are_refused_by_typed_errors() -> None:
    found = [hostile_assignment(seed) for seed in range(600)]
    assert found.count("DecodeError") > 450


def test_a_placement_that_is_none_of_the_recipe_is_refused() -> None:
    for seed in range(300):
        with pytest.raises(REFUSALS):
            lower_job(other_recipe(random.Random(seed), b""))


def test_what_a_pass_stumbles_over_is_a_fault_of_the_bytes() -> None:
    with pytest.raises(DecodeError, match=r"cannot use it \(IndexError: index 4"), jobs._of_foreign_bytes():
        np.zeros(4)[4]
    with pytest.raises(CapacityError, match="too large"), jobs._of_foreign_bytes():
        raise CapacityError("too large")


@pytest.mark.parametrize("name", ["fcp", "dcp", "flexsp", "auto", "wlb"])
def test_no_truncated_assignment_is_read(name: str) -> None:
    data = assignment(name)
    for size in range(0, len(data), 7):
        with pytest.raises(DecodeError):
            lower_job(data[:size])


# ---------------------------------------------------------------------------------------------- rules


def test_another_placement_is_not_taken_for_the_one_that_was_stored() -> None:
    data = assignment("ring")
    with pytest.raises(DecodeError, match="was changed, or another release made it"):
        lower_job(other_blocks(random.Random(0), data))


def test_the_number_of_microbatches_is_that_of_the_batches() -> None:
    data = assignment("fcp")
    choices = opened(data)
    for microbatches in ([], choices.microbatches * 2):
        with pytest.raises(DecodeError, match="for 1 batches"):
            lower_job(closed(data, msgspec.structs.replace(choices, microbatches=microbatches)))


def test_another_release_and_another_version_are_named() -> None:
    found = outermost(assignment("fcp"))
    with pytest.raises(VersionError, match=r"release '0\.0\.1' made it"):
        lower_job(wire.encode_struct(msgspec.structs.replace(found, release="0.0.1")))
    with pytest.raises(VersionError, match=r"version 99\.0"):
        lower_job(wire.encode_struct(msgspec.structs.replace(found, version=(99, 0))))
    with pytest.raises(DecodeError, match="not an Apportion assignment"):
        lower_job(
            plan_job(
                Job(cluster(2), MODEL, Policy(find_recipe("fcp")), 64), (Batch.from_lengths([9]),)
            ).plan.encode()
        )


def test_bytes_that_expand_without_end_are_not_expanded() -> None:
    found = outermost(assignment("fcp"))
    bomb = zlib.compress(bytes(1 << 28), 1)
    for field in ("request", "choices"):
        bad = wire.encode_struct(msgspec.structs.replace(found, **{field: bomb}))
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError, match="more than the"):
                lower_job(bad)
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
        finally:
            tracemalloc.stop()


def test_blocks_that_make_too_many_cells_are_not_cut() -> None:
    asked = Job(Cluster(1, 8), Model(), Policy(find_recipe("fcp")), 100_000)
    data = plan_job(asked, (Batch.from_lengths([300_000]),), verify=False).assignment
    assert data is not None
    choices, count = opened(data), 299_999
    zero, length = np.zeros(count, np.int64), np.ones(count, np.int64)
    length[-1] = 2
    choices.microbatches[0].blocks = compact._cell(length=length, home=zero, weight=zero)
    with pytest.raises(DecodeError, match="at most 16777216 are read"):
        lower_job(closed(data, choices))


def test_an_iteration_beyond_the_limits_has_no_compact_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, batch = Job(cluster(4), MODEL, Policy(find_recipe("ring")), 64), Batch.from_lengths(LENGTHS)
    limits = (
        (compact, "MOST_CELLS"),
        (cell_counts, "MOST_PLACED"),
        (compact, "MOST_REQUEST"),
        (compact, "MOST_CHOICES"),
    )
    for module, name in limits:
        with monkeypatch.context() as small:
            small.setattr(module, name, 1)
            assert plan_job(asked, (batch,)).assignment is None


def test_sequences_of_a_packing_recipe_are_each_there_once() -> None:
    data = assignment("wlb")
    choices = opened(data)
    choices.sequences[0] = choices.sequences[1]
    with pytest.raises(DecodeError, match="each sequence"):
        lower_job(closed(data, choices))
    choices = opened(data)
    choices.microbatches = choices.microbatches * 1000
    with pytest.raises(DecodeError, match="microbatches"):
        lower_job(closed(data, choices))


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.sliding_window(5), masks.full(), masks.chunked(6)], ids=repr
)
def test_cells_are_counted_without_being_cut(mask: masks.Mask) -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        batch = Batch.from_lengths(rng.integers(1, 40, 5).tolist(), mask=mask)
        cuts = rng.choice(np.arange(1, batch.tokens), rng.integers(0, batch.tokens - 1), replace=False)
        starts = np.concatenate([[0], np.sort(cuts), [batch.tokens]])
        bands = batch.bands("default")
        assert cell_counts.count_cells(bands, starts) == len(cut_cells(bands, starts))


def test_what_is_stored_is_far_smaller_than_the_plan() -> None:
    lengths = np.random.default_rng(0).lognormal(8.5, 1.2, 200).astype(int) + 1
    asked = Job(Cluster(2, 8), replace(MODEL, q_heads=8), Policy(find_recipe("fcp")), 2**17)
    planned = plan_job(asked, (Batch.from_lengths(lengths.tolist()),), verify=False)
    assert planned.assignment is not None
    assert len(planned.assignment) * 20 < len(planned.plan.encode())
