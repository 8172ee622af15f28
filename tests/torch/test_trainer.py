"""The trainer seam: loader, loss, baselines, refused arguments, self-test and a short demo."""

import json
from itertools import chain

import jobs
import numpy as np
import pytest
import torch
from cases import model, recipe

from apportion.ir import masks
from apportion.ir.batch import Batch, Sequence
from apportion.ir.cluster import Cluster
from apportion.ir.errors import CapacityError, ConfigError, ExecutionError, UnknownNameError
from apportion.planner import api
from apportion.planner.recipes import find_recipe
from apportion.trainer import demo, selftest
from apportion.trainer.attention import PlanHandle, planned_attention
from apportion.trainer.baselines import contiguous, zigzag_ring
from apportion.trainer.loader import PlannedLoader, local_rows
from apportion.trainer.loss import IGNORED, normalised_loss

LENGTHS = [40, 9, 33, 1, 25, 60, 12]


class Recorded:
    """A dataset that remembers what was read; sample i is 100 i, 100 i + 1, …"""

    def __init__(self, lengths):
        self.lengths, self.read = lengths, []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.read.append(index)
        return np.arange(self.lengths[index]) + 100 * index


def piece_of(batch, ranks=1, rank=0, **options):
    return api.plan(batch, Cluster(1, ranks), model(2, **options), recipe(), verify=False).for_rank(rank)


# --- loader


def test_every_token_is_on_one_rank_with_its_label_and_position(pool):
    results = pool.run(jobs.loaded, 3, LENGTHS)
    for step in zip(*results, strict=True):
        tokens, labels, positions = (np.concatenate([rank[i] for rank in step]) for i in range(3))
        order = np.argsort(tokens)
        assert len(set(tokens.tolist())) == len(tokens)
        np.testing.assert_array_equal(tokens % 100, positions)
        last = np.append(np.diff(tokens[order]) != 1, True)
        np.testing.assert_array_equal(labels[order], np.where(last, IGNORED, tokens[order] + 1))
        assert {rank[3] for rank in step} == {step[0][3]}
    seen = np.concatenate([part[0] for rank in results for part in rank])
    assert len(seen) == sum(LENGTHS)


def test_iterations_end_with_their_last_microbatch_and_count_all_labels():
    dataset = Recorded(LENGTHS)
    loader = PlannedLoader(dataset, LENGTHS, Cluster(1, 1), model(2), 64, microbatches=2, shuffle=False)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    assert [(b.iteration, b.microbatch, b.is_last) for b in batches] == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, False),
        (1, 1, True),
    ]
    for iteration in (0, 1):
        group = [b for b in batches if b.iteration == iteration]
        assert {b.valid_tokens for b in group} == {sum(int((b.labels != IGNORED).sum()) for b in group)}
    assert sorted(dataset.read) == list(range(len(LENGTHS)))


def test_a_pack_step_spreads_the_samples_of_an_iteration_anew():
    lengths = [40, 8, 8, 8, 30, 10, 16, 4]
    loader = PlannedLoader(
        Recorded(lengths), lengths, Cluster(1, 1), model(2), 64, microbatches=2, shuffle=False, recipe="wlb"
    )
    batches = list(loader)
    assert [(b.iteration, b.microbatch, b.is_last) for b in batches] == [(0, 0, False), (0, 1, True)]
    assert all(len(b.tokens) <= 64 for b in batches)
    assert sorted(np.concatenate([b.tokens for b in batches]).tolist()) == sorted(
        chain(*(Recorded(lengths)[i].tolist() for i in range(len(lengths))))
    )
    deferring = {**find_recipe("wlb").to_data()["steps"], "pack": {"wlb": {"defer": True}}}
    loader = PlannedLoader(
        Recorded(lengths), lengths, Cluster(1, 1), model(2), 64, recipe={"name": "mine", "steps": deferring}
    )
    with pytest.raises(ConfigError, match="defer"):
        list(loader)


def test_order_follows_seed_and_epoch():
    def order(loader):
        return [b.tokens.tolist() for b in loader]

    loader = PlannedLoader(Recorded(LENGTHS), LENGTHS, Cluster(1, 1), model(2), 64, seed=3)
    first, again = order(loader), order(loader)
    loader.set_epoch(1)
    assert first == again
    assert sorted(chain(*order(loader))) == sorted(chain(*first))
    assert order(loader) != first


def test_a_rank_reads_only_what_it_holds():
    batch = Batch.from_lengths([8, 8, 8, 8])
    for rank in range(4):
        piece, data = piece_of(batch, 4, rank), Recorded([8] * 4)
        local_rows(piece, batch, data.__getitem__)
        assert data.read == sorted(set(piece.layout("attention").spans["sequence"].tolist()))
        assert len(data.read) < 4


def test_labels_follow_the_mask_s_own_rule_and_small_dtypes_do_not_wrap():
    batch = Batch.from_sequences([Sequence(9, masks.shared_question(3, [4, 2]))])
    ids = np.arange(250, 259).astype(np.uint16)
    tokens, labels = local_rows(piece_of(batch), batch, lambda _: ids)
    want = batch.labels()[tokens.numpy() - 250]
    np.testing.assert_array_equal(labels.numpy(), np.where(want >= 0, want + 250, IGNORED))


def test_loader_refuses_what_it_cannot_do():
    build = lambda **more: PlannedLoader(Recorded([9]), [9], Cluster(1, 1), model(2), **more)  # noqa: E731
    with pytest.raises(CapacityError, match="sample 0 has 9 tokens, a microbatch takes 8"):
        build(tokens=8)
    with pytest.raises(UnknownNameError, match="source"):
        build(tokens=9, source="remote")
    with pytest.raises(ConfigError, match="microbatches"):
        build(tokens=9, microbatches=0)
    for lengths, says in [
        ([9.0], r"lengths\[0\] = 9.0: must be an integer"),
        (np.array([9.0]), "integer dtype"),
        ([0], r"lengths\[0\]"),
        ([5, 4], "the dataset has 1 samples"),
    ]:
        with pytest.raises(ConfigError, match=says):
            PlannedLoader(Recorded([9]), lengths, Cluster(1, 1), model(2), 9)
    assert len(PlannedLoader(Recorded([9]), torch.tensor([9]), Cluster(1, 1), model(2), 9)) == 1
    batch = Batch.from_lengths([4])
    with pytest.raises(ExecutionError, match="planned with length 4"):
        local_rows(piece_of(batch), batch, lambda _: [1, 2, 3])


# --- loss


def test_shares_of_ranks_and_microbatches_sum_to_the_mean():
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 7, generator=gen)
    labels = torch.tensor([1, 2, IGNORED, 3, 0, 6, IGNORED, 5, 4, 2])
    shares = [normalised_loss(logits[a:b], labels[a:b], 8) for a, b in ((0, 4), (4, 4), (4, 10))]
    whole = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    torch.testing.assert_close(torch.stack(shares).sum(), whole)
    assert shares[1].item() == 0
    torch.testing.assert_close(normalised_loss(logits, labels, 8, averaged_over=4), whole * 4)


# --- attention arguments


def inputs_of(handle):
    header = handle.slice.header
    shapes = [
        (header.q_heads, header.head_dim),
        (header.kv_heads, header.head_dim),
        (header.kv_heads, header.v_head_dim),
    ]
    return [torch.zeros(handle.rows, *shape, dtype=handle.dtype) for shape in shapes]


def test_what_planned_attention_does_not_do_is_refused_by_name():
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    for name, value in {
        "dropout_p": 0.1,
        "alibi_slopes": torch.ones(2),
        "attn_bias": torch.ones(6, 6),
        "attn_mask": torch.ones(6, 6),
        "is_causal": True,
    }.items():
        with pytest.raises(ConfigError, match=name):
            planned_attention(q, k, v, handle, **{name: value})
    planned_attention(q, k, v, handle, dropout_p=0.0, attn_mask=None, is_causal=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_prob'"):
        planned_attention(q, k, v, handle, dropout_prob=0.1)
    with pytest.raises(ExecutionError, match="cross-attention"):
        planned_attention(q, k[:3], v[:3], handle)
    with pytest.raises(ConfigError, match="softcap"):
        planned_attention(q, k, v, handle, softcap=0.0)


def test_wrong_shapes_dtypes_kinds_and_ranks_are_errors():
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    with pytest.raises(
        ExecutionError, match=r"q has shape \(5, 2, 8\); this rank's part of the plan is \(6, 2, 8\)"
    ):
        planned_attention(q[:5], k[:5], v[:5], handle)
    with pytest.raises(ExecutionError, match=r"q has dtype torch\.float32, the plan torch\.float64"):
        planned_attention(q.float(), k.float(), v.float(), handle)
    with pytest.raises(UnknownNameError, match="kind"):
        planned_attention(q, k, v, handle, kind="local")
    with pytest.raises(ExecutionError, match="a slice of rank 1 of 2 on rank 0 of 1"):
        PlanHandle(piece_of(Batch.from_lengths([6]), 2, 1))


def test_a_kind_must_be_named_where_there_are_several():
    kinds = {"global": masks.causal(), "local": masks.sliding_window(3)}
    handle = PlanHandle(piece_of(Batch.from_lengths([6], kinds), kinds=kinds))
    with pytest.raises(ConfigError, match="several attention kinds"):
        planned_attention(*inputs_of(handle), handle)


def test_a_batch_dimension_of_one_is_kept():
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = (torch.randn_like(x) for x in inputs_of(handle))
    out = planned_attention(q[None], k[None], v[None], handle)
    torch.testing.assert_close(out[0], planned_attention(q, k, v, handle))
    with pytest.raises(ExecutionError, match="batch dimension must be 1"):
        planned_attention(q.expand(2, *q.shape), k[None], v[None], handle)


# --- baselines


def test_baselines_count_loads_bytes_and_tokens_exactly():
    batch, m = Batch.from_lengths([8]), model(2, "fp32")
    filled = contiguous(batch, 2, m)
    # queries 0-3 have 10 pairs, 4-7 have 26; rank 1 fetches 4 keys
    row = 3 * 2 * 8 * 4  # k and v, fp32: out, out again, gradient home
    assert filled.compute_imbalance == pytest.approx(26 / 18 - 1)
    assert (filled.token_imbalance, filled.bytes_moved, filled.slots) == (0, 4 * row, 3)
    ring = zigzag_ring(batch, 2, m)
    # chunks of 2 tokens hold 3, 7, 11, 15 pairs: rank 0 has the first and last
    assert ring.compute_imbalance == ring.token_imbalance == 0
    assert (ring.bytes_moved, ring.slots) == (8 * (2 + 2) * 2 * 8 * 4, 4)


def test_baselines_of_a_window_fetch_only_what_it_sees():
    batch = Batch.from_lengths([100], masks.sliding_window(5))
    assert contiguous(batch, 4, model(2)).bytes_moved == 3 * 4 * 3 * 2 * 8 * 8


# --- self-test and demo


def test_selftest_in_one_process(capsys):
    assert selftest.run(as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert {row["kind"] for row in record["rows"]} == {"causal", "window"}
    assert all(row["error"] <= 2 * max(row["plain_error"], 1e-7) for row in record["rows"])


def test_demo_agrees_in_two_steps(capsys):
    assert demo.run(steps=2, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert record["largest_difference"] <= record["tolerance"]
    assert len(record["losses"]["planned"]) == len(record["losses"]["plain"]) == 2
    assert set(record["layouts"]) == {"planned (fcp)", "contiguous", "zig-zag ring"}


def test_demo_exits_non_zero_where_losses_differ(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_train_planned", lambda steps: iter([1.0]))
    monkeypatch.setattr(demo, "_train_plain", lambda steps: iter([1.001]))
    assert demo.run(steps=1) == 1
    assert "losses differ by 1.0e-03" in capsys.readouterr().out


def test_demo_without_a_repository_uses_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path)
    assert len(demo._corpus()) > 10_000
    assert len(demo._workload(None)) > 10
