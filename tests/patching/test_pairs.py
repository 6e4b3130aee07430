"""Donors that fit, and those that do not; what `causal_patch` shows of itself."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from worlds import items, opened, targets, with_donor

import depthprobe
from depthprobe import tables
from depthprobe.errors import UserError
from depthprobe.patching import subjects
from depthprobe.tasks.donors import donors_of


@pytest.mark.parametrize("words", ["word", "byte"])
def test_found_donors_have_the_items_tokens_but_for_one_word(words: str) -> None:
    model = opened("llama", words)
    found = subjects(model.tokenizer, targets(model, [*items(n=4), *items("follow", n=4)]))
    assert len(found.found) >= 8
    assert {pair.donor.kind for s in found.found for pair in s.pairs} == {
        "relation", "distractor", "name", "distractor_name",
    }  # fmt: skip
    for one in found.found:
        assert not one.pairs[0].control and {pair.against for pair in one.pairs} == {one.pairs[0].donor.item.answer}
        for pair in one.pairs:
            ours, theirs = one.target.prompt_ids, pair.target.prompt_ids
            assert len(ours) == len(theirs)
            assert {n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b} <= set(pair.word)
    without = subjects(model.tokenizer, targets(model, items(n=4)), controls=False)
    assert all(len(one.pairs) == 1 for one in without.found)


def test_a_given_donor_of_another_length_is_one_line() -> None:
    model = opened("llama", "byte")
    item = items(n=1, hops=(1,))[0]
    lengths = {len(model.tokenizer(f" {word}")["input_ids"]) for word in item.candidates}
    assert len(lengths) > 1
    own = len(targets(model, [item])[0].prompt_ids)
    donors = [d for d in donors_of(item, "relation") if len(targets(model, [d.item])[0].prompt_ids) != own]
    theirs = len(targets(model, [donors[0].item])[0].prompt_ids)
    said = rf"item {item.id} and its donor .* have {own} and {theirs} tokens \(donors\): give a donor"
    with pytest.raises(UserError, match=said) as caught:
        depthprobe.causal_patch(model, item, donors=[donors[0]])
    assert "\n" not in str(caught.value)


def test_other_donors_that_do_not_fit() -> None:
    model = opened("llama")
    item = with_donor(model, "kinship")
    donor = next(donors_of(item, "relation"))
    stranger = replace(donor, base_id="nobody")
    same = replace(donor, item=replace(item, id="same"))
    elsewhere = replace(donor, base_span=item.facts[donor.fact].subject_span)
    for wrong, text in (
        ([stranger], "belongs to item nobody, which is not among the items"),
        ([same], "have the same tokens"),
        ([elsewhere], "differ in tokens outside the changed word"),
        (["cousin"], "there is no donor of kind 'cousin'"),
        (["relation", donor], "partly kinds and partly donors"),
    ):
        with pytest.raises(UserError, match=text):
            depthprobe.causal_patch(model, item, donors=wrong)  # type: ignore[arg-type]
    bare = replace(item, facts=(), id="bare")
    with pytest.raises(UserError, match="none of 1 items has a donor that fits"):
        depthprobe.causal_patch(model, bare)
    with pytest.raises(UserError, match="there are no items"):
        depthprobe.causal_patch(model, [])
    with pytest.raises(UserError, match=r"position 99 is outside the prompt of \d+ tokens \(item "):
        depthprobe.causal_patch(model, item, positions=[99])


def test_a_given_donor_is_patched_and_the_result_shows_itself() -> None:
    model = opened("looped")
    item = with_donor(model, "kinship")
    donor = next(donors_of(item, "relation"))
    result = depthprobe.causal_patch(model, item, donors=[donor], positions=["changed_word", -1], position="each")
    tables.check("patching", result.frame)
    assert result.donors["donor"].to_list() == [donor.item.id] and result.donors["tokens"][0].len() == 1 + len(
        item.text.replace(".", " .").replace("'", " ' ").replace("-", " - ").split()
    )
    assert result.frame["position"].null_count() == 0 and set(result.frame["role"]) == {"changed_word", "last"}
    assert result.by_role().is_empty()  # single positions
    assert "1 donors" in repr(result) and repr(result).startswith("PatchResult(looped: 1 items")
    told: list[tuple[int, ...]] = []
    whole = depthprobe.causal_patch(model, item, donors=[donor], progress=lambda *n: told.append(n))
    assert told == [(0, 1), (1, 1)]
    by = whole.by_role(right=False)
    assert by.filter(pl.col("role") == "changed_word")["n"].to_list() == [1] * len(model.axis)
    html = whole._repr_html_()
    assert "<table>" in html and "changed_word" in html
    assert whole.engines <= {"suffix", "hooks"} and whole.engines and whole.flops > 0


@pytest.mark.slow
def test_the_embedded_model_moves_the_answer_to_the_last_token() -> None:
    """A trained model, one story: what the changed name brings ends up at the last token, and a control brings none."""
    model = depthprobe.load("follow-demo")
    from depthprobe.tasks.generate import Generator

    asked = [i for i in Generator("follow", hops=(1, 2, 3), split="heldout", seed=1000).items(2) if i.hops == 3]
    result = depthprobe.causal_patch(model, asked, positions=["changed_word", "last"], span=["one", "later"])
    assert result.n_right >= 1
    by = result.by_role()
    real = by.filter(~pl.col("control"))
    last = real.filter((pl.col("role") == "last") & (pl.col("span") == "one")).sort("depth")["effect"]
    assert last[0] == pytest.approx(0, abs=1e-3) and last[-1] == pytest.approx(1, abs=1e-3)
    source = real.filter((pl.col("role") == "changed_word") & (pl.col("span") == "later")).sort("depth")["effect"]
    assert source[0] == pytest.approx(1, abs=1e-3) and source[-1] == pytest.approx(0, abs=1e-3)
    control = by.filter(pl.col("control") & (pl.col("depth") == 0) & (pl.col("role") == "changed_word"))
    assert control["effect"].abs().max() < 0.2  # type: ignore[operator]
