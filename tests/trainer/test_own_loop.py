"""Custom losses and models that would silently train wrongly fail in their first steps; correct ones do not, and
their results are unchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ranks import jobs_own_loop
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse

KINDS, MANY = ("far", "near"), ("near", "near", "near", "far")


@pytest.mark.parametrize(
    "loop",
    sparse(
        [
            {"loss": "own"},
            {"loss": "own", "reduces": "ddp summed"},
            {"loss": "own", "reduces": "fsdp summed"},
            {"loss": "own times ranks", "reduces": "ddp"},
            {"loss": "own times ranks", "reduces": "fsdp"},
            {"loss": "labels further on, of the iteration"},
            {"loss": "weights shifted"},
            {"loss": "weights of samples"},
            *({"net": net} for net in ("places", "places in closure", "table", "checkpointed", "functional")),
            {"net": "hidden states"},
            {"net": "compiled", "reduces": "ddp summed"},
            {"net": "sharded optimizer", "reduces": "ddp summed"},
            {"net": "functional call"},
            {"net": "recurrent"},
            {"net": "recurrent", "reduces": "ddp", "loss": "own times ranks"},
            {"net": "dict", "loss": "own"},
            {"net": "windows", "kinds": KINDS},
            {"kinds": MANY},
            {"net": "bf16", "loss": "own", "reduces": "fsdp summed"},
            {"net": "frozen", "reduces": "fsdp summed"},
            {"reduces": "ddp averaged over", "scaled": 1024.0},
            {"net": "autocast", "loss": "own"},
        ],
        7,
    ),
    ids=str,
)
def test_correct_loops_train(pool: Pool, loop: dict[str, Any]) -> None:
    assert pool.run(jobs_own_loop.trained, 2, loop) == ["", ""]


def test_a_rank_may_have_no_rows_in_the_last_microbatch(pool: Pool) -> None:
    assert sorted(pool.run(jobs_own_loop.with_no_rows_at_last, 2)) == [0, 1]


@pytest.mark.parametrize("net", sparse(["fsdp", "dropout", "kept statistics"], 3))
def test_checking_a_model_does_not_change_it(pool: Pool, net: str) -> None:
    found, expected = (pool.run(jobs_own_loop.weights, 2, net, checks) for checks in (True, False))
    assert found == expected


@pytest.mark.parametrize(("iterations", "warnings"), [(32, 0), (40, 1)])
def test_a_loop_without_an_optimizer_is_told_that_it_is_not_checked(
    pool: Pool, iterations: int, warnings: int
) -> None:
    for found in pool.run(jobs_own_loop.updated_by_hand, 2, iterations):
        texts = [text for text in found if "no torch.optim.Optimizer has stepped" in text]
        assert len(texts) == warnings


@pytest.mark.slow
def test_a_second_training_is_checked_like_the_first(pool: Pool) -> None:
    for loop, message in (
        ({}, "$"),
        ({"loss": "own"}, "$"),
        ({"loss": "mean of rows"}, MEAN),
        ({"net": "rows as places"}, rf"ConfigError: model = 'Own': places {ROWS}"),
        ({"loss": "own", "reduces": "ddp"}, r"ConfigError: model = 'Distrib.*averages gradients"),
        ({"loss": "another"}, r"UserWarning: the loss cannot be checked"),
        ({"loss": "weights"}, r"ConfigError: weights = fields"),
    ):
        for found in pool.run(jobs_own_loop.trained, 2, loop, True):
            assert re.match(message, found), (loop, found)


MEAN = r"ConfigError: loss = 'cross entropy': is a mean over the \d+ labels of this rank"
ROWS = "computes or receives rows that depend on other rows, their number or order"
OWN = "ConfigError: model = 'Own':"
DIFFER = "ExecutionError: gradients differ between ranks"
AVERAGED = "ConfigError: model = 'Distrib.*averages gradients.*sum_gradients"
UNCHECKED = "UserWarning: the loss cannot be checked"
TERM = "UserWarning: the loss has a term other than its cross entropy: on each rank"
SHIFT = r"ConfigError: weights = fields\['worth'\] = 'not shifted'"
BUFFERS = r"ExecutionError: buffers differ between ranks, 1 of \d+"
BEHIND = r"ConfigError: labels = 'shifted by a row': .*batch\.roll"
PARTS = "ConfigError: group = '2 ranks': hold different shards of parameters.*communicator="
SWAPPED = r"UserWarning: the attention kinds \['far', 'near'\] could be swapped unnoticed.*window="


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"loss": "mean of rows"}, MEAN),
        ({"loss": "mean of rows", "reduces": "ddp"}, MEAN),
        ({"loss": "mean of rows over microbatches", "reduces": "fsdp"}, MEAN),
        ({"loss": "own", "reduces": "ddp"}, AVERAGED),
        ({"loss": "own", "reduces": "fsdp"}, "ConfigError: model = 'FSDP2': averages gradients"),
        ({"loss": "own times ranks"}, f"{OWN} sums gradients.*multiplied by the number of ranks, 2"),
        (
            {"loss": "own times ranks", "reduces": "ddp summed"},
            "ConfigError: model = 'Distrib.*sums gradients",
        ),
        ({"loss": "another"}, f"{UNCHECKED}: on each rank"),
        ({"loss": "and a term"}, TERM),
        ({"loss": "own and a term"}, TERM),
        ({"net": "compiled step", "reduces": "no"}, DIFFER),
        ({"loss": "a term apart"}, "UserWarning: a backward is of a loss other than the cross entropy: "),
        ({"loss": "own, unweighted"}, "ConfigError: loss_weights = .*: the loss has no weights"),
        ({"reduces": "ddp", "scaled": 1024.0}, AVERAGED),
        ({"reduces": "ddp", "scaled": 1024.0, "net": "evaluated"}, AVERAGED),
        (
            {"reduces": "ddp averaged over more"},
            "ConfigError: averaged_over = 3: .*averages gradients; pass 2",
        ),
        ({"reduces": "apart"}, f"{OWN} sums gradients over 2 ranks.*of 1; .*replicas="),
        ({"loss": "weights"}, rf"{SHIFT}.*shifted=\(\.\.\., 'worth'"),
        ({"loss": "weights in double"}, SHIFT),
        ({"loss": "own weights"}, SHIFT),
        (
            {"loss": "labels further on, divided by those of a microbatch"},
            r"UserWarning: losses of other labels have the divisors \[\d+.0\] and \[\d+.0\]",
        ),
        ({"net": "rows as places"}, f"{OWN} places {ROWS}"),
        ({"net": "rows as places, compiled"}, f"{OWN} places {ROWS}"),
        (
            {"net": "zeroed early", "reduces": "ddp summed"},
            r"UserWarning: \d+ gradients have changed before microbatch 1 of iteration 0, other than by a backw",
        ),
        ({"net": "kept places"}, f"{OWN} places {ROWS}"),
        ({"net": "largest position from 50 on"}, f"{OWN} layers.0 {ROWS}"),
        ({"net": "noise"}, "Own gives different results each time: its layers are not checked"),
        ({"net": "begins at zero: rows as places"}, f"{OWN} layers.0 {ROWS}"),
        ({"net": "begins at zero: mean"}, f"{OWN} layers.0 {ROWS}"),
        ({"net": "taught"}, f"{OWN} places {ROWS}"),
        ({"net": "places of rows"}, f"{OWN} receives 0, 1, ... for this rank's rows.*position_ids"),
        ({"net": "functional", "loss": "own"}, UNCHECKED),
        ({"net": "functional call", "reduces": "no"}, DIFFER),
        (
            {"net": "master copies", "reduces": "no"},
            "UserWarning: an optimizer steps, but on no parameter of the mod",
        ),
        ({"net": "functional", "loss": "own", "reduces": "no"}, DIFFER),
        ({"net": "table of rows"}, f"{OWN} receives an argument with equal rows on ranks"),
        ({"net": "counted", "reduces": "sums"}, BUFFERS),
        ({"net": "counted", "reduces": "ddp summed"}, BUFFERS),
        ({"net": "counted", "reduces": "fsdp summed"}, BUFFERS),
        ({"reduces": "fsdp1"}, "ConfigError: model = 'FSDP1': averages gradients.*averaged_over=2"),
        ({"loss": "labels of rows behind"}, BEHIND),
        ({"loss": "tokens of rows behind"}, BEHIND),
        ({"loss": "labels left out"}, 'ConfigError: labels = "fewer than the batch\'s": .*weights= of 0'),
        ({"loss": "labels changed"}, "ConfigError: labels = 'changed': .*put loss_mask into the samples"),
        ({"loss": "weights of a rank shifted"}, "UserWarning: weights of losses are different multiples"),
        ({"loss": "mean of shares"}, r"ExecutionError: factors of losses differ between ranks, \["),
        ({"net": "hooked"}, "UserWarning: parameters have hooks: .*clip after"),
        ({"net": "body"}, r"\d of \d+ parameters are outside Body, which calls attention"),
        ({"net": "rows behind"}, f"{OWN} head {ROWS}"),
        ({"net": "statistics"}, f"{OWN} norm {ROWS}"),
        ({"net": "largest position"}, rf"{OWN} layers\.0 {ROWS}"),
        ({"net": "mean", "loss": "own", "reduces": "ddp summed"}, rf"{OWN} layers\.0 {ROWS}"),
        (
            {"net": "rows as places", "reduces": "fsdp summed"},
            f"ConfigError: model = 'FSDPOwn': places {ROWS}",
        ),
        ({"net": "rows as places", "reduces": "ddp averaged over"}, f"{OWN} places {ROWS}"),
        ({"net": "attention beside", "loss": "own"}, f"{OWN} out {ROWS}"),
        ({"net": "head alone", "loss": "own", "reduces": "no"}, DIFFER),
        ({"net": "reduced early", "reduces": "fsdp summed"}, "ExecutionError: FSDP2 has not reduced"),
        (
            {"net": "rates of ranks", "reduces": "fsdp summed"},
            "ExecutionError: learning rates differ between ranks",
        ),
        ({"net": "tensor parallel"}, PARTS),
        ({"net": "tensor parallel", "reduces": "no"}, f"{OWN} out {ROWS}.*communicator="),
        ({"kinds": KINDS}, SWAPPED),
        (
            {"kinds": ("near", "far", "far", "far")},
            "ConfigError: kind = {'far': 3, 'near': 1}: .*its own kind=",
        ),
    ],
    ids=str,
)
def test_wrong_loops_fail_in_their_first_steps(pool: Pool, loop: dict[str, Any], message: str) -> None:
    for found in pool.run(jobs_own_loop.trained, 2, loop):
        assert re.match(message, found), found


def test_ranks_are_compared_again_when_parameters_are_unfrozen(pool: Pool) -> None:
    for error in pool.errors(jobs_own_loop.unfrozen, 2):
        assert re.match(f"{DIFFER}.*unfreeze before wrapping", error), error


def test_gradients_that_only_some_ranks_have_are_summed(pool: Pool) -> None:
    assert pool.run(jobs_own_loop.one_sided, 2) == [[[[3.0, 3.0]], None]] * 2


def test_gradients_that_an_optimizer_does_not_clear_do_not_hinder_others(pool: Pool) -> None:
    assert pool.run(jobs_own_loop.one_stepped, 2) == [[[6.0, 6.0]]] * 2
