"""What callers from Python give, in whatever kind: taken for what it plainly means, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, depth_model

from depthprobe.depth import Cell, Coordinate, Cut, Edit
from depthprobe.depth.arguments import memory, whole
from depthprobe.depth.cells import asked
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError

IDS = torch.arange(3, 12) % VOCABULARY
LAST = Coordinate(1, 3)


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_whole_numbers_of_any_library() -> None:
    for three in (3, np.int8(3), np.uint64(3), torch.tensor(3), np.array(3)):
        assert whole(three, "n") == 3 and type(whole(three, "n")) is int
    for odd in (True, np.bool_(True), torch.tensor(True), 3.0, np.float32(3), "3", None, [3], float("nan")):
        assert refusal(whole, odd, "n").startswith("n is ")
    assert memory(2e9) == memory(np.float64(2e9)) == memory(np.int64(2_000_000_000)) == 2_000_000_000
    for odd in (0, -5, 0.5, float("nan"), float("inf"), True, "1GiB", None):
        assert "give a number of bytes" in refusal(memory, odd)


def test_one_of_a_kind_serves_for_a_list() -> None:
    cell = Cell((Edit(LAST, (2,), torch.zeros(1, 32)),))
    call = asked(IDS.tolist(), cell, np.int64(4), LAST, np.int64(1 << 20))
    assert call.input_ids.dtype == torch.long and call.input_ids.tolist() == IDS.tolist()
    assert (call.cells, call.read, call.coordinates, call.max_bytes) == ((cell,), (4,), (LAST,), 1 << 20)
    assert asked(IDS, [cell, cell], torch.tensor([1, 2]), [LAST], 1)[2] == (1, 2)
    assert asked(IDS.numpy(), (), None, None, 1)[1:4] == ((), None, None)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"input_ids": "Ann"}, "input_ids is 'Ann': give the token ids of one prompt"),
        ({"input_ids": 5}, "input_ids is 5"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids is "),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, "input_ids have shape (2, 3)"),
        ({"input_ids": []}, "input_ids have shape (0,)"),
        ({"input_ids": [1.5, 2.0]}, "input_ids are float32: give whole numbers"),
        ({"cells": None}, "cells is None: give cells"),
        ({"cells": [Edit(LAST, (1,), None)]}, "is no Cell (cell 0)"),
        ({"cells": "x"}, "cells is 'x'"),
        ({"read": []}, "no tokens are asked for"),
        ({"read": True}, "read is True"),
        ({"read": [1.5]}, "read is 1.5"),
        ({"coordinates": "r1.l1"}, "coordinates is 'r1.l1': take them from"),
        ({"coordinates": [(1, 1)]}, "is no Coordinate (coordinates)"),
        ({"coordinates": 4}, "coordinates is 4"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_bytes": float("nan")}, "max_bytes is nan"),
    ],
)
def test_other_kinds_are_one_line(changed: dict[str, Any], text: str) -> None:
    call: dict[str, Any] = {"input_ids": IDS, "cells": (), "read": None, "coordinates": None, "max_bytes": 1 << 20}
    assert text in refusal(asked, **{**call, **changed})
    model = depth_model("llama")
    assert isinstance(model, TappedModel)
    for method in (model.resume, model.plan_resume):
        assert text in refusal(method, **{**call, **changed})


ONE = torch.zeros(1, 32)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Edit(LAST, (1,), ONE), "is no Cell (cell 0)"),
        (Cell(Edit(LAST, (1,), ONE)), "the edits of a cell are a Edit"),  # type: ignore[arg-type]
        (Cell((Cut(LAST, (2,), (1,)),)), "give a tuple of Edit"),  # type: ignore[arg-type]
        (Cell((), (Edit(LAST, (1,), ONE),)), "give a tuple of Cut"),  # type: ignore[arg-type]
        (Cell((Edit((1, 1, "resid_post"), (1,), ONE),)), "is no Coordinate (cell 0)"),  # type: ignore[arg-type]
        (Cell((), (Cut((1, 1), (2,), (1,)),)), "is no Coordinate (cell 0)"),  # type: ignore[arg-type]
        (Cell((Edit(LAST, 1, ONE),)), "positions are 1 (cell 0)"),  # type: ignore[arg-type]
        (Cell((Edit(LAST, (1.0,), ONE),)), "a position is 1.0"),  # type: ignore[arg-type]
        (Cell((Edit(LAST, (True,), ONE),)), "a position is True"),
        (Cell((Edit(LAST, (1,), [[0.0] * 32]),)), "the value of an edit is a list"),  # type: ignore[arg-type]
        (Cell((Edit(LAST, (1,), ONE.long()),)), "the value of an edit is a Tensor"),
    ],
)
def test_cells_of_odd_parts(cell: Any, text: str) -> None:
    model = depth_model("llama")
    assert isinstance(model, TappedModel)
    for call in (model.resume, model.plan_resume):
        assert text in refusal(call, IDS, [cell])


def test_numpy_positions_of_an_edit() -> None:
    model = depth_model("llama")
    assert isinstance(model, TappedModel)
    value, point = torch.ones(2, 32), Coordinate(1, 1)
    plain = model.resume(IDS, [Cell((Edit(point, (1, 4), value),))]).states[LAST]
    for odd in ((np.int64(1), np.int64(4)), [1, 4]):
        cell = Cell((Edit(point, odd, value),))  # type: ignore[arg-type]
        assert torch.equal(model.resume(IDS, [cell]).states[LAST], plain)


def test_capture_takes_one_coordinate_and_refuses_other_kinds() -> None:
    model, ids = depth_model("llama"), IDS[None]
    assert set(model.capture(ids, coordinates=LAST).states) == {LAST}  # type: ignore[arg-type]
    for options, text in (
        ({"coordinates": 5}, "coordinates is 5"),
        ({"coordinates": "r1.l1"}, "coordinates is 'r1.l1'"),
        ({"coordinates": [(1, 1)]}, "is no Coordinate"),
        ({"cache": "x"}, "a str is no key-value cache (cache)"),
        ({"logits": None}, "logits is None: give True or False"),
        ({"keep_cache": "yes"}, "keep_cache is 'yes'"),
        ({"positions": True}, "positions is bool"),
        ({"positions": [1]}, "positions is list"),
    ):
        assert text in refusal(model.capture, ids, **options)
    assert model.capture_bytes(1, 9, np.int64(4)) == model.capture_bytes(1, 9, 4)  # type: ignore[arg-type]
    assert "positions is True" in refusal(model.capture_bytes, 1, 9, True)
    assert "rows is 0" in refusal(model.capture_bytes, 0, 9)
