"""`apportion profile` writes a hardware file that `--hardware` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion import Hardware, cli
from apportion.backends.torch.profile.device import ProfileScope
from apportion.backends.torch.profile.links import Line, Links
from apportion.trainer.measure import profile as profiling

scopes: list[ProfileScope] = []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Replaces the profile, which takes a minute, with a fixed result."""
    hardware = Hardware.load("a100")
    scopes.clear()

    def profile(_: bool, progress: Any, *, name: str, effort: ProfileScope, **options: Any) -> Hardware:
        scopes.append(effort)
        for done in range(3 if progress else 0):
            progress(done + 1, 3)
        return Hardware.from_data(hardware.to_data() | {"name": name})

    monkeypatch.setattr(profiling, "profile", profile)
    return hardware


def test_a_profile_can_be_read_as_a_hardware_file(
    measured: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert cli.main(["profile", "--quick", "-o", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    written = Hardware.load(path)
    assert (written.name, written.forward) == ("mine", measured.forward)
    assert record["engine"] == "flash"
    assert (record["file"], record["digest"]) == (str(path), written.digest())
    assert cli.main(["profile", "-o", str(path), "--name", "rack7"]) == 0
    assert "linear_tflops" in capsys.readouterr().out
    assert Hardware.load(path).name == "rack7"


def test_links_are_measured_on_several_ranks(measured: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        ranks, rank = 2, 0

    links = Links(Line(3.0, 12.5), None, "gloo", 1, post_us=2.0, contention=0.1)
    monkeypatch.setattr(profiling, "Communicator", Ranks)
    monkeypatch.setattr(profiling, "profile_links", lambda: links)
    found = profiling.run(True, "pair", lambda done, total: None)
    assert found is not None
    assert (found.intra_gbs.value, found.inter_gbs) == (12.5, measured.inter_gbs)
    assert (found.post_us.value, found.contention.value) == (2.0, 0.1)
    monkeypatch.setattr(Ranks, "rank", 1)
    assert profiling.run(True, "pair") is None


def test_a_profile_is_measured_at_the_sizes_of_the_model(measured: Hardware, tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    sizes = "q_heads: 12, kv_heads: 4, head_dim: 32, hidden: 384, ffn: 1000"
    model.write_text(f"{{{sizes}, dtype: fp32, layers: 2}}")
    command = ["profile", "-o", str(tmp_path / "mine.json"), "--model", str(model), "--tokens", "333"]
    assert cli.main(command) == 0
    (effort,) = scopes
    found = effort.model
    assert (found.q_heads, found.head_dim, found.hidden, found.ffn) == (12, 32, 384, 1000)
    assert effort.tokens == 333


def test_an_unwritable_output_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiling, "run", lambda *args: pytest.fail("measured"))
    assert cli.main(["profile", "-o", "nowhere/mine.json"]) == 2
    assert "there is no folder" in capsys.readouterr().err
