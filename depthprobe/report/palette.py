"""Colours of the report, stated once: named tokens, a light and a dark value for each.

Figures and style sheet never hold a colour. They say `var(--hop-3)`; the style sheet defines the variable for
both themes, and the page's script looks it up when it draws, so that a change of theme redraws the figures in
the new colours. Ramps are interpolated in OKLab (perceptually even steps) and their lightness is monotone, so
that the order of hops survives every kind of colour blindness and a grey print.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["THEMES", "contrast", "css", "hop_token", "mix", "resolve", "tokens"]

#: theme -> token -> colour
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#faf9f6",
        "card": "#ffffff",
        "sunk": "#f3f1ec",
        "ink": "#1d1b26",
        "soft": "#5a5768",
        "rule": "#dfdcd4",
        "grid": "#e9e6df",
        "accent": "#4036a0",
        "model": "#4036a0",
        "rival": "#b4500f",
        "other": "#8d8a97",
        "gate": "#087568",
        "role-chain": "#4036a0",
        "role-branch": "#087568",
        "role-decoy": "#b4500f",
        "role-offchain": "#6f6c7a",
        "role-gender": "#a8246e",
    },
    "dark": {
        "page": "#121118",
        "card": "#1a1922",
        "sunk": "#22212c",
        "ink": "#edebf4",
        "soft": "#aaa7ba",
        "rule": "#34323f",
        "grid": "#2b2935",
        "accent": "#b0a8ff",
        "model": "#b0a8ff",
        "rival": "#ff9f5a",
        "other": "#8a8799",
        "gate": "#4fd1bd",
        "role-chain": "#b0a8ff",
        "role-branch": "#4fd1bd",
        "role-decoy": "#ff9f5a",
        "role-offchain": "#9a97a8",
        "role-gender": "#f58ac4",
    },
}

#: few hops -> many hops: cool to warm; lightness rises in both themes, within reach of 3:1 on the card
_HOPS = {
    "light": ("#26157a", "#7d1f8f", "#c23a63", "#c97a08"),
    "dark": ("#7d78f5", "#c46ee0", "#ff8a8f", "#ffd877"),
}
#: share or accuracy 0 -> 1
_HEAT = {
    "light": ("#f4f2fb", "#c3bbec", "#7668c8", "#2a1b78"),
    "dark": ("#22212c", "#453f86", "#8176dc", "#e4dfff"),
}
_HEAT_STEPS = 9
#: below zero, where a share should not be: 0 -> -1
_COLD = {
    "light": ("#f4f2fb", "#f5d3b8", "#d98545", "#8f3c06"),
    "dark": ("#22212c", "#6b3c1c", "#c06a2c", "#ffcfa3"),
}
_COLD_STEPS = 4


#: tokens besides the rungs' that have a translucent "-band"
_BANDED = (
    "accent", "model", "rival", "gate", "other", "role-chain", "role-branch", "role-decoy", "role-offchain",
    "role-gender",
)  # fmt: skip


def hop_token(index: int) -> str:
    """The token of the index-th rung (0-based) among the hops of a run."""
    return f"hop-{index + 1}"


def tokens(theme: str, n_hops: int) -> dict[str, str]:
    """A theme's tokens: the plain ones, `hop-1`…, `heat-0`…`heat-8` with text that can be
    read on them (`on-heat-0`…), translucent `hop-1-band`…"""
    found = dict(THEMES[theme])
    found |= {hop_token(i): colour for i, colour in enumerate(_ramp(_HOPS[theme], n_hops))}
    for name in [name for name in found if name in _BANDED or name.startswith("hop-")]:
        r, g, b = _rgb(found[name])
        found[f"{name}-band"] = f"rgba({r},{g},{b},{0.13 if theme == 'light' else 0.16})"
    for i, colour in enumerate(_ramp(_HEAT[theme], _HEAT_STEPS)):
        found[f"heat-{i}"] = colour
        found[f"on-heat-{i}"] = max(("#ffffff", "#121118"), key=lambda text: contrast(text, colour))
    for i, colour in list(enumerate(_ramp(_COLD[theme], _COLD_STEPS + 1)))[1:]:
        found[f"cold-{i}"] = colour
        found[f"on-cold-{i}"] = max(("#ffffff", "#121118"), key=lambda text: contrast(text, colour))
    return found


def effect_scale() -> list[list[float | str]]:
    """A plotly colour scale from −1 to 1 made of tokens: the heat ramp above 0, another below."""
    cold = [[0.5 - 0.5 * i / _COLD_STEPS, f"var(--cold-{i})"] for i in range(_COLD_STEPS, 0, -1)]
    return [*cold, *([0.5 + 0.5 * float(at), token] for at, token in heat_scale())]


def heat_scale() -> list[list[float | str]]:
    """A plotly colour scale made of tokens."""
    return [[i / (_HEAT_STEPS - 1), f"var(--heat-{i})"] for i in range(_HEAT_STEPS)]


def css(n_hops: int) -> str:
    """The variables of both themes: the viewer's preference, unless the page's root carries `data-theme`."""

    def block(theme: str) -> str:
        return "".join(f"--{name}:{value};" for name, value in tokens(theme, n_hops).items())

    return (
        f":root{{color-scheme:light;{block('light')}}}\n"
        "@media (prefers-color-scheme:dark){"
        f":root:not([data-theme=light]){{color-scheme:dark;{block('dark')}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{block('dark')}}}\n"
    )


_VARIABLE = re.compile(r"var\(--([a-z0-9-]+)\)")


def resolve(spec: Any, theme: str, n_hops: int) -> Any:
    """A copy of a figure's nested dicts and lists with every token replaced by its colour.

    What the page's script does in the browser; for notebooks and tests.
    """
    table = tokens(theme, n_hops)

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        if isinstance(node, str):
            return _VARIABLE.sub(lambda match: table[match.group(1)], node)
        return node

    return walk(spec)


def mix(a: str, b: str, share: float) -> str:
    """The colour at `share` of the way from a to b ("#rrggbb"), in OKLab."""
    x, y = _oklab(a), _oklab(b)
    return _hex(tuple(p + (q - p) * share for p, q in zip(x, y, strict=True)))


def contrast(a: str, b: str) -> float:
    """The WCAG 2 contrast ratio of two "#rrggbb" colours, 1 to 21."""
    hi, lo = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (hi + 0.05) / (lo + 0.05)


def _ramp(anchors: tuple[str, ...], n: int) -> list[str]:
    if n == 1:
        return [anchors[1]]
    found: list[str] = []
    for i in range(n):
        place = i / (n - 1) * (len(anchors) - 1)
        left = min(int(place), len(anchors) - 2)
        found.append(mix(anchors[left], anchors[left + 1], place - left))
    return found


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(colour: str) -> tuple[float, ...]:
    return tuple(
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _rgb(colour))
    )


def _luminance(colour: str) -> float:
    r, g, b = _linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _oklab(colour: str) -> tuple[float, ...]:
    """Björn Ottosson's OKLab from linear sRGB."""
    r, g, b = _linear(colour)
    u = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    v = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    w = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * u + 0.7936177850 * v - 0.0040720468 * w,
        1.9779984951 * u - 2.4285922050 * v + 0.4505937099 * w,
        0.0259040371 * u + 0.7827717662 * v - 0.8086757660 * w,
    )


def _hex(lab: tuple[float, ...]) -> str:
    light, a, b = lab
    u = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    v = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    w = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * u - 3.3077115913 * v + 0.2309699292 * w,
        -1.2684380046 * u + 2.6097574011 * v - 0.3413193965 * w,
        -0.0041960863 * u - 0.7034186147 * v + 1.7076147010 * w,
    )
    out = "#"
    for c in linear:
        c = min(max(c, 0.0), 1.0)
        out += f"{round(255 * (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055)):02x}"
    return out
