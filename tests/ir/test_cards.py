"""Cards that notebooks show."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import apportion as ap
from apportion import MissingDependencyError, masks
from apportion.ir import cards
from tests.support.examples import EXAMPLES

REQUEST = ap.Batch.from_lengths([700, 300, 24]), ap.Cluster(1, 2), ap.Model(2, 1, 16)
SPECS = [*EXAMPLES.values(), masks.bands([(0, 10, 0, 10, 0, 9)]), masks.slices([(0, 6, 0, 6, 1)])]


@pytest.mark.parametrize("spec", SPECS)
def test_every_mask_has_a_card_that_shows_its_bands(spec: masks.Mask) -> None:
    html = spec._repr_html_()
    assert type(spec).__name__ in html
    length = spec.shown_length()
    mask = cards.sample_mask(spec.bands(length), length)
    assert mask.any()
    assert html.count("M") >= len(np.flatnonzero(mask.any(1)))
    assert len(html) < 20_000


def test_a_short_mask_is_drawn_token_by_token() -> None:
    mask = cards.sample_mask(masks.sliding_window(2).bands(5), 5)
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_bars_of_many_ranks_show_the_largest_of_each_group() -> None:
    html = cards.bars("many", np.arange(1000))
    assert html.count("<rect") <= cards.BARS
    assert "height='80.00'" in html
    assert cards.bars("none", np.zeros(0)).count("<rect") == 0


def test_text_in_cards_is_escaped() -> None:
    html = cards.card("<b>", [("<i>", "<script>")]) + cards.table("&", ["<th>"], [["<td>"]])
    assert not re.search(r"<script>|<i>|<b><b>", html)


def test_batches_plans_simulations_and_comparisons_have_cards() -> None:
    plan, comparison = ap.plan(*REQUEST), ap.compare(*REQUEST, ["fcp", "ring", "ulysses"])
    for value, text in (
        (REQUEST[0], "1,024 in 3 sequences"),
        (plan, "auto on 2 ranks"),
        (ap.simulate(plan), "simulated on h100"),
        (comparison, "speed-up over ring"),
        (REQUEST[1], "2: 1 nodes of 2"),
        (REQUEST[2], "2 query, 1 KV, of 16"),
    ):
        assert text in value._repr_html_()
        assert len(repr(value)) < 300
    assert repr(plan.for_rank(1)) == f"<Slice: rank 1 of 2, auto, plan {plan.id.hex()[:12]}>"
    iteration = ap.plan_iteration(*REQUEST)
    assert re.fullmatch("<IterationPlan: 1 microbatch on 2 ranks, [0-9a-f]{12}>", repr(iteration))
    assert repr(iteration.slice_for(0)).startswith("<IterationSlice: rank 0 of 2, 1 microbatch, plan ")
    assert ap.Plan.decode(plan.encode())._repr_html_() == plan._repr_html_()


def test_the_card_of_a_comparison_equals_the_printed_table() -> None:
    pytest.importorskip("pandas")
    comparison = ap.compare(*REQUEST, ["fcp"], baseline="ulysses")
    frame = comparison.to_pandas()
    assert list(frame["recipe"]) == ["ulysses", "fcp"]
    record = comparison.record()
    assert frame["forward_ms"].tolist() == [row["forward_ms"] for row in record["rows"]]
    assert frame["speedup.median"].tolist() == [row["speedup"]["median"] for row in record["rows"]]
    assert (record["baseline"], record["batches"]) == ("ulysses", 1)


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    comparison = ap.compare(*REQUEST, ["fcp"])
    with pytest.raises(MissingDependencyError, match="notebook"):
        comparison.to_pandas()
