"""States, logits and readouts against transformers' own `output_hidden_states` and plain forwards."""

from __future__ import annotations

import pytest
import torch
from tiny_models import DECODERS, LOOPED, VOCABULARY, depth_model, module
from torch import Tensor

from depthprobe.depth import Coordinate, DepthModel, continue_cache
from depthprobe.errors import UserError

LENGTHS = (9, 4, 12, 1)


def rows(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def pad(parts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(len(part) for part in parts)
    ids, mask = (
        torch.zeros(len(parts), longest, dtype=torch.long),
        torch.zeros(len(parts), longest, dtype=torch.long),
    )
    for number, part in enumerate(parts):
        place = slice(len(part)) if side == "right" else slice(longest - len(part), None)
        ids[number, place], mask[number, place] = part, 1
    return ids, mask


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def plain_states(model: DepthModel, row: Tensor) -> dict[Coordinate, Tensor]:
    """Unpadded reference of a decoder: hidden states of one row's last token, all but the (normed) last."""
    out = model.model(input_ids=row[None], output_hidden_states=True)
    return {c: h[0, -1] for c, h in zip(model.axis[:-1], out.hidden_states[:-1], strict=True)}


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_decoder_states_are_those_of_single_rows(kind: str, side: str) -> None:
    model = depth_model(kind)
    parts = rows()
    capture = model.capture(*pad(parts, side))
    assert model.axis == (Coordinate(0, 0, "embed"), Coordinate(1, 1), Coordinate(1, 2), Coordinate(1, 3))
    for number, row in enumerate(parts):
        for coordinate, state in plain_states(model, row).items():
            close(capture.states[coordinate][number], state)
        close(capture.logits[number], model.model(input_ids=row[None]).logits[0, -1])
    assert model.check_identity(capture) < 1e-5


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_decoder_readout_is_norm_and_head(kind: str) -> None:
    """The lens of layer l equals the model cut after layer l."""
    model, row = depth_model(kind), rows()[0]
    capture = model.capture(row[None])
    cut = module(kind)
    stack = cut.get_submodule(model._path)  # type: ignore[attr-defined]
    for depth in (2, 1):
        del stack[depth]
        cut.config.num_hidden_layers = depth
        close(
            model.readout(capture.states[model.axis[depth]], model.axis[depth]), cut(row[None]).logits[:, -1]
        )


def looped_reference(
    model: DepthModel, row: Tensor
) -> tuple[dict[Coordinate, Tensor], Tensor, Tensor | None]:
    """States, logits and gate of one row, block by block, in plain code."""
    from depthprobe.models.attend import DenseAttend
    from depthprobe.models.core import Rotary
    from depthprobe.models.masks import build_mask

    m = model.model
    c = m.config
    ids = row[None]
    n = ids.shape[1]
    attend = DenseAttend(build_mask(n, n, ids.device))
    positions = Rotary.of(torch.arange(n)[None], c)
    previous = None
    if c.n_previous_tokens:
        shifts = [
            torch.cat([torch.full((1, min(b, n)), -1), ids[:, : n - b]], 1)[:, :n]
            for b in range(1, c.n_previous_tokens + 1)
        ]
        previous = torch.stack(shifts, -1)
    states: dict[Coordinate, Tensor] = {}
    x = m.embed(ids, previous)
    states[Coordinate(0, 0, "embed")] = x
    attend.enter("prelude")
    for layer, block in enumerate(m.prelude):
        x = states[Coordinate(0, layer + 1)] = block(x, positions, attend, layer)
    entry, state, gates = x, None, []
    for loop in range(1, c.n_loops + 1):
        attend.enter("core", loop)
        x = m.loop_input(state, entry)
        for layer, block in enumerate(m.core):
            x = states[Coordinate(loop, layer + 1)] = block(x, positions, attend, layer)
        state = x
        if c.norm_per_loop:
            state = states[Coordinate(loop, c.n_core, "loop_state")] = m.norm(x)
        if m.gate is not None:
            gates.append(m.gate(state if c.norm_per_loop else m.norm(state)).sigmoid()[0, -1, 0])
    attend.enter("coda")
    x = state
    for layer, block in enumerate(m.coda):
        x = states[Coordinate(c.n_loops + 1, layer + 1)] = block(x, positions, attend, layer)
    logits = m.lm_head(x if c.norm_per_loop and not len(m.coda) else m.norm(x))
    gate = torch.stack(gates) if gates else None
    return {key: value[0, -1] for key, value in states.items()}, logits[0, -1], gate


@pytest.mark.parametrize("kind", LOOPED)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_looped_states_are_those_of_single_rows(kind: str, side: str) -> None:
    model = depth_model(kind)
    parts = rows()
    capture = model.capture(*pad(parts, side))
    for number, row in enumerate(parts):
        states, logits, gate = looped_reference(model, row)
        assert tuple(states) == model.axis
        for coordinate, state in states.items():
            close(capture.states[coordinate][number], state)
        close(capture.logits[number], logits)
        close(logits, model.model(row[None]).logits[0, -1])
        assert (gate is None) == (capture.gate_lambda is None) == (not model.gate)
        if gate is not None:
            assert capture.gate_lambda is not None
            close(capture.gate_lambda[number], gate)
    assert model.check_identity(capture) < 1e-5
    assert len(model.loop_ends) == model.n_loops == 3
    assert all(end.loop == r + 1 and end.layer == 2 for r, end in enumerate(model.loop_ends))


@torch.no_grad()
def test_a_readout_norms_exactly_once() -> None:
    model = depth_model("looped-ouro-coda")
    capture = model.capture(rows()[0][None])
    residual, state = Coordinate(2, 2), Coordinate(2, 2, "loop_state")
    close(model.readout(capture.states[residual], residual), model.readout(capture.states[state], state))
    close(model.readout(capture.states[state], state), model.model.lm_head(capture.states[state]))


@pytest.mark.parametrize("kind", [*DECODERS, *LOOPED])
@torch.no_grad()
def test_a_continued_cache_gives_the_whole(kind: str) -> None:
    model = depth_model(kind)
    if not model.can_continue:
        with pytest.raises(UserError, match="cannot continue"):
            model.capture(rows()[0][None], keep_cache=True)
        return
    parts = rows()
    first = model.capture(*pad(parts, "left"), coordinates=(), keep_cache=True)
    owners = [2, 0, 0, 3]
    tails = rows(7)
    ids, mask = pad(tails, "right")
    whole_mask = torch.cat([first.attention_mask[owners], mask], 1)
    second = model.capture(
        ids, whole_mask, cache=continue_cache(first.cache, torch.tensor(owners)), keep_cache=True
    )
    wholes = [torch.cat([parts[owner], tail]) for owner, tail in zip(owners, tails, strict=True)]
    third_tails = rows(9) if model.bridges_gaps else None
    captures = [(second, wholes)]
    if third_tails is not None:
        ids, mask = pad(third_tails, "right")
        third = model.capture(ids, torch.cat([second.attention_mask, mask], 1), cache=second.cache)
        captures.append((third, [torch.cat(pair) for pair in zip(wholes, third_tails, strict=True)]))
    for capture, sequences in captures:
        for number, sequence in enumerate(sequences):
            alone = model.capture(sequence[None])
            close(capture.logits[number], alone.logits[0])
            for coordinate in model.axis:
                close(capture.states[coordinate][number], alone.states[coordinate][0])


@torch.no_grad()
def test_positions_and_coordinates_are_kept_to() -> None:
    model, row = depth_model("llama"), rows()[2]
    chosen = (Coordinate(1, 2),)
    capture = model.capture(row[None], positions=torch.tensor([5]), coordinates=chosen)
    assert tuple(capture.states) == chosen
    close(capture.states[chosen[0]], model.capture(row[None, :6]).states[chosen[0]])
    close(capture.logits, model.model(row[None]).logits[:, 5])


@pytest.mark.parametrize("kind", ["llama", "looped"])
@torch.no_grad()
def test_misuse_is_named(kind: str) -> None:
    model = depth_model(kind)
    ids = torch.randint(3, VOCABULARY, (2, 5))
    with pytest.raises(UserError, match=r"position 5 is outside its 5 tokens \(row 1\)"):
        model.capture(ids, positions=torch.tensor([1, 5]))
    with pytest.raises(UserError, match="row 1 holds padding alone"):
        model.capture(ids, torch.tensor([[1] * 5, [0] * 5]))
    with pytest.raises(UserError, match="row 0 is read at padding, token 4"):
        model.capture(ids, torch.tensor([[1] * 4 + [0], [1] * 5]), positions=torch.tensor([4, 4]))
    with pytest.raises(UserError, match=r"has no depth r9\.l1"):
        model.capture(ids, coordinates=[Coordinate(9, 1)])
    with pytest.raises(UserError, match="attention_mask has shape"):
        model.capture(ids, torch.ones(2, 4))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "looped-ouro-coda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_reads_in_float32(kind: str, dtype: torch.dtype) -> None:
    model = depth_model(kind)
    model.model.to(dtype)
    capture = model.capture(*pad(rows(), "left"))
    assert capture.logits.dtype == dtype and model.dtype == dtype
    model.check_identity(capture)
    read = model.readout(capture.states[model.axis[1]], model.axis[1])
    assert read.dtype == torch.float32
    float32 = depth_model(kind)
    float32.model.load_state_dict({key: value.float() for key, value in model.model.state_dict().items()})
    close(read, float32.readout(capture.states[model.axis[1]].float(), model.axis[1]))


@pytest.mark.parametrize("kind", ["llama", "looped"])
@torch.no_grad()
def test_a_readout_that_differs_is_refused(kind: str) -> None:
    model = depth_model(kind)
    capture = model.capture(rows()[0][None])
    model._tail.norms[0].weight.mul_(1.01)  # type: ignore[union-attr]
    with pytest.raises(
        UserError, match=r"differs from the model's own logits by .* at most 1e-04 is allowed in float32"
    ):
        model.check_identity(capture)


@torch.no_grad()
def test_fingerprint_follows_config_and_weights() -> None:
    prints = {depth_model(kind).fingerprint() for kind in ("llama", "llama-tied", "looped", "looped-ouro")}
    assert len(prints) == 4
    model = depth_model("llama")
    assert model.fingerprint() in prints and len(model.fingerprint()) == 64
    next(model.model.parameters())[7, 3] += 1e-3
    assert model.fingerprint() not in prints


@torch.no_grad()
def test_ids_matter_at_real_tokens_alone() -> None:
    model = depth_model("llama")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 999]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    logits = model.capture(ids, mask).logits
    assert logits is not None
    assert torch.equal(logits, model.capture(ids.clamp(max=9), mask).logits)
    with pytest.raises(UserError, match=r"token 3 is 999, and llama knows 0 … \d+ \(row 1\): tokenise with"):
        model.capture(ids)
    with pytest.raises(UserError, match=r"token 0 is -1"):
        model.capture(torch.tensor([[-1, 2]]))


def test_a_continuation_wants_the_mask_of_past_and_present() -> None:
    model, ids = depth_model("llama"), torch.randint(3, VOCABULARY, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    before = model.capture(ids[:, :4], mask[:, :4], keep_cache=True)
    for wrong, text in ((None, "has no attention_mask"), (mask[:, 4:], r"has shape \(2, 2\)")):
        with pytest.raises(UserError, match=text):
            model.capture(ids[:, 4:], wrong, cache=before.cache)
    with pytest.raises(UserError, match=r"has shape \(2, 9\) .2 × 6 tokens.: give 2 × 6"):
        model.capture(ids, torch.ones(2, 9))
    whole, rest = model.capture(ids, mask), model.capture(ids[:, 4:], mask, cache=before.cache)
    torch.testing.assert_close(whole.logits, rest.logits, rtol=1e-5, atol=1e-5)


def test_what_is_no_tensor_of_tokens_is_refused() -> None:
    model = depth_model("llama")
    for given, text in (
        ([[1, 2]], "input_ids is a list"),
        (torch.tensor([[1.5, 2.0]]), "input_ids is float32: give whole numbers"),
        (torch.tensor([1, 2]), r"input_ids have shape \(2,\)"),
    ):
        with pytest.raises(UserError, match=text):
            model.capture(given)  # type: ignore[arg-type]
    ids = torch.tensor([[3, 4]])
    with pytest.raises(UserError, match="'embed' is no Coordinate"):
        model.capture(ids, coordinates=["embed"])  # type: ignore[list-item]
    with pytest.raises(UserError, match="names_filter is 3"):
        model.capture(ids, names_filter=3)  # type: ignore[arg-type]
    assert len(model.capture(ids, coordinates=(c for c in model.axis[:2])).states) == 2  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a state has shape \(1, 5\)"):
        model.readout(torch.ones(1, 5), model.axis[-1])
    with pytest.raises(UserError, match=r"r9\.l9 is no depth of llama"):
        model.readout(torch.ones(1, 32), Coordinate(9, 9))
    with pytest.raises(UserError, match="positions is 'last'"):
        model.capture_bytes(1, 4, "last")  # type: ignore[arg-type]


def test_a_probe_can_be_trained_on_states() -> None:
    model = depth_model("llama")
    state = model.capture(torch.tensor([[3, 4, 5]])).states[model.axis[1]]
    probe = torch.nn.Linear(model.width, 2)
    probe(state).sum().backward()
    assert probe.weight.grad is not None and not state.requires_grad
