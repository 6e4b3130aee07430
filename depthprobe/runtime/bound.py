"""How much faster leaving early could be at most, in FLOPs and in time.

The FLOP bound of arXiv 2608.09444 on the speed-up over full depth is (F0 + U·F_r) / (F0 + d̄·F_r) with F0 the FLOPs
outside the core, F_r those of one core application and d̄ the mean exit. The same in time takes the seconds that a tick
of a full batch costs for them. Neither counts prefill.
"""

from __future__ import annotations

from depthprobe.runtime.roofline import Clock


def bound(outside: float, core: float, n_loops: int, mean_exit: float) -> float:
    """(F0 + U·F_r) / (F0 + d̄·F_r): FLOPs or seconds of a token outside the core and of one core application."""
    return (outside + n_loops * core) / (outside + mean_exit * core)


def flop_bound(clock: Clock, mean_exit: float) -> float | None:
    """The bound in FLOPs; None where F0/F_r is not known."""
    return None if clock.f0 is None else bound(clock.f0, 1.0, clock.n_loops, mean_exit)


def token_seconds(clock: Clock, width: int, context: float, loops: float) -> float:
    """Seconds of a token that runs so many loops, each stage in full batches of `width` rows of `context` keys."""
    outside = clock.prelude(width, width * context) + clock.coda(width, width * context)
    return (outside + loops * clock.recurrent(width, width * context)) / width


def time_bound(clock: Clock, width: int, context: float, mean_exit: float) -> float:
    """The bound in seconds at these row counts."""
    full = token_seconds(clock, width, context, clock.n_loops)
    return full / token_seconds(clock, width, context, mean_exit)
