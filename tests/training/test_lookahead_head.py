"""Distilling the lookahead head: its loss, its measure, and a small run from stories to file."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from depthprobe.errors import UserError
from depthprobe.halting import Lookahead, LookaheadHead, QExit, q_exit
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.lookahead import (
    HeadRecipe,
    Traces,
    agreement,
    ahead_exits,
    fit_head,
    head_loss,
    late_exits,
    parse_data,
    story_rows,
    traces,
    train_head,
)
from tests.halting.loops import exits

TINY = HeadRecipe(stories=12, heldout=6, longest=3, steps=20, rows=5)


def tiny(**options: object) -> tuple[LoopedForCausalLM, object]:
    tokenizer = family_tokenizer()
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2,
             "n_loops": 4, "initializer_range": 0.3}  # fmt: skip
    return LoopedForCausalLM(LoopedConfig(**{**shape, **options})).eval(), tokenizer


def random_traces(n: int = 50, n_loops: int = 5, d: int = 6) -> tuple[Traces, LookaheadHead]:
    """States in which the next gate can be read exactly: by the head that is returned."""
    states = torch.randn(n, n_loops, d, generator=torch.Generator().manual_seed(0))
    states[:, 1:, 0] = states[:, :-1, 1]  # what the gate reads is told one loop before
    gate, ahead = F.one_hot(torch.tensor(0), d).float(), F.one_hot(torch.tensor(1), d).float()
    zero = torch.zeros(())
    head = LookaheadHead(ahead, zero, gate, zero, torch.ones(d), 0.0)
    return Traces(states, states @ gate, torch.arange(n) % 5 == 0, n), head


def test_the_loss_on_a_worked_example() -> None:
    # λ = (0.2, 0.5, ·), predicted λ̂ = 0.25 at depth 2: cross-entropy at 0.5, and |0.8·0.5 − 0.8·0.75| = 0.2
    gates, predicted = torch.logit(torch.tensor([[0.2, 0.5, 0.7]])), torch.logit(torch.tensor([[0.25]]))
    expected = -0.5 * math.log(0.25) - 0.5 * math.log(0.75) + 0.2
    assert head_loss(predicted, gates, torch.ones(1)).item() == pytest.approx(expected)
    both = head_loss(predicted.expand(2, 1), gates.expand(2, 3), torch.tensor([1.0, 3.0]))
    assert both.item() == pytest.approx(expected)  # weights sum to one


def test_exits_of_head_and_gate_are_those_of_the_rules() -> None:
    seen, right = random_traces()
    wrong = replace(right, weight=right.weight + 0.5, bias=right.bias + 0.3)
    for head in (right, wrong):
        predicted = head(seen.states)
        for q in (0.3, 0.7, 1.0):
            rule = Lookahead(QExit(q), head)
            asked = exits(rule, seen.states, gates=seen.gates, predicted=predicted)
            assert torch.equal(ahead_exits(seen, head, q), asked)
    found = agreement(seen, right, 0.7)
    own = q_exit(gate_logits=seen.gates, q=0.7, min_depth=2)
    for kind, chosen in (("answers", seen.asked), ("tokens", torch.ones_like(seen.asked))):
        told = found[kind]
        assert told["n"] == int(chosen.sum()) and told["head_equal"] == told["head_within_one"] == 1.0
        assert told["gate_depth_from_2"] == told["head_depth"] == pytest.approx(own[chosen].double().mean().item())
        late = late_exits(seen, 0.7)[chosen]
        assert told["late_equal"] == pytest.approx((late == own[chosen]).double().mean().item())
    assert agreement(seen, wrong, 0.7)["tokens"]["head_equal"] < 1.0


def test_a_gate_that_is_all_but_sure_has_not_reached_all_of_it() -> None:
    """1 − survival rounds to 1 where the survival is 4e-18; q = 1 is not reached, in the rule and here."""
    seen, head = random_traces(5)
    sure = replace(head, bias=torch.tensor(40.0))
    asked = exits(Lookahead(QExit(1.0), sure), seen.states, gates=seen.gates, predicted=sure(seen.states))
    assert ahead_exits(seen, sure, 1.0).tolist() == asked.tolist() == [5] * 5


def test_fitting_finds_what_the_states_tell() -> None:
    seen, right = random_traces(n=400)
    model, _ = tiny(hidden_size=6, num_attention_heads=1, n_loops=5)
    head = fit_head(model, seen, 300)
    assert torch.allclose(head.weight, right.weight, atol=0.1) and abs(float(head.bias)) < 0.1
    assert agreement(seen, head, 0.7)["tokens"]["head_equal"] > 0.97


def test_rows_are_prompts_with_their_answers_of_the_split() -> None:
    _, tokenizer = tiny()
    for split in ("train", "heldout"):
        rows = list(story_rows(tokenizer, ("kinship", "follow"), split, 6, 3, seed=1))
        assert len(rows) == 6 and all(0 < row.asked < len(row.ids) for row in rows)
        assert rows == list(story_rows(tokenizer, ("kinship", "follow"), split, 6, 3, seed=1))
        texts = [tokenizer.decode(row.ids[row.asked + 1 :]).strip() for row in rows]
        assert all(texts)


def test_traces_are_those_of_plain_forwards() -> None:
    model, tokenizer = tiny()
    rows = list(story_rows(tokenizer, ("follow",), "train", 5, 3, seed=0)) + list(
        story_rows(tokenizer, ("kinship",), "train", 5, 3, seed=0)
    )
    seen = traces(model, rows, share=1.0, seed=0, batch=4)
    assert int(seen.asked.sum()) == seen.stories == len(rows)
    at = 0
    for row in rows:
        with torch.no_grad():
            alone = model(torch.tensor([row.ids]), output_loop_states=True)
        n = len(row.ids)
        assert int(seen.asked[at : at + n].nonzero()) == row.asked
        assert torch.allclose(seen.gates[at : at + n], alone.gate_logits[0], atol=1e-4)
        states = torch.stack([model.normed(s)[0] for s in alone.loop_states], dim=1)
        assert torch.allclose(seen.states[at : at + n], states, atol=1e-4)
        at += n
    some = traces(model, rows, share=0.1, seed=0, batch=4)
    assert int(some.asked.sum()) == len(rows) < len(some.asked) < at / 2


def test_a_small_run_says_how_it_agrees() -> None:
    model, tokenizer = tiny()
    said: list[str] = []
    before = {name: p.clone() for name, p in model.named_parameters()}
    head = train_head(model, tokenizer, ("follow",), TINY, say=said.append)
    assert said == ["train: 12 stories", "heldout: 6 stories"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    head.check(model)
    assert {row["q"] for row in head.about["heldout"]} == {0.5, 0.7, 0.9}
    assert head.about["heldout"][0]["answers"]["n"] == 6 and head.about["data"] == "stories:follow"
    again = train_head(model, tokenizer, ("follow",), TINY, say=said.append)
    assert torch.equal(again.weight, head.weight)


def test_what_cannot_be_trained_is_refused() -> None:
    model, tokenizer = tiny(exit_gate=False)
    with pytest.raises(UserError, match="no exit gate"):
        train_head(model, tokenizer, ("follow",), TINY)
    model, tokenizer = tiny(n_loops=2)
    with pytest.raises(UserError, match="3 loops or more"):
        train_head(model, tokenizer, ("follow",), TINY)
    assert parse_data("stories") == ("kinship", "follow") and parse_data("stories:follow") == ("follow",)
    for data in ("pydoc", "stories:other", "", "x.txt"):
        with pytest.raises(UserError, match="stories:kinship"):
            parse_data(data)
