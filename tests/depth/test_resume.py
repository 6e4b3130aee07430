"""Changed forwards: against plain hooks of the tests' own, and against each other."""

from __future__ import annotations

import pytest
import torch
from tiny_models import DECODERS, LOOPED, VOCABULARY, depth_model
from torch import Tensor

from depthprobe.depth import Cell, Coordinate, Cut, DepthModel, Edit, suffix_memory
from depthprobe.depth.suffix_memory import TooLittleMemoryError
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError

LENGTH = 9


def ids(seed: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def opened(kind: str) -> TappedModel:
    model = depth_model(kind)
    assert isinstance(model, TappedModel)
    return model


def donor_states(model: DepthModel, seed: int = 4) -> dict[Coordinate, Tensor]:
    capture = model.capture(ids(seed)[None], positions="all", coordinates=model.points)
    return {point: state[0] for point, state in capture.states.items()}


@pytest.mark.parametrize("kind", [*DECODERS, *LOOPED])
def test_the_two_oracles(kind: str) -> None:
    """All of the donor's tokens at depth 0, and its last token at the last depth, give the donor's output."""
    model = opened(kind)
    theirs = donor_states(model)
    first, last = model.axis[0], model.axis[-1]
    everywhere = tuple(range(LENGTH))
    cells = [
        Cell((Edit(first, everywhere, theirs[first]),)),
        Cell((Edit(last, (LENGTH - 1,), theirs[last][-1:]),)),
        Cell(),
    ]
    resumed = model.resume(ids(), cells)
    clean = model.capture(ids()[None], coordinates=(last,)).states[last]
    torch.testing.assert_close(resumed.states[last][0], theirs[last][-1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(resumed.states[last][1], theirs[last][-1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(resumed.states[last][2], clean, rtol=1e-5, atol=1e-5)
    assert (resumed.n_run, resumed.n_filled) == (2, 1) and resumed.drift < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma2", "phi", "looped", "looped-ouro-coda"])
def test_one_cell_at_each_point_against_a_hook(kind: str) -> None:
    model = opened(kind)
    theirs = donor_states(model)
    last, read = model.axis[-1], (4, LENGTH - 1)
    cells = [Cell((Edit(point, (2, 5), theirs[point][[2, 5]]),)) for point in model.points]
    resumed = model.resume(ids(), cells, read)
    for point, state in zip(model.points, resumed.states[last], strict=True):
        tap, count = model.taps[point], 0

        def put(value: Tensor, point: Coordinate = point) -> Tensor:
            value = value.clone()
            value[:, [2, 5]] = theirs[point][[2, 5]]
            return value

        def before(_module: object, args: tuple[object, ...], tap=tap) -> object:
            nonlocal count
            count += 1
            return (put(args[0]), *args[1:]) if count == tap.call + 1 else None  # type: ignore[arg-type]

        def after(_module: object, _args: object, out: object, tap=tap) -> object:
            nonlocal count
            count += 1
            if count != tap.call + 1:
                return None
            return put(out) if isinstance(out, Tensor) else (put(out[0]), *out[1:])  # type: ignore[index]

        module = model.model.get_submodule(tap.path)
        with module.register_forward_pre_hook(before) if tap.before else module.register_forward_hook(after):
            logits = model.model(input_ids=ids()[None]).logits
        # the last depth, read with the model's own head, against the logits of the hooked forward
        torch.testing.assert_close(model.readout(state, last), logits[0, list(read)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "looped"])
def test_a_cut_edge_moves_nothing(kind: str) -> None:
    """With all edges from a token cut in all layers, what stands there does not matter."""
    model = opened(kind)
    theirs, last, key = donor_states(model), model.axis[-1], 3
    later = tuple(range(key + 1, LENGTH))
    layers = [point for point in model.axis if point.site == "resid_post"]
    cut = tuple(Cut(layer, later, (key,)) for layer in layers)
    embed = model.axis[0]
    edit = Edit(embed, (key,), theirs[embed][[key]])
    resumed = model.resume(ids(), [Cell((edit,), cut), Cell((), cut), Cell((edit,))])
    state = resumed.states[last]
    torch.testing.assert_close(state[0], state[1], rtol=1e-5, atol=1e-5)
    assert float((state[1] - resumed.clean[last]).abs().max()) > 1e-3
    assert float((state[2] - resumed.clean[last]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "neox", "gemma2", "looped-ouro-coda"])
def test_a_skipped_block_adds_nothing(kind: str) -> None:
    model = opened(kind)
    last, point = model.axis[-1], Coordinate(1, 2)
    everywhere = tuple(range(LENGTH))
    zeros = torch.zeros(LENGTH, model.width)
    whole = model.capture(ids()[None], positions="all", coordinates=[point._replace(site="resid_pre")])
    entered = whole.states[point._replace(site="resid_pre")][0]
    cells = [Cell((Edit(point, everywhere, None),)), Cell((Edit(point, everywhere, entered),))]
    if "attn_out" in model.sites and kind in ("llama", "neox"):
        cells.append(Cell(tuple(Edit(point._replace(site=s), everywhere, zeros) for s in ("attn_out", "mlp_out"))))
    state = model.resume(ids(), cells).states[last]
    for other in state[1:]:
        torch.testing.assert_close(state[0], other, rtol=1e-5, atol=1e-5)


def test_what_is_filled() -> None:
    model = opened("llama")
    theirs, clean = donor_states(model), donor_states(model, 3)
    last, value = model.axis[-1], torch.ones(1, model.width)
    cells = [
        Cell((Edit(Coordinate(1, 1), (6,), value),)),  # behind what is read
        Cell((Edit(last, (2,), value),)),  # another token at the end
        Cell((Edit(Coordinate(1, 3, "mlp_out"), (2,), value),)),
        Cell((Edit(Coordinate(1, 2), (2,), clean[Coordinate(1, 2)][[2]]),)),  # what stood there
        Cell((), (Cut(Coordinate(1, 3), (2,), (1,)),)),
        Cell((), (Cut(Coordinate(1, 1), (2,), (4,)),)),  # later keys are not seen anyway
        Cell((Edit(Coordinate(1, 3, "resid_pre"), (2,), value),)),  # read through keys and values
        Cell((Edit(Coordinate(1, 1), (5,), theirs[Coordinate(1, 1)][[5]]),)),
    ]
    resumed = model.resume(ids(), cells, read=(5,))
    assert (resumed.n_run, resumed.n_filled) == (2, 6)
    assert all(torch.equal(state, resumed.clean[last]) for state in resumed.states[last][:6])


def test_a_sweep_is_split_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)
    model = opened("llama")
    theirs = donor_states(model)
    cells = [Cell((Edit(p, (t,), theirs[p][[t]]),)) for p in model.axis for t in range(LENGTH)]
    with pytest.raises(TooLittleMemoryError) as little:
        model.plan_resume(ids(), cells, max_bytes=1)
    allowed = little.value.least + 8_000
    whole, split = model.resume(ids(), cells), model.resume(ids(), cells, max_bytes=allowed)
    last = model.axis[-1]
    torch.testing.assert_close(whole.states[last], split.states[last], rtol=1e-5, atol=1e-5)
    assert model.plan_resume(ids(), cells, max_bytes=allowed).n_batches > 1
    assert split.token_layers > whole.token_layers  # an unpatched row in each batch


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell((Edit(Coordinate(1, 9), (0,), torch.ones(1, 32)),)), r"has no depth r1\.l9 \(cell 0\)"),
        (Cell((Edit(Coordinate(1, 1, "loop_state"), (0,), torch.ones(1, 32)),)), "does not show its loop_state"),
        (Cell((Edit(Coordinate(1, 1), (LENGTH,), torch.ones(1, 32)),)), "outside the prompt of 9 tokens"),
        (Cell((Edit(Coordinate(1, 1), (1, 1), torch.ones(2, 32)),)), "give tokens once, in ascending order"),
        (Cell((Edit(Coordinate(1, 1), (1,), torch.ones(2, 32)),)), r"has a value of shape \(2, 32\)"),
        (Cell((Edit(Coordinate(1, 1, "attn_out"), (1,), None),)), "skipped at its resid_post"),
        (Cell((), (Cut(Coordinate(1, 1), (1, 2), (2,)),)), "token 2 is cut from itself"),
        (Cell((), (Cut(Coordinate(2, 1), (2,), (1,)),)), r"has no layer r2\.l1"),
    ],
)
def test_cells_that_do_not_fit(cell: Cell, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        opened("llama").resume(ids(), [cell])
    assert "\n" not in str(caught.value)


def test_a_layer_without_attention_has_no_edges_to_cut() -> None:
    from more_models import more_module

    from depthprobe.depth import DecoderModel

    model = DecoderModel(more_module("recurrent-gemma"), None, "recurrent")
    with pytest.raises(UserError, match=r"no attention is known there in recurrent .*: patch its residual .* or skip"):
        model.resume(ids(), [Cell((), (Cut(Coordinate(1, 1), (LENGTH - 1,), (1,)),))])
