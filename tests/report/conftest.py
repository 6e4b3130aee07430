"""Synthetic runs, made once: a looped model with a gate, a transformer, a deep loop, the smallest run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from synthetic import layers_axis, looped_axis, write_run
from synthetic_causal import add_causal


@pytest.fixture(scope="session")
def looped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("looped"), looped_axis(), with_tokens=24)


@pytest.fixture(scope="session")
def layers_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    axis = layers_axis()
    return write_run(
        tmp_path_factory.mktemp("layers"), axis, model="SmolLM2-135M-Instruct", gate=False, n_stories=20, with_tokens=3
    )


@pytest.fixture(scope="session")
def deep_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four loops of four layers and a per-loop norm, with prelude and coda."""
    axis = looped_axis(4, layers=4, prelude=1, coda=1, loop_state=True)
    return write_run(tmp_path_factory.mktemp("deep"), axis, tasks=("follow",), n_stories=12)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One story, one hop count, a task of the user's with a name that is markup, nothing optional."""
    return write_run(
        tmp_path_factory.mktemp("small"), looped_axis(3), model="</script><b>x</b>",
        tasks=("my <i>data</i>",), hops=(2,), n_stories=1, gate=False, shortcuts=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def causal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looped model in which information moves later with more hops, with enough clusters to say so."""
    folder = tmp_path_factory.mktemp("causal")
    hops = (1, 2, 3)
    return add_causal(
        write_run(folder, looped_axis(6), tasks=("follow",), hops=hops, n_stories=52, with_tokens=4), n_positioned=6
    )


@pytest.fixture(scope="session")
def deep_causal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in a loop, a prelude and a coda; few stories; both tasks; no table of a kind that was not asked."""
    axis = looped_axis(3, layers=2, prelude=1, coda=1)
    run = write_run(tmp_path_factory.mktemp("deep-causal"), axis, hops=(1, 3), n_stories=8)
    return add_causal(run, n_positioned=0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from chromium()
