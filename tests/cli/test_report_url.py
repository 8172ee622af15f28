"""`apportion report` of a job on a server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from apportion import cli
from apportion.ir.bytes.job import Job
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.client import create_job
from apportion.service.http.run.child import serving


def test_the_report_of_a_job_is_written_with_its_key_and_without_keys_at_all(tmp_path: Path) -> None:
    job = Job(Cluster(1, 2), Model(2, 1, 16), Policy(find_recipe("fcp")), 2048)
    key_file, page = tmp_path / "run.key", tmp_path / "r.html"
    with serving(tmp_path / "plans") as server, closing(create_job(server.url, "run", job)) as client:
        client.submit(client.begin("first"), 0, [Batch.from_lengths([700, 300])])
        client.plan(1, 0, 0)
        key_file.write_text(client.key or "")
        key_file.chmod(0o600)
        for more in ([], ["--key-file", str(key_file)], ["--epoch", "1"]):
            page.unlink(missing_ok=True)
            assert cli.main(["report", client.url, "-o", str(page), "--json", *more]) == cli.OK
            assert "fcp on 2 ranks" in page.read_text(encoding="utf-8")
        page.unlink()
        assert cli.main(["report", client.url, "-o", str(page), "--iteration", "9"]) == cli.BAD_INPUT
        assert not page.exists()


def test_a_server_s_report_takes_no_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["report", "http://127.0.0.1:1/v1/jobs/run", "--hardware", "h100", "-o", str(tmp_path / "r.html")]
    assert cli.main(words) == cli.BAD_INPUT
    assert "--hardware" in capsys.readouterr().err
