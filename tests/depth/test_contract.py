"""What a capture keeps: positions, names, storage dtype, no head, memory; each against a plain capture."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, depth_model
from torch import Tensor, nn

from depthprobe.depth import Coordinate, DepthModel
from depthprobe.errors import UserError

KINDS = ("llama", "gemma2", "opt", "looped", "looped-ouro-coda")


def batch(rows: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    """Left-padded by 0, 2 and 4 tokens."""
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return ids, mask


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_many_positions_are_many_single_ones(kind: str) -> None:
    model, (ids, mask) = depth_model(kind), batch()
    each = torch.tensor([[0, 6, 3], [2, 6, 6], [5, 4, 6]])
    several, every = model.capture(ids, mask, each), model.capture(ids, mask, "all")
    assert model.check_identity(several) < 1e-5 and model.check_identity(every) < 1e-5
    assert several.positions is not None and every.positions is None
    for column in range(3):
        one = model.capture(ids, mask, each[:, column])
        rows = torch.arange(3)
        for coordinate in model.axis:
            close(several.states[coordinate][:, column], one.states[coordinate])
            close(every.states[coordinate][rows, each[:, column]], one.states[coordinate])
        assert several.logits is not None and every.logits is not None
        close(several.logits[:, column], one.logits)
        close(every.logits[rows, each[:, column]], one.logits)
        if model.gate:
            assert several.gate_lambda is not None and every.gate_lambda is not None
            assert several.gate_lambda.shape == (3, 3, model.n_loops)
            close(several.gate_lambda[:, column], one.gate_lambda)
            close(every.gate_lambda[rows, each[:, column]], one.gate_lambda)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [None, "all", torch.tensor([[6, 5], [6, 5], [6, 5]])])
@pytest.mark.parametrize("dtype", [None, "float16", torch.bfloat16])
@torch.no_grad()
def test_only_what_was_asked_for_is_held(kind: str, positions: object, dtype: object) -> None:
    model, (ids, mask) = depth_model(kind), batch()
    wanted = (model.axis[1], model.axis[-1])
    capture = model.capture(ids, mask, positions, wanted, dtype=dtype)  # type: ignore[arg-type]
    assert tuple(capture.states) == wanted
    held = 0
    for tensor in (*capture.states.values(), capture.logits, capture.gate_lambda):
        if tensor is not None:
            held += tensor.untyped_storage().nbytes()
    assert held == capture.nbytes
    assert held == model.capture_bytes(3, 7, positions, wanted, dtype)  # type: ignore[arg-type]
    plain = model.capture(ids, mask, positions, wanted)  # type: ignore[arg-type]
    for coordinate in wanted:
        state = capture.states[coordinate]
        assert state.dtype == (model.dtype if dtype is None else torch.float16 if dtype == "float16" else dtype)
        assert torch.equal(state, plain.states[coordinate].to(state.dtype))
    assert capture.logits is not None and capture.logits.dtype == model.dtype
    model.check_identity(capture)  # with the tolerance of the storage dtype


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_head_can_be_left_out(kind: str) -> None:
    model, (ids, mask) = depth_model(kind), batch()
    head = model._tail.head
    full, bare = model.capture(ids, mask, "all"), model.capture(ids, mask, "all", logits=False)
    assert bare.logits is None and bare.nbytes == model.capture_bytes(3, 7, "all", logits=False)
    for coordinate in model.axis:
        assert torch.equal(bare.states[coordinate], full.states[coordinate])
    assert "forward" not in vars(head)
    with pytest.raises(UserError, match="holds no logits, which the identity check compares"):
        model.check_identity(bare)
    with pytest.raises(UserError, match="the last depth, which the identity check"):
        model.check_identity(model.capture(ids, mask, coordinates=model.axis[:1]))

    class Heavy(nn.Module):
        def forward(self, _state: Tensor) -> Tensor:
            raise AssertionError("the head ran")

    from depthprobe.depth.reading import HeadAt, Read

    heavy = Heavy()
    with HeadAt(heavy, Read(None), run=False) as none:
        assert none.logits(heavy(torch.ones(1, 2, 3))) is None


def names_of(model: DepthModel) -> list[str]:
    return list(model.names.values())


def test_names_count_from_zero() -> None:
    model = depth_model("llama")
    assert names_of(model)[:6] == [
        "hook_embed", "blocks.0.hook_resid_pre", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out",
        "blocks.0.hook_resid_post", "blocks.1.hook_resid_pre",
    ]  # fmt: skip
    looped = depth_model("looped-ouro-coda")
    names = looped.names
    assert names[Coordinate(0, 1)] == "prelude.blocks.0.hook_resid_post"
    assert names[Coordinate(3, 2)] == "loops.2.blocks.1.hook_resid_post"
    assert names[Coordinate(3, 2, "loop_state")] == "loops.2.hook_loop_state"
    assert names[Coordinate(4, 1, "mlp_out")] == "coda.blocks.0.hook_mlp_out"
    assert len(set(names.values())) == len(names) == len(looped.points)


@torch.no_grad()
def test_names_filter_and_cache() -> None:
    model, (ids, mask) = depth_model("looped-ouro-coda"), batch()
    whole = model.capture(ids, mask, coordinates=model.points)
    cache = whole.cache_dict()
    assert list(cache) == names_of(model) and len(cache) == len(model.points)
    name = "loops.2.blocks.1.hook_resid_post"
    assert cache[name] is cache[Coordinate(3, 2)] is whole.states[Coordinate(3, 2)]
    assert name in cache and Coordinate(3, 2) in cache and "blocks.1.hook_resid_post" not in cache
    with pytest.raises(KeyError, match=r"near to it: loops\.2\.blocks\.1\.hook_resid_post"):
        cache["loops.2.blocks.1.hook_resid_past"]
    picks = {
        "a name": (name, [name]),
        "several": ([name, "hook_embed"], ["hook_embed", name]),
        "a pattern": ("*hook_loop_state", [f"loops.{r}.hook_loop_state" for r in range(3)]),
        "a function": (lambda n: n.startswith("coda") and n.endswith("post"), ["coda.blocks.0.hook_resid_post"]),
    }
    for label, (names_filter, names) in picks.items():
        capture = model.capture(ids, mask, names_filter=names_filter)
        assert list(capture.cache_dict()) == names == list(cache.filtered(names_filter)), label
        for picked in names:
            assert torch.equal(capture.cache_dict()[picked], cache[picked])


@pytest.mark.parametrize("kind", ["llama", "looped", "looped-ouro"])
@torch.no_grad()
def test_what_goes_in_and_what_the_parts_return(kind: str) -> None:
    """In a plain pre-norm layer, resid_pre + attn_out + mlp_out = resid_post."""
    model, (ids, mask) = depth_model(kind), batch()
    states = model.capture(ids, mask, "all", model.points).states
    for depth in (point for point in model.axis if point.site == "resid_post"):
        before = states[depth._replace(site="resid_pre")]
        if kind != "looped-ouro":  # which norms what its parts return
            parts = states[depth._replace(site="attn_out")] + states[depth._replace(site="mlp_out")]
            close(before + parts, states[depth])
        if depth.layer > 1:
            assert torch.equal(before, states[depth._replace(layer=depth.layer - 1)])
    first = model.axis[1]._replace(site="resid_pre")
    close(states[first], states[model.axis[0]])


@torch.no_grad()
def test_estimates_are_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    model, (ids, mask) = depth_model("looped"), batch()
    capture = model.capture(ids, mask, "all", dtype="float16", verbose=True)
    printed = capsys.readouterr().out.strip()
    assert printed == model.describe_capture(3, 7, "all", dtype="float16")
    assert printed.startswith("looped: 9 of 33 states in float16, logits, gate of 3 × 7 tokens: ")
    assert printed.rsplit(": ", 1)[1] in repr(capture)
    assert "Capture(looped: 9 states of 3 × 7 × 32 (float16), logits 3 × 7 × 61, gate 3 × 7 × 3: " in repr(capture)
    model.capture(ids, mask)
    assert capsys.readouterr().out == ""


@torch.no_grad()
def test_notebooks_show_short_tables() -> None:
    model, (ids, mask) = depth_model("looped"), batch()
    model.name = "<b>looped"
    page = model._repr_html_()
    assert "3 × 2" in page and "loop" in page and "<b>looped" not in page and "&lt;b&gt;looped" in page
    shown = model.capture(ids, mask)._repr_html_()
    assert "&lt;b&gt;looped" in shown and "r1.l1" in shown and len(shown) < 600
    assert "looped" in repr(model) and "2 layers" in repr(model)
    assert len(repr(model.capture(ids, mask).cache_dict())) < 200
