"""A head's file is what was written, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from depthprobe.errors import UserError
from depthprobe.halting import LookaheadHead
from depthprobe.models import embedded_path


@pytest.mark.parametrize("name", ["weight", "bias", "gate_weight", "norm_weight"])
def test_a_changed_number_is_refused(name: str, tmp_path: Path) -> None:
    head = LookaheadHead.load(embedded_path("follow-demo"))
    file = tmp_path / "head.safetensors"
    head.save(file)
    with safe_open(str(file), framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a mapping)
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, str(file), metadata)
    with pytest.raises(UserError, match=r"checksum differs|hash of the lookahead head"):
        LookaheadHead.load(file)
