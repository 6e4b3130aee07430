"""The copy of SmolLM2 is whole or absent, and says what brings it when it is absent."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthprobe.errors import UserError
from depthprobe.models import smollm2


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "depthprobe"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel whose conversion writes empty files, and a reader for it."""
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / smollm2.GGUF_NAME)
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(smollm2, "_write_copy", write_all)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**12))


def write_all(source: Path, folder: Path) -> None:
    for name in smollm2._COMPLETE:
        (folder / name).touch()


def test_without_the_wheel_the_command_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_gguf", lambda: None)
    with pytest.raises(UserError) as caught:
        smollm2.smollm2_path()
    assert smollm2.INSTALL in str(caught.value)
    assert not cache.exists()


def test_converts_once(cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.smollm2_path()
    assert folder.parent == cache and smollm2.cached_smollm2() == folder

    def again(source: Path, folder: Path) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(smollm2, "_write_copy", again)
    assert smollm2.smollm2_path() == folder


def test_a_failed_conversion_leaves_nothing(
    cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(source: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_write_copy", break_off)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_path()
    assert smollm2.cached_smollm2() is None and list(cache.iterdir()) == []


def test_another_process_may_finish_first(cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cache / smollm2._FOLDER

    def be_late(source: Path, folder: Path) -> None:
        write_all(source, folder)
        target.mkdir()
        write_all(source, target)
        (target / "first").touch()

    monkeypatch.setattr(smollm2, "_write_copy", be_late)
    assert (smollm2.smollm2_path() / "first").exists()
    assert list(cache.iterdir()) == [target]


def test_an_incomplete_folder_is_replaced(cache: Path, wheel: None) -> None:
    (cache / smollm2._FOLDER).mkdir(parents=True)
    (cache / smollm2._FOLDER / "config.json").touch()
    assert smollm2.cached_smollm2() is None
    smollm2.smollm2_path()
    assert smollm2.cached_smollm2() is not None


def test_full_disk_is_said_before_the_work(cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match=r"540 MB are needed .* XDG_CACHE_HOME"):
        smollm2.smollm2_path()


@pytest.mark.slow
def test_the_real_copy_speaks() -> None:
    if (folder := smollm2.cached_smollm2()) is None:
        pytest.skip(f"no converted copy of SmolLM2 on this machine: {smollm2.INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    tokens = tokenizer("The Eiffel Tower is located in the city of", return_tensors="pt")
    with torch.no_grad():
        best = model(**tokens).logits[0, -1].argmax().item()
    assert tokenizer.decode([best]) == " Paris"
