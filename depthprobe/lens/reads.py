"""The forwards behind one batch of lens rows: which tokens are run, and where states are read.

Every item is read at the last token of its prompt, and again after each beginning that some of its answers
share (`Target.nodes`) and after each token of its whole answer. Where the model can continue from a cache,
the story that the rungs of a ladder share is run once, and beginnings are run as continuations of their
prompt; otherwise whole sequences are run. The tests hold both to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthprobe.depth import Capture, Coordinate, DepthModel, continue_cache
from depthprobe.errors import UserError
from depthprobe.lens.targets import Path, Target
from depthprobe.lens.vocabulary import not_finite

#: A common prefix is run apart only if that leaves at most this share of the (padded) tokens.
_WORTH_SHARING = 0.8


@dataclass(frozen=True, slots=True)
class Reads:
    """States of a batch of B items, and of what follows their prompts (M rows).

    Attributes:
        root: capture at the last token of each prompt, B rows.
        after: (index of the item, tokens after its prompt) → row of `states` and `logits`, M of them.
        states: coordinate → [M, d] in the model's dtype.
    """

    root: Capture
    after: dict[tuple[int, Path], int]
    states: dict[Coordinate, Tensor]


def run_batch(model: DepthModel, targets: Sequence[Target]) -> Reads:
    """All forwards of a batch; the readout identity is checked on each.

    Raises:
        UserError: NaN logits (names the item), or a readout that does not reproduce the model's logits.
    """
    keys: dict[tuple[int, Path], int] = {}
    for number, target in enumerate(targets):
        suffixes = [node.suffix for node in target.nodes if node.suffix]
        suffixes += [target.answer_ids[:length] for length in range(1, len(target.answer_ids))]
        for suffix in dict.fromkeys(suffixes):
            keys[number, suffix] = len(keys)
    keep = bool(keys) and model.can_continue
    # a shared story and then a continued prompt leave padding between the two
    share = model.can_continue and (model.bridges_gaps or not keep)
    root = _run_prompts(
        model, [t.prompt_ids for t in targets], [t.item.story_id for t in targets], keep, share
    )
    _check(model, root, [target.item.id for target in targets])

    pieces: list[Capture] = []
    rows = list(keys)
    for start in range(0, len(rows), max(1, len(targets))):
        chunk = rows[start : start + len(targets)]
        owners = [number for number, _ in chunk]
        if keep:
            suffixes = [suffix for _, suffix in chunk]
            index = torch.tensor(owners, device=model.device)
            piece = _continue(model, root, index, suffixes)
        else:
            piece = _run(model, [(*targets[number].prompt_ids, *suffix) for number, suffix in chunk])
        _check(model, piece, [targets[number].item.id for number in owners])
        pieces.append(piece)
    states = {c: torch.cat([piece.states[c] for piece in pieces]) for c in model.axis} if pieces else {}
    return Reads(Capture(root.states, root.logits, root.gate_lambda, root.attention_mask), keys, states)


def padded(rows: Sequence[Sequence[int]], pad: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask), both int64 [B, longest row]."""
    longest = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(len(row))
        ids[number, place] = torch.tensor(row, dtype=torch.long)
        mask[number, place] = 1
    return ids, mask


def _run(model: DepthModel, rows: Sequence[Sequence[int]], keep_cache: bool = False) -> Capture:
    ids, mask = padded(rows, pad_id(model))
    return model.capture(ids, mask, keep_cache=keep_cache)


def _run_prompts(
    model: DepthModel, prompts: list[Path], stories: list[str], keep_cache: bool, share: bool
) -> Capture:
    """Capture at the end of each prompt; prompts of one story share the run of what they have in common."""
    split = split_stories(prompts, stories) if share else None
    if split is None:
        return _run(model, prompts, keep_cache)
    ids, mask = padded(split.prefixes, pad_id(model))
    prefix = model.capture(ids, mask, coordinates=(), keep_cache=True, logits=False)
    rows = torch.tensor(split.owners, device=model.device)
    return _continue(model, prefix, rows, split.rests, keep_cache)


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts as what those of one story begin with, and the rest (at least one token) of each.

    Attributes:
        prefixes: one for each story.
        owners: index of the prefix of each prompt.
        rests: what each prompt goes on with.
    """

    prefixes: tuple[Path, ...]
    owners: tuple[int, ...]
    rests: tuple[Path, ...]


def split_stories(prompts: Sequence[Path], stories: Sequence[str]) -> Split | None:
    """Prompts split where their stories end; None if that would save too little."""
    shared = _common_prefixes(prompts, stories)
    if not shared:
        return None
    order = list(shared)
    rests = tuple(prompt[shared[story] :] for prompt, story in zip(prompts, stories, strict=True))
    apart = len(order) * max(shared.values()) + len(rests) * max(map(len, rests))
    if apart > _WORTH_SHARING * len(prompts) * max(map(len, prompts)):
        return None
    first = {story: prompt for prompt, story in zip(reversed(prompts), reversed(stories), strict=True)}
    prefixes = tuple(first[story][: shared[story]] for story in order)
    return Split(prefixes, tuple(order.index(story) for story in stories), rests)


def _continue(
    model: DepthModel, before: Capture, rows: Tensor, suffixes: Sequence[Path], keep_cache: bool = False
) -> Capture:
    """Run suffixes, each behind one of the rows of an earlier capture that kept its cache."""
    ids, mask = padded(suffixes, pad_id(model), "right")
    whole = torch.cat([before.attention_mask[rows], mask.to(model.device)], dim=1)
    return model.capture(ids, whole, cache=continue_cache(before.cache, rows), keep_cache=keep_cache)


def _common_prefixes(prompts: Sequence[Path], stories: Sequence[str]) -> dict[str, int]:
    """Story → tokens that all its prompts begin with, leaving at least one to run; {} if a story has none."""
    shared: dict[str, int] = {}
    first: dict[str, Path] = {}
    for prompt, story in zip(prompts, stories, strict=True):
        reference = first.setdefault(story, prompt)
        length = shared.get(story, len(prompt) - 1)
        length = min(length, len(prompt) - 1)
        same = next((i for i in range(length) if prompt[i] != reference[i]), length)
        if same == 0:
            return {}
        shared[story] = same
    return shared


def _check(model: DepthModel, capture: Capture, names: Sequence[str]) -> None:
    assert capture.logits is not None
    check_logits(model, capture.logits, lambda row: f"item {names[row]}", capture.states)
    model.check_identity(capture)


def check_logits(
    model: DepthModel, logits: Tensor, name: Callable[[int], str], states: Mapping[Coordinate, Tensor]
) -> None:
    """The model's own logits [N, V] are numbers. Raises UserError; `name` says what a row is called.

    A token that a model rules out with −inf is none of the damage. If a state [N, d] has overflowed, the first
    depth at which that is seen is named.
    """
    bad = (logits.isnan() | (logits == torch.inf)).any(-1)
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    for coordinate, state in states.items():
        if bool(state[row].isinf().any()):
            raise not_finite(model, state[row], coordinate, name(row))
    if bool(logits[row].isnan().any()):
        remedy = "the weights may be damaged; in half precision, try --dtype float32"
        raise UserError(f"{model.name} gives NaN logits", where=name(row), remedy=remedy)
    dtype = str(logits.dtype).removeprefix("torch.")
    what = f"the logits of {model.name} overflow {dtype} (its largest number is {torch.finfo(logits.dtype).max:.5g})"
    raise UserError(what, where=name(row), remedy="run it with --dtype float32 or bfloat16")


def pad_id(model: DepthModel) -> int:
    """Any id serves: padding is masked. The tokenizer's own where it has one."""
    pad = getattr(model.tokenizer, "pad_token_id", None)
    return int(pad) if isinstance(pad, int) and 0 <= pad < model.vocab_size else 0
