"""`analyze --probes lens,patching`: what a run holds, stopping it, and what a dry run says."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import depthprobe
from depthprobe import files
from depthprobe.cli.main import main
from depthprobe.errors import UserError
from depthprobe.pipeline import AnalyzeConfig, AnalyzeResult, dry_run, parse_bytes, questions
from depthprobe.pipeline.config import NAMES, SITES
from depthprobe.pipeline.prepare import opened
from depthprobe.pipeline.probes import PROBES

SMALL: dict[str, Any] = {
    "task": "kinship", "hops": "1-2", "n": 2, "batch_size": 4, "resamples": 100, "browse": 0,
    "probes": "lens,patching", "probe_items": 1,
}  # fmt: skip
CAUSAL = {"donors", "patching", "knockout", "windows", "window_slopes", "patching_by_role", "knockout_by_depth"}


@pytest.fixture(autouse=True)
def quick_and_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def steady(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(questions, "TRAINING_STORIES", 30)
    patch.setattr("depthprobe.runs.folder.git_commit", lambda: "c0ffee")
    patch.setattr("depthprobe.report.write_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AnalyzeResult:
    with pytest.MonkeyPatch.context() as patch:
        steady(patch)
        return depthprobe.analyze(str(tiny), out=tmp_path_factory.mktemp("runs") / "whole", **SMALL)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tables").glob("*.parquet"))}


def test_names_are_those_of_the_rooms() -> None:
    assert ("lens", *PROBES) == NAMES
    assert SITES == depthprobe.patching.SITES


def test_a_run_holds_the_tables_of_its_probes(whole: AnalyzeResult) -> None:
    assert {name.removesuffix(".parquet") for name in bytes_of(whole.folder)} >= CAUSAL
    patching = whole.table("patching")
    assert patching["item"].n_unique() == 2 and set(patching["span"]) == {"one", "later"}
    assert set(patching["role"]) >= {"changed_word", "last"}
    assert whole.table("knockout")["item"].n_unique() == 2
    assert whole.table("donors").height == patching.select("item", "donor_kind").n_unique()
    assert whole.manifest["counts"]["patched_items"] == whole.manifest["counts"]["patched_by_token"] == 2
    (task,) = whole.summary["tasks"]
    assert "By patching" in task["headline"] and {row["quantity"] for row in task["windows"]} >= {"source_area"}
    assert not (whole.folder / "tables" / "patching").exists()  # its parts are joined


def test_the_first_question_of_each_k_is_patched_token_by_token(tiny: Path, tmp_path: Path) -> None:
    """At every token and every depth of the first site, in the run that `analyze` makes by itself."""
    options = {**SMALL, "n": 3, "probe_items": 2, "sites": "resid_post,mlp_out"}
    result = depthprobe.analyze(str(tiny), out=tmp_path / "run", **options)
    patching = result.table("patching")
    single = patching.filter(pl.col("position").is_not_null())
    first = patching.group_by("hops", maintain_order=True).agg(pl.col("item").first())
    assert single["item"].unique(maintain_order=True).to_list() == first["item"].to_list() and first.height == 2
    assert patching["item"].n_unique() == 4
    assert set(single["site"]) == {"resid_post"} and set(single["span"]) == {"one"} and not single["control"].any()
    tokens = {row["item"]: row["tokens"] for row in result.table("donors").iter_rows(named=True)}
    depths = patching.filter((pl.col("site") == "resid_post") & (pl.col("span") == "one"))["depth"].n_unique()
    for (item,), rows in single.partition_by("item", as_dict=True).items():
        assert rows.select("position", "depth").is_unique().all()
        assert rows["position"].n_unique() == len(tokens[item]) and rows.height == len(tokens[item]) * depths
        # a role of one token is that token
        same = ["item", "donor_kind", "site", "span", "role", "depth"]
        both = patching.filter((pl.col("role") == "last") & pl.col("position").is_null()).join(
            rows.filter(pl.col("role") == "last"), on=same, suffix="_single"
        )
        assert both.height == depths
        assert (both["ld_patched"] - both["ld_patched_single"]).abs().max() < 1e-4  # type: ignore[operator]
    none = depthprobe.analyze(str(tiny), out=tmp_path / "none", **options, patch_tokens=0)
    assert none.table("patching")["position"].null_count() == patching.height - single.height
    assert none.table("windows").equals(result.table("windows"))


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


@pytest.mark.parametrize("nth", [3, 4, 5, 7, 9])
def test_killed_between_parts_and_resumed(
    whole: AnalyzeResult, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """1: manifest, 2: the lens, 3–5 and 6–8: two items' donors, patching, knockout; then final tables."""
    out, count, replace = tmp_path / "run", 0, files.os.replace

    def dying(*paths: Any) -> None:
        nonlocal count
        count += 1
        replace(*paths)
        if count == nth:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dying)
        patch.setattr("depthprobe.runs.RunFolder.remove_if_empty", lambda run: None)
        with pytest.raises(Killed):
            depthprobe.analyze(str(tiny), out=out, **SMALL)
    assert depthprobe.analyze(str(tiny), out=out, resume=True, **SMALL).summary == whole.summary
    assert bytes_of(out) == bytes_of(whole.folder)


def test_a_run_without_the_probe_has_none_of_its_tables(tiny: Path, tmp_path: Path) -> None:
    plain = {name: value for name, value in SMALL.items() if name not in ("probes", "probe_items")}
    result = depthprobe.analyze(str(tiny), out=tmp_path / "run", **plain)
    assert not {name.removesuffix(".parquet") for name in bytes_of(result.folder)} & CAUSAL
    assert result.summary["tasks"][0]["windows"] == [] and "By patching" not in result.summary["headline"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"probes": "patching"}, "'lens' is missing.*ask for lens,patching"),
        ({"probes": "lens,magic"}, "there is no 'magic'"),
        ({"probes": ""}, "there is no ''"),
        ({"sites": "attn_out"}, "--sites says nothing without the patching probe"),
        ({"patch_tokens": 2}, "--patch-tokens says nothing without the patching probe"),
        ({"probes": "lens,patching", "probe_items": 2, "patch_tokens": 3}, "--patch-tokens 3 asks for more than the 2"),
        ({"probes": "lens,patching", "probe_items": 7, "n": 6}, "--probe-items 7 asks .* 6 of --n: give --n 7 or more"),
        ({"spare_first": 1, "probes": "lens,patching"}, "--spare-first says nothing without the effective probe"),
        ({"spare_first": -1, "probes": "lens,effective"}, "whole number of at least 0, got -1"),
        ({"probe_items": 3}, "--probe-items says nothing without a probe beside the lens"),
        ({"probes": "lens,patching", "sites": "attention"}, "there is no 'attention'"),
        ({"probes": "lens,patching", "probe_items": 0}, "at least 1, got 0"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        AnalyzeConfig.of(options)


def test_options_that_fit() -> None:
    config = AnalyzeConfig.of({"probes": ["patching", "lens"], "sites": "resid_post,attn_out"})
    assert config.probes == ("lens", "patching") and config.sites == ("resid_post", "attn_out")
    assert parse_bytes("512M") == parse_bytes("512MiB") == 512 << 20 and parse_bytes("1.5GB") == 3 << 29
    for wrong in ("much", "12", "-1G", "1GG"):
        with pytest.raises(UserError, match="no amount of memory"):
            parse_bytes(wrong)
    for unit in ("EiB", "PB", "bits"):
        with pytest.raises(UserError, match=f"there is no unit '{unit}' here: give a number in KiB, MiB, GiB or TiB"):
            parse_bytes(f"1{unit}")
    with pytest.raises(UserError, match="it is less than 1 MiB: give a number in KiB"):
        parse_bytes("2")


def test_memory_without_a_sweep_says_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max-memory says nothing without a probe beside the lens"):
        depthprobe.analyze(str(tiny), out=tmp_path / "run", max_memory="2GiB", task="kinship", hops="1-2", n=2)
    assert not (tmp_path / "run").exists()


def test_a_site_that_the_model_lacks_leaves_nothing(tmp_path: Path) -> None:
    from tiny_saved import save_model

    model = save_model(tmp_path / "model", "llama")
    with pytest.raises(UserError, match=r"does not show its loop_state \(sites\): it has no loops"):
        depthprobe.analyze(str(model), out=tmp_path / "run", **{**SMALL, "sites": "loop_state"})


def test_a_dry_run_says_what_a_run_takes(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["analyze", str(tiny), "--task", "kinship", "--hops", "1-2", "--n", "2", "--dry-run"]
    assert main([*arguments, "--probes", "lens,patching", "--probe-items", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lens, patching = told["probes"]
    assert (lens["items"], lens["cells"], patching["items"]) == (4, 4, 4)
    assert patching["cells"] > 100 and patching["flops"] > 0 < lens["flops"] and patching["bytes"] <= 1 << 30
    assert told["seconds"] == pytest.approx(lens["seconds"] + patching["seconds"]) and told["seconds"] > 0
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "cells" in out and "nothing was written" in out and not list(tmp_path.iterdir())
    assert main([*arguments, "--resume"]) == 2
    assert "--resume says nothing" in capsys.readouterr().err


def test_a_dry_run_checks_the_folder_as_the_run_would(
    whole: AnalyzeResult, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("x")

    def both(out: Path, said: str, **options: Any) -> None:
        for call in (dry_run, depthprobe.analyze):
            with pytest.raises(UserError, match=said):
                call(str(tiny), out=out, **{**SMALL, **options})

    with monkeypatch.context() as patch:
        patch.setattr("depthprobe.depth.load", lambda *_, **__: pytest.fail("the model is loaded"))
        both(tmp_path / "used", "not empty and holds no run")
        both(tmp_path / "file", "a file stands where the run folder should be")
        both(tmp_path / "file" / "below", "a file stands where|cannot write here: Not a directory")
        both(whole.folder, "another seed: 1000 there, 7 here", seed=7)

        def full(self: Path, *_: object, **__: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        patch.setattr(Path, "touch", full)
        both(tmp_path / "new", "Read-only file system")
    said: list[str] = []
    dry_run(str(tiny), out=whole.folder, remark=said.append, **SMALL)
    assert said[0] == f"this run is finished already: {whole.folder}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "used"]


@pytest.mark.parametrize("kind", ["looped-plain", "llama"])
def test_a_dry_run_counts_what_the_run_computes(kind: str, tmp_path: Path) -> None:
    """Planned operations against those that torch counts in the same part, within 10 %."""
    from tiny_saved import save_model
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = AnalyzeConfig.of({**SMALL, "model": str(save_model(tmp_path / "model", kind)), "probes": NAMES})
    ready = opened(config, split_given=False, say=lambda _: None, told=lambda *_: None)
    for name, probe in PROBES.items():
        work = probe.prepare(ready.model, ready.prepared, config, 1 << 30, lambda _: None)
        # the counter knows no fused attention of a CPU
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            next(iter(work.rows(set(range(1, work.n_parts)))))
        assert work.cost(0).flops == pytest.approx(counted.get_total_flops(), rel=0.1), name


def test_the_cells_of_a_dry_run_are_those_of_the_run(whole: AnalyzeResult, tiny: Path) -> None:
    planned = dry_run(str(tiny), **SMALL).probes[1]
    assert planned.cells == whole.table("patching").height + whole.table("knockout").height
    assert whole.table("patching").filter(pl.col("control"))["item"].n_unique() >= 1


SKIPS = {**SMALL, "probes": "lens,effective", "n": 1}


def test_first_tokens_may_be_spared(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    plain = depthprobe.analyze(str(tiny), out=tmp_path / "plain", remark=said.append, **SKIPS)
    assert plain.manifest["counts"]["spared_first"] == 0 and not any("never skipped" in line for line in said)
    spared = depthprobe.analyze(str(tiny), out=tmp_path / "spared", remark=said.append, spare_first=2, **SKIPS)
    assert spared.manifest["counts"]["spared_first"] == 2 and "the first 2 tokens are never skipped" in said[-1]
    assert not plain.table("effective").equals(spared.table("effective"))
    assert spared.manifest["config"]["spare_first"] == 2
    with pytest.raises(UserError, match=r"spare_first"):
        depthprobe.analyze(str(tiny), out=tmp_path / "spared", resume=True, spare_first=1, **SKIPS)
    with pytest.raises(UserError, match=r"leave none to skip when 500 are spared.*--spare-first"):
        dry_run(str(tiny), spare_first=500, **SKIPS)
    arguments = ["analyze", str(tiny), "--task", "kinship", "--hops", "1-2", "--n", "1", "--browse", "0", "--dry-run"]
    assert main([*arguments, "--probes", "lens,effective", "--spare-first", "1", "--probe-items", "1"]) == 0
    assert "the first token is never skipped" in capsys.readouterr().err


def test_the_coda_lens_of_a_run(tiny: Path, tmp_path: Path) -> None:
    from tiny_saved import save_model

    with_coda = save_model(tmp_path / "coda", "looped-ouro-coda")
    asked: dict[str, Any] = {"task": "kinship", "hops": "1-2", "n": 1, "resamples": 100, "browse": 1, "lens": "coda"}
    run = depthprobe.analyze(str(with_coda), out=tmp_path / "run", **asked)
    assert set(run.table("lens").filter("is_loop_end")["lens"]) == {"coda"} and run.table("tokens").height
    # every depth is read by one lens or the other, and all of them are told
    assert sorted(set(run.table("accuracy")["depth"])) == sorted(set(run.table("lens")["depth"]))
    coda, plain = (dry_run(str(with_coda), **asked | {"lens": lens}).probes[0].flops for lens in ("coda", "plain"))
    assert coda > plain
    with pytest.raises(UserError, match="lens"):
        depthprobe.analyze(str(with_coda), out=tmp_path / "run", **asked | {"lens": "plain"})
    with pytest.raises(UserError, match="--tuned says nothing without --lens tuned"):
        AnalyzeConfig.of({"lens": "coda", "tuned": "x"})
    ordinary = save_model(tmp_path / "llama", "llama")
    for model, told in ((tmp_path / "none", "has no coda"), (ordinary, "cannot be stopped at a loop: it is a Llama")):
        if not model.exists():
            save_model(model, "looped-ouro")
        with pytest.raises(UserError, match=told):
            depthprobe.analyze(str(model), out=tmp_path / "other", **asked)
    assert not (tmp_path / "other").exists()
