"""Models opened along their depth axis: catch states anywhere, read them with the model's own head."""

from __future__ import annotations

from depthprobe.depth.coordinates import SITES, Coordinate
from depthprobe.depth.decoder import DecoderModel
from depthprobe.depth.load import load
from depthprobe.depth.looped import LoopedModel
from depthprobe.depth.model import Capture, DepthModel, continue_cache, pick

__all__ = [
    "SITES", "Capture", "Coordinate", "DecoderModel", "DepthModel", "LoopedModel", "continue_cache", "load",
    "pick",
]  # fmt: skip
