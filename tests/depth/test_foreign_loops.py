"""transformers' own looped models: true coordinates, against plain hooks that write down what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from more_models import FOREIGN, more_module
from tiny_models import VOCABULARY
from torch import Tensor

from depthprobe.depth import Coordinate, DecoderModel, wrap
from depthprobe.errors import UserError

LAYERS = {
    "dory": ["model.layers.*"],
    "dory-last-loop": ["model.layers.*"],
    "hrm": ["model.L_module.layers.*", "model.H_module.layers.*"],
    "inkling": ["model.layers.*"],
}
R, LOOP_LAYERS = {"dory": 3, "dory-last-loop": 3, "hrm": 8, "inkling": 3}, 2


def expected_axis(kind: str) -> list[Coordinate]:
    """Written down from the configurations: prelude, R loops of two layers, coda."""
    if kind == "hrm":  # (L L L H) (L L L H), two layers a call, each call normed at its end
        return [Coordinate(0, 0, "embed")] + [
            depth
            for loop in range(1, 9)
            for depth in (Coordinate(loop, 1), Coordinate(loop, 2), Coordinate(loop, 2, "loop_state"))
        ]
    coda = 2 if kind == "inkling" else 1
    axis = [Coordinate(0, 0, "embed"), Coordinate(0, 1), Coordinate(0, 2)]
    axis += [Coordinate(loop, layer) for loop in (1, 2, 3) for layer in (1, 2)]
    axis += [Coordinate(4, layer + 1) for layer in range(coda)]
    return axis + ([Coordinate(4, 2, "final_state")] if kind == "inkling" else [])


def executed(model: Any, kind: str, ids: Tensor) -> list[tuple[str, Tensor]]:
    """(module, output) of every call of a layer or norm, in order of execution."""
    import fnmatch

    out: list[tuple[str, Tensor]] = []
    handles = []
    norms = {"hrm": ["model.?_module.final_norm"], "inkling": ["model.final_input"]}.get(kind, [])
    for path, module in model.named_modules():
        patterns = [*LAYERS[kind], *norms]
        if any(fnmatch.fnmatch(path, pattern) and path.count(".") == pattern.count(".") for pattern in patterns):

            def hook(_module: Any, _args: Any, output: Any, path: str = path) -> None:
                out.append((path, (output if isinstance(output, Tensor) else output[0]).clone()))

            handles.append(module.register_forward_hook(hook))
    model(ids)
    for handle in handles:
        handle.remove()
    return out


@pytest.mark.parametrize("kind", FOREIGN)
@torch.no_grad()
def test_coordinates_are_the_order_of_execution(kind: str) -> None:
    plain = more_module(kind)
    model = DecoderModel(plain, None, kind)
    assert list(model.axis) == expected_axis(kind)
    assert model.n_loops == R[kind] and model.n_layers == LOOP_LAYERS
    assert [end.loop for end in model.loop_ends] == list(range(1, R[kind] + 1))
    assert {end.site for end in model.loop_ends} == {"loop_state" if kind == "hrm" else "resid_post"}
    ids = torch.randint(3, VOCABULARY - 2, (2, 9), generator=torch.Generator().manual_seed(2))
    calls = executed(plain, kind, ids)
    assert len(calls) == len(model.axis) - 1
    if kind == "hrm":
        order = "".join(path[len("model.")] for path, _ in calls if path.endswith("final_norm"))
        assert order == "LLLHLLLH"
    capture = model.capture(ids, positions="all")
    for depth, (_, state) in zip(model.axis[1:], calls, strict=True):
        torch.testing.assert_close(capture.states[depth], state)
    assert capture.logits is not None
    torch.testing.assert_close(capture.logits, plain(ids).logits)
    assert model.check_identity(capture) < 1e-5


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_are_single_rows(kind: str, side: str) -> None:
    model = DecoderModel(more_module(kind), None, kind)
    ids = torch.randint(3, VOCABULARY - 2, (2, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 9, dtype=torch.long)
    real = slice(4, None) if side == "left" else slice(5)
    mask[0] = 0
    mask[0, real] = 1
    padded, alone = model.capture(ids, mask), model.capture(ids[:1, real])
    for depth in model.axis:
        torch.testing.assert_close(padded.states[depth][0], alone.states[depth][0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_loop_state_is_normed_once() -> None:
    model = DecoderModel(more_module("hrm"), None, "hrm")
    capture = model.capture(torch.arange(3, 9)[None])
    last = model.axis[-1]
    assert last == Coordinate(8, 2, "loop_state")
    state, residual = capture.states[last], capture.states[Coordinate(8, 2)]
    torch.testing.assert_close(model.readout(state, last), model.model.lm_head(state))
    torch.testing.assert_close(model.readout(residual, Coordinate(8, 2)), model.readout(state, last))


@torch.no_grad()
def test_names_have_loops() -> None:
    model = DecoderModel(more_module("dory"), None, "dory")
    capture = model.capture(torch.arange(3, 9)[None], names_filter="loops.*.blocks.1.hook_resid_post")
    assert list(capture.states) == [Coordinate(loop, 2) for loop in (1, 2, 3)]
    assert model.names[Coordinate(4, 1)] == "coda.blocks.0.hook_resid_post"
    assert not model.can_continue
    inkling = DecoderModel(more_module("inkling"), None, "inkling")
    assert inkling.names[inkling.axis[-1]] == "hook_final_state" and inkling.vocab_size == VOCABULARY - 2


@pytest.mark.parametrize("kind", FOREIGN)
@torch.no_grad()
def test_traces_tell_loops_apart(kind: str) -> None:
    pytest.importorskip("nnsight")
    native = DecoderModel(more_module(kind), None, kind)
    traced = wrap(native, route="nnsight")
    ids = torch.arange(3, 12)[None]
    a, b = native.capture(ids, coordinates=native.points), traced.capture(ids, coordinates=traced.points)
    for point in native.points:
        torch.testing.assert_close(a.states[point], b.states[point])


def test_a_bridge_keeps_one_loop_alone() -> None:
    pytest.importorskip("transformer_lens")
    with pytest.raises(UserError, match="hrm") as caught:
        wrap(more_module("hrm"), name="hrm", route="transformer-lens")
    assert "take route='native'" in str(caught.value)
