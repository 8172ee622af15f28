"""The place passes on whole sequences: the tokens of each rank, and what all of them refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import bands as band_algebra
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.place import wlb
from apportion.planner.place.blend.placement import Blend
from apportion.planner.place.contiguous import Contiguous
from apportion.planner.place.distca.placement import Distca
from apportion.planner.place.flexsp import FlexSp
from apportion.planner.place.hybrid import HybridDp, MegatronHybrid
from apportion.planner.place.lpt import Lpt
from apportion.planner.place.whole import Whole
from apportion.planner.place.wlb import Wlb, busiest_us, query_pieces
from apportion.planner.place.zeppelin import Zeppelin
from apportion.planner.place.zigzag import ZigZag
from apportion.planner.problem import Placement, Problem
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.sequences import Sequences
from apportion.planner.tasks.cells import cut_cells
from tests.support.placements import MASKS, owners, place, problem, tokens, work

EVEN = [
    ZigZag(chunk=1),
    ZigZag("batch", chunk=1),
    Contiguous(),
    Wlb("sequence", chunk=1),
    Wlb("document", chunk=1),
]
PLACES = [
    *EVEN,
    *(Whole(), HybridDp(), HybridDp(capacity=10_000), MegatronHybrid(), MegatronHybrid(capacity=10_000)),
]
CAPPED = [Blend(), Blend(head=1), Distca(), Distca(head_tail="all"), Distca(head_tail="none", kv_ranges=True)]
ALL = [*PLACES, *CAPPED, Zeppelin(), Zeppelin(cap="enforce", parts=3)]


def words(placement: Placement) -> str:
    """The rank of every token, rank 0 as a, one word a block."""
    return " ".join(
        chr(ord("a") + rank) * length
        for rank, length in zip(placement.home.tolist(), placement.lengths.tolist(), strict=True)
    )


def ranks_of(made: Problem, placement: Placement, sequence: int) -> set[int]:
    begin, end = made.batch.starts[sequence : sequence + 2]
    return set(owners(placement)[begin:end].tolist())


@pytest.mark.parametrize("placer", ALL, ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 120) | st.integers(200, 900), min_size=1, max_size=14),
    mask=st.sampled_from(sorted(MASKS)),
    ranks=st.integers(1, 11),
    speed=st.sampled_from([1.0, 0.5]),
)
def test_every_token_has_one_rank_and_every_block_its_weight(
    placer: Any, lengths: list[int], mask: str, ranks: int, speed: float
) -> None:
    made, again = (problem(lengths, ranks, MASKS[mask], speeds=(speed, *[1.0] * 10)[:ranks]) for _ in "12")
    placement, repeated = place(placer, made), place(placer, again)
    assert placement.starts[0] == 0
    assert placement.starts[-1] == sum(lengths)
    assert (placement.lengths > 0).all()
    assert len(placement.home) == len(placement.weight) == len(placement.starts) - 1
    assert placement.home.min() >= 0
    assert placement.home.max() < ranks
    assert placement.weight.sum() == made.batch.area("default")
    assert (placement.weight == row_weights(made, placement.starts)).all()
    assert placement.bound <= (work(placement, ranks) / made.speeds).max() * (1 + 1e-12)
    assert placer not in CAPPED or (tokens(placement, ranks) <= made.token_caps).all()
    assert (repeated.starts == placement.starts).all()
    assert (repeated.home == placement.home).all()
    for key, execution in (placement.execution or {}).items():
        assert execution.rank.shape == (1, len(cut_cells(made.bands["default"], placement.starts)))
        assert execution.rank.min() >= 0
        assert execution.rank.max() < ranks
        assert (repeated.execution[key].rank == execution.rank).all()
    assert placer.is_uncapped
    assert type(placer).__dataclass_params__.frozen


@pytest.mark.parametrize("placer", [*EVEN, Blend()], ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), ranks=st.integers(1, 13))
def test_tokens_differ_by_at_most_one_over_all_sequences(placer: Any, lengths: list[int], ranks: int) -> None:
    own = tokens(place(placer, problem(lengths, ranks)), ranks)
    assert own.max() - own.min() <= 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12), ranks=st.integers(1, 9))
def test_zigzag_chunks_differ_by_at_most_one_and_mirror(lengths: list[int], ranks: int) -> None:
    made = problem(lengths, ranks)
    owner = owners(place(ZigZag(chunk=1), made))
    for chain in np.split(owner, made.batch.starts[1:-1]):
        turns = np.sign(np.diff(chain))
        assert (np.diff(turns[turns != 0]) <= 0).all()  # ranks ascend, then descend
        share, counts = len(chain) // (2 * ranks), np.bincount(chain, minlength=ranks)
        assert counts.min() >= 2 * share
        assert counts.max() <= 2 * share + 2


def test_one_block_per_sequence() -> None:
    shards = Sequences()(problem([5, 1, 9], 2))
    assert shards.starts.tolist() == [0, 5, 6, 15]
    assert shards.piece.tolist() == [0, 1, 2]
    assert shards.weight.tolist() == [15, 1, 45]
    assert shards.block_tokens == 0


@pytest.mark.parametrize(
    ("placer", "ranks", "lengths", "expected"),
    [
        (ZigZag(chunk=1), 4, [16], "aa bb cc dddd cc bb aa"),
        (ZigZag(chunk=1), 4, [16, 16], "aa bb cc dddd cc bb aa aa bb cc dddd cc bb aa"),
        (ZigZag(chunk=1), 4, [8, 8], "a b c dd c b a a b c dd c b a"),
        # 4 of 12 tokens are left over when every chunk has one: each rank gets one, alternately in chunk 1 and 2
        (ZigZag(chunk=1), 4, [12], "aa b cc ddd c bb a"),
        # three tokens for the ranks a, b, c; the next sequence continues with d
        (ZigZag(chunk=1), 4, [3, 1], "a c b d"),
        (ZigZag(chunk=1), 4, [1, 1, 1, 1, 1], "a b c d a"),
        (ZigZag(chunk=1), 1, [5, 7], "aaaaa aaaaaaa"),
        (ZigZag("batch", chunk=1), 4, [3, 13], "aa bb cc dddd cc bb aa"),
        (Contiguous(), 4, [3, 7], "aa bbb cc ddd"),
        (Contiguous(), 4, [2], "b d"),
        (Whole(), 2, [8, 6, 5, 5], "aaaaaaaa bbbbbb bbbbb aaaaa"),
        # 10 tokens per rank: 20 take two ranks, and the others stay whole
        (HybridDp(), 4, [5, 20, 5, 5, 5], "ccccc aaaaa bbbbbbbbbb aaaaa ddddd ccccc ddddd"),
        (Zeppelin(capacity=6), 4, [24], "aaa bbb ccc dddddd ccc bbb aaa"),
        (Zeppelin(capacity=7), 4, [26], "aaaa bbbb ccc dddddd ccc bbb aaa"),
        (Blend(), 1, [5, 7, 1], "aaaaa aaaaaaa a"),
        (Blend(), 4, [4] * 8, "dddd dddd cccc cccc bbbb bbbb aaaa aaaa"),
    ],
    ids=str,
)
def test_placements_by_hand(placer: Any, ranks: int, lengths: list[int], expected: str) -> None:
    assert words(place(placer, problem(lengths, ranks))) == expected


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_zigzag_balances_causal_work(ranks: int) -> None:
    """Exactly, if 2N divides every length; otherwise each leftover token adds at most one whole row."""
    even = place(ZigZag(chunk=1), problem([6 * ranks, 14 * ranks], ranks))
    assert len(set(work(even, ranks).tolist())) == 1
    lengths = [6 * ranks + 1, 9 * ranks + 5, 3]
    odd = work(place(ZigZag(chunk=1), problem(lengths, ranks)), ranks)
    assert odd.max() - odd.min() <= 4 * sum(lengths)


@pytest.mark.parametrize(
    "lengths", [[100] * 20_000, [5] * 20_000, np.random.default_rng(1).integers(1, 24, 20_000)]
)
def test_many_short_sequences_overload_no_rank(lengths: NDArray[Any] | list[int]) -> None:
    load = work(place(ZigZag(chunk=1), problem(lengths, 16)), 16)
    assert load.max() <= 1.02 * load.mean()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), ranks=st.integers(1, 8))
def test_whole_never_cuts_and_keeps_near_the_mean(lengths: list[int], ranks: int) -> None:
    made = problem(lengths, ranks)
    placement = place(Whole(), made)
    assert placement.starts.tolist() == made.batch.starts.tolist()
    assert tokens(placement, ranks).max() <= max(2 * sum(lengths) / ranks, 1) + max(lengths)


def test_whole_fills_ranks_exactly_to_an_explicit_cap() -> None:
    # the sequence of 8 fills one rank, and four short ones each of the others
    made = problem([8, 2, 2, 2, 2, 2, 2, 2, 2], 3, token_cap=8)
    assert tokens(place(Whole(), made), 3).tolist() == [8, 8, 8]


def test_only_whole_and_hybrid_dp_consider_speeds() -> None:
    speeds = (1.0, 1.0, 1.0, 0.25)
    for placer in (Whole(), HybridDp()):
        load = work(place(placer, problem([16] * 400, 4, speeds=speeds)), 4)
        assert load[3] < load[0]
    for placer in EVEN:
        slow, even = problem([16] * 40, 4, speeds=speeds), problem([16] * 40, 4)
        assert (owners(place(placer, slow)) == owners(place(placer, even))).all()


def test_lpt_cuts_first_for_the_rank_with_the_least_work_over_speed() -> None:
    made = problem([1, 9, 1], 2, speeds=(0.5, 1.0))
    assert words(place(Lpt(), made)) == "a bbbbbbb aa b"


def test_hybrid_dp_gives_long_sequences_consecutive_ranks_by_length() -> None:
    made = problem([64, 33, 17, 9, 5, 30, 40, 58], 8)
    placement = place(HybridDp(), made)  # 256 tokens: 32 per rank
    for sequence, length in enumerate(made.batch.lengths.tolist()):
        own = ranks_of(made, placement, sequence)
        assert len(own) == -(-length // 32)
        assert max(own) - min(own) == len(own) - 1


@pytest.mark.parametrize(
    ("placer", "ranks", "lengths", "expected"),
    [
        (HybridDp(), 4, [32] * 4, [1, 1, 1, 1]),
        (HybridDp(capacity=8), 4, [32] * 4, [4, 4, 4, 4]),
        (HybridDp(), 8, [90], [8]),
        # 16 tokens per rank: 33 need 3 ranks, so 4; 20 need 2; the short ones wait for the next turn
        (MegatronHybrid(), 4, [33, 20, 6, 5], [{0, 1, 2, 3}, {0, 1}, {2}, {3}]),
        # 2 and 3 tokens per rank: groups are widened until no rank is idle
        (MegatronHybrid(), 8, [8, 8], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (MegatronHybrid(), 8, [10, 10], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (MegatronHybrid(capacity=10), 8, [10], [8]),
        (MegatronHybrid(), 8, [90], [8]),
    ],
    ids=str,
)
def test_ranks_of_sequences_by_hand(placer: Any, ranks: int, lengths: list[int], expected: Any) -> None:
    made = problem(lengths, ranks)
    found = [ranks_of(made, place(placer, made), sequence) for sequence in range(len(lengths))]
    assert [
        len(own) if isinstance(each, int) else own for own, each in zip(found, expected, strict=True)
    ] == (expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=20), power=st.integers(0, 5))
def test_megatron_groups_are_aligned_powers_of_two(lengths: list[int], power: int) -> None:
    ranks = 2**power
    made = problem(lengths, ranks)
    size = -(-sum(lengths) // ranks)
    placement = place(MegatronHybrid(), made)
    for sequence, length in enumerate(lengths):
        own = ranks_of(made, placement, sequence)
        if length < 2 * ranks:
            continue  # fewer tokens than chunks need not reach all ranks of the group
        assert len(own) & (len(own) - 1) == 0
        assert len(own) >= min(ranks, -(-length // size))
        assert min(own) % len(own) == 0
        assert max(own) - min(own) == len(own) - 1


# ------------------------------------------------------------------------------------------------ refusals

TOO_LONG = r"sequence 1 has 90 tokens and needs 9 ranks of 10.*at least 12"


@pytest.mark.parametrize(
    ("placer", "lengths", "ranks", "more", "message"),
    [
        (Whole(), [10, 50, 10], 4, {"token_cap": 40}, "sequence 1 has 50 tokens.* 40,.*token_cap to 50"),
        (Whole(), [6, 6, 6], 2, {"token_cap": 10}, r"1 of 3 whole sequences \(6 tokens\).*at most 10 tokens"),
        (HybridDp(capacity=10), [5, 90, 5], 8, {}, TOO_LONG),
        (MegatronHybrid(capacity=10), [5, 90, 5], 8, {}, TOO_LONG),
        (Blend(), [40, 30, 30], 4, {"token_cap": 24}, "token_cap to at least 25"),
        (Zeppelin(capacity=49), [100], 2, {}, r"raise recipe\.place\.zeppelin\.capacity to at least 50"),
        (Zeppelin("paper", capacity=100), [40] * 3, 2, {"token_cap": 60}, "token_cap is 60"),
        (Distca(), [100] * 2, 4, {"home_ranks": [(0,), (0,)], "token_cap": 120}, "token_cap is 120"),
        (Distca(receive_bytes=1000), [5000, 9, 9], 3, {"home_ranks": [[0], [1], [2]]}, "receive_bytes 1000"),
        (Distca(buffer_bytes=100), [5000], 4, {}, "even without any moves"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(placer: Any, lengths: Any, ranks: int, more: Any, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        place(placer, problem(lengths, ranks, **more))


@pytest.mark.parametrize("placer", [*PLACES, Blend(), Zeppelin(), FlexSp()], ids=str)
def test_home_ranks_are_refused(placer: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch.home_ranks.*recipe fcp"):
        place(placer, problem([8, 8], 2, home_ranks=[[1], None]))


@pytest.mark.parametrize(
    "placer", [ZigZag(chunk=1), HybridDp(), MegatronHybrid(), Wlb("document", chunk=1), Blend()], ids=str
)
def test_an_explicit_cap_is_obeyed_or_refused_with_numbers(placer: Any) -> None:
    lengths = [40, 17, 9, 9, 9, 5, 3, 3]
    used = int(tokens(place(placer, problem(lengths, 4)), 4).max())
    assert tokens(place(placer, problem(lengths, 4, token_cap=used)), 4).max() <= used
    with pytest.raises(CapacityError, match="token_cap"):
        place(placer, problem(lengths, 4, token_cap=23))


# ------------------------------------------------------------------------------------------------ wlb


class Tiles:
    """A cost model whose kernel computes whole tiles of 128 query rows."""

    def attention_us(self, phase: str, q_rows: Any, kv_rows: Any, pairs: Any, *heads: int) -> NDArray[Any]:
        return -(-q_rows // 128) * 128 * pairs / q_rows


class Priced(Problem):
    """A problem with the test's own cost model."""

    cost = Tiles()


def priced(lengths: list[int], ranks: int) -> Priced:
    made = problem(lengths, ranks)
    return Priced(made.batch, made.cluster, made.model, made.policy)


@pytest.mark.parametrize(
    ("lengths", "ranks", "shard"),
    [
        ([8192, 512, 512], 4, "document"),
        ([100] * 64, 8, "sequence"),
        ([3000, 200, 200, 100, 100], 8, None),
        ([4096], 8, None),
    ],
    ids=str,
)
def test_wlb_takes_the_cheaper_sharding(lengths: list[int], ranks: int, shard: str | None) -> None:
    made = priced(lengths, ranks)
    found = {name: place(Wlb(name, chunk=1), made) for name in ("sequence", "document", "auto")}
    times = {name: busiest_us(made, placement) for name, placement in found.items()}
    assert times["auto"] == min(times.values())
    assert shard is None or words(found["auto"]) == words(found[shard])


@pytest.mark.parametrize(
    ("lengths", "shard"),
    [([512] * 256, "sequence"), ([65536] + [1024] * 64, "document"), ([32768], "document")],
    ids=["short documents", "one long among short", "one document"],
)
def test_wlb_on_the_built_in_hardware(lengths: list[int], shard: str) -> None:
    model = ap.Model(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn=14336, layers=2)
    made = problem(lengths, 8, model=model)
    assert words(place(Wlb(chunk=1), made)) == words(place(Wlb(shard, chunk=1), made))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    mask=st.sampled_from(sorted(MASKS)),
    ranks=st.integers(1, 6),
)
def test_priced_pieces_cover_the_mask(lengths: list[int], mask: str, ranks: int) -> None:
    made = problem(lengths, ranks, MASKS[mask])
    placement = place(Wlb("document", chunk=1), made)
    pieces, block = query_pieces(made.bands["default"], placement.starts, np.ones(len(placement.home), bool))
    areas = band_algebra.area(pieces)
    assert (areas > 0).all()
    assert (np.bincount(block, areas, len(placement.home)) == placement.weight).all()


def test_wlb_prices_a_sample_of_ranks_if_pieces_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    made = priced([2048] * 8, 8)
    placement = place(Wlb("document", chunk=1), made)
    exact = busiest_us(made, placement)
    monkeypatch.setattr(wlb, "PRICED_PIECES", len(placement.home) // 4)
    assert busiest_us(made, placement) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("placer", [ZigZag(chunk=1), Wlb("document", chunk=1), HybridDp()], ids=str)
def test_placements_balance_a_workload_of_64_ranks(placer: Any) -> None:
    placement = place(placer, problem(lognormal_lengths(1, 64 * 4096).tolist(), 64))
    load, own = work(placement, 64), tokens(placement, 64)
    if isinstance(placer, HybridDp):
        assert own.max() <= 1.2 * own.mean()
    else:
        assert load.max() <= 1.01 * load.mean()


def test_zigzag_gives_short_sequences_fewer_ranks() -> None:
    made = problem([4096, 300, 300, 600, 100], 4)
    ranks = [ranks_of(made, place(ZigZag(chunk=128), made), sequence) for sequence in range(5)]
    assert [len(some) for some in ranks] == [4, 1, 1, 2, 1]
    assert ranks[1] | ranks[2] | ranks[3] == {0, 1, 2, 3}  # on the ranks with the fewest tokens
