"""`depthprobe.load`: what opens, and the one line for everything that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import module, word_tokenizer

import depthprobe
from depthprobe.depth import DecoderModel, LoopedModel
from depthprobe.depth import load as load_function
from depthprobe.errors import UserError


def saved(folder: Path, kind: str = "llama") -> Path:
    tokenizer = word_tokenizer(["Bob is the son of Ann ."])
    module(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def refusal(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        depthprobe.load(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["llama-tied", "looped", "looped-ouro"])
@torch.no_grad()
def test_a_saved_model_opens_with_the_same_logits(tmp_path: Path, kind: str) -> None:
    model = depthprobe.load(saved(tmp_path, kind))
    assert isinstance(model, LoopedModel if kind.startswith("looped") else DecoderModel)
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    ids = torch.randint(4, 20, (2, 6))
    assert torch.allclose(model.capture(ids).logits, module(kind)(ids).logits[:, -1], atol=1e-5)
    assert depthprobe.load(str(tmp_path)).fingerprint() == model.fingerprint()
    half = depthprobe.load(tmp_path, dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.fingerprint() != model.fingerprint()


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no folder './nowhere'" in refusal("./nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")
    # the tests run with HF_HUB_OFFLINE: a hub id is looked for in the hub's cache alone
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    text = refusal("nobody/nothing")
    assert "unknown model 'nobody/nothing'" in text and "cannot be reached" in text and "smollm2" in text
    assert "has no revisions" in refusal("smollm2", revision="main")
    assert "has no revisions" in refusal(tmp_path, revision="main")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("RepositoryNotFoundError", "unknown model 'a/b' (not a name, not a folder, not on the hub)"),
        ("GatedRepoError", "'a/b' is gated: accept its terms"),
        ("RevisionNotFoundError", "'a/b' has no revision 'v9'"),
        ("ConnectionError", "the hub cannot be reached"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: str, said: str) -> None:
    import builtins

    import huggingface_hub
    from huggingface_hub import errors

    def fail(*_: Any, **__: Any) -> str:
        kind = getattr(errors, error, None) or getattr(builtins, error)
        raised = kind.__new__(kind)
        Exception.__init__(raised, "first line\nsecond line")
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert said in refusal("a/b", revision="v9")


def test_a_hub_id_fetches_neither_pickles_nor_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetched(name: str, **settings: Any) -> str:
        asked.update(settings, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    model = depthprobe.load("some/model", revision="abc")
    assert model.name == asked["name"] == "some/model" and asked["revision"] == "abc"
    assert not [
        pattern for pattern in asked["allow_patterns"] if pattern.endswith((".py", ".bin", ".pt", "*"))
    ]


def test_folders_that_lack_something(folder: Path, tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "kept")
    assert "has no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    text = refusal(folder)
    assert "as a pickle, which can run code" in text and "pytorch_model.bin" in text
    (tmp_path / "kept").rename(folder / "model.safetensors")
    depthprobe.load(folder)  # safetensors beside a pickle are read, the pickle is not
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refusal(folder)


def test_damaged_files(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer of" in refusal(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:300])
    (folder / "tokenizer.json").unlink()
    saved(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "tokenizer.json", folder)
    assert "cannot be loaded" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json cannot be read" in refusal(folder)


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 tensors, the first is lm_head.weight" in refusal(folder)


def changed(folder: Path, **fields: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return refusal(folder)


def test_architectures_that_are_refused(folder: Path) -> None:
    auto = {"AutoConfig": "code.Config"}
    assert "cannot open the architecture 'unheard'" in changed(folder, model_type="unheard")
    assert "needs code from its checkpoint, and depthprobe runs none" in changed(folder, auto_map=auto)
    assert "is an encoder-decoder" in changed(folder, model_type="t5", auto_map={})
    assert "is quantised" in changed(folder, model_type="llama", quantization_config={"quant_method": "gptq"})


def test_a_tokenizer_larger_than_the_model(folder: Path) -> None:
    word_tokenizer([" ".join(f"w{n}" for n in range(100))]).save_pretrained(folder)
    assert "the tokenizer has 104 tokens and the model 61" in refusal(folder)


def test_devices_and_dtypes(folder: Path) -> None:
    assert "unknown dtype 'int8': one of auto, float32, bfloat16, float16" in refusal(folder, dtype="int8")
    assert "device 'gpu' cannot be used" in refusal(folder, device="gpu")
    assert "device 'meta' cannot be used" in refusal(folder, device="meta")
    if not torch.cuda.is_available():
        assert "device 'cuda:0' cannot be used" in refusal(folder, device="cuda:0")


def test_stacks_that_are_refused() -> None:
    import transformers as t

    size = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = t.BertConfig(**size, hidden_size=16, intermediate_size=16)
    with pytest.raises(UserError, match=r"bert is no decoder: its tokens see .* \(architecture bert\)"):
        DecoderModel(t.BertForMaskedLM(bert), None, "bert")
    t5 = t.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="t5 is an encoder-decoder"):
        DecoderModel(t.T5ForConditionalGeneration(t5), None, "t5")
    with pytest.raises(UserError, match=r"llama has no language-model head \(architecture llama\)"):
        DecoderModel(module("llama").model, None, "llama")
    cut = module("llama")
    cut.config.num_hidden_layers = 2
    with pytest.raises(UserError, match=r"does not run all its layers in a forward: 2 of 3 in model\.layers"):
        DecoderModel(cut, None, "cut")


def test_layers_that_run_again_are_loops() -> None:
    shared = module("llama")
    shared.model.layers[1] = shared.model.layers[0]
    model = DecoderModel(shared, None, "shared")
    assert [str(depth) for depth in model.axis] == ["embed", "r1.l1", "r2.l1", "r3.l1"]
    assert model.n_loops == 2 and [str(end) for end in model.loop_ends] == ["r1.l1", "r2.l1"]


def test_load_is_the_public_name() -> None:
    assert depthprobe.load is load_function


def test_layers_that_the_configuration_does_not_know_are_not_left_out(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["num_hidden_layers"] -= 1
    file.write_text(json.dumps(config))
    said = refusal(folder)
    assert "tensors of layers that config.json knows nothing of (model.layers.2." in said


def test_what_load_takes_and_what_it_says() -> None:
    assert "there is no file 'none.gguf'" in refusal("none.gguf")
    model = depthprobe.load("follow-demo", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    again = depthprobe.load(model.model)
    assert isinstance(again, LoopedModel) and depthprobe.wrap(again) is again
    with pytest.raises(UserError, match="for a model that is yet to be read"):
        depthprobe.load(model.model, dtype="float16")
    with pytest.raises(UserError, match="a int has no depth axis"):
        depthprobe.load(3)
