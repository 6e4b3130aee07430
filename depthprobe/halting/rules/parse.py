"""Exit rules as text, as the command line and a record of a run have them.

    parse_rule("q:0.9")                     QExit(0.9)
    parse_rule("hazard:0.3,min=2")          HazardThreshold(0.3, min_depth=2)
    parse_rule("lookahead:0.9", head=head)  Lookahead(QExit(0.9), head); also lookahead:hazard:0.3, lookahead:l2:0.1

A rule's `spec()` gives the text back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from depthprobe.errors import UserError
from depthprobe.halting.head import LookaheadHead
from depthprobe.halting.rules.act import ACT
from depthprobe.halting.rules.base import ExitRule
from depthprobe.halting.rules.gate import HazardThreshold, QExit, SampledExit
from depthprobe.halting.rules.lookahead import Lookahead
from depthprobe.halting.rules.output import Confidence, EntropyChange, OutputEntropy, OutputKL
from depthprobe.halting.rules.planned import FixedDepth, FullDepth, RandomExit, Replay
from depthprobe.halting.rules.state import RelativeL2, SecondOrder


class _Form(NamedTuple):
    """How a rule is written: what its value is (None: it has none), its class, whether the value may be left out."""

    value: Callable[[str], object] | None
    make: Callable[..., ExitRule]
    optional: bool = False
    least: bool = True


def _probabilities(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split("/"))


_FORMS: dict[str, _Form] = {
    "full": _Form(None, FullDepth, least=False),
    "fixed": _Form(int, FixedDepth, least=False),
    "q": _Form(float, QExit),
    "hazard": _Form(float, HazardThreshold),
    "ponder": _Form(None, SampledExit),
    "act": _Form(float, ACT, optional=True),
    "l2": _Form(float, RelativeL2, optional=True),
    "second": _Form(float, SecondOrder),
    "kl": _Form(float, OutputKL, optional=True),
    "entropy": _Form(float, OutputEntropy),
    "entropy-change": _Form(float, EntropyChange, optional=True),
    "confidence": _Form(float, Confidence),
    "random": _Form(_probabilities, RandomExit),
    "replay": _Form(None, Replay, least=False),
}
_OPTIONS = {"min": "min_depth", "min_prompt": "min_depth_prompt"}
RULE_NAMES = (*_FORMS, "lookahead")


def parse_rule(text: str, head: LookaheadHead | None = None) -> ExitRule:
    """The rule that `text` says: NAME, NAME:VALUE (or NAME=VALUE), then options ",min=2" and ",min_prompt=1".

    Args:
        head: for "lookahead:…" over a rule on the gate.

    Raises:
        UserError: an unknown name or option, a value that is missing, too much or impossible.
    """
    name, value, options = _split(text)
    if name == "lookahead":
        inner = _lookahead_inner(text)
        return Lookahead(parse_rule(inner), head)
    form = _FORMS.get(name)
    if form is None:
        raise UserError(f"there is no exit rule '{name}'", where=text, remedy=f"known: {', '.join(RULE_NAMES)}")
    settings: dict[str, int] = {}
    for option in options:
        key, _, number = option.partition("=")
        if key not in _OPTIONS or not form.least:
            known = "it has none" if not form.least else f"known: {', '.join(_OPTIONS)}"
            raise UserError(f"{name} has no option '{key}'", where=text, remedy=known)
        least = _read(int, number, key, text)
        assert isinstance(least, int)
        settings[_OPTIONS[key]] = least
    if form.value is None:
        if value is not None:
            raise UserError(f"{name} takes no value", where=text, remedy=f"write {name}")
        return form.make(**settings)
    if value is None:
        if not form.optional:
            example = "random:0.5/0.3/0.2" if name == "random" else "fixed:3" if name == "fixed" else f"{name}:0.5"
            raise UserError(f"{name} needs a value", where=text, remedy=f"for example {example}")
        return form.make(**settings)
    return form.make(_read(form.value, value, name, text), **settings)


def _split(text: str) -> tuple[str, str | None, list[str]]:
    first, *options = (part.strip() for part in text.strip().split(","))
    at = min((i for i in (first.find(":"), first.find("=")) if i >= 0), default=-1)
    if at < 0:
        return first.lower(), None, options
    return first[:at].strip().lower(), first[at + 1 :].strip(), options


def _lookahead_inner(text: str) -> str:
    """What a lookahead looks ahead of: a rule, or a number, which is a quantile."""
    rest = text.strip()[len("lookahead") :].lstrip(":= ")
    if not rest:
        raise UserError("lookahead needs a rule", where=text, remedy="for example lookahead:0.9, or lookahead:l2:0.1")
    try:
        float(rest.partition(",")[0])
    except ValueError:
        return rest
    return f"q:{rest}"


def _read(kind: Callable[[str], object], value: str, name: str, text: str) -> object:
    try:
        return kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number"}.get(kind, "numbers like 0.5/0.3/0.2")
        raise UserError(f"the value of {name} is '{value}', not {words}", where=text) from None
