"""Items → the table `tokens`: what every token of a prompt says at a choice of depths, for the report's browser.

    chosen = browsed(model, prepared.targets)
    for number, rows in token_rows(model, chosen, batch_size=32):
        ...                                   # a polars frame with the columns of tables.SCHEMAS["tokens"]

A looped model is read where its loops end, another at every layer; at `MOST_DEPTHS` of these, evenly spread, if
there are more. Tokens that the prompts of a story share are run and read once. As with `lens_rows`, a batch's
rows depend on the model and the batch alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from depthprobe import tables
from depthprobe.depth import Capture, Coordinate, DepthModel, continue_cache
from depthprobe.errors import UserError
from depthprobe.lens.coda import coda_states
from depthprobe.lens.gate import gate_columns
from depthprobe.lens.reads import check_logits, pad_id, padded, split_stories
from depthprobe.lens.targets import Target
from depthprobe.lens.tuned import TunedLens
from depthprobe.lens.vocabulary import Said, read
from depthprobe.lens.words import Words

#: What is read unless another number of items is asked for: so many of them, and so many logits (tokens × depths ×
#: vocabulary), about three minutes of one core.
MOST_ITEMS, MOST_LOGITS = 500, 1 << 32
#: Depths of one item.
MOST_DEPTHS = 12
#: The model's own logits held at once, in elements.
_OWN = 1 << 25
_TOP = 5


def browse_depths(model: DepthModel) -> tuple[int, ...]:
    """Indices on the axis that the table has, rising; the last depth is one of them."""
    last = len(model.axis) - 1
    ends = frozenset(model.loop_ends)
    found = [depth for depth, c in enumerate(model.axis) if not ends or c in ends or depth == last]
    if len(found) > MOST_DEPTHS:
        found = [found[place] for place in np.linspace(0, len(found) - 1, MOST_DEPTHS).round().astype(int)]
    return tuple(found)


def browsed(model: DepthModel, targets: Sequence[Target], most: int | None = None) -> tuple[Target, ...]:
    """The targets that the table has: whole stories first, of each task in turn; in the order of `targets`.

    Args:
        most: how many; None for as many as `MOST_ITEMS` and `MOST_LOGITS` allow, at least one.
    """
    stories: dict[str, dict[str, int]] = {}
    for target in targets:
        known = stories.setdefault(target.item.task, {})
        known.setdefault(target.item.story_id, len(known))

    def turn(number: int) -> tuple[int, str, int, int]:
        item = targets[number].item
        return stories[item.task][item.story_id], item.task, item.hops, number

    order = sorted(range(len(targets)), key=turn)
    if most is None:
        each = len(browse_depths(model)) * model.vocab_size
        sizes = np.cumsum([len(targets[number].prompt_ids) * each for number in order])
        most = min(MOST_ITEMS, max(1, int((sizes <= MOST_LOGITS).sum())))
    return tuple(targets[number] for number in sorted(order[:most]))


def token_rows(
    model: DepthModel,
    targets: Sequence[Target],
    batch_size: int = 32,
    *,
    done: Collection[int] = (),
    tuned: TunedLens | None = None,
    coda: bool = False,
) -> Iterator[tuple[int, pl.DataFrame]]:
    """(number of the batch, its rows) for every batch that is not in `done`; lenses as in `lens.table.lens_batch`."""
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} is not positive", remedy="give at least 1")
    for number in range(-(-len(targets) // batch_size)):
        if number not in done:
            yield number, token_batch(model, targets[number * batch_size : (number + 1) * batch_size], tuned, coda)


@torch.inference_mode()
def token_batch(
    model: DepthModel, targets: Sequence[Target], tuned: TunedLens | None = None, coda: bool = False
) -> pl.DataFrame:
    """The rows of one batch: items in order, their positions in order, and for each the depths in order.

    Args:
        tuned: a tuned lens that was checked against the model (`as_lens`); None: the plain lens.
        coda: read the end of each loop behind the coda, all tokens stopped there (`lens.coda`).

    Raises:
        UserError: NaN or an overflow (names item and position), or the readout identity fails at any token.
    """
    depths = browse_depths(model)
    frames, start = [], 0
    while start < len(targets):
        stop, longest = start, 0
        while stop < len(targets):
            longest = max(longest, len(targets[stop].prompt_ids))
            if stop > start and (stop + 1 - start) * longest * model.vocab_size > _OWN:
                break
            stop += 1
        frames.append(_frame(model, targets[start:stop], depths, tuned, coda))
        start = stop
    return pl.concat(frames) if frames else tables.empty("tokens")


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Every real token of a batch, once; N of them.

    Attributes:
        states: coordinate → [N, d] in the model's dtype.
        logits: [N, V], the model's own.
        gate_lambda: [N, R] float32, or None.
        places: for each prompt, the rows of its tokens.
    """

    states: dict[Coordinate, Tensor]
    logits: Tensor
    gate_lambda: Tensor | None
    places: tuple[np.ndarray[Any, Any], ...]


def run_everywhere(
    model: DepthModel,
    prompts: Sequence[tuple[int, ...]],
    stories: Sequence[str],
    coordinates: Sequence[Coordinate],
    side: str = "left",
) -> Everywhere:
    """Prompts read at every token; what the prompts of a story have in common is run once.

    Args:
        coordinates: the depths to keep; the last of the axis among them.
        side: where whole prompts are padded.
    """
    split = split_stories(prompts, stories) if model.can_continue else None
    if split is None:
        ids, mask = padded(prompts, pad_id(model), side)
        pieces = [_piece(model.capture(ids, mask, "all", coordinates), mask)]
        return _joined(model, pieces, [[(0, row)] for row in range(len(prompts))])
    ids, mask = padded(split.prefixes, pad_id(model))
    prefix = model.capture(ids, mask, "all", coordinates, keep_cache=True)
    after, after_mask = padded(split.rests, pad_id(model), "right")
    rows = torch.tensor(split.owners, device=model.device)
    whole = torch.cat([prefix.attention_mask[rows], after_mask.to(model.device)], dim=1)
    cache = continue_cache(prefix.cache, rows)
    rest = model.capture(after, whole, "all", coordinates, cache=cache)
    pieces = [_piece(prefix, mask), _piece(rest, after_mask)]
    return _joined(model, pieces, [[(0, owner), (1, row)] for row, owner in enumerate(split.owners)])


def _piece(capture: Capture, mask: Tensor) -> tuple[Capture, np.ndarray[Any, Any]]:
    """A capture at all tokens, and which of them are real, bool [B, S]."""
    return capture, mask.bool().numpy()


def _joined(
    model: DepthModel,
    pieces: Sequence[tuple[Capture, np.ndarray[Any, Any]]],
    parts: Sequence[Sequence[tuple[int, int]]],
) -> Everywhere:
    """Real tokens of several captures as flat rows. parts: for each prompt its (piece, row of the batch)."""
    numbers: list[np.ndarray[Any, Any]] = []
    first = 0
    kept: list[Tensor] = []
    for _, real in pieces:
        numbers.append(first + real.ravel().cumsum().reshape(real.shape) - 1)
        first += int(real.sum())
        kept.append(torch.from_numpy(real.ravel().nonzero()[0]).to(model.device))
    places = tuple(
        np.concatenate([numbers[piece][row][pieces[piece][1][row]] for piece, row in one]) for one in parts
    )

    def flat(tensors: Sequence[Tensor | None]) -> Tensor | None:
        rows = [t.flatten(0, 1)[index] for t, index in zip(tensors, kept, strict=True) if t is not None]
        return torch.cat(rows) if rows else None

    captures = [capture for capture, _ in pieces]
    states = {c: torch.cat([x.states[c].flatten(0, 1)[i] for x, i in zip(captures, kept, strict=True)])
              for c in captures[0].states}  # fmt: skip
    logits = flat([capture.logits for capture in captures])
    assert logits is not None
    return Everywhere(states, logits, flat([capture.gate_lambda for capture in captures]), places)


def say_everywhere(
    model: DepthModel,
    ran: Everywhere,
    coordinates: Sequence[Coordinate],
    name: Any,
    tuned: TunedLens | None = None,
    behind: Mapping[Coordinate, Tensor] | None = None,
    **options: Any,
) -> Said:
    """What every token says, with the readout identity checked at each; options as `vocabulary.read` has them.

    Args:
        behind: states [N, d] behind the coda, by the depth that they stand for.
    """
    check_logits(model, ran.logits, name, ran.states)
    if model.dtype != torch.float32:  # in float32 `read` compares the same two
        last = model.axis[-1]
        model.check_identity(Capture({last: ran.states[last]}, ran.logits, None, torch.ones(1)))
    states = ran.states if tuned is None else tuned.translated(ran.states, model.axis[-1])
    behind = behind or {}
    depths = [(model.axis[-1], behind[c]) if c in behind else (c, states[c]) for c in coordinates]
    return read(model, depths, own=ran.logits, name=name, **options)


def _behind_coda(
    model: DepthModel, targets: Sequence[Target], ran: Everywhere, coordinates: Sequence[Coordinate]
) -> dict[Coordinate, Tensor]:
    """The states [N, d] of the tokens of `ran` behind the coda, at the ends of loops among some depths."""
    last = model.axis[-1]
    found = {c: ran.states[last] for c in coordinates if c == model.loop_ends[-1]}
    ends = [c for c in coordinates if c in model.loop_ends[:-1]]
    ids, mask = padded([target.prompt_ids for target in targets], pad_id(model), "right")
    everywhere = torch.arange(ids.shape[1]).expand_as(ids)
    states = coda_states(model, ids, mask, everywhere, [model.loop_ends.index(c) + 1 for c in ends])
    for end, state in zip(ends, states, strict=True):
        flat = torch.empty_like(ran.states[last])
        for row, places in zip(state, ran.places, strict=True):
            flat[torch.from_numpy(places).to(flat.device)] = row[: len(places)]
        found[end] = flat
    return found


def _frame(
    model: DepthModel, targets: Sequence[Target], depths: tuple[int, ...], tuned: TunedLens | None, coda: bool
) -> pl.DataFrame:
    coordinates = [model.axis[depth] for depth in depths]
    ran = run_everywhere(model, [t.prompt_ids for t in targets], [t.item.story_id for t in targets], coordinates)

    def name(row: int) -> str:
        owner = next(number for number, rows in enumerate(ran.places) if row in rows)
        return f"item {targets[owner].item.id}, token {int((ran.places[owner] == row).argmax())}"

    behind = _behind_coda(model, targets, ran, coordinates) if coda else None
    said = say_everywhere(model, ran, coordinates, name, tuned, behind, top_k=_TOP, full=False)
    places = np.concatenate(ran.places)  # [T], T tokens of all prompts
    top_ids = said.top_ids.cpu().numpy()[places]  # [T, D, 5]
    top_probs = said.top_logprobs.exp().cpu().numpy()[places]
    n_tokens, n_depths = top_ids.shape[:2]
    words = Words(model.tokenizer)
    ids = np.concatenate([np.asarray(target.prompt_ids) for target in targets])
    lengths = [len(target.prompt_ids) for target in targets]
    by_token = np.repeat(np.arange(n_tokens), n_depths)

    def by_depth(values: Sequence[Any], dtype: Any) -> pl.Series:
        return pl.Series(list(values) * n_tokens, dtype=dtype)

    tokens = pl.DataFrame(
        {
            "item": pl.Series([t.item.id for t, length in zip(targets, lengths, strict=True) for _ in range(length)]),
            "position": np.concatenate([np.arange(length) for length in lengths]),
            "token": words.column(ids),
            "token_id": ids,
        }
    )[by_token]
    gate_lambda, gate_cdf = gate_columns(ran.gate_lambda, model.loop_ends, coordinates, places)
    top = words.column(top_ids)
    flat = top_probs.reshape(-1, top_probs.shape[-1])
    columns = tokens.with_columns(
        by_depth(depths, pl.Int32).alias("depth"),
        by_depth([c.loop for c in coordinates], pl.Int32).alias("loop"),
        by_depth([c.layer for c in coordinates], pl.Int32).alias("layer"),
        by_depth([c.site for c in coordinates], pl.String).alias("site"),
        words.column(top_ids[..., 0]).alias("top1"),
        pl.Series("top1_prob", flat[:, 0]),
        top.reshape(flat.shape).arr.to_list().alias("top5"),
        pl.Series("top5_probs", np.ascontiguousarray(flat)).arr.to_list(),
        gate_lambda.alias("gate_lambda"),
        gate_cdf.alias("gate_cdf"),
    )
    return tables.conform("tokens", columns)
