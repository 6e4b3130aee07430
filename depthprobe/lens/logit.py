"""`logit_lens`: what each depth of a model would say, for a notebook.

    from depthprobe.lens import logit_lens
    result = logit_lens(model, "Ann is the mother of Bob. Bob is the", targets=" son")
    result.frame.filter(depth=12)              # polars, one line a position and depth
    result.top_ids, result.entropy             # tensors [N, D, k], [N, D]
    logit_lens(model, text, positions="last", lens="coda")
    logit_lens(model, text, lens="tuned", tuned="model.tuned.safetensors")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from depthprobe.depth import Capture, Coordinate, DepthModel
from depthprobe.depth.arguments import coordinates_of, flag, is_flag, whole
from depthprobe.errors import UserError
from depthprobe.lens.coda import coda_exit_states, coda_states
from depthprobe.lens.reads import check_logits, pad_id, padded
from depthprobe.lens.result import LensResult
from depthprobe.lens.targets import chat_prompt, check_bos, check_chat, encode, frame, with_bos
from depthprobe.lens.tuned import TunedLens, as_lens
from depthprobe.lens.vocabulary import Said, read
from depthprobe.lens.words import Words

LENSES = ("plain", "tuned", "coda", "coda-exits")
Ids = Sequence[int]
#: Numbers held at once of a batch: the model's own logits and the states, in elements (16 MiB of float32).
_HELD = 1 << 22


@torch.inference_mode()
def logit_lens(
    model: DepthModel,
    text_or_ids: str | Sequence[str] | Ids | Sequence[Ids] | Tensor,
    positions: Literal["all", "last"] | int | Sequence[int] = "all",
    top_k: int = 5,
    targets: str | int | Sequence[str | int] | Tensor | None = None,
    lens: str = "plain",
    *,
    tuned: TunedLens | str | Path | None = None,
    coordinates: Sequence[Coordinate] | Coordinate | None = None,
    bos: str = "tokenizer",
    chat: bool = False,
    side: Literal["left", "right"] = "left",
) -> LensResult:
    """Read states with the model's own final norm and head, in float32 (nostalgebraist 2020, "logit lens").

    The last depth is compared with the model's own logits at every position that is read.

    Args:
        model: opened by any route.
        text_or_ids: one text or several; token ids of one row or several, taken as they are (a tensor [S] or
            [B, S] holds no padding); what a tokenizer returns, which is cut by its mask. A word that the tokenizer
            does not know is read as its unknown token.
        positions: "all", "last", or indices into the unpadded rows; negative ones count from the end.
        top_k: how many of the best tokens to name.
        targets: tokens to follow: ids, or texts of one token each (mind the leading space), the same at every
            position; or ids of each row, int64 [B] or [B, T].
        lens: "plain": norm and head alone; "tuned": behind the translators of a tuned lens; "coda": all positions
            stop at loop r and the coda runs on; "coda-exits": the others stop where their gate lets them (see
            `lens.coda`).
        tuned: the tuned lens, or the path of one; of lens "tuned" alone.
        coordinates: depths to read with the plain or the tuned lens; default: the whole axis. The last one is always
            read.
        bos: what stands in front of a text: as the "tokenizer" has it, "always" or "never".
        chat: put each text through the tokenizer's chat template, up to where the assistant's turn begins.
        side: where shorter rows are padded; it changes nothing but rounding.

    Raises:
        UserError: no tokens, a position out of range, a text of several tokens as a target, a lens, BOS or chat
            template that the model does not have, a tuned lens of another model, a row beyond the context; NaN or an
            overflow (says where); a readout that does not reproduce the model.
    """
    if lens not in LENSES:
        raise UserError(f"there is no lens '{lens}'", remedy=f"one of {', '.join(LENSES)}")
    if (lens == "tuned") != (tuned is not None):
        what = f"lens '{lens}' takes no tuned lens" if tuned is not None else "lens 'tuned' needs a tuned lens"
        raise UserError(what, where="tuned", remedy="give lens='tuned' and tuned=PATH, or neither")
    along = lens in ("plain", "tuned")  # both read the axis
    if not along and coordinates is not None:
        raise UserError("a coda lens is read at the ends of the loops", where="coordinates", remedy="leave them out")
    if not isinstance(model, DepthModel):
        remedy = "open it with depthprobe.load or depthprobe.wrap"
        raise UserError(f"a {type(model).__name__} has no depth axis", remedy=remedy)
    top_k, chat = whole(top_k, "top_k", 1), flag(chat, "chat")
    if side not in ("left", "right"):
        raise UserError(f"side is {side!r}", remedy="one of left, right")
    if coordinates is not None and not (coordinates := coordinates_of(coordinates)):
        raise UserError("coordinates are empty", remedy="name a depth, or leave them out")
    translators = None if tuned is None else as_lens(tuned, model)
    rows = _rows(model, text_or_ids, bos, chat)
    wanted = [_positions(positions, len(row), number) for number, row in enumerate(rows)]
    target_ids = _targets(model, targets, len(rows))
    last = model.axis[-1]
    depths = list(coordinates or model.axis) if along else list(model.loop_ends)
    if along and last not in depths:
        depths.append(last)
    if along:
        depths.sort(key=lambda c: _place(model, c))

    each = max(map(len, wanted)) * (model.vocab_size + len(depths) * model.width)
    batch = max(1, _HELD // each)
    said: list[Said] = []
    gates: list[Tensor] = []
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        some, gate = _batch(model, rows[part], wanted[part], depths, lens, top_k, target_ids, start, side, translators)
        said.append(some)
        gates += [] if gate is None else [gate.float().cpu()]

    def joined(name: str) -> Tensor | None:
        pieces = [getattr(piece, name) for piece in said]
        return None if pieces[0] is None else torch.cat(pieces).cpu()

    top_ids, top_logprobs = joined("top_ids"), joined("top_logprobs")
    entropy, kl, identity, normaliser = (joined(name) for name in ("entropy", "kl_final", "identity", "log_normaliser"))
    assert top_ids is not None and top_logprobs is not None and normaliser is not None
    assert entropy is not None and kl is not None and identity is not None
    owner = torch.tensor([number for number, places in enumerate(wanted) for _ in places])
    logits = joined("target_logit")
    bos_id = getattr(model.tokenizer, "bos_token_id", None)
    return LensResult(
        model_name=model.name,
        lens=lens,
        depths=tuple(depths),
        depth_index=tuple(_place(model, c) for c in depths),
        input_ids=rows,
        rows=owner,
        positions=torch.tensor([place for places in wanted for place in places]),
        top_ids=top_ids,
        top_probs=top_logprobs.exp(),
        entropy=entropy,
        kl_final=kl,
        target_ids=None if target_ids is None else target_ids[owner],
        target_logits=logits,
        target_logprobs=None if logits is None else logits - normaliser[..., None],
        target_ranks=joined("target_rank"),
        gate_lambda=torch.cat(gates) if gates else None,
        loop_ends=model.loop_ends,
        identity=float(identity.max()),
        bos=tuple(bos_id is not None and row[0] == bos_id for row in rows),
        words=Words(model.tokenizer),
    )


def _batch(
    model: DepthModel,
    rows: Sequence[tuple[int, ...]],
    wanted: Sequence[Sequence[int]],
    depths: Sequence[Coordinate],
    lens: str,
    top_k: int,
    targets: Tensor | None,
    first: int,
    side: str,
    tuned: TunedLens | None,
) -> tuple[Said, Tensor | None]:
    """What some rows say, and their gate, [N, R]. first: number of the first row, for errors and targets."""
    ids, mask = padded(rows, pad_id(model), side)
    most, length = max(map(len, wanted)), ids.shape[1]
    starts = [length - len(row) if side == "left" else 0 for row in rows]
    # rows with fewer positions read their last one again, and what comes of it is dropped
    places = torch.tensor(
        [[start + p for p in (*ps, *[ps[-1]] * (most - len(ps)))] for start, ps in zip(starts, wanted, strict=True)]
    )
    kept = torch.tensor([number < len(ps) for ps in wanted for number in range(most)], device=model.device)
    owners = [(number, p) for number, ps in enumerate(wanted) for p in ps]

    def name(row: int) -> str:
        number, place = owners[row]
        return f"row {first + number}, token {place}"

    last = model.axis[-1]
    along = lens in ("plain", "tuned")
    asked = tuple(depths) if along else (last,)
    capture = model.capture(ids, mask, places, asked)
    assert capture.logits is not None
    every = bool(kept.all())

    def flat(values: Tensor) -> Tensor:
        """[B, P, …] → [N, …], without a copy where nothing is dropped."""
        return values.flatten(0, 1) if every else values.flatten(0, 1)[kept]

    own = flat(capture.logits)
    states = {c: flat(capture.states[c]) for c in asked}
    check_logits(model, own, name, states)
    gate = None if capture.gate_lambda is None else flat(capture.gate_lambda)
    del capture
    if model.dtype != torch.float32:  # in float32 `read` compares the same two
        model.check_identity(Capture({last: states[last]}, own, None, mask))
    of_rows = None
    if targets is not None:
        of_rows = targets[torch.tensor([first + number for number, _ in owners])].to(model.device)
    if along:
        if tuned is not None:
            states = tuned.translated(states, last)
        found = [(c, states[c]) for c in depths]
        return read(model, found, top_k=top_k, targets=of_rows, own=own, name=name), gate
    run = coda_states if lens == "coda" else coda_exit_states
    found = [(last, flat(state)) for state in run(model, ids, mask, places)]
    if lens == "coda":  # the last loop of it is the model itself
        return read(model, found, top_k=top_k, targets=of_rows, own=own, name=name), gate
    checked = read(model, [(last, states[last])], top_k=1, own=own, full=False, name=name)
    said = read(model, found, top_k=top_k, targets=of_rows, name=name)
    return Said(
        said.top_ids, said.top_logprobs, said.log_normaliser, said.entropy, said.kl_final, said.target_logit,
        said.target_rank, checked.identity,
    ), gate  # fmt: skip


def _rows(model: DepthModel, given: Any, bos: str, chat: bool) -> tuple[tuple[int, ...], ...]:
    """The token ids of each row, with BOS as asked."""
    remedy = "give a text, texts, the token ids of a row, or of several"
    if isinstance(given, Mapping):  # what a tokenizer returns
        given = _without_padding(given)
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    if isinstance(given, str):
        given = [given]
    elif not isinstance(given, Sequence):
        raise UserError(f"a {type(given).__name__} cannot be read", remedy=remedy)
    texts = sum(isinstance(row, str) for row in given)
    if texts and texts < len(given):
        raise UserError("some rows are texts and some are not", remedy=remedy)
    if texts:
        rows = _tokenised(model, list(given), bos, chat)
    else:
        if bos != "tokenizer" or chat:
            remedy = "give texts, or leave these out"
            raise UserError("token ids are taken as they are", where="bos, chat", remedy=remedy)
        nested = bool(len(given)) and isinstance(given[0], Sequence | Tensor | np.ndarray)
        rows = tuple(_whole(row, "token ids", remedy) for row in (given if nested else [given] if len(given) else ()))
    if not rows:
        raise UserError("there is nothing to read", remedy="give a text or token ids")
    for number, row in enumerate(rows):
        if not row:
            raise UserError(f"row {number} has no tokens", remedy="give it a text")
        if min(row) < 0 or max(row) >= model.vocab_size:
            what = f"row {number} has a token outside 0 … {model.vocab_size - 1}"
            raise UserError(what, where=model.name, remedy="give ids of this model's tokenizer")
        if model.context_length is not None and len(row) > model.context_length:
            what = f"row {number} has {len(row)} tokens, the context of {model.name} {model.context_length}"
            raise UserError(what, remedy="shorten it")
    return rows


def _tokenised(model: DepthModel, texts: list[str], bos: str, chat: bool) -> tuple[tuple[int, ...], ...]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer", remedy="give token ids")
    check_bos(tokenizer, bos)
    if chat:
        check_chat(tokenizer)
        texts = [chat_prompt(tokenizer, text, f"row {number}") for number, text in enumerate(texts)]
    plain = encode(tokenizer, texts)
    full = plain if chat else encode(tokenizer, texts, special=True)
    rows = [frame(tokenizer, one, whole) if one else tuple(whole) for one, whole in zip(plain, full, strict=True)]
    return tuple(with_bos(tokenizer, row, bos) for row in rows)


def _positions(asked: Any, length: int, row: int) -> list[int]:
    """Indices 0 … length − 1."""
    if isinstance(asked, str):
        if asked not in ("all", "last"):
            raise UserError(f"positions is '{asked}'", remedy='give "all", "last" or indices')
        return list(range(length)) if asked == "all" else [length - 1]
    places = _whole(asked, "positions", 'give "all", "last" or indices')
    if not places:
        raise UserError("no positions are asked for", remedy='give "all", "last" or indices')
    for place in places:
        if not -length <= place < length:
            what = f"position {place} is outside its {length} tokens"
            raise UserError(what, where=f"row {row}", remedy=f"give {-length} … {length - 1}")
    return [place % length for place in places]


def _targets(model: DepthModel, targets: Any, rows: int) -> Tensor | None:
    """Token ids to follow, int64 [B, T]."""
    if targets is None:
        return None
    if isinstance(targets, Tensor):
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise UserError(f"targets are {targets.dtype}", remedy="give token ids as whole numbers")
        ids = targets.cpu().long()
        ids = ids[:, None] if ids.dim() == 1 else ids
        if ids.dim() != 2 or len(ids) != rows or not ids.numel():
            raise UserError(f"targets have shape {tuple(targets.shape)}", remedy=f"one (or T) for each of {rows} rows")
    else:
        remedy = "name tokens by their ids or texts, or leave them out"
        several = [targets] if isinstance(targets, str) or not isinstance(targets, Iterable) else list(targets)
        if not several:
            raise UserError("targets are empty", remedy=remedy)
        one = [
            _token(model, target) if isinstance(target, str) else _whole(target, "targets", remedy)[0]
            for target in several
        ]
        ids = torch.tensor([one] * rows)
    if int(ids.min()) < 0 or int(ids.max()) >= model.vocab_size:
        raise UserError(f"a target is outside 0 … {model.vocab_size - 1}", where=model.name)
    return ids


def _token(model: DepthModel, text: str) -> int:
    if model.tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer", where="targets", remedy="give token ids")
    ids = encode(model.tokenizer, [text])[0]
    unknown = model.tokenizer.unk_token_id
    # of a tokenizer whose unknown token is also another one (GPT-2's end of text) that one can be meant
    if len(ids) != 1 or (ids[0] == unknown and text != model.tokenizer.unk_token):
        what = f"'{text}' is {len(ids)} tokens" if len(ids) != 1 else f"the tokenizer does not know '{text}'"
        raise UserError(what, where="targets", remedy="give a text of one token, with its leading space, or an id")
    return ids[0]


def _whole(given: Any, what: str, remedy: str) -> tuple[int, ...]:
    """One whole number or several, of whatever library."""
    try:
        flat = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
        if any(map(is_flag, flat if isinstance(flat, list | tuple) else [flat])):
            raise TypeError
        return tuple(index(one) for one in (flat if isinstance(flat, Iterable) else [flat]))
    except TypeError:
        shown = f"{type(given).__name__} {given!r}"[:80]
        raise UserError(f"{what} are no whole numbers but a {shown}", remedy=remedy) from None


def _without_padding(given: Mapping[str, Any]) -> list[list[int]]:
    """The rows of what a tokenizer returned, cut by its mask."""
    if "input_ids" not in given:
        raise UserError("a mapping without input_ids cannot be read", remedy="give what the tokenizer returns")
    ids, mask = torch.as_tensor(given["input_ids"]), given.get("attention_mask")
    ids = ids[None] if ids.dim() == 1 else ids
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).view_as(ids)
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


def _place(model: DepthModel, coordinate: Coordinate) -> int:
    if coordinate not in model.axis:
        known = f"{model.axis[0]} … {model.axis[-1]}"
        raise UserError(f"{coordinate} is not on the axis of {model.name}", remedy=f"it has {known}")
    return model.axis.index(coordinate)
