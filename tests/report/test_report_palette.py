"""Colours: order that survives colour blindness, contrast, and no token without a value."""

from __future__ import annotations

import pytest

from depthprobe.report import palette


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("n_hops", [1, 2, 6, 8, 12])
def test_hops_rise_in_lightness_and_stand_out(theme: str, n_hops: int) -> None:
    tokens = palette.tokens(theme, n_hops)
    hops = [tokens[palette.hop_token(i)] for i in range(n_hops)]
    from_black = [palette.contrast(colour, "#000000") for colour in hops]
    assert from_black == sorted(from_black)
    assert len(set(hops)) == n_hops
    assert min(palette.contrast(colour, tokens["card"]) for colour in hops) >= 3  # WCAG: graphics


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(theme: str) -> None:
    tokens = palette.THEMES[theme]
    for ground in ("page", "card", "sunk"):
        assert palette.contrast(tokens["ink"], tokens[ground]) >= 7
        assert palette.contrast(tokens["soft"], tokens[ground]) >= 4.5
        assert palette.contrast(tokens["accent"], tokens[ground]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_heat_moves_away_from_the_card(theme: str) -> None:
    tokens = palette.tokens(theme, 1)
    steps = [palette.contrast(tokens[f"heat-{i}"], tokens["card"]) for i in range(9)]
    assert steps == sorted(steps)


def test_both_themes_define_the_same_tokens() -> None:
    assert palette.tokens("light", 6).keys() == palette.tokens("dark", 6).keys()


def test_mix_of_ends_is_the_ends() -> None:
    assert palette.mix("#26157a", "#c97a08", 0) == "#26157a"
    assert palette.mix("#26157a", "#c97a08", 1) == "#c97a08"


def test_contrast_of_black_and_white() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_resolve_replaces_tokens_at_any_depth() -> None:
    spec = {"a": [{"b": "var(--ink)"}], "n": 1, "t": "k = 1"}
    assert palette.resolve(spec, "light", 1) == {
        "a": [{"b": palette.THEMES["light"]["ink"]}],
        "n": 1,
        "t": "k = 1",
    }
