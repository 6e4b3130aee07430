"""Served tokens again, through forwards over all positions at once: what each would have said, and what its gate said,
at every loop, under full keys and under the keys as served.

    from depthprobe.replay import read_served, replay
    served = read_served(folder, read_meta(folder))
    table = replay(model, served.requests, rule, ragged_prefill=False)      # the table `replayed`

`analysis.agreement` makes of it where a token would have settled, and why it left elsewhere.
"""

from __future__ import annotations

from depthprobe.replay.replayed import replay
from depthprobe.replay.rules import AskedRule, check_replayable
from depthprobe.replay.served import Served, ServedRequest, read_served

__all__ = ["AskedRule", "Served", "ServedRequest", "check_replayable", "read_served", "replay"]
