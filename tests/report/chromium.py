"""A page in headless Chromium, with what it said and asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
_PATIENCE = 180_000  # milliseconds: a busy machine may take a minute to open a page of 5 MB


@dataclass
class Watch:
    """What a page said and asked for."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def chromium() -> Iterator[Any]:
    """A running Chromium, or a skip that says how to get one."""
    if _CHROMIUM is None:
        pytest.skip("there is no Chromium: `apt-get install chromium` brings it")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is in the dev extra")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield running
        running.close()


def open_page(
    browser: Any, path: Path, *, scheme: str = "light", width: int = 1280, fragment: str = "", items: bool = True
) -> tuple[Any, Watch]:
    """The page with its figures drawn, and its item browser unless it has none (`items`)."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    context.set_default_timeout(_PATIENCE)
    page, watch = context.new_page(), Watch()
    page.on("console", lambda said: watch.complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: watch.complaints.append(str(error)))
    page.on("request", lambda request: watch.requests.append(request.url))
    page.goto(path.as_uri() + fragment)
    page.wait_for_selector("html[data-ready]")
    if items:
        page.wait_for_selector("#browser[data-ready]")
    return page, watch


def rgb(colour: str) -> str:
    """"#rrggbb" as a computed style says it."""
    return f"rgb({int(colour[1:3], 16)}, {int(colour[3:5], 16)}, {int(colour[5:7], 16)})"
