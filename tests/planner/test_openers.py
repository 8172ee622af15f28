"""Tasks that overwrite instead of accumulate, and rows that are cleared for other tasks."""

import pytest

import apportion as ap
from apportion import Batch, Cluster, Model, Sequence, masks
from apportion.ir.isa import Op

MODEL = Model(q_heads=4, kv_heads=2, head_dim=64, layers=1)


QUESTION = masks.shared_question(40, [30, 50, 20])


@pytest.mark.parametrize("mask", [masks.causal(), QUESTION, masks.full(), masks.prefix_lm(20)], ids=str)
def test_whole_sequences_at_home_need_no_clear(mask: masks.Mask) -> None:
    batch = Batch.from_sequences([Sequence(140, mask)] * 4)
    steps = {"shard": {"sequences": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}
    made = ap.plan(batch, Cluster(1, 2), MODEL, recipe={"name": "whole", "steps": steps})
    for program in made.programs.values():
        count = program["instructions"]["count"]
        assert not count[program["instructions"]["op"] == Op.CLEAR].any()


def test_answers_share_one_task_on_their_question() -> None:
    batch = Batch.from_sequences([Sequence(140, QUESTION)])
    made = ap.plan(batch, Cluster(1, 1), MODEL, recipe="contiguous")
    program = made.programs["default", "forward"]
    rows = program["operands"]["rows"][program["tasks"]["q"]]
    # the question with its first answer; the two other answers; their common task on the question
    assert sorted(rows.tolist()) == [20, 50, 70, 70]
