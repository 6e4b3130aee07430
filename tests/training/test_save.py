"""A trained model's folder: whole or not there, and opened by everything that opens models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import depthprobe
from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM
from depthprobe.models.embedded import FILES, embedded_path
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.recipes import FOLLOW, RECIPES, demo_config
from depthprobe.training.save import card, new_folder, save_model

WORDS = family_tokenizer()


@pytest.fixture(scope="module")
def model() -> LoopedForCausalLM:
    torch.manual_seed(0)
    return LoopedForCausalLM(demo_config(FOLLOW, WORDS)).eval()


def test_what_is_saved_is_what_loads(tmp_path: Path, model: LoopedForCausalLM) -> None:
    folder = new_folder(tmp_path / "models" / "demo")
    assert list(tmp_path.iterdir()) == []  # a check makes nothing
    save_model(model, WORDS, folder, 7, replace(FOLLOW, gate_margin=0.125))
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]
    assert {path.name for path in folder.iterdir()} >= set(FILES)
    assert folder.stat().st_mode & 0o777 == 0o755

    again = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(again, LoopedForCausalLM) and again.config.exit_q == model.config.exit_q
    for (name, ours), theirs in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    text = "Bobby is the son of Kim. Bobby is Kim's"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == WORDS(text).input_ids
    opened = depthprobe.load(str(folder))
    assert opened.n_loops == 8 and opened.gate and opened.tokenizer(text).input_ids == WORDS(text).input_ids

    card = (folder / "README.md").read_text()
    assert "--seed 7" in card and "more than 0.125 nats" in card and "461,825 parameters" in card
    assert not re.search(r"(?<!`)\{(?!\")", card)  # no field was left open


class Broken(PreTrainedTokenizerFast):
    """Fails when the model is already on the disk."""

    error: BaseException

    def save_pretrained(self, *_: object, **__: object) -> tuple[str, ...]:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_what_is_interrupted_leaves_nothing(tmp_path: Path, model: LoopedForCausalLM, error: BaseException) -> None:
    broken = Broken(tokenizer_object=WORDS.backend_tokenizer)
    broken.error = error
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with pytest.raises(type(error)):
            save_model(model, broken, tmp_path / name, 0, FOLLOW)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not any((tmp_path / "empty").iterdir())


def test_an_hours_work_is_kept_when_its_place_was_taken_meanwhile(tmp_path: Path, model: LoopedForCausalLM) -> None:
    folder = new_folder(tmp_path / "demo")
    folder.mkdir()
    (folder / "theirs").touch()
    with pytest.raises(UserError, match="it is whole in") as caught:
        save_model(model, WORDS, folder, 0, FOLLOW)
    kept = Path(re.search(r"whole in (\S+): move it", str(caught.value))[1])  # type: ignore[index]
    assert {path.name for path in kept.iterdir()} >= set(FILES)
    assert [path.name for path in folder.iterdir()] == ["theirs"]


def test_an_empty_folder_and_a_link_to_one_can_be_named(tmp_path: Path, model: LoopedForCausalLM) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    folder = new_folder(tmp_path / "link")
    save_model(model, WORDS, folder, 0, FOLLOW)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link" / "config.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}


@pytest.mark.parametrize("task", RECIPES)
def test_the_embedded_models_are_of_the_recipes_as_they_are(task: str) -> None:
    folder = embedded_path(f"{task}-demo")
    model = LoopedForCausalLM.from_pretrained(folder)
    told = (folder / "README.md").read_text()
    # the lookahead head came to the model later
    told = re.sub(r"- \*\*Lookahead head\*\*:.*?(?=^- )", "", told, flags=re.DOTALL | re.MULTILINE)
    assert told == card(model, 0, RECIPES[task])
    ours, theirs = demo_config(RECIPES[task], WORDS).to_dict(), model.config.to_dict()
    assert {key for key, value in ours.items() if theirs[key] != value} <= {"architectures", "dtype", "_name_or_path"}
