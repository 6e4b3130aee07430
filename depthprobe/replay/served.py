"""What a trace says was served, request by request: also of a process that was killed.

    about = read_meta(folder)
    served = read_served(folder, about)
    served.requests[0].tokens, served.left_out          # and how many cannot be replayed, by reason
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthprobe.errors import UserError
from depthprobe.runtime.record import read_lines

_BROKEN = "serve the requests again: a trace must not be changed by hand"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request with at least one token.

    Fields:
        id: its name in the trace.
        prompt, tokens: ids, given and generated.
        exits: depth at which each generated token's row left; as many as tokens.
        prompt_exits: of prompt[:-1]; U each where the prompt was served densely.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    exits: tuple[int, ...]
    prompt_exits: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """What was fed: the last generated token never is."""
        return (*self.prompt, *self.tokens[:-1])


@dataclass(frozen=True, slots=True)
class Served:
    """The requests of a trace that can be replayed, in the order of their arrival, and the others by reason."""

    requests: list[ServedRequest]
    left_out: dict[str, int] = field(default_factory=dict)


def read_served(folder: Path, about: Mapping[str, Any]) -> Served:
    """Join the lines of a trace. A request without an end is served as far as its tokens go.

    Args:
        about: what `trace.json` says, for loops and the kind of prefill.

    Raises:
        UserError: lines that contradict each other, naming request and token, or that are not a trace's.
    """
    starts: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for line in read_lines(folder, "requests"):
        (starts if line.get("event") == "start" else ends)[line["request"]] = line
    for line in read_lines(folder, "tokens"):
        rows.setdefault(line["request"], {})[line["index"]] = line
    n_loops, dense = int(about["n_loops"]), about.get("prefill") == "dense"
    left_out: dict[str, int] = {}

    def leave_out(why: str) -> None:
        left_out[why] = left_out.get(why, 0) + 1

    for name in (rows.keys() | ends.keys()) - starts.keys():
        leave_out("its beginning is not on record")
        rows.pop(name, None)
    requests = []
    for name, start in starts.items():
        tokens, exits = _tokens(name, rows.get(name, {}), ends.get(name))
        prompt = tuple(start["prompt"])
        if not tokens:
            leave_out("no token was made")
            continue
        if dense:
            prompt_exits = (n_loops,) * (len(prompt) - 1)
        elif name in ends:
            prompt_exits = tuple(ends[name]["prompt_exits"])
        else:
            leave_out("cut off, and with it the exits of its prompt")
            continue
        _check(name, prompt, prompt_exits, exits, n_loops)
        requests.append(ServedRequest(name, prompt, tokens, exits, prompt_exits))
    return Served(requests, left_out)


def _tokens(
    name: str, rows: Mapping[int, Mapping[str, Any]], end: Mapping[str, Any] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and exits, as the end of the request has them, or its tokens' lines up to the first that is missing."""
    if end is None:
        count = next(k for k in range(len(rows) + 1) if k not in rows)
        return tuple(rows[k]["token"] for k in range(count)), tuple(rows[k]["exit"] for k in range(count))
    tokens, exits = tuple(end["tokens"]), tuple(end["exits"])
    if len(tokens) != len(exits):
        raise UserError(f"{len(tokens)} tokens and {len(exits)} exits", where=f"request {name}", remedy=_BROKEN)
    for k, row in sorted(rows.items()):
        for what, mine, whole in (("token", row["token"], tokens), ("exit", row["exit"], exits)):
            if k >= len(whole) or whole[k] != mine:
                other = whole[k] if k < len(whole) else "none"
                says = f"its line has {what} {mine}, the request's end {other}"
                raise UserError(says, where=f"request {name}, token {k}", remedy=_BROKEN)
    return tokens, exits


def _check(
    name: str, prompt: tuple[int, ...], prompt_exits: tuple[int, ...], exits: tuple[int, ...], n_loops: int
) -> None:
    if len(prompt_exits) != len(prompt) - 1:
        what = f"{len(prompt_exits)} exits for the {len(prompt) - 1} tokens before the prompt's last"
        raise UserError(what, where=f"request {name}", remedy=_BROKEN)
    for kind, depths in (("prompt token", prompt_exits), ("token", exits)):
        for k, depth in enumerate(depths):
            if not 1 <= depth <= n_loops:
                what = f"an exit at {depth}, not within 1 to {n_loops}"
                raise UserError(what, where=f"request {name}, {kind} {k}", remedy=_BROKEN)
