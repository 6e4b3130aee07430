"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from depthprobe.cli.main import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def test_the_first_screen_shows_the_two_commands() -> None:
    first_screen = README[:2000]
    assert "make analyze" in first_screen and "make test" in first_screen


def test_every_command_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `depthprobe (\w+)", README, re.MULTILINE)) == set(COMMANDS)


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nnsight")
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", README, re.DOTALL):  # one after the other, as they are read
        exec(compile(snippet, "README.md", "exec"), names)
        assert capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (Path(__file__).parent.parent / target).exists(), target
