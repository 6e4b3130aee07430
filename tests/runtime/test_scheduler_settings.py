"""Settings of the scheduler that cannot be served are refused."""

from __future__ import annotations

from typing import Any

import pytest

from depthprobe.errors import UserError
from depthprobe.runtime.settings import SchedulerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width is 0.*whole number from 1"),
        ({"core_pages": 1.5}, "core_pages is 1.5"),
        ({"spare": -1}, "spare is -1"),
        ({"policy": "fifo"}, "policy is 'fifo'.*refill, no-refill, lockstep, full"),
        ({"kv": "dense"}, "no KV layout"),
        ({"horizon": 2}, "horizon is 2.*0, 1"),
        ({"prefill": "none"}, "prefill is 'none'.*dense, ragged"),
        ({"coda_share": 1.1}, "coda_share is 1.1"),
        ({"kv": "depth-indexed"}, "depth-indexed has no early exits"),
        ({"kv": "depth-indexed", "policy": "full", "prefill": "ragged"}, "depth-indexed has no early exits"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SchedulerConfig(**{"n_loops": 3, "width": 2, "core_pages": 1000, **options})
