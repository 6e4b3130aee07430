"""Cells and whole answers, against a plain hook and plain forwards of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import polars as pl
import pytest
import torch
from tiny_models import depth_model
from torch import Tensor
from worlds import items, opened, subject, targets, tokenizer, with_donor

import depthprobe
from depthprobe.depth import Coordinate, DecoderModel, suffix_memory
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.lens import lens_batch
from depthprobe.lens.targets import Target
from depthprobe.patching import part_cost, patching_rows, places, prepare_patching
from depthprobe.patching import subjects as sought
from depthprobe.patching import sweep as sweeping
from depthprobe.patching.probe import CUT_ROLES, Plan, bases, pair_roles
from depthprobe.patching.scores import Tally
from depthprobe.patching.sweep import sweep

PLENTY = 1 << 28


def logits_of(model: TappedModel, ids: Sequence[int], patches: dict[Coordinate, tuple[list[int], Tensor]]) -> Tensor:
    """[S, V], one plain forward with a hook for each patch."""
    hooks = []
    try:
        for coordinate, (tokens, value) in patches.items():
            tap, seen = model.taps[coordinate], [0]

            def change(given: Any, tap: Any = tap, seen: Any = seen, tokens: Any = tokens, value: Any = value) -> Any:
                seen[0] += 1
                if seen[0] != tap.call + 1:
                    return None
                state = (given[0] if isinstance(given, tuple) else given).clone()
                state[:, tokens] = value
                return (state, *given[1:]) if isinstance(given, tuple) else state

            module = model.model.get_submodule(tap.path)
            hooks.append(
                module.register_forward_pre_hook(lambda _m, args, change=change: change(args)) if tap.before
                else module.register_forward_hook(lambda _m, _a, out, change=change: change(out))
            )  # fmt: skip
        with torch.inference_mode():
            return model.model(input_ids=torch.tensor([list(ids)])).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()


def every(model: TappedModel, target: Target, place: Coordinate) -> Tensor:
    """[S, d] of the clean run."""
    capture = model.capture(torch.tensor([target.prompt_ids]), positions="all", coordinates=(place,))
    return capture.states[place][0]


def answer_logprob(
    model: TappedModel, target: Target, source: Target, word: str, coordinates: Sequence[Coordinate],
    tokens: Sequence[int],
) -> float:  # fmt: skip
    """log p(word) after the prompt, token by token, each from a forward in which the source's states are put."""
    path, end, total = target.paths[target.words.index(word)], len(target.prompt_ids), 0.0
    for length, token in enumerate(path):
        behind = path[:length]
        at = [*tokens, *range(end, end + length)] if end - 1 in tokens else list(tokens)
        theirs = model.capture(torch.tensor([[*source.prompt_ids, *behind]]), positions="all", coordinates=coordinates)
        put = {c: (at, theirs.states[c][0][at]) for c in coordinates}
        logits = logits_of(model, (*target.prompt_ids, *behind), put)
        total += float(logits[-1].log_softmax(-1)[token])
    return total


@pytest.mark.parametrize(
    ("kind", "words", "task"),
    [
        ("llama", "word", "follow"), ("llama", "byte", "kinship"), ("gpt2", "byte", "follow"),
        ("gemma2", "byte", "kinship"), ("looped", "word", "kinship"), ("looped-ouro-coda", "byte", "kinship"),
    ],
)  # fmt: skip
def test_whole_answers_against_plain_forwards(kind: str, words: str, task: str) -> None:
    model = opened(kind, words)
    item = with_donor(model, task)
    sites = [site for site in ("resid_post", "attn_out", "loop_state") if site != "loop_state" or model.loop_ends]
    at = [(1, 1), (1, 2)]
    result = depthprobe.causal_patch(
        model, item, sites=sites, at=None if model.loop_ends else at, controls=False,
        positions=["changed_word", "last"], directions=("donor_to_item", "item_to_donor"),
    )  # fmt: skip
    one = subject(model, item)
    pair = one.pairs[0]
    roles, _ = pair_roles(model, one, pair)
    rows = result.frame.to_dicts()
    assert words == "word" or any(len(path) > 1 for path in one.target.paths)
    for row in rows[:: max(1, len(rows) // 6)]:
        into, source = one.target, pair.target
        own, other = item.answer, pair.donor.item.answer
        if row["direction"] == "item_to_donor":
            into, source, own, other = source, into, other, own
        coordinate = next(p.coordinate for p in places(model, row["site"]) if p.depth == row["depth"])
        got = [answer_logprob(model, into, source, word, (coordinate,), roles[row["role"]]) for word in (own, other)]
        clean = [answer_logprob(model, into, into, word, (coordinate,), ()) for word in (own, other)]
        there = [answer_logprob(model, source, source, word, (coordinate,), ()) for word in (own, other)]
        assert row["ld_patched"] == pytest.approx(got[0] - got[1], rel=1e-4, abs=1e-4)
        assert row["ld_clean"] == pytest.approx(clean[0] - clean[1], rel=1e-4, abs=1e-4)
        assert row["ld_donor"] == pytest.approx(there[0] - there[1], rel=1e-4, abs=1e-4)
        assert row["p_answer"] == pytest.approx(torch.tensor(got[0]).exp().item(), rel=1e-3)
        assert row["p_donor"] == pytest.approx(torch.tensor(got[1]).exp().item(), rel=1e-3)


@pytest.mark.parametrize(("kind", "words"), [("llama", "byte"), ("looped", "byte"), ("looped-ouro", "word")])
def test_both_ends_of_the_curve_are_known(kind: str, words: str) -> None:
    """The word at depth 0, and the last token at the last, bring the whole of the other story's answer."""
    model = opened(kind, words)
    result = depthprobe.causal_patch(
        model, items(n=3), span=["one"] if kind == "llama" else ["one", "later"],
        directions=("donor_to_item", "item_to_donor"),
    )  # fmt: skip
    frame = result.frame.filter(~pl.col("control") & (pl.col("span") == "one"))
    last = len(model.axis) - 1
    for role, depth, effect in (
        ("changed_word", 0, 1.0), ("last", last, 1.0), ("changed_word", last, 0.0), ("last", 0, 0.0),
    ):  # fmt: skip
        found = frame.filter((pl.col("role") == role) & (pl.col("depth") == depth))["effect"].to_list()
        assert found == pytest.approx([effect] * len(found), abs=2e-3) and found, role


def test_controls_are_measured_against_the_real_donor() -> None:
    model = opened("llama")
    result = depthprobe.causal_patch(model, items("follow", n=4, hops=(1, 2)))
    for (_,), block in result.donors.partition_by("item", as_dict=True).items():
        assert block["donor_answer"].n_unique() == 1 and not block["control"][0]
    frame = result.frame.filter((pl.col("role") == "last") & (pl.col("depth") == 0))
    both = frame.join(frame.filter(~pl.col("control")), on="item", suffix="_real")
    assert both["control"].any()
    for name in ("ld_clean", "ld_donor"):
        assert both[name].to_list() == pytest.approx(both[f"{name}_real"].to_list(), abs=1e-5)


@pytest.mark.parametrize("words", ["word", "byte"])
@pytest.mark.parametrize("task", ["kinship", "follow"])
def test_the_best_candidate_is_the_lens_one(words: str, task: str) -> None:
    """Branches that are left out cannot hold the best."""
    model = opened("llama", words)
    asked = targets(model, items(task, n=6))
    rows = lens_batch(model, asked).filter(pl.col("depth") == len(model.axis) - 1)
    for target, correct, logprob in zip(asked, rows["candidate_correct"], rows["answer_logprob"], strict=True):
        tally = sweep(model, target, [target.answer], max_bytes=PLENTY).tally
        assert bool(tally.best()[0] == target.answer) == correct
        assert float(tally.logprob(target.answer)[0]) == pytest.approx(logprob, rel=1e-4)


def test_branches_are_run_only_while_they_can_win() -> None:
    model = opened("llama", "byte")
    target = targets(model, items(n=1, hops=(2,)))[0]
    tally = Tally(target, [target.answer], 2)
    # the answer alone is run with all cells: whole, and not once for each of its beginnings
    path = target.paths[target.answer]
    assert len(target.nodes) > 2 and len(path) > 1 and tally.first_runs == (path[:-1],)
    assert tally.contexts(path[:-1])[0] == () and set(tally._asked) <= set(tally.contexts(path[:-1]))
    opened_runs: list[tuple[int, ...]] = []
    generator = torch.Generator().manual_seed(0)
    states = {c: torch.randn(2, model.width, generator=generator) for c in [(), *(n.suffix for n in target.nodes)]}

    def state(context: tuple[int, ...]) -> Tensor:
        return states.setdefault(context, torch.randn(2, model.width, generator=generator))

    whole = Tally(target, [target.answer], 2)
    every = torch.arange(2)
    for run in tally.first_runs:
        contexts = tally.contexts(run)
        tally.add(model, every, contexts, torch.stack([state(c) for c in contexts], 1))
    while (still := tally.open()) is not None:
        context, rows = still
        opened_runs.append(context)
        tally.add(model, rows, [context], state(context)[rows][:, None])
    for context in {n.suffix for n in target.nodes} | set(tally._asked):
        whole.add(model, every, [context], state(context)[:, None])
    assert whole.open() is None and torch.equal(whole.best(), tally.best())
    assert len(set(opened_runs)) < len(target.nodes)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_sabotaged_engine_is_caught(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("llama")
    resume = TappedModel.resume

    def broken(self: TappedModel, ids: Tensor, cells: Any, *args: Any, **options: Any) -> Any:
        done = resume(self, ids, cells, *args, **options)
        if len(cells) > 2:
            state = done.states[self.axis[-1]]
            state[-2 if which == "first" else -1] += 0.05 * state.abs().max()
        return done

    monkeypatch.setattr(TappedModel, "resume", broken)
    said = "changed word patched at depth 0" if which == "first" else "last token patched at the last depth"
    with pytest.raises(UserError, match=rf"the {said} does not give the logits .*item .* and donor ") as caught:
        depthprobe.causal_patch(model, items()[1], controls=False)
    assert "\n" not in str(caught.value)


def test_zero_and_mean() -> None:
    model = opened("looped", "word")
    asked = items("follow", n=6, hops=(2,))  # donors are spread over all items, so both calls have all of them
    result = depthprobe.causal_patch(model, asked, kinds=("zero", "mean"), at=[(2, 1)], controls=False)
    subjects = sought(model.tokenizer, targets(model, asked), controls=False).found
    assert len(subjects) >= 3
    place = Coordinate(2, 1)
    for row in result.frame.filter(pl.col("role") == "changed_fact").to_dicts():
        own = next(s for s in subjects if s.item.id == row["item"])
        roles = {s.item.id: pair_roles(model, s, s.pairs[0])[0]["changed_fact"] for s in subjects}
        if row["kind"] == "mean":
            others = [
                every(model, s.target, place)[list(roles[s.item.id])] for s in subjects if s is not own
            ]  # fmt: skip
            value = torch.cat(others).mean(0)
        else:
            value = torch.zeros(model.width)
        at = list(roles[own.item.id])
        logits = logits_of(model, own.target.prompt_ids, {place: (at, value.expand(len(at), -1))})[-1]
        first, other = (own.target.paths[own.target.words.index(w)][0] for w in (own.item.answer, own.pairs[0].against))
        assert row["ld_patched"] == pytest.approx(float(logits[first] - logits[other]), rel=1e-4, abs=1e-4), row["kind"]
        assert row["direction"] == "donor_to_item" and row["n_positions"] == len(at)
    with pytest.raises(UserError, match=r"at least one other \(kind mean\)"):
        depthprobe.causal_patch(model, asked[0], kinds="mean")


def test_a_cut_against_a_mask() -> None:
    """Cutting every earlier token in every layer leaves the last token alone with itself."""
    model = opened("llama")
    item = with_donor(model, "follow")
    result = depthprobe.causal_patch(model, item, knockout=3, at=[(0, 0)])
    assert result.knockout is not None
    one = subject(model, item)
    roles, _ = pair_roles(model, one, one.pairs[0])
    length = len(one.target.prompt_ids)
    for row in result.knockout.to_dicts():
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[-1, list(roles[row["role"]])] = False
        with torch.inference_mode():
            ids = torch.tensor([one.target.prompt_ids])
            logits = model.model(input_ids=ids, attention_mask=mask[None, None]).logits
        wanted = logits[0, -1].float().log_softmax(-1)[one.target.answer_ids[0]]
        assert row["window"] == 3 and row["loop"] == row["layer"] == 1
        assert row["logprob_cut"] == pytest.approx(float(wanted), rel=1e-4)
        assert row["p_answer"] == pytest.approx(float(wanted.exp()), rel=1e-4)
    assert set(result.knockout["role"]) == set(CUT_ROLES)


@pytest.mark.parametrize("engine", ["suffix", "hooks"])
def test_only_what_was_asked_for_is_counted(engine: str) -> None:
    model = opened("llama")
    item = with_donor(model, "follow")
    options: dict[str, Any] = {"at": (0, 0), "controls": False, "engine": engine}
    one = depthprobe.causal_patch(model, item, positions="changed_word", **options)
    assert (one.n_cells, one.n_run, one.n_filled) == (1, 1, 0)
    # the last token is the same word in both stories
    none = depthprobe.causal_patch(model, item, positions="last", **options)
    assert (none.n_cells, none.n_run, none.n_filled) == (1, 0, 1)
    # two oracles a pair, which are run and counted in flops alone
    assert none.flops > 0 and one.engines == none.engines == {engine}


def test_a_model_to_which_all_stories_are_one_is_counted_too() -> None:
    """There the last token's oracle does not run."""
    model = depth_model("llama", tokenizer("word"))
    assert isinstance(model, TappedModel)
    with torch.no_grad():
        for n in range(3):
            model.model.get_submodule(f"model.layers.{n}.self_attn.o_proj").weight.zero_()
    result = depthprobe.causal_patch(model, with_donor(model, "follow"), controls=False, positions="changed_word")
    assert (result.n_cells, result.n_run, result.n_filled) == (4, 3, 1)


def test_answers_of_several_tokens_are_counted_as_often_as_they_run() -> None:
    model = opened("llama", "byte")
    asked = items(n=2)
    result = depthprobe.causal_patch(model, asked)
    assert result.n_run + result.n_filled > result.n_cells and result.n_run


def test_all_engines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the first item alone."""
    resume, calls = TappedModel.resume, [0]

    def changing(self: TappedModel, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        return resume(self, *args, **options | {"engine": "suffix" if calls[0] == 1 else "hooks"})

    monkeypatch.setattr(TappedModel, "resume", changing)
    result = depthprobe.causal_patch(opened("llama"), items("follow", n=3), controls=False, positions="last")
    assert result.donors["item"].n_unique() > 1 and result.engines == {"suffix", "hooks"}


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_nothing_is_divided_by_the_rounding_of_half_precision(dtype: torch.dtype, least: float) -> None:
    model, asked = opened("llama"), items("follow", n=6)
    half = DecoderModel(deepcopy(model.model).to(dtype), model.tokenizer, "half")
    exact, found = (depthprobe.causal_patch(m, asked, positions="changed_word").frame for m in (model, half))
    apart = (found["ld_clean"] - found["ld_donor"]).abs()
    assert found["effect"].is_not_null().to_list() == (apart > least).to_list()
    assert exact["effect"].null_count() == 0 and 0 < apart.min() < 0.05 < apart.max()  # type: ignore[operator]
    assert (exact["effect"] - found["effect"]).abs().max() < 0.6  # type: ignore[operator]


def test_a_small_memory_splits_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("llama", "byte")
    asked = items(n=1, hops=(2,))
    whole = depthprobe.causal_patch(model, asked, sites=("resid_post", "mlp_out"))
    calls: list[int] = []
    run = sweeping._One.run

    def counted(self: Any, specs: Any, *args: Any, **options: Any) -> None:
        calls.append(len(specs))
        run(self, specs, *args, **options)

    monkeypatch.setattr(sweeping._One, "run", counted)
    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)
    monkeypatch.setattr(sweeping, "_SHARE", 0.03)
    split = depthprobe.causal_patch(model, asked, sites=("resid_post", "mlp_out"), max_bytes=500_000)
    assert len(calls) > 5 and max(calls) < whole.n_cells / 2
    for name in ("ld_patched", "p_answer"):
        torch.testing.assert_close(whole.frame[name].to_torch(), split.frame[name].to_torch(), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"one cell .* needs .* are allowed \(max_bytes, --max-memory\)"):
        depthprobe.causal_patch(model, asked, max_bytes=1000)


def test_a_part_holds_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of the sources that its cells need, where they need them, and the values: with a continuation too."""
    model = opened("llama", "byte")
    item = with_donor(model, "follow", hops=1, control=True)
    one = subject(model, item)
    asked, _ = bases(model, Plan.of(model), one)
    base = asked[0]
    assert len(base.sources) > 1 and len(base.target.answer_ids) > 1
    held: list[int] = []
    states, resume = sweeping._One._states, TappedModel.resume

    def captured(self: Any, *args: Any) -> Any:
        found = states(self, *args)
        held[-1] += sum(state.nbytes for state in found.values())
        return found

    def resumed(self: Any, ids: Tensor, cells: Any, at: Any, *args: Any, **options: Any) -> Any:
        held[-1] += sum(edit.value.nbytes for cell in cells for edit in cell.edits)
        held.append(0)
        return resume(self, ids, cells, at, *args, **options)

    monkeypatch.setattr(sweeping._One, "_states", captured)
    monkeypatch.setattr(TappedModel, "resume", resumed)
    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)
    monkeypatch.setattr(sweeping, "_SHARE", 0.02)
    length = len(base.target.prompt_ids) + max(map(len, base.target.paths))
    share = (2 * len(base.sources) + 2) * length * model.width * 4
    held.append(0)
    done = sweep(model, base.target, base.numbers, base.sources, base.specs, max_bytes=share * 50)
    assert len(held) > 3 and max(held) <= share
    whole = sweep(model, base.target, base.numbers, base.sources, base.specs, max_bytes=PLENTY)
    for word in base.numbers:
        torch.testing.assert_close(done.tally.logprob(word), whole.tally.logprob(word), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_bytes", [3_000_000, PLENTY])
def test_a_dry_run_plans_the_sweeps_that_run(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("llama")
    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)
    monkeypatch.setattr(sweeping, "_SHARE", 0.02)
    work = prepare_patching(model, targets(model, items("follow", n=2)), max_bytes=max_bytes)
    calls: dict[str, list[Any]] = {"plan_resume": [], "resume": []}
    for name, seen in calls.items():
        plain = getattr(TappedModel, name)

        def spied(self: Any, ids: Any, cells: Any, at: Any = None, *args: Any, own: Any = plain, seen: Any = seen,
                  **options: Any) -> Any:  # fmt: skip
            what = [[(e.coordinate, e.positions) for e in cell.edits] + list(cell.cuts) for cell in cells]
            seen.append((list(ids), what, at, options["max_bytes"]))
            return own(self, ids, cells, at, *args, **options)

        monkeypatch.setattr(TappedModel, name, spied)
    cost = part_cost(work, 0)
    list(patching_rows(work, done=range(1, work.n_parts)))
    assert calls["plan_resume"] == calls["resume"]
    sweeps = len(calls["resume"])
    if max_bytes == PLENTY:  # one for the item and one for each donor; what is told is what they take, not the limit
        assert sweeps == 1 + len(work.subjects.found[0].pairs) and cost.bytes < PLENTY / 10
    else:
        assert sweeps > 1 + len(work.subjects.found[0].pairs) and max_bytes / 10 < cost.bytes <= max_bytes
