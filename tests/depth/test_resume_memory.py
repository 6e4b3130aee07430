"""A sweep keeps to its memory: bytes of living tensors, counted as they come and go, against limit and plan."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, depth_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthprobe.depth import Cell, Edit, suffix_memory
from depthprobe.depth.suffix_memory import TooLittleMemoryError
from depthprobe.depth.tapped import TappedModel

LENGTH = 24


class Live(TorchDispatchMode):
    """Bytes of the tensors that were made within it and still live, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given or key in self._sizes:  # a view
                continue
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def sweep_of(kind: str) -> tuple[TappedModel, Tensor, list[Cell]]:
    model = depth_model(kind)
    assert isinstance(model, TappedModel)
    ids = torch.randint(3, VOCABULARY - 2, (LENGTH,), generator=torch.Generator().manual_seed(0))
    value = torch.ones(1, model.width)
    return model, ids, [Cell((Edit(point, (t,), value),)) for point in model.axis for t in range(2, LENGTH, 3)]


@pytest.mark.parametrize("engine", ["suffix", "hooks"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "looped", "looped-ouro-coda"])
def test_live_bytes_keep_to_the_limit(kind: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_memory, "HELD_BYTES", 0)  # what lies outside tensors
    model, ids, cells = sweep_of(kind)
    whole = model.resume(ids, cells, engine=engine)
    with pytest.raises(TooLittleMemoryError) as caught:
        model.resume(ids, cells, engine=engine, max_bytes=1)
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        for limit in (caught.value.least, caught.value.least * 5 // 4):
            plan = model.plan_resume(ids, cells, engine=engine, max_bytes=limit)
            with Live() as live:
                done = model.resume(ids, cells, engine=engine, max_bytes=limit)
            assert live.peak <= plan.nbytes <= limit
            assert plan.n_batches > 1 or limit > caught.value.least
            for point, state in whole.states.items():
                torch.testing.assert_close(done.states[point], state, rtol=1e-5, atol=1e-5)
            before = live.now
            del done
            assert live.now < before <= live.peak
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["suffix", "hooks"])
def test_a_limit_that_cannot_be_kept_is_refused_with_the_least_that_can(engine: str) -> None:
    model, ids, cells = sweep_of("looped")
    with pytest.raises(TooLittleMemoryError, match=r"needs \d+ KiB beside the model, and 1 KiB are allowed") as caught:
        model.resume(ids, cells, engine=engine, max_bytes=1000)
    assert "\n" not in str(caught.value) and caught.value.least > suffix_memory.HELD_BYTES
    assert model.resume(ids, cells[:1], engine=engine, max_bytes=caught.value.least).n_run <= 1
    with pytest.raises(TooLittleMemoryError):
        model.resume(ids, cells, engine=engine, max_bytes=caught.value.least - 1)
