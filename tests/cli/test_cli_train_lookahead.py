"""`depthprobe train lookahead`: a head beside its model, told how well it agrees; refusals before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from depthprobe.cli.main import main
from depthprobe.halting import LookaheadHead
from depthprobe.training import lookahead


def test_a_head_for_an_embedded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head.safetensors"
    command = ["train", "lookahead", "follow-demo", "--data", "stories:follow", "--out", str(out), "--longest", "3"]
    assert main([*command, "--stories", "20", "--heldout", "8", "--seed", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n"
    assert "q 0.9 answers n 8: equal" in shown.err and "late" in shown.err
    head = LookaheadHead.load(out)
    assert head.about["recipe"]["seed"] == 3 and head.about["recipe"]["stories"] == 20
    assert main([*command, "--stories", "20", "--heldout", "8"]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["follow-demo", "--data", "pydoc"], "stories:follow"),
        (["follow-demo", "--data", "stories:other"], "stories:follow"),
        (["nothing-demo", "--data", "stories"], "nothing-demo"),
        (["follow-demo", "--data", "stories", "--stories", "0"], "--stories"),
        (["follow-demo", "--data", "stories", "--longest", "2"], "--longest"),
        (["follow-demo", "--data", "stories:follow", "--order", "sorted"], "sorted"),
        (["follow-demo"], "--data"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["train", "lookahead", *arguments, "--out", str(tmp_path / "head.safetensors")]) == 2
    shown = capsys.readouterr()
    told = shown.err.splitlines()[-1]
    assert told.startswith("error: ") and named in told and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookahead, "train_head", lambda *_, **__: pytest.fail("trained"))
    command = ["train", "lookahead", "follow-demo", "--data", "stories:follow"]
    assert main([*command, "--out", str(tmp_path / "head.pt")]) == 2
    assert "head.safetensors" in capsys.readouterr().err
