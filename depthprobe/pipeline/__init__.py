"""Items → lens → analysis → run folder → report, in one call.

    import depthprobe
    result = depthprobe.analyze("follow-demo", hops="1-6", n=100, out="runs/demo")
    result.summary["headline"]
    result.table("slopes")             # a polars frame
    result.report                      # path of report.html
"""

from __future__ import annotations

from depthprobe.pipeline.agree import Agreement, add_to_run, agree
from depthprobe.pipeline.analyze import AnalyzeResult, analyze
from depthprobe.pipeline.config import AnalyzeConfig, parse_bytes, parse_hops, read_config
from depthprobe.pipeline.frontier import Frontier, frontier
from depthprobe.pipeline.plan import DryRun, dry_run

__all__ = [
    "Agreement", "AnalyzeConfig", "AnalyzeResult", "DryRun", "Frontier", "add_to_run", "agree", "analyze", "dry_run",
    "frontier", "parse_bytes", "parse_hops", "read_config",
]  # fmt: skip
