"""The whole chain on gloo: `apportion profile` under torchrun, a forecast from its profile, real training steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chain import verdict

REPOSITORY = Path(__file__).resolve().parents[2]
#: in addition to the command's tolerance, since test machines are busy
MARGIN = 2.0

pytestmark = pytest.mark.slow


def test_forecasts_from_a_profile_are_near_measured_training_times() -> None:
    command = [sys.executable, "-m", "benchmarks.chain", "--recipes", "ring,hybrid_dp", "--batches", "1"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--json"], cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert done.returncode in (0, 1), done.stderr
    record = json.loads(done.stdout)
    assert [row["recipe"] for row in record["rows"]] == ["ring", "hybrid_dp"]
    for row in record["rows"]:
        assert row["cpu_s"] <= row["measured_s"] <= row["wall_s"]
        assert row["cpu_s"] / MARGIN <= row["forecast_s"] <= row["measured_s"] * MARGIN
        assert sum(row["parts_s"].values()) == pytest.approx(row["forecast_s"], rel=1e-3)
    assert record["figures"]["intra_gbs"] > 0
    assert record["of"] == 2
    assert all(load > 0 for load in record["load_average"])
    assert (record["verdict"] == "ok") == (record["within_of_measured"] == 2) == (done.returncode == 0)


@pytest.mark.parametrize(
    ("ratios", "verdict_text", "counts"),
    [
        ([(1.2, 1.3), (0.75, 0.8)], "ok", (2, 1)),
        ([(0.5, 1.2), (0.9, 0.9)], "busy", (1, 2)),
        ([(0.5, 1.3), (0.9, 0.9)], "missed", (1, 1)),
    ],
)
def test_the_verdict_follows_from_the_counts(ratios: Any, verdict_text: Any, counts: Any) -> None:
    result = verdict([{"ratio": measured, "ratio_cpu": computed} for measured, computed in ratios])
    within = {"within_of_measured": counts[0], "within_of_cpu": counts[1]}
    assert result == {"verdict": verdict_text, **within, "of": 2}
