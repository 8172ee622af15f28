"""Files for operation: queries ask for metrics that are there, alerts are in the runbook, options are the server's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from apportion import cli
from tests.service.servers import begin, live, make_job

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
#: functions and words of PromQL that the files use
WORDS = {"sum", "by", "le", "rate", "increase", "ignoring", "histogram_quantile", "up", "job"}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    with live(folder=tmp_path_factory.mktemp("store")) as server:
        make_job(server.caller)
        begin(server.caller)
        return server.caller("GET", "/metrics").body.decode()


@pytest.mark.parametrize(
    "query", [rule["expr"] for rule in RULES] + [t["expr"] for p in PANELS for t in p["targets"]]
)
def test_queries_ask_for_metrics_that_are_there(metrics: str, query: str) -> None:
    names = set(re.findall(r"^# TYPE (\S+)", metrics, re.MULTILINE))
    samples = set(re.findall(r"^(\w+)[{ ]", metrics, re.MULTILINE))
    asked = set(re.findall(r"\b[a-z][a-z_]*\b", re.sub(r'"[^"]*"|\[[^]]*\]', "", query))) - WORDS
    assert asked or query.startswith("up{")
    for name in asked:
        assert name in names | samples, name
        assert ("rate" in query or "increase" in query) or not name.endswith("_total")


def test_every_alert_is_in_the_runbook() -> None:
    page = (ROOT / "docs/operation.md").read_text()
    sections = set(re.findall(r"^### (Apportion\w+)$", page, re.MULTILINE))
    assert sections == {rule["alert"] for rule in RULES}
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in RULES)


def test_kubernetes_and_systemd_start_the_server_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, service, workload = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    file = tmp_path / "serve.yaml"
    file.write_text(config["data"]["serve.yaml"])
    assert cli.main(["serve", "--config", str(file), "--show-config"]) == cli.OK
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["--config", "/etc/apportion/serve.yaml"]
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == 8321
    volumes = {volume["name"] for volume in pod["volumes"]} | {
        claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    unit = (DEPLOY / "apportion.service").read_text()
    for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE):
        for pair in shlex.split(line):
            name, _, value = pair.partition("=")
            monkeypatch.setenv(name, value)
    assert cli.main(["serve", "--show-config"]) == cli.OK  # which refuses variables that name no option
    capsys.readouterr()
