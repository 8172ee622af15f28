"""Options of `apportion serve` from a file and from the environment: what goes before what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion import cli


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, tuple[object, str]]:
    assert cli.main(["serve", "--show-config", "--json", *args]) == cli.OK
    return {name: (told["value"], told["from"]) for name, told in json.loads(capsys.readouterr().out).items()}


def test_command_line_environment_file_default_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nkeep: 2\nmax-jobs: 3\nadmin-key-file: key\n")
    monkeypatch.setenv("APPORTION_SERVE_PORT", "4")
    monkeypatch.setenv("APPORTION_SERVE_KEEP", "5")
    monkeypatch.setenv("APPORTION_SERVE_DIR", "plans")
    found = shown(capsys, "--config", str(file), "--port", "6")
    assert found["port"] == (6, "command line")
    assert found["keep"] == (5, "environment")
    assert found["dir"] == ("plans", "environment")
    assert found["max-jobs"] == (3, "file")
    assert found["admin-key-file"] == ("key", "file")
    assert found["deadline"] == (60.0, "default")


def test_what_is_shown_is_a_file_that_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--show-config", "--port", "7", "--store-gb", "0.5"]) == cli.OK
    file = tmp_path / "serve.yaml"
    file.write_text(capsys.readouterr().out)
    found = shown(capsys, "--config", str(file))
    assert (found["port"], found["store-gb"]) == ((7, "file"), (0.5, "file"))


def test_passwords_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--store", "redis://user:word@host:6379/0")
    assert found["store"][0] == "redis://user:***@host:6379/0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean port"),
        ("port: [1]", "must be text or a number"),
        ("port: yes", "must be text or a number"),
        ("- port", "must be"),
        ("port: x", "--port"),
        ("port: 70000", "--port"),
        ("config: other.yaml", "unknown field"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert cli.main(["serve", "--show-config", "--config", str(file)]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_variable_that_names_no_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APPORTION_SERVE_PROT", "1")
    assert cli.main(["serve", "--show-config"]) == cli.BAD_INPUT
    assert "did you mean APPORTION_SERVE_PORT" in capsys.readouterr().err
