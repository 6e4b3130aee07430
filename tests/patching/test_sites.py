"""The places of a site, and which go together."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
import torch
from worlds import opened, with_donor

import depthprobe
from depthprobe.depth import Coordinate
from depthprobe.errors import UserError
from depthprobe.patching import offered_sites, places
from depthprobe.patching.probe import Plan
from depthprobe.patching.sites import together


def test_the_residual_runs_from_the_embedding_to_the_head() -> None:
    for kind in ("llama", "gpt2", "looped", "looped-ouro", "looped-ouro-coda"):
        model = opened(kind)
        along = places(model, "resid_post")
        assert along[0].coordinate == model.axis[0] and along[-1].coordinate == model.axis[-1], kind
        assert [model.axis[p.depth] for p in along] == [p.coordinate for p in along]
    ouro = opened("looped-ouro")
    assert [p.coordinate.site for p in places(ouro, "loop_state")] == ["loop_state"] * 3
    assert [p.coordinate for p in places(opened("looped"), "loop_state")] == list(opened("looped").loop_ends)


def test_a_site_beside_the_axis_has_the_depth_of_its_layer() -> None:
    model = opened("looped-ouro-coda")
    for place in places(model, "attn_out"):
        assert model.axis[place.depth] == place.coordinate._replace(site="resid_post")


def test_spans() -> None:
    model = opened("looped")  # prelude 1, core 2 × 3, coda 1
    along = places(model, "resid_post")
    one = together(model, along, "one", 1)
    assert [patch.coordinates for patch in one] == [(place.coordinate,) for place in along]
    window = together(model, along, "window", 3)
    assert len(window) == len(along) - 2 and window[1].coordinates == tuple(p.coordinate for p in along[1:4])
    later = {patch.place.coordinate: patch.coordinates for patch in together(model, along, "later", 1)}
    assert later[Coordinate(2, 1)] == (Coordinate(2, 1), Coordinate(3, 1))
    assert later[Coordinate(0, 1)] == (Coordinate(0, 1),) and later[Coordinate(4, 1)] == (Coordinate(4, 1),)


@pytest.mark.parametrize("kind", ["looped", "looped-ouro", "looped-ouro-coda"])
@pytest.mark.parametrize("site", ["resid_post", "resid_pre", "loop_state"])
def test_at_chooses_where_spans_start_and_not_where_they_end(kind: str, site: str) -> None:
    model = opened(kind)
    options: dict[str, Any] = {"sites": site, "span": ["one", "later", "window"], "window": 2}
    whole = Plan.of(model, **options).patches
    ends = {tuple(place.coordinate[:2]) for place in places(model, site)} - {
        tuple(patch.place.coordinate[:2]) for patch in whole if patch.span == "window"
    }
    reached: set[str] = set()
    for place in places(model, site):
        loop, layer, _ = place.coordinate
        if (loop, layer) in ends:
            with pytest.raises(UserError, match=f"a window of 2 does not fit behind loop {loop}, layer {layer}"):
                Plan.of(model, **options, at=(loop, layer))
            continue
        wanted = tuple(patch for patch in whole if tuple(patch.place.coordinate[:2]) == (loop, layer))
        assert Plan.of(model, **options, at=(loop, layer)).patches == wanted
        reached |= {patch.span for patch in wanted if len(patch.coordinates) > 1}
    assert reached == {"later", "window"}


def test_rows_of_some_depths_are_those_of_the_whole_sweep() -> None:
    model = opened("looped")
    item = with_donor(model, "follow")
    options: dict[str, Any] = {
        "span": ["later", "window"], "window": 3, "controls": False, "positions": ["changed_word", "last"],
    }  # fmt: skip
    few = depthprobe.causal_patch(model, item, at=[(1, 2), (2, 1)], **options).frame
    whole = depthprobe.causal_patch(model, item, **options).frame
    same = whole.filter((pl.col("loop") * 10 + pl.col("layer")).is_in([12, 21]))
    assert few.height == same.height == 8 and few["window"].to_list() == same["window"].to_list()
    torch.testing.assert_close(few["ld_patched"].to_torch(), same["ld_patched"].to_torch(), rtol=1e-5, atol=1e-5)
    assert few["ld_patched"].n_unique() > 3


def test_some_depths_alone() -> None:
    assert [p.coordinate for p in places(opened("looped"), "resid_post", [(0, 0), (2, 1)])] == [
        Coordinate(0, 0, "embed"), Coordinate(2, 1),
    ]  # fmt: skip
    with pytest.raises(UserError, match="has no resid_post at loop 9, layer 1"):
        places(opened("looped"), "resid_post", [(9, 1)])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sites": "loop_state"}, r"does not show its loop_state \(sites\): it has no loops"),
        ({"sites": "attn"}, "there is no site 'attn'"),
        ({"span": "later"}, "has no loops, so there are no later ones"),
        ({"span": "two"}, "there is no 'two'"),
        ({"span": "window", "window": 9}, "a window of 9 does not fit 4 places"),
        ({"window": 2}, "a window of 2 says nothing without span 'window'"),
        ({"kinds": "noise"}, "there is no 'noise'"),
        ({"directions": ()}, "no directions are asked for: name one"),
        ({"position": "some"}, "there is no 'some'"),
        ({"positions": "first"}, "there is no role 'first'"),
        ({"positions": ()}, "no positions are asked for"),
    ],
)
def test_what_the_model_lacks_or_says_nothing(options: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        Plan.of(opened("llama"), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_site_that_the_architecture_lacks() -> None:
    model = opened("gemma2")
    model._taps = {point: tap for point, tap in model._taps.items() if point.site != "attn_out"}
    try:
        with pytest.raises(UserError, match=r"does not show its attn_out \(sites\): it has resid_pre, resid_post, mlp"):
            places(model, "attn_out")
        assert "attn_out" not in offered_sites(model)
    finally:
        opened.cache_clear()
