"""The placements of today's trainers: the tokens of each rank."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import bands as band_algebra
from apportion.ir.request.policy import Step
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.place import wlb
from apportion.planner.place.contiguous import Contiguous
from apportion.planner.place.hybrid import HybridDp, MegatronHybrid
from apportion.planner.place.whole import Whole
from apportion.planner.place.wlb import Wlb, busiest_us, query_pieces
from apportion.planner.place.zigzag import ZigZag
from apportion.planner.problem import Placement, Problem
from apportion.planner.recipe.registry import build
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.sequences import Sequences
from tests.support.placements import MASKS, problem

PLACES = [
    ZigZag(chunk=1),
    ZigZag("batch", chunk=1),
    Contiguous(),
    Whole(),
    HybridDp(),
    HybridDp(capacity=10_000),
    MegatronHybrid(),
    MegatronHybrid(capacity=10_000),
    Wlb("sequence", chunk=1),
    Wlb("document", chunk=1),
]
EVEN = [
    ZigZag(chunk=1),
    ZigZag("batch", chunk=1),
    Contiguous(),
    Wlb("sequence", chunk=1),
    Wlb("document", chunk=1),
]


def place(placer: Any, made: Problem | Priced) -> Placement | None:
    return placer(made, Sequences()(made))


def owners(placement: Placement) -> NDArray[Any]:
    """The rank of every token."""
    return np.repeat(placement.home, placement.lengths)


def letters(placement: Placement) -> str:
    """The rank of every token as one word: rank 0 is a."""
    return "".join(chr(ord("a") + rank) for rank in owners(placement).tolist())


def tokens(placement: Placement, ranks: int) -> NDArray[Any]:
    return placement.rank_sums(placement.lengths, ranks)


def work(placement: Placement, ranks: int) -> NDArray[Any]:
    return placement.rank_sums(placement.weight, ranks)


def ranks_of(made: Problem, placement: Placement, sequence: int) -> set[int]:
    begin, end = made.batch.starts[sequence : sequence + 2]
    return set(owners(placement)[begin:end].tolist())


@pytest.mark.parametrize("placer", PLACES, ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=14),
    mask=st.sampled_from(sorted(MASKS)),
    ranks=st.integers(1, 11),
)
def test_every_token_has_one_rank_and_every_block_its_weight(
    placer: Any, lengths: list[int], mask: str, ranks: int
) -> None:
    made = problem(lengths, ranks, MASKS[mask])
    placement = place(placer, made)
    assert placement.starts[0] == 0
    assert placement.starts[-1] == sum(lengths)
    assert (placement.lengths > 0).all()
    assert len(placement.home) == len(placement.weight) == len(placement.starts) - 1
    assert placement.home.min() >= 0
    assert placement.home.max() < ranks
    assert placement.weight.sum() == made.batch.area("default")
    assert (placement.weight == row_weights(made, placement.starts)).all()
    assert placement.bound <= work(placement, ranks).max() * (1 + 1e-12)
    repeated = place(placer, problem(lengths, ranks, MASKS[mask]))
    assert (repeated.starts == placement.starts).all()
    assert (repeated.home == placement.home).all()


@pytest.mark.parametrize("placer", EVEN, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30), ranks=st.integers(1, 13))
def test_tokens_differ_by_at_most_one_over_all_sequences(
    placer: ZigZag | Wlb | Contiguous, lengths: list[int], ranks: int
) -> None:
    own = tokens(place(placer, problem(lengths, ranks)), ranks)
    assert own.max() - own.min() <= 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12), ranks=st.integers(1, 9))
def test_zigzag_chunks_differ_by_at_most_one_and_mirror(lengths: list[int], ranks: int) -> None:
    made = problem(lengths, ranks)
    owner = owners(place(ZigZag(chunk=1), made))
    for begin, end in zip(made.batch.starts[:-1], made.batch.starts[1:], strict=True):
        chain = owner[begin:end]
        share = len(chain) // (2 * ranks)
        turn = int(
            chain.argmax()
        )  # the last rank's first token separates the ascending half from the descending one
        while turn < len(chain) and chain[turn] == chain.max():
            turn += 1
        assert (np.diff(chain[:turn]) >= 0).all()
        assert (np.diff(chain[turn:]) <= 0).all()
        counts = np.bincount(chain, minlength=ranks)
        assert counts.min() >= 2 * share
        assert counts.max() <= 2 * share + 2


def test_one_block_per_sequence() -> None:
    made = problem([5, 1, 9], 2)
    shards = Sequences()(made)
    assert shards.starts.tolist() == [0, 5, 6, 15]
    assert shards.piece.tolist() == [0, 1, 2]
    assert shards.weight.tolist() == [15, 1, 45]
    assert shards.block_tokens == 0


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([16], "aabbccddddccbbaa"),
        ([8, 8], "abcddcbaabcddcba"),
        # 4 of 12 tokens are left over when every chunk has one: each rank gets one, alternately in chunk 1 and 2
        ([12], "aabcc" + "dddcbba"),
        # three tokens for the ranks a, b, c; the next sequence continues with d
        ([3, 1], "acb" + "d"),
        ([1, 1, 1, 1, 1], "abcda"),
    ],
)
def test_zigzag_by_hand(lengths: list[int], expected: str) -> None:
    assert letters(place(ZigZag(chunk=1), problem(lengths, 4))) == expected


def test_zigzag_joins_neighbours_of_one_rank_within_a_sequence() -> None:
    placement = place(ZigZag(chunk=1), problem([16, 16], 4))
    assert placement.starts.tolist() == [0, 2, 4, 6, 10, 12, 14, 16, 18, 20, 22, 26, 28, 30, 32]
    assert placement.home.tolist() == [0, 1, 2, 3, 2, 1, 0] * 2


def test_zigzag_over_the_batch_cuts_the_token_axis() -> None:
    placement = place(ZigZag("batch", chunk=1), problem([3, 13], 4))
    assert letters(placement) == "aabbccddddccbbaa"
    assert len(placement.home) == 7


def test_zigzag_on_one_rank_leaves_sequences_whole() -> None:
    assert place(ZigZag(chunk=1), problem([5, 7], 1)).starts.tolist() == [0, 5, 12]


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


def test_contiguous_shares() -> None:
    placement = place(Contiguous(), problem([3, 7], 4))
    assert letters(placement) == "aabbbccddd"
    assert len(placement.home) == 4
    assert letters(place(Contiguous(), problem([2], 4))) == "bd"


def test_whole_sequences_go_to_the_least_loaded() -> None:
    made = problem([8, 6, 5, 5], 2)
    placement = place(Whole(), made)
    assert placement.starts.tolist() == made.batch.starts.tolist()
    assert letters(placement) == "aaaaaaaa" + "bbbbbb" + "bbbbb" + "aaaaa"


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


def test_whole_names_the_sequence_that_no_rank_can_hold() -> None:
    with pytest.raises(
        CapacityError, match=r"sequence 1 has 50 tokens.*token_cap of 40.*raise token_cap to 50"
    ):
        place(Whole(), problem([10, 50, 10], 4, token_cap=40))


def test_whole_reports_the_sequences_that_do_not_fit() -> None:
    with pytest.raises(CapacityError, match=r"1 of 3 whole sequences \(6 tokens\).*at most 10 tokens"):
        place(Whole(), problem([6, 6, 6], 2, token_cap=10))


def test_only_whole_and_hybrid_dp_consider_speeds() -> None:
    speeds = (1.0, 1.0, 1.0, 0.25)
    for placer in (Whole(), HybridDp()):
        load = work(place(placer, problem([16] * 400, 4, speeds=speeds)), 4)
        assert load[3] < load[0]
    for placer in EVEN:
        slow, even = problem([16] * 40, 4, speeds=speeds), problem([16] * 40, 4)
        assert (owners(place(placer, slow)) == owners(place(placer, even))).all()


def test_a_bound_respects_speeds() -> None:
    made = problem([64] * 8, 4, speeds=(1.0, 1.0, 1.0, 0.5))
    for placer in PLACES:
        placement = place(placer, made)
        assert placement.bound <= (work(placement, 4) / made.speeds).max() * (1 + 1e-12)


def test_hybrid_dp_by_hand() -> None:
    # 40 tokens on 4 ranks: 10 per rank; 20 tokens take two ranks, and the others stay whole
    placement = place(HybridDp(), problem([5, 20, 5, 5, 5], 4))
    assert letters(placement)[5:25] == "aaaaabbbbbbbbbbaaaaa"
    rest = letters(placement)[:5] + letters(placement)[25:]
    assert set(rest) == {"c", "d"}
    assert tokens(placement, 4).tolist() == [10] * 4


def test_hybrid_dp_gives_long_sequences_consecutive_ranks_by_length() -> None:
    made = problem([64, 33, 17, 9, 5, 30, 40, 58], 8, ap.masks.causal())
    placement = place(HybridDp(), made)  # 256 tokens: 32 per rank
    for sequence, length in enumerate(made.batch.lengths.tolist()):
        own = ranks_of(made, placement, sequence)
        assert len(own) == -(-length // 32)
        assert max(own) - min(own) == len(own) - 1


def test_hybrid_dp_smaller_capacity_spreads_more() -> None:
    made = problem([32, 32, 32, 32], 4)
    assert all(len(ranks_of(made, place(HybridDp(), made), s)) == 1 for s in range(4))
    assert all(len(ranks_of(made, place(HybridDp(capacity=8), made), s)) == 4 for s in range(4))


def test_megatron_hybrid_by_hand() -> None:
    # 64 tokens on 4 ranks: 16 per rank; 33 tokens need 3 ranks, so 4; 20 need 2; the short ones wait for the next turn
    made = problem([33, 20, 6, 5], 4)
    placement = place(MegatronHybrid(), made)
    assert ranks_of(made, placement, 0) == {0, 1, 2, 3}
    assert ranks_of(made, placement, 1) == {0, 1}
    assert ranks_of(made, placement, 2) == {2}
    assert ranks_of(made, placement, 3) == {3}


def test_megatron_hybrid_widens_groups_until_no_rank_is_idle() -> None:
    made = problem([8, 8], 8)  # 2 tokens per rank: four ranks each
    assert [ranks_of(made, place(MegatronHybrid(), made), s) for s in (0, 1)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    made = problem([10, 10], 8)  # 3 ranks each, rounded up to 4
    assert [ranks_of(made, place(MegatronHybrid(), made), s) for s in (0, 1)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    alone = problem([10], 8)
    wide = place(MegatronHybrid(capacity=10), alone)
    assert ranks_of(alone, wide, 0) == set(range(8))


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


@pytest.mark.parametrize("placer", [HybridDp(capacity=10), MegatronHybrid(capacity=10)], ids=str)
def test_a_document_longer_than_all_ranks_is_refused_under_a_cap(placer: HybridDp | MegatronHybrid) -> None:
    with pytest.raises(CapacityError, match=r"sequence 1 has 90 tokens and needs 9 ranks of 10.*at least 12"):
        place(placer, problem([5, 90, 5], 8))
    everywhere = place(type(placer)(), problem([90], 8))
    assert set(everywhere.home.tolist()) == set(range(8))


@pytest.mark.parametrize("placer", PLACES, ids=str)
def test_home_ranks_are_refused(placer: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch.home_ranks.*recipe fcp"):
        place(placer, problem([8, 8], 2, home_ranks=[[1], None]))


@pytest.mark.parametrize(
    "placer", [ZigZag(chunk=1), HybridDp(), MegatronHybrid(), Wlb("document", chunk=1)], ids=str
)
def test_an_explicit_cap_is_obeyed_or_refused_with_numbers(placer: Any) -> None:
    lengths = [40, 17, 9, 9, 9, 5, 3, 3]
    used = int(tokens(place(placer, problem(lengths, 4)), 4).max())
    assert tokens(place(placer, problem(lengths, 4, token_cap=used)), 4).max() <= used
    with pytest.raises(CapacityError, match="token_cap"):
        place(placer, problem(lengths, 4, token_cap=23))


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("zigzag", "over", "rank"),
        ("wlb", "shard", "chunk"),
        ("hybrid_dp", "capacity", 0),
        ("hybrid_dp", "capacity", True),
        ("megatron_hybrid", "capacity", 1.5),
    ],
)
def test_wrong_parameters_are_refused(name: str, parameter: str, value: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Step("place", name, {parameter: value}))
    assert caught.value.field == f"recipe.place.{name}.{parameter}"


@pytest.mark.parametrize("placer", [Sequences(), *PLACES], ids=str)
def test_passes_are_frozen(placer: Any) -> None:
    with pytest.raises((FrozenInstanceError, TypeError)):
        placer.over = placer.capacity = placer.shard = None
    if not isinstance(placer, Sequences):
        assert placer.is_uncapped


class Tiles:
    """A cost model whose kernel computes whole tiles of query rows."""

    def __init__(self, tile: int) -> None:
        self.tile = tile

    def attention_us(
        self,
        phase: str,
        q_rows: NDArray[Any],
        kv_rows: NDArray[Any],
        pairs: NDArray[Any],
        q_heads: int,
        kv_heads: int,
    ) -> NDArray[Any]:
        return -(-q_rows // self.tile) * self.tile * pairs / q_rows


class Priced(Problem):
    """A problem with the test's own cost model."""

    cost = Tiles(128)


def priced(lengths: list[int], ranks: int) -> Priced:
    made = problem(lengths, ranks)
    return Priced(made.batch, made.cluster, made.model, made.policy)


def test_wlb_cuts_documents_or_the_pack_depending_on_their_lengths() -> None:
    skewed = priced([8192, 512, 512], 4)
    assert (owners(place(Wlb(chunk=1), skewed)) == owners(place(Wlb("document", chunk=1), skewed))).all()
    short = priced([100] * 64, 8)
    assert (owners(place(Wlb(chunk=1), short)) == owners(place(Wlb("sequence", chunk=1), short))).all()


def test_wlb_takes_the_cheaper_sharding() -> None:
    for lengths in ([8192, 512, 512], [100] * 64, [3000, 200, 200, 100, 100], [4096]):
        made = priced(lengths, 8)
        choices = [busiest_us(made, place(Wlb(shard, chunk=1), made)) for shard in ("sequence", "document")]
        assert busiest_us(made, place(Wlb(chunk=1), made)) == min(choices)


@pytest.mark.parametrize(
    ("lengths", "shard"),
    [([512] * 256, "sequence"), ([65536] + [1024] * 64, "document"), ([32768], "document")],
    ids=["short documents", "one long among short", "one document"],
)
def test_wlb_on_the_built_in_hardware(lengths: list[int], shard: str) -> None:
    made = problem(lengths, 8)
    model = ap.Model(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn=14336, layers=2)
    made = Problem(made.batch, made.cluster, model, made.policy)
    assert letters(place(Wlb(chunk=1), made)) == letters(place(Wlb(shard, chunk=1), made))


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


@pytest.mark.parametrize("placer", PLACES, ids=str)
def test_placements_balance_a_workload_of_64_ranks(placer: Any) -> None:
    """Placements that balance tokens or causal work do so on 64 ranks."""
    made = problem(lognormal_lengths(1, 64 * 4096).tolist(), 64)
    placement = place(placer, made)
    load, own = work(placement, 64), tokens(placement, 64)
    if placer in EVEN:
        assert own.max() - own.min() <= 1
    if placer in (ZigZag(chunk=1), Wlb("document", chunk=1)):
        assert load.max() <= 1.01 * load.mean()
    if isinstance(placer, HybridDp) and placer.capacity is None:
        assert own.max() <= 1.2 * own.mean()


def test_zigzag_gives_short_sequences_fewer_ranks() -> None:
    made = problem([4096, 300, 300, 600, 100], 4)
    placement = place(ZigZag(chunk=128), made)
    lengths = np.diff(placement.starts)
    ranks = [
        set(placement.home[(placement.starts[:-1] >= low) & (placement.starts[:-1] < high)].tolist())
        for low, high in zip(made.batch.starts[:-1], made.batch.starts[1:], strict=True)
    ]
    assert [len(some) for some in ranks] == [4, 1, 1, 2, 1]
    assert ranks[1] | ranks[2] | ranks[3] == {0, 1, 2, 3}  # on the ranks with the fewest tokens
    assert lengths.sum() == made.batch.tokens
