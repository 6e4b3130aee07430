"""Models opened along their depth axis: catch states anywhere, read them with the model's own head."""

from __future__ import annotations

from depthprobe.depth.capture import Capture, DepthCache
from depthprobe.depth.cells import Cell, Cut, Edit, Resumed
from depthprobe.depth.coordinates import SITES, Coordinate, NamesFilter
from depthprobe.depth.decoder import DecoderModel
from depthprobe.depth.load import load
from depthprobe.depth.looped import LoopedModel
from depthprobe.depth.model import DepthModel, continue_cache
from depthprobe.depth.reading import Positions, pick
from depthprobe.depth.wrap import ROUTES, Route, wrap

__all__ = [
    "ROUTES", "SITES", "Capture", "Cell", "Coordinate", "Cut", "DecoderModel", "DepthCache", "DepthModel", "Edit",
    "LoopedModel", "NamesFilter", "Positions", "Resumed", "Route", "continue_cache", "load", "pick", "wrap",
]  # fmt: skip
