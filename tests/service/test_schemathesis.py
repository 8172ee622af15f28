"""The server against its own OpenAPI document: schemathesis with all of its checks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from apportion.service.http.serve import Server
from tests.service.requests import TOKEN
from tests.support.programs import run

pytestmark = pytest.mark.slow
# A schema cannot express that one field must fit another (a key its body, heads their groups): such requests are well
# formed, and answered with 422, or with 409 if the key belongs to a different request.
CONFIG = """
[[operations]]
include-name = ["POST /v1/plan", "PUT /v1/plans/{key}"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "409", "422", "429"]
"""


def test_the_server_conforms_to_its_openapi_document(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml", "--no-color"]
    command += ["run", f"{server.url}/openapi.json", "--checks", "all", "--continue-on-failure"]
    command += ["--max-examples", "40", "--seed", "11", "--request-timeout", "30", "--warnings", "off"]
    command += ["--exclude-path", "/metrics", "--header", f"Authorization: Bearer {TOKEN}"]
    assert re.search(r"Tested: ([0-9]+)", run(*command, cwd=tmp_path)).group(1) == "9"
