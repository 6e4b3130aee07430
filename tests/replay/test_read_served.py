"""Traces that were cut off or changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM
from depthprobe.pipeline import agree
from depthprobe.replay import read_served
from depthprobe.runs.trace_tables import trace_tables
from depthprobe.runtime.record import read_meta
from tests.replay.served_cases import asked, edit, serve, tiny


@pytest.fixture
def model() -> LoopedForCausalLM:
    return tiny(7)


def read(folder: Path) -> Any:
    return read_served(folder, read_meta(folder))


def test_a_killed_trace_is_read_as_far_as_it_goes(tmp_path: Path, model: LoopedForCausalLM) -> None:
    folder = serve(tmp_path / "t", model, "q:0.5", asked(4, 6))
    whole = {r.id: r for r in read(folder).requests}
    edit(folder, "requests", lambda line: not (line["event"] == "end" and line["request"] in ("q1", "q2")))
    for stream in ("tokens", "requests", "ticks"):
        (file,) = folder.glob(f"{stream}-*.jsonl")
        text = file.read_text()
        file.write_text(text[: len(text.rstrip("\n")) - 3])  # the last line is cut
    found = read(folder)
    cut = {r.id: r for r in found.requests}
    for name, request in cut.items():
        assert request.prompt == whole[name].prompt and request.prompt_exits == whole[name].prompt_exits
        count = len(request.tokens)
        assert request.tokens == whole[name].tokens[:count] and request.exits == whole[name].exits[:count]
    tables = agree(folder, model=model, resamples=20).tables
    assert tables["agreement"].height == sum(len(r.tokens) for r in cut.values())
    ended = dict(tables["served_requests"].select("request", "finish_reason").iter_rows())
    assert ended["q1"] is None and ended["q2"] is None
    assert tables["served_ticks"].height == tables["served_ticks"]["tick"].n_unique() > 0


def test_without_its_end_a_ragged_prompt_is_unknown(tmp_path: Path, model: LoopedForCausalLM) -> None:
    folder = serve(tmp_path / "t", model, "q:0.5", asked(4, 6), prefill="ragged")
    edit(folder, "requests", lambda line: not (line["event"] == "end" and line["request"] == "q3"))
    edit(folder, "requests", lambda line: not (line["event"] == "start" and line["request"] == "q4"))
    remarks: list[str] = []
    found = agree(folder, model=model, resamples=20, remark=remarks.append)
    assert found.left_out == {"its beginning is not on record": 1, "cut off, and with it the exits of its prompt": 1}
    assert len(remarks) == 2 and remarks[1].startswith("1 request left out: cut off")
    assert set(found.tables["agreement"]["request"]) == {"q0", "q1", "q2", "q5"}
    assert trace_tables(folder)["served_requests"].filter(request="q3")["prompt_exits"].null_count() == 1
    edit(folder, "requests", lambda line: False)
    with pytest.raises(UserError, match="no request of the trace can be replayed"):
        agree(folder, model=model)


def other(depth: int) -> int:
    return depth - 1 if depth > 1 else depth + 1


@pytest.mark.parametrize("prefill", ["dense", "ragged"])
def test_an_exit_changed_in_one_place_contradicts_the_other(
    tmp_path: Path, model: LoopedForCausalLM, prefill: str
) -> None:
    folder = serve(tmp_path / "t", model, "q:0.5", asked(4, 6, 4), prefill=prefill)

    def change(line: dict) -> None:
        if line["request"] == "q2" and line["event"] == "end":
            line["exits"][0] = other(line["exits"][0])

    edit(folder, "requests", change)
    with pytest.raises(UserError, match=r"its line has exit \d, the request's end \d \(request q2, token 0\)"):
        agree(folder, model=model)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("rule", ["q:0.5", "l2:0.5", "lookahead:l2:0.6"])
def test_an_exit_changed_everywhere_is_named(
    tmp_path: Path, model: LoopedForCausalLM, rule: str, index: int
) -> None:
    requests = [r for r in asked(4, 12, 4) if r.sampling.max_new_tokens > 2]
    folder, name = serve(tmp_path / "t", model, rule, requests), requests[-1].id

    def end(line: dict) -> None:
        if line["request"] == name and line["event"] == "end":
            line["exits"][index] = other(line["exits"][index])

    def row(line: dict) -> None:
        if (line["request"], line["index"]) == (name, index):
            line["exit"] = line["executed"] = other(line["exit"])

    edit(folder, "requests", end)
    edit(folder, "tokens", row)
    match = rf"left at loop \d, and by {rule} it leaves at \d \(request {name}, token {index}\)"
    with pytest.raises(UserError, match=match):
        agree(folder, model=model)


def test_other_changes_are_named(tmp_path: Path, model: LoopedForCausalLM) -> None:
    """A token, a prompt's exit, a gate value, a planned exit: what the rule cannot tell, the numbers do."""

    def changed(name: str, rule: str, stream: str, change: Any) -> str:
        folder = serve(tmp_path / name, model, rule, asked(4, 6, 4), prefill="ragged")
        edit(folder, stream, change)
        with pytest.raises(UserError) as caught:
            agree(folder, model=model)
        return str(caught.value)

    def token(line: dict) -> None:
        if line["request"] == "q1" and line["event"] == "end":
            line["tokens"][0] = (line["tokens"][0] + 1) % 17

    assert "its line has token" in changed("token", "q:0.5", "requests", token)

    def prompt(line: dict) -> None:
        if line["event"] == "end":
            line["prompt_exits"] = [other(e) for e in line["prompt_exits"]]

    assert "request q" in changed("prompt", "q:0.5", "requests", prompt)

    def short(line: dict) -> None:
        if line["event"] == "end" and line["request"] == "q0":
            line["prompt_exits"] = [*line["prompt_exits"], 2]

    assert "before the prompt's last (request q0)" in changed("short", "q:0.5", "requests", short)

    def beyond(line: dict) -> None:
        if line["request"] == "q1":
            line["exits"] = [9 for _ in line.get("exits", ())]

    assert "request q1, token 0" in changed("beyond", "q:0.5", "requests", beyond)

    def gate(line: dict) -> None:
        if (line["request"], line["index"]) == ("q3", 0):
            line["lambda"][0] += 0.01

    assert "λ at loop 1 is" in changed("gate", "q:0.5", "tokens", gate)

    def planned(line: dict) -> None:
        if (line["request"], line["index"]) == ("q3", 0):
            line["lambda"].append(0.5)

    assert "λ is on record for 3 loops, and it left at 2 (request q3, token 0)" in changed(
        "planned", "fixed:2", "tokens", planned
    )


def test_tables_of_a_trace(tmp_path: Path, model: LoopedForCausalLM) -> None:
    folder = serve(tmp_path / "t", model, "q:0.5", asked(4, 6, 4), tap=2)
    found = trace_tables(folder)
    tokens, requests = found["served_tokens"], found["served_requests"]
    assert requests["item"].to_list() == [f"i{i}" for i in range(6)]
    for row in requests.iter_rows(named=True):
        own = tokens.filter(request=row["request"]).sort("index")
        assert own["token"].to_list() == row["tokens"] and own["exit"].to_list() == row["exits"]
        assert row["prompt_exits"] == [5] * (len(row["prompt"]) - 1) and row["finish_reason"] == "length"
    for row in tokens.iter_rows(named=True):
        assert len(row["lens"]) == len(row["gate_lambda"]) == row["exit"] and len(row["lens"][0]) == 2
    # the tap reads the state by norm and head; without a coda that is the replay's readout
    replayed = agree(folder, model=model, resamples=20).tables["replayed"].filter(kv="served")
    seen = {(r, i, d): t for r, i, d, t in replayed.select("request", "index", "loop", "top1").iter_rows()}
    for row in tokens.iter_rows(named=True):
        assert [best[0] for best in row["lens"]] == [
            seen[row["request"], row["index"], loop] for loop in range(1, row["exit"] + 1)
        ]
    with pytest.raises(UserError, match="there is no trace here"):
        trace_tables(tmp_path)
    edit(folder, "tokens", lambda line: line.update(exit="two"))
    with pytest.raises(UserError, match="not those of a trace"):
        trace_tables(folder)
