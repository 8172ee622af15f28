"""`apportion show --svg`: the drawing matches the programs and is valid XML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, VerifyError, plan as make_plan, simulate
from apportion.cli.pictures import draw as pictures, svg
from apportion.cli.pictures.draw import CELLS, Colours, draw
from apportion.cli.pictures.mask_cells import Axis, axis_of, owners
from apportion.cli.printed import plans as printed
from apportion.ir.masks import bands, specs as masks
from apportion.ir.request.workload import lognormal_lengths
from apportion.ir.verify.subject import Subject
from apportion.planner.recipe.recipes import entries
from apportion.report.content import verdict
from tests.support.commands import Command
from tests.support.sparse import sparse

SVG = "{http://www.w3.org/2000/svg}"
MODEL = Model(q_heads=8, kv_heads=4, head_dim=64, layers=2)
LENGTHS = (1500, 700, 300, 61)
Spec = masks.Mask | Mapping[str, masks.Mask] | None


def planned(recipe: str = "fcp", mask: Spec = None, ranks: int = 4, lengths: Any = LENGTHS) -> Plan:
    batch = Batch.from_lengths(lengths, mask)
    return make_plan(batch, Cluster(1, ranks), MODEL, recipe=recipe, seed=0, verify=False)


def fills(text: str) -> set[str]:
    return set(re.findall(r'<path fill="([^"]+)"', text))


def allowed(plan: Plan, axis: Axis) -> np.ndarray:
    """bool [cells, cells]: whether the dense mask allows any pair of a cell."""
    tokens = plan.request.batch.tokens
    dense = bands.dense(plan.request.batch.bands("default"), tokens, tokens)
    sums = np.add.reduceat(np.add.reduceat(dense, axis.edges[:-1], axis=0), axis.edges[:-1], axis=1)
    return np.asarray(sums > 0)


# --- the rank of each cell


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("recipe", sparse([name for name in entries() if name != "round_robin"], 3))
def test_exactly_the_cells_of_the_mask_have_a_rank(recipe: str, phase: str) -> None:
    plan = planned(recipe)
    axis = axis_of(plan, 40)
    np.testing.assert_array_equal(owners(plan, "default", phase, axis) >= 0, allowed(plan, axis))


def test_queries_that_stay_home_are_computed_there() -> None:
    plan = planned("ring")
    axis = axis_of(plan, CELLS)
    cells = owners(plan, "default", "forward", axis)
    spans = plan.layout("attention").spans
    rank, token, length = spans.rank_of_row(), spans["token"], spans["length"]
    whole = [
        (row, int(rank[at[0]]))
        for row, (first, end) in enumerate(zip(axis.edges, axis.edges[1:], strict=False))
        if len(at := np.flatnonzero((token <= first) & (end <= token + length)))
    ]
    assert len(whole) > 20
    assert all(set(cells[row][cells[row] >= 0].tolist()) == {home} for row, home in whole)


def test_ranks_that_share_heads_are_all_drawn() -> None:
    plan = planned("ulysses")
    cells = owners(plan, "default", "forward", axis_of(plan, CELLS))
    assert set(np.unique(cells)) == {-1, 0, 1, 2, 3}
    assert all(len(set(row[row >= 0].tolist())) == 1 for row in cells)


def test_the_legend_explains_rows_that_show_shares_of_heads() -> None:
    assert "one share of the heads" in draw(planned("ulysses"))
    assert "one share of the heads" not in draw(planned("ring"))


def test_a_plan_that_reads_unwritten_rows_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Subject.traced_tasks
    monkeypatch.setattr(Subject, "traced_tasks", lambda *args: replace(real(*args), complete=False))
    with pytest.raises(VerifyError, match="never written; verify the plan"):
        draw(planned())


def test_only_the_longest_of_many_sequences_are_drawn() -> None:
    plan = planned(lengths=[10] * 30 + [900] + [500] + [11] * 20)
    axis = axis_of(plan, 50)
    assert axis.lengths.tolist() == [900, 500, *[11] * 10]
    assert axis.starts.tolist()[:3] == [300, 1200, 1700]
    assert "the 12 longest of 52 sequences" in draw(plan)


# --- the file


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_picture_is_xml_with_a_title_and_the_colours_of_all_ranks(phase: str) -> None:
    text = draw(planned(), phase=phase)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title") == f"fcp: {phase} of kind default on 4 ranks"
    assert "2,561 tokens" in str(root.findtext(f"{SVG}desc"))
    assert {Colours(4, 4, False).of(rank) for rank in range(4)} <= fills(text)
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"rank 0", "rank 3", "keys (tokens)", "queries (tokens)", "milliseconds", "waits"} <= texts
    assert not {element.tag for element in root.iter()} & {f"{SVG}image", f"{SVG}script", f"{SVG}style"}
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_equal_plans_have_equal_pictures() -> None:
    assert draw(planned("distca")) == draw(Plan.decode(planned("distca").encode()))


def test_text_is_escaped() -> None:
    raw = 'a<b>&"]]>\x01\ud800'
    root = ElementTree.fromstring(svg.document(9, 9, raw, raw, [svg.text(0, 0, raw)]))
    shown = [root.findtext(f"{SVG}{name}") for name in ("title", "desc", "text")]
    assert shown == ['a<b>&"]]>\ufffd\ufffd'] * 3


def test_another_kind_can_be_drawn() -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(64)}
    plan = planned("fcp", kinds)
    assert "kind global" in draw(plan)
    assert "kind local" in draw(plan, kind="local")
    filled = [np.sum(owners(plan, kind, "forward", axis_of(plan, CELLS)) >= 0) for kind in kinds]
    assert filled[1] < filled[0] / 3


def test_the_picture_of_many_ranks_is_small() -> None:
    lengths = lognormal_lengths(0, 64 * 4096)
    text = draw(planned("fcp", ranks=64, lengths=lengths))
    assert len(text.encode()) < 300_000
    assert "rank 63" in text


def test_a_picture_above_the_size_limit_is_drawn_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = draw(planned())
    monkeypatch.setattr(pictures, "MAX_BYTES", len(fine) - 1)
    coarse = draw(planned())
    assert len(coarse) < len(fine)
    assert fills(coarse) >= fills(fine) - {"#57606a"}


def test_colours_stand_for_nodes_if_there_are_too_many_ranks() -> None:
    batch = Batch.from_lengths([4000] * 40)
    text = draw(make_plan(batch, Cluster(10, 8), MODEL, recipe="contiguous", seed=0))
    assert "node 9" in text
    assert "rank 9<" not in text
    assert "the 64 longest-waiting ranks" in text


def test_colours_of_ranks_are_distinct() -> None:
    for count in (2, 8, 9, 16, 64):
        assert len({svg.colour(rank, count) for rank in range(count)}) == count


def test_boxes_cover_each_cell_once() -> None:
    cells = np.random.default_rng(0).integers(-1, 3, (12, 9))
    cells[3:7, 2:5] = 1
    drawn = np.full_like(cells, -1)
    for owner, row, high, start, wide in svg._boxes(cells):
        assert (drawn[row : row + high, start : start + wide] == -1).all()
        drawn[row : row + high, start : start + wide] = owner
    np.testing.assert_array_equal(drawn, cells)


# --- the command


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.plan"
    path.write_bytes(planned().encode())
    return path


def test_show_writes_the_picture_and_prints_its_path(run: Command, plan_file: Path) -> None:
    target = plan_file.with_suffix(".svg")
    done = run("show", plan_file, "--svg", target, "--phase", "backward", "--json")
    assert (done.code, done.json["svg"]) == (0, str(target))
    assert target.read_text(encoding="utf-8") == draw(planned(), phase="backward")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "default"], "add --svg"),
        (["--phase", "forward"], "add --svg"),
        (["--svg", "nowhere/p.svg"], "there is no folder"),
        (["--svg", "p.svg", "--phase", "sideways"], "the plan has forward, backward"),
        (["--svg", "p.svg", "--kind", "none"], "the plan has default"),
        (["--svg", "p.svg", "--rank", "4"], "the plan has ranks 0 to 3"),
    ],
)
def test_plans_that_cannot_be_drawn_are_refused(
    run: Command, plan_file: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan_file.parent)
    done = run("show", plan_file, *options)
    assert (done.code, message in done.err) == (2, True)
    assert not Path("p.svg").exists()


# --- the trials of a search


def test_show_lists_the_recipes_that_a_search_tried(run: Command, tmp_path: Path) -> None:
    recipe, batch, path = (tmp_path / name for name in ("mine.yaml", "batch.json", "p.plan"))
    search = "{portfolio: {candidates: [fcp, ring, contiguous], improve: false}}"
    recipe.write_text(f"{{name: mine, steps: {{search: {search}}}}}")
    batch.write_text('{"lengths": [900, 500, 60], "mask": {"causal": {}}}')
    planned = run("plan", "--batch", batch, "--ranks", 4, "--recipe", recipe, "-o", path)
    assert "is the best of 3 tried (search space exhausted)" in planned.out
    printed = " ".join(run("show", path).out.split("tried", 2)[2].split())
    shard = "shard blocks (block: auto, solver: lpt_near, zigzag: True)"
    assert all(name in printed for name in ("fcp", "ring", "contiguous", shard))


def test_the_search_table_has_times_lower_bounds_and_refusals() -> None:
    steps = {"place": {"lpt": {}}, "reshuffle": True}
    trials = [
        {"recipe": {"name": name, "steps": steps}, "ms": ms, "least_ms": 2.0, "refused": refused}
        for name, ms, refused in (("a", 2.5, None), ("b", None, None), ("c", None, "too large"))
    ]
    table = printed.search_table({"recipe": trials[0]["recipe"], "tried": trials})
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert [(str(row[1]), str(row[2])) for row in rows] == [
        ("2.500", "place lpt, reshuffle"),
        ("> 2.000", "place lpt, reshuffle"),
        ("refused", "too large"),
    ]


def test_a_report_begins_with_a_verdict_and_a_remedy() -> None:
    ring = simulate(planned("ring"))
    sentence, remedy = verdict(ring)
    lost = max(ms for name, ms in ring.lost_ms.items() if name != "ideal")
    assert sentence.startswith(f"{ring.efficiency:.0%} of {ring.forward_ms:.2f} ms forward")
    assert f"the largest loss, {lost / (ring.forward_ms + ring.backward_ms):.0%}, is " in sentence
    assert remedy.startswith("Try --recipe auto, or ")
    one_rank = simulate(planned("contiguous", ranks=1, lengths=[200_000]))
    assert verdict(one_rank)[1] == "Nothing else to try: train with it."
