"""The simulator: timelines computed by hand, invariants of any program, descriptions, traces and data."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from apportion import Batch, Cluster, ConfigError, Hardware, Model, Plan, VerifyError, masks
from apportion.ir.isa import Op
from apportion.ir.request.figures import Figure
from apportion.ir.tensors import PHASES, Tensor
from apportion.planner import api
from apportion.planner.cost import CostModel
from apportion.planner.simulate import Simulation, simulate, simulate_with
from apportion.planner.simulate.losses import whole_us
from tests.support.parse import parse
from tests.support.timelines import (
    MODEL,
    PLANS,
    STRATEGIES,
    Unit,
    forward,
    path_invariants,
    plan_of,
    run_invariants,
    transfers,
    work,
)

RECEIVE = "launch 0: receive KV.work[0:8) from 0\nwait 0"

# --- timelines by hand


def test_communication_hides_behind_work() -> None:
    run = forward(
        f"launch 0: send KV.home[0:8) to 1\n{work(20)}\nwait 0\nfinish O.home[0:20)",
        f"launch 0: receive KV.work[0:8) from 0\n{work(12)}\nwait 0\n{work(5)}",
    )
    assert transfers(run) == {(0, 0, 1): (0.0, 11.0)}
    assert run.finish_us.tolist() == [20.0, 17.0]
    assert run.exposed_us.tolist() == [0.0, 0.0]
    assert run.makespan_us == 20.0
    assert run.ideal_us == (20 + 12 + 5) / 2
    assert run.efficiency == 18.5 / 20


def test_ranks_of_a_node_share_its_nic() -> None:
    programs = [f"launch 0: send KV.home[0:8) to {peer}\nwait 0" for peer in (2, 3)]
    programs += [f"launch 0: receive KV.work[0:8) from {peer}\nwait 0" for peer in (0, 1)]
    shared = forward(*programs, nodes=2, ranks_per_node=2, nics_per_node=1)
    assert transfers(shared) == {(0, 0, 2): (0.0, 21.0), (0, 1, 3): (16.0, 37.0)}  # latency occupies no port
    alone = forward(*programs, nodes=2, ranks_per_node=2, nics_per_node=2)
    assert transfers(alone) == {(0, 0, 2): (0.0, 21.0), (0, 1, 3): (0.0, 21.0)}


def test_a_node_of_four_ranks_and_two_nics_shares_them_in_pairs() -> None:
    programs = [f"launch 0: send KV.home[0:8) to {4 + rank}\nwait 0" for rank in range(4)]
    programs += [f"launch 0: receive KV.work[0:8) from {rank}\nwait 0" for rank in range(4)]
    run = forward(*programs, nodes=2, ranks_per_node=4, nics_per_node=2)
    assert [start for start, _ in transfers(run).values()] == [0.0, 16.0, 0.0, 16.0]


def test_channels_overlap_and_rounds_of_one_channel_do_not() -> None:
    def programs(channel: str) -> list[str]:
        return [
            f"launch 0: send KV.home[0:8) to 1\nlaunch 1{channel}: send KV.home[0:8) to 2\nwait 0\nwait 1",
            RECEIVE,
            f"launch 1{channel}: receive KV.work[0:8) from 0\nwait 1",
            "",
        ]

    one = forward(*programs(""), nodes=2, ranks_per_node=2)
    assert transfers(one) == {(0, 0, 1): (0.0, 11.0), (1, 0, 2): (11.0, 32.0)}
    two = forward(*programs(" channel 1"), nodes=2, ranks_per_node=2)
    assert transfers(two) == {(0, 0, 1): (0.0, 11.0), (1, 0, 2): (0.0, 21.0)}
    same_port = forward(*programs(" channel 1"))
    assert transfers(same_port) == {(0, 0, 1): (0.0, 11.0), (1, 0, 2): (8.0, 19.0)}


def all_to_all(ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        tiles = [f"send KV.home[0:8) to {peer}" for peer in peers]
        tiles += [f"receive KV.work[{8 * i}:{8 * i + 8}) from {peer}" for i, peer in enumerate(peers)]
        yield f"launch 0 all_to_all: {', '.join(tiles)}\nwait 0"


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_all_to_all_keeps_every_port_busy(ranks: int) -> None:
    assert forward(*all_to_all(ranks)).makespan_us == 8 * (ranks - 1) + 3


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_all_to_all_across_nodes_keeps_the_nics_busy(nics: int) -> None:
    run = forward(*all_to_all(12), nodes=3, ranks_per_node=4, nics_per_node=nics)
    busiest = 4 // nics * 8 * 16  # ranks of a NIC, ranks elsewhere, 16 us each
    assert busiest + 5 <= run.makespan_us <= 1.05 * busiest + 5


def test_a_round_without_transfers_completes_when_its_channel_reaches_it() -> None:
    run = forward(
        f"launch 0: send KV.home[0:8) to 1\nlaunch 1 all_to_all\nwait 1\n{work(2)}",
        "launch 0: receive KV.work[0:8) from 0\nlaunch 1 all_to_all\nwait 1",
        f"launch 1 all_to_all\nwait 1\n{work(2)}",
    )
    assert run.finish_us.tolist() == [13.0, 11.0, 2.0]


def test_ports_serve_in_order_of_readiness() -> None:
    run = forward(
        f"{work(2)}\nlaunch 0: send KV.home[0:8) to 1\nwait 0",
        "launch 0: receive KV.work[0:8) from 0\nlaunch 1 channel 1: receive KV.work[8:12) from 2\n"
        "launch 2 channel 2: receive KV.work[12:20) from 3\nwait 0\nwait 1\nwait 2",
        f"{work(3)}\nlaunch 1 channel 1: send KV.home[0:4) to 1\nwait 1",
        "launch 2 channel 2: send KV.home[0:8) to 1\nwait 2",
    )
    assert transfers(run) == {(2, 3, 1): (0.0, 11.0), (0, 0, 1): (8.0, 19.0), (1, 2, 1): (16.0, 23.0)}


def test_a_slow_rank_works_longer() -> None:
    send, receive = ("launch 0: send KV.home[0:8) to 1\nwait 0", RECEIVE)
    run = forward(f"{work(6)}\n{send}", f"{receive}\n{work(6)}", speeds=[2.0, 0.5])
    assert run.compute_us.tolist() == [3.0, 12.0]
    assert run.finish_us.tolist() == [14.0, 26.0]
    assert run.ideal_us == 12 / 2.5


COPIES = Unit(a_row=3.0, a_byte=1 / 256)


def test_staged_messages_are_packed_before_their_transfers() -> None:
    """KV home rows are two arrays, KV work rows one: 512 bytes are read and written, only on rank 0."""
    run = forward("launch 0: send KV.home[0:8) to 1\nclear O.home[0:8)\nwait 0", RECEIVE, costs=COPIES)
    pack, clear = 3 + 1024 / 256, 3 + 320 / 256
    assert transfers(run) == {(0, 0, 1): (pack, pack + 8 + 3)}
    assert run.compute_us.tolist() == [pack + clear, 0.0]
    assert run.exposed_us.tolist() == [8 + 3 - clear, pack + 8 + 3]
    assert run.finish_us.tolist() == [pack + 8 + 3] * 2


def test_gradients_are_rounded_as_they_are_packed_and_widened_as_they_are_unpacked() -> None:
    """dKV of 8 rows, one head and 8 numbers: 256 bytes of float32, 128 on the wire."""
    programs = (
        "launch 0: send dKV.work[0:8) to 1\nwait 0",
        "launch 0: receive dKV.work[0:8) from 0\nwait 0\nadd dKV.work[0:8) -> dKV.home[0:8)",
    )
    model = {**MODEL, "dtype": "bf16"}
    models = model, model | {"sent_gradients": "model"}
    plans = (plan_of(*programs, phase="backward", model=one) for one in models)
    wide, narrow = (simulate_with(plan, COPIES).runs["default", "backward"] for plan in plans)
    assert transfers(wide) == {(0, 0, 1): (0.0, 256 / 64 + 3)}  # direct
    copy, add, cast = 3 + 384 / 256, 3 + 3 * 256 / 256, 3 + 64 * (4 + 8) * 6 / 256
    assert transfers(narrow) == {(0, 0, 1): (copy, copy + 128 / 64 + 3)}
    assert wide.compute_us.tolist() == [cast, add + cast]
    assert narrow.compute_us.tolist() == [copy + cast, copy + add + cast]
    assert narrow.sent_bytes.tolist() == [128, 0]
    assert narrow.launches.tolist() == [count + 1 for count in wide.launches.tolist()]


def test_staged_messages_are_unpacked_after_the_wait() -> None:
    """O is two arrays in either space: 320 bytes, 5 us on the wire."""
    run = forward(
        "launch 0: send O.work[0:8) to 1\nwait 0",
        "launch 0: receive O.work[0:8) from 0\nwait 0\nclear O.home[0:8)",
        costs=COPIES,
    )
    copy, clear = 3 + 640 / 256, 3 + 320 / 256
    assert transfers(run) == {(0, 0, 1): (copy, copy + 5 + 3)}
    assert run.exposed_us.tolist() == [8.0, copy + 8.0]
    assert run.finish_us.tolist() == [copy + 8.0, copy + 8.0 + copy + clear]
    assert [step.text for step in run.critical_path()] == [
        "rank 0 computes 0.00550 ms (pack)",
        "rank 1 waits 0.0135 ms in round 0 for O from rank 0 (0.00032 MB, 0.00800 ms)",
        "rank 1 computes 0.00975 ms (unpack, clear)",
    ]
    pack, unpack = (101, 102)
    on_compute = run.spans.stream == 0
    columns = (run.spans.rank, run.spans.op, run.spans.start_us, run.spans.end_us, run.spans.instruction)
    assert list(zip(*(column[on_compute].tolist() for column in columns), strict=True)) == [
        (0, pack, 0.0, 5.5, 0),
        (0, Op.WAIT, 5.5, 13.5, 1),
        (1, Op.WAIT, 0.0, 13.5, 1),
        (1, unpack, 13.5, 19.0, 1),
        (1, Op.CLEAR, 19.0, 23.25, 2),
    ]


def test_a_round_waits_until_its_messages_are_posted() -> None:
    """Rank 0 posts two messages, of two tiles and of one; rank 2 posts one, and waits for those of rank 0."""
    run = forward(
        "launch 0: send KV.home[0:8) to 1, send KV.home[8:16) to 1, send Q.home[0:8) to 2\nwait 0",
        "launch 0: receive KV.work[0:8) from 0, receive KV.work[8:16) from 0\nwait 0",
        "launch 0: receive Q.work[0:8) from 0\nwait 0",
        costs=Unit(post_us=10.0),
    )
    assert transfers(run)[0, 0, 2] == (16.0, 16.0 + 4 + 3 + 2 * 10)
    assert run.makespan_us == 43.0


def test_the_busiest_rank_may_be_a_receiver() -> None:
    run = forward(
        "launch 0: receive Q.work[0:8) from 1, receive Q.work[8:16) from 2\nwait 0",
        *["launch 0: send Q.home[0:8) to 0\nwait 0"] * 2,
    )
    total = int(run.received_bytes[0])
    assert run.to_data()["bytes"] == {"total": total, "max_rank": total, "inter_node": run.inter_node_bytes}


def test_gradients_are_cast_after_the_last_instruction() -> None:
    """64 rows: dQ of 4 numbers and dKV of 8, read and written in 8 bytes each."""
    first = "clear dQ.home[0:64)\nlaunch 0: send Q.home[0:8) to 1\nwait 0"
    plan = plan_of(first, "launch 0: receive Q.work[0:8) from 0", phase="backward")
    run = simulate_with(plan, Unit(a_row=1.0, a_byte=1.0)).runs["default", "backward"]
    cast = 1 + 64 * 4 * 16 + 64 * 8 * 16
    clear = 1 + 64 * 32
    assert run.compute_us.tolist() == [clear + cast, cast]
    assert run.finish_us.tolist() == [clear + 4 + 3 + cast, cast]
    assert run.critical_path()[-1].text == f"rank 0 computes {cast / 1e3:.1f} ms (cast)"
    path_invariants(run)


# --- times of instructions

ADD_DQ = "add dQ.work[0:2) -> dQ.home[0:2)"


def busy(program: str, costs: Unit, phase: str = "forward", model: dict[str, Any] = MODEL) -> float:
    """Microseconds in which the only rank's compute stream is busy."""
    run = simulate_with(plan_of(program, phase=phase, model=model), costs).runs["default", phase]
    return float(run.compute_us[0])


def test_tasks_of_an_instruction_are_one_launch() -> None:
    two = (
        "attend Q.home[0:4) KV.home[0:4) -> O.home[0:4) causal, Q.home[0:2) KV.home[0:3) -> O.home[0:2) full"
    )
    assert busy(two, Unit(launch=100.0)) == 100 + 10 + 6
    assert busy(f"{two}\n{two}", Unit(launch=100.0)) == 2 * (100 + 10 + 6)
    assert busy(two, Unit(launch=100.0, chain=40.0)) == 100 + 40  # the longest chain


@pytest.mark.parametrize(
    ("phase", "line", "moved"),
    [  # rows of 8-byte numbers: KV and dKV 64, O 40 (with its log-sum-exp), dO, Q and dQ 32, delta 16 bytes
        ("forward", "clear O.home[0:2)", 2 * 40),
        ("forward", "copy KV.home[0:2) -> KV.work[0:2)", 2 * 2 * 64),
        ("forward", "merge O.work[0:2) -> O.home[0:2) first", 2 * 2 * 40),
        ("forward", "merge O.work[0:2) -> O.home[0:2)", 3 * 2 * 40),
        ("forward", "finish O.home[0:2)", 2 * (40 + 32 + 8)),
        ("backward", "delta dO.home[0:2) O.home[0:2) -> delta.home[0:2)", 2 * (32 + 40 + 16)),
        ("backward", "add dKV.work[0:2) -> dKV.home[0:2)", 3 * 2 * 64),
        ("backward", f"{ADD_DQ} first, dKV.work[0:1) -> dKV.home[0:1)", 4 * 32 + 3 * 64),
        ("forward", "project X.home[0:2) -> Q.work[0:2) KV.work[0:2)", 2 * 2 * (32 + 64)),
    ],
)
def test_row_operations_take_time_per_byte_read_and_written(phase: str, line: str, moved: int) -> None:
    casts = 64 * (4 + 8) * 16 if phase == "backward" else 0  # dQ and dKV of the home rows
    assert busy(line, Unit(a_byte=1.0), phase) == moved + casts
    assert busy(line, Unit(a_row=1.0), phase) == (2 if phase == "backward" else 1)


def test_gradients_of_a_projection_are_added_into_hidden_rows() -> None:
    """X and dX have 8 numbers; the home rows of dX alone are cast, if they are added to."""
    line = "project_grad X.home[0:2) dQ.work[0:2) none -> dX.home[0:2)"
    casts = 64 * 8 * 16
    assert busy(line, Unit(a_byte=1.0), "backward") == 3 * 2 * 64 + casts
    assert busy(f"{line} first", Unit(a_byte=1.0), "backward") == 2 * 2 * 64


ATTEND = "attend Q.home[0:4) KV.home[0:4) -> O.{0}[0:4) full"
#: the same accumulator twice, then another one
AGAIN = ", Q.home[0:4) KV.home[4:8) -> O.{0}[0:4) full, Q.home[4:6) KV.home[4:8) -> O.{0}[4:6) full"
GRAD = "attend_grad Q.home[0:4) KV.home[0:4) dO.home[0:4) delta.home[0:4) -> dQ.{0}[0:4) dKV.{0}[0:4) full"
NARROW = MODEL | {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("line", "space", "model", "moved", "done"),
    [  # a row of O has 4 numbers and its log-sum-exp, a result 4; of dQ 4, of dKV 8
        (ATTEND, "work", MODEL, 4 * (2 * 40 - 32), 0),
        (f"{ATTEND} first", "work", MODEL, 4 * (40 - 32), 0),
        (ATTEND, "work", NARROW, 4 * (2 * 20 - 8), 0),
        (f"{ATTEND} first", "work", NARROW, 4 * (20 - 8), 0),
        (f"{ATTEND} first{AGAIN}", "work", NARROW, 4 * (20 - 8) + 2 * (2 * 20 - 8), 0),
        (f"{ATTEND}{AGAIN} first", "work", NARROW, 4 * (2 * 20 - 8) + 2 * (20 - 8), 0),
        (f"{ATTEND}\n{ATTEND}", "work", NARROW, 2 * 4 * (2 * 20 - 8), 0),
        (GRAD, "work", NARROW, 4 * (2 * 16 - 8) + 4 * (2 * 32 - 16), 0),
        (f"{GRAD} first_dq", "work", NARROW, 4 * (16 - 8) + 4 * (2 * 32 - 16), 0),
        (f"{GRAD} first_dq first_dkv", "work", NARROW, 4 * (16 - 8) + 4 * (32 - 16), 0),
        # complete home rows are read, unless they are new, and their log-sum-exp is written; results are not cast
        (ATTEND, "home", MODEL, 4 * (40 + 8), 0),
        (ATTEND, "home", NARROW, 4 * (20 + 4), 0),
        (f"{ATTEND} first", "home", NARROW, 4 * 4, 0),
        (f"{ATTEND} first{AGAIN}", "home", NARROW, 4 * 4 + 2 * (20 + 4), 0),
        (f"{ATTEND}\n{ATTEND}", "home", NARROW, 4 * (2 * 20 - 8) + 4 * (20 + 4), 0),
        (GRAD, "home", NARROW, 4 * 16 + 4 * 32, 4),
        (f"{GRAD} first_dq first_dkv", "home", NARROW, 0, 4),
    ],
)
def test_accumulators_are_read_and_written_once_per_instruction(
    line: str, space: str, model: dict[str, Any], moved: int, done: int
) -> None:
    phase = "backward" if line.startswith("attend_grad") else "forward"
    line = line.format(space)
    casts = (64 - done) * (4 + 8) * (4 + 2) if phase == "backward" else 0
    pairs = busy(line, Unit(), phase, model)
    assert busy(line, Unit(a_byte=1.0), phase, model) == pairs + moved + casts


@pytest.mark.parametrize(("rows", "left"), [(4, 4), (6, 2), (64, 60)])
def test_finish_skips_complete_rows(rows: int, left: int) -> None:
    line = f"{ATTEND.format('home')} first\nfinish O.home[{4 if rows == 4 else 0}:{rows + 4 * (rows == 4)})"
    finish = left * (20 + 8 + 4)  # the wide row, the output and its log-sum-exp
    pairs = busy(line, Unit(), "forward", NARROW)
    assert busy(line, Unit(a_byte=1.0), "forward", NARROW) == pairs + 4 * 4 + finish
    alone = f"{ATTEND.format('home')} first\nfinish O.home[0:4)"
    assert busy(alone, Unit(a_byte=1.0, a_row=9.0), "forward", NARROW) == pairs + 4 * 4


def test_a_gradient_is_two_launches() -> None:
    assert busy(GRAD.format("home"), Unit(launch=100.0), "backward") == 200 + 16


def test_projections_take_their_share_of_the_linear_layers() -> None:
    costs = Unit(a_token=1.0)
    parameters = {"q": 8 * 4, "kv": 8 * 8}
    whole = costs.linear_parameters
    both = "project X.home[0:3) -> Q.work[0:3) KV.work[0:3)"
    assert busy(both, costs) == pytest.approx(3 * (parameters["q"] + parameters["kv"]) / whole)
    alone = "project X.home[0:3) -> Q.work[0:3) none"
    assert busy(alone, costs) == pytest.approx(3 * parameters["q"] / whole)
    grad = "project_grad X.home[0:3) none dKV.home[0:3) -> dX.home[0:3) first"
    assert busy(grad, costs, "backward") == pytest.approx(3 * 3 * parameters["kv"] / whole)


# --- kernels during transfers


def test_transfers_slow_kernels_down() -> None:
    """8 us on the wire, in which 8 / 1.5 us of work is done; instructions after a wait run afterwards."""
    run = forward(
        f"launch 0: send KV.home[0:8) to 1\n{work(20)}\nwait 0",
        f"launch 0: receive KV.work[0:8) from 0\n{work(12)}\nwait 0\n{work(5)}",
        work(7),
        costs=Unit(contention=0.5),
    )
    added = 8 - 8 / 1.5
    assert transfers(run) == {(0, 0, 1): (0.0, 11.0)}
    assert run.finish_us.tolist() == pytest.approx([20 + added, 12 + added + 5, 7])
    assert run.slowed_us.tolist() == pytest.approx([added, added, 0])
    assert run.compute_us.tolist() == pytest.approx([20 + added, 17 + added, 7])
    assert run.exposed_us.tolist() == pytest.approx([0, 0, 0])


def test_contention_is_a_loss_of_its_own() -> None:
    """Rank 0 runs 8 us at half speed, then at full again."""
    sender, receiver = f"launch 0: send KV.home[0:8) to 1\n{work(20)}\nwait 0", RECEIVE
    found = simulate_with(plan_of(sender, receiver), Unit(contention=1.0)).lost
    assert (found.contention, found.stalls) == pytest.approx((4.0, 0.0))


# --- invariants of any program


@pytest.fixture(params=PLANS, ids=lambda path: path.stem)
def by_hand(request: pytest.FixtureRequest) -> Plan:
    return parse(request.param.read_text())


def test_timelines_of_hand_written_plans_keep_the_invariants(by_hand: Plan) -> None:
    found = simulate(by_hand)
    assert list(found.runs) == [(kind, phase) for kind in by_hand.header.kinds for phase in PHASES]
    for run in found.runs.values():
        run_invariants(run)
        path_invariants(run)
        assert run.makespan_us >= run.compute_us.max() >= run.ideal_us > 0
    path = found.critical_path()
    assert path[-1].end_us == pytest.approx(1e3 * (found.forward_ms + found.backward_ms))
    assert 0 < found.efficiency < 1


def scrambled(seed: int) -> Plan:
    """Random work, rounds, channels and transfers, which all ranks list in the same order."""
    rng = random.Random(seed)
    nodes, per_node, rounds = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.randrange(1, 8)
    ranks = nodes * per_node
    lines: list[list[str]] = [[] for _ in range(ranks)]
    open_rounds: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(rounds):
        channel, tiles = rng.randrange(3), defaultdict(list)
        for _ in range(rng.randrange(12) if ranks > 1 else 0):
            source, target = rng.sample(range(ranks), 2)
            rows = rng.randrange(1, 20)
            tiles[source].append(f"send KV.home[0:{rows}) to {target}")
            tiles[target].append(f"receive KV.work[0:{rows}) from {source}")
        for rank in range(ranks):
            if rng.random() < 0.7:
                lines[rank].append(work(rng.randrange(1, 30)))
            if open_rounds[rank] and rng.random() < 0.5:
                lines[rank].append(f"wait {open_rounds[rank].pop(0)}")
            if tiles[rank]:
                lines[rank].append(f"launch {number} channel {channel}: {', '.join(tiles[rank])}")
                open_rounds[rank].append(number)
    for rank in range(ranks):
        lines[rank] += [f"wait {number}" for number in open_rounds[rank]]
    cluster = {"nodes": nodes, "ranks_per_node": per_node, "nics_per_node": rng.choice([1, 2])}
    speeds = [rng.choice([1.0, 0.75]) for _ in range(ranks)]
    return plan_of(*("\n".join(mine) for mine in lines), **cluster, speeds=speeds)


@pytest.mark.parametrize("contention", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(40))
def test_timelines_of_random_programs_keep_the_invariants(seed: int, contention: float) -> None:
    run = simulate_with(scrambled(seed), Unit(contention=contention)).runs["default", "forward"]
    run_invariants(run, contention)
    path_invariants(run)


def start_times(out: list[int], into: list[int], wire: list[float]) -> list[float]:
    """The start times of transfers that are all ready at 0, found naively: in this order, and whenever ports are freed,
    each takes the first one that it can."""
    start, busy = [-1.0] * len(out), {}

    def take(port: int | None, now: float) -> None:
        for transfer, ports in enumerate(zip(out, into, strict=True)):
            if start[transfer] < 0 and port in (None, *ports) and not busy.keys() & set(ports):
                start[transfer] = now
                busy.update(dict.fromkeys(ports, now + wire[transfer]))
                if port is not None:
                    return

    take(None, 0.0)
    while busy:
        now = min(busy.values())
        freed = sorted(port for port, end in busy.items() if end == now)
        for port in freed:
            del busy[port]
        for port in freed:
            if port not in busy:
                take(port, now)
    return start


@pytest.mark.parametrize("ranks", [5, 24, 40])
def test_long_queues_are_served_in_order(ranks: int) -> None:
    rng = random.Random(ranks)
    tiles: list[list[str]] = [[] for _ in range(ranks)]
    for source, target in permutations(range(ranks), 2):
        rows = rng.randrange(1, 40)
        tiles[source].append(f"send KV.home[0:{rows}) to {target}")
        tiles[target].append(f"receive KV.work[0:{rows}) from {source}")
    run = forward(*(f"launch 0: {', '.join(mine)}\nwait 0" for mine in tiles))
    traffic = run.traffic
    columns = traffic.out_port.tolist(), traffic.in_port.tolist(), traffic.wire_us.tolist()
    assert run.times.start.tolist() == start_times(*columns)
    path_invariants(run)


@pytest.mark.parametrize("recipe", STRATEGIES)
def test_timelines_of_recipes_keep_the_invariants(recipe: str) -> None:
    batch = Batch.from_lengths([5000, 1500, 900, 500, 292, 3000, 2000, 800], mask=masks.causal())
    model = Model(q_heads=8, kv_heads=4, head_dim=64)
    plan = api.plan(batch, Cluster(2, 4, nics_per_node=2), model, recipe=recipe, verify=False)
    found = simulate(plan)
    assert {name: plan.report["bytes"][name] for name in found.bytes} == found.bytes
    for run in found.runs.values():
        run_invariants(run)
        path_invariants(run)
        assert run.makespan_us >= run.compute_us.max() >= run.ideal_us
    slow = simulate(plan, replace(Hardware.load("h100"), contention=Figure(0.1, "made up")))
    for key, run in slow.runs.items():
        run_invariants(run, 0.1)
        path_invariants(run)
        assert sum(slow.losses[key]) == pytest.approx(run.makespan_us)
        assert min(slow.losses[key]) > -1e-6 * run.makespan_us
        assert (run.slowed_us <= 0.1 * (run.compute_us - run.slowed_us) + 1e-6).all()


CROSSED = (
    "launch 0: send KV.home[0:8) to 1\nwait 0\nlaunch 1: receive KV.work[0:8) from 1\nwait 1",
    "launch 1: send KV.home[0:8) to 0\nwait 1\nlaunch 0: receive KV.work[0:8) from 0\nwait 0",
)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (CROSSED, "2 ranks wait for rounds that never complete, rank 0 for round 0"),
        (
            ("launch 3: send KV.home[0:8) to 1\nwait 3", "launch 3\nwait 3"),
            "round 3: rank 0 sends 1 tiles to rank 1",
        ),
        (("", "wait 4"), "rank 1 waits for round 4 but never launches it"),
    ],
)
def test_programs_that_cannot_run_are_refused(programs: tuple[str, ...], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        simulate_with(plan_of(*programs), Unit())


def test_a_plan_without_work_takes_no_time() -> None:
    found = simulate_with(plan_of("", ""), Unit())
    assert (found.forward_ms, found.backward_ms, found.exposed_ms, found.efficiency) == (0, 0, 0, 1)
    assert sum(found.lost) == 0
    assert (found.attainable, found.of_attainable, found.time_imbalance) == (1, 1, 0)
    assert found.critical_path() == []


# --- losses


def losses_of(recipe: str, batch: Batch, ranks: int = 4, **cluster: Any) -> Simulation:
    model = Model(q_heads=8, kv_heads=2, head_dim=64, layers=2)
    return simulate(api.plan(batch, Cluster(1, ranks, **cluster), model, recipe=recipe))


@pytest.mark.parametrize("recipe", ["fcp", "blend", "ring", "ulysses", "dcp"])
@pytest.mark.parametrize("speeds", [None, (1.0, 0.5, 1.0, 0.8)])
def test_losses_add_up_to_the_whole_time(recipe: str, speeds: tuple[float, ...] | None) -> None:
    found = losses_of(recipe, Batch.from_lengths([9000, 700, 650, 40, 1]), speeds=speeds)
    for key, run in found.runs.items():
        lost = found.losses[key]
        assert sum(lost) == pytest.approx(run.makespan_us)
        assert lost.ideal == run.ideal_us
        assert min(lost) > -1e-6 * run.makespan_us
    assert found.efficiency <= found.attainable <= 1
    assert found.of_attainable == pytest.approx(found.efficiency / found.attainable)


def test_one_document_per_rank_loses_only_launches_and_row_work() -> None:
    found = losses_of("contiguous", Batch.from_lengths([4096] * 4))
    lost = found.lost
    assert lost.cutting == pytest.approx(0, abs=1e-6)
    assert lost.imbalance == pytest.approx(0, abs=1e-6)
    assert lost.stalls == pytest.approx(0, abs=1e-6)
    assert found.of_attainable == pytest.approx(1 - (lost.launches + lost.rows) / sum(lost))


def test_answers_to_one_question_are_attainable_together() -> None:
    batch = Batch.from_lengths([1000], mask=masks.shared_question(100, [300, 300, 300]))
    costs = CostModel(Hardware.load("h100"), Model())
    # the question continues in its first answer; the two others see the question and themselves
    rows, keys = np.array([400, 300, 300, 600]), np.array([400, 300, 300, 100])
    pairs = np.array([80_200, 45_150, 45_150, 60_000])
    separate = costs.attention_us("forward", rows, keys, pairs, 32, 8).sum()
    assert whole_us(batch, Model(), "default", "forward", costs) == pytest.approx(separate)


# --- descriptions


@pytest.fixture(scope="module")
def relayed() -> Simulation:
    path = next(path for path in PLANS if path.stem == "relay")
    return simulate(parse(path.read_text()), Hardware.load("a100"))


def test_figures_of_a_simulation_follow_from_its_runs(relayed: Simulation) -> None:
    forward, backward = relayed.runs.values()
    assert relayed.hardware == "a100"
    assert relayed.forward_ms == forward.makespan_us / 1e3
    assert relayed.backward_ms == backward.makespan_us / 1e3
    assert relayed.exposed_ms == (forward.exposed_us + backward.exposed_us).max() / 1e3
    both = forward.makespan_us + backward.makespan_us
    assert relayed.efficiency == pytest.approx((forward.ideal_us + backward.ideal_us) / both)
    assert relayed.peak_rows == {"KV": 16, "dKV": 16}
    assert forward.peak_rows[:, Tensor.KV].tolist() == [0, 8, 8, 16]
    assert relayed.peak_work_rows == max(int(run.peak_rows.sum(1).max()) for run in (forward, backward))
    tile = 8 * 64  # 8 rows of one KV head, K and V of 4 numbers of 8 bytes
    assert forward.sent_bytes.tolist() == [tile, tile, 2 * tile, 0]
    assert forward.received_bytes.tolist() == [0, tile, tile, 2 * tile]
    assert forward.inter_node_bytes == 3 * tile
    assert relayed.bytes["total"] == int(forward.sent_bytes.sum() + backward.sent_bytes.sum())


def test_spans_list_the_work_of_every_stream() -> None:
    sender = f"{work(6)}\nlaunch 0 channel 2: send KV.home[0:8) to 1\nwait 0"
    run = forward(sender, f"launch 0 channel 2: receive KV.work[0:8) from 0\n{work(4)}\nwait 0\n{work(5)}")
    attend, launch, wait = (int(op) for op in (Op.ATTEND, Op.LAUNCH, Op.WAIT))
    assert list(zip(*(column.tolist() for column in run.spans), strict=True)) == [
        (0, 0, attend, 0.0, 6.0, 0, -1, -1),
        (0, 0, wait, 6.0, 17.0, 2, 0, -1),
        (0, 3, launch, 6.0, 17.0, 1, 0, 1),
        (1, 0, attend, 0.0, 4.0, 1, -1, -1),
        (1, 0, wait, 4.0, 17.0, 2, 0, -1),
        (1, 0, attend, 17.0, 22.0, 3, -1, -1),
        (1, 3, launch, 6.0, 17.0, 0, 0, 0),
    ]


def test_the_critical_path_names_ranks_and_what_they_wait_for() -> None:
    run = forward(
        f"{work(6)}\nlaunch 0: send KV.home[0:8) to 1, send KV.home[0:8) to 2\nwait 0\n"
        "launch 1: send KV.home[0:8) to 2\nwait 1",
        RECEIVE,
        "launch 0: receive KV.work[0:8) from 0\nlaunch 1: receive KV.work[8:16) from 0\nwait 1",
    )
    assert [(step.kind, step.rank, step.us, step.round, step.peer) for step in run.critical_path()] == [
        ("compute", 0, 6.0, -1, -1),
        ("transfer", 1, 8.0, 0, 0),
        ("transfer", 2, 11.0, 0, 0),
        ("transfer", 2, 11.0, 1, 0),
    ]
    assert [step.text.split(" (0.")[0] for step in run.critical_path()] == [
        "rank 0 computes 0.00600 ms (attend)",
        "KV from rank 0 to rank 1 (round 0) goes before KV from rank 0 to rank 2 (round 0) on the link out of rank 0",
        "rank 0 waits 0.0190 ms in round 0 until rank 2 has KV",
        "rank 0 waits 0.0110 ms in round 1 until rank 2 has KV",
    ]


def test_the_path_goes_through_a_busy_channel() -> None:
    run = forward(
        "launch 0: send KV.home[0:8) to 1\nwait 0",
        "launch 0: receive KV.work[0:8) from 0\nlaunch 1: receive KV.work[8:16) from 2\nwait 1",
        "launch 1: send KV.home[0:8) to 1\nwait 1",
    )
    assert [step.text.split(" (0.")[0] for step in run.critical_path()] == [
        "channel 0 of rank 1 is busy with round 0 for KV from rank 0",
        "rank 1 waits 0.0220 ms in round 1 for KV from rank 2",
    ]


def test_a_trace_has_aligned_ranks_streams_and_arrows(relayed: Simulation) -> None:
    trace = json.loads(json.dumps(relayed.trace()))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 (node 0)", "rank 1 (node 0)", "rank 2 (node 1)", "rank 3 (node 1)"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [threads[2, tid] for tid in range(3)] == ["compute", "channel 0", "channel 1"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all((e["pid"], e["tid"]) in threads and e["dur"] >= 0 for e in slices)
    assert {e["cat"] for e in slices} == {"default forward", "default backward"}
    end = 1e3 * (relayed.forward_ms + relayed.backward_ms)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(end, abs=2e-3)
    backward = [e["ts"] for e in slices if e["cat"] == "default backward" and e["tid"] == 0]
    assert min(backward) == pytest.approx(1e3 * relayed.forward_ms, abs=2e-3)
    assert trace["otherData"]["complete"] is True


def test_every_arrow_begins_and_ends_in_a_round(relayed: Simulation) -> None:
    events = relayed.trace()["traceEvents"]
    rounds = [e for e in events if e["ph"] == "X" and e["tid"] > 0]
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 2 * sum(len(run.traffic.sender) for run in relayed.runs.values())
    for arrow in arrows:
        enclosing = [e for e in rounds if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert any(e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in enclosing)


def test_a_trace_of_some_ranks_states_which(relayed: Simulation) -> None:
    trace = relayed.trace(ranks=[2, 0])
    assert trace["otherData"]["ranks_shown"] == [0, 2]
    assert trace["otherData"]["complete"] is False
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 2}
    with pytest.raises(ConfigError, match=r"ranks = 4: must be in \[0, 4\)"):
        relayed.trace(ranks=[4])


def test_large_plans_show_the_ranks_of_the_critical_path_first() -> None:
    programs = ["" for _ in range(80)]
    programs[70] = work(9)
    shown = simulate_with(plan_of(*programs), Unit()).trace()["otherData"]["ranks_shown"]
    assert shown == [*range(63), 70]


def test_data_is_plain_and_has_timelines(relayed: Simulation) -> None:
    data = json.loads(json.dumps(relayed.to_data(), allow_nan=False))
    assert data["forward_ms"] == pytest.approx(relayed.forward_ms, abs=1e-3)
    forward = data["runs"][0]
    assert (forward["kind"], forward["phase"]) == ("default", "forward")
    assert len(forward["ranks"]["exposed_us"]) == 4
    assert len({len(column) for column in forward["spans"].values()}) == 1
    assert [step["kind"] for step in forward["critical_path"]].count("compute") > 0
    assert "spans" not in relayed.to_data(spans=False)["runs"][0]
