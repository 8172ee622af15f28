"""The whole chain on gloo: `apportion profile` under torchrun, a forecast on what it wrote, real training steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: beside what the command promises: tests run on machines that do other things
MARGIN = 2.0

pytestmark = pytest.mark.slow


def test_forecasts_on_a_profile_are_near_what_training_takes():
    command = [sys.executable, "-m", "benchmarks.chain", "--recipes", "ring,hybrid_dp", "--batches", "1"]
    ran = subprocess.run(
        [*command, "--rounds", "3", "--json"], cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode in (0, 1), ran.stderr
    record = json.loads(ran.stdout)
    assert [row["recipe"] for row in record["rows"]] == ["ring", "hybrid_dp"]
    for row in record["rows"]:
        assert row["cpu_s"] <= row["measured_s"] <= row["wall_s"]
        assert row["cpu_s"] / MARGIN <= row["forecast_s"] <= row["measured_s"] * MARGIN
        assert sum(row["parts_s"].values()) == pytest.approx(row["forecast_s"], rel=1e-3)
    assert record["figures"]["intra_gbs"] > 0
