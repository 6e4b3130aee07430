"""Rules from text and back, and what is said about text that is no rule."""

from __future__ import annotations

import pytest
import torch

from depthprobe.errors import UserError
from depthprobe.halting import (
    ACT,
    Confidence,
    EntropyChange,
    ExitRule,
    FixedDepth,
    FullDepth,
    HazardThreshold,
    Lookahead,
    LookaheadHead,
    OutputEntropy,
    OutputKL,
    QExit,
    RandomExit,
    RelativeL2,
    Replay,
    SecondOrder,
    parse_rule,
)
from depthprobe.halting.rules import RULE_NAMES, SampledExit

HEAD = LookaheadHead(*(torch.zeros(shape) for shape in ((3,), (), (3,), (), (3,))), norm_eps=0.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("q:0.5", QExit(0.5)),
        ("q=0.5,min=2", QExit(0.5, 2)),
        (" Q : .5 , min=3 , min_prompt=1 ", QExit(0.5, 3, 1)),
        ("hazard:0.3", HazardThreshold(0.3)),
        ("full", FullDepth()),
        ("fixed:3", FixedDepth(3)),
        ("l2:0.1", RelativeL2(0.1)),
        ("l2", RelativeL2(0.03)),
        ("l2,min=4", RelativeL2(0.03, 4)),
        ("second:0.2", SecondOrder(0.2)),
        ("kl:5e-4", OutputKL(5e-4)),
        ("kl", OutputKL(5e-4)),
        ("entropy:1.5", OutputEntropy(1.5)),
        ("entropy-change", EntropyChange(1e-3)),
        ("confidence:0.9", Confidence(0.9)),
        ("act", ACT(0.01)),
        ("act:0.05", ACT(0.05)),
        ("random:.5/.3/.2", RandomExit((0.5, 0.3, 0.2))),
        ("replay", Replay()),
    ],
)
def test_text_to_rule_and_back(text: str, rule: ExitRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(rule.spec()) == rule


def test_ponder_and_lookahead() -> None:
    ponder = parse_rule("ponder,min=2")
    assert isinstance(ponder, SampledExit) and ponder.min_depth == 2 and ponder.spec() == "ponder,min=2"
    for text, inner in (
        ("lookahead:0.9", QExit(0.9)),
        ("lookahead=0.9,min=3", QExit(0.9, 3)),
        ("lookahead:q:0.9", QExit(0.9)),
        ("lookahead:hazard:0.3,min_prompt=2", HazardThreshold(0.3, 1, 2)),
        ("lookahead:l2:0.1", RelativeL2(0.1)),
        ("lookahead:fixed:2", FixedDepth(2)),
    ):
        rule = parse_rule(text, HEAD)
        assert isinstance(rule, Lookahead) and rule.rule == inner
        assert rule.spec() == f"lookahead:{inner.spec()}" and parse_rule(rule.spec(), HEAD).spec() == rule.spec()
    assert isinstance(parse_rule("lookahead:l2"), Lookahead)  # needs no head


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "known: full, fixed, q"),
        ("qq:0.5", "no exit rule 'qq'"),
        ("0.5", "no exit rule '0.5'"),
        ("q", "q needs a value.*q:0.5"),
        ("q:", "not a number"),
        ("q:half", "'half', not a number"),
        ("q:0", "quantile"),
        ("q:nan", "quantile"),
        ("q:0.5,least=2", "no option 'least'.*min, min_prompt"),
        ("q:0.5,min=two", "'two', not a whole number"),
        ("q:0.5,min", "not a whole number"),
        ("q:0.5,min=0", "min_depth"),
        ("fixed:2.5", "not a whole number"),
        ("fixed:3,min=2", "no option 'min'"),
        ("full:3", "takes no value"),
        ("ponder:0.5", "takes no value"),
        ("random:0.5/x", "0.5/0.3/0.2"),
        ("random:0.5/0.3", "sum to 0.8"),
        ("random", "needs a value"),
        ("lookahead", "lookahead:0.9"),
        ("lookahead:0.9", "train lookahead"),
        ("lookahead:act", "ACT"),
        ("lookahead:lookahead:fixed:2", "already"),
        ("lookahead:nothing", "no exit rule 'nothing'"),
    ],
)
def test_text_that_is_no_rule_is_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as refused:
        parse_rule(text)
    assert "\n" not in str(refused.value)


def test_every_name_is_told() -> None:
    with pytest.raises(UserError) as refused:
        parse_rule("?")
    assert all(name in str(refused.value) for name in RULE_NAMES)
