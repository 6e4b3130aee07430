"""Causal patching: states of one story in the run of another, and attention edges that are cut."""

from __future__ import annotations

from depthprobe.patching.causal import causal_patch
from depthprobe.patching.pairs import DEFAULT_KINDS, Pair, Subject, Subjects, subjects
from depthprobe.patching.probe import DEFAULT_ROLES, DIRECTIONS, PATCHES, Plan, probe
from depthprobe.patching.result import PatchResult
from depthprobe.patching.roles import ROLES, offsets, roles_of
from depthprobe.patching.sites import SITES, SPANS, offered_sites, places
from depthprobe.patching.table import TABLES, Cost, Work, describe, part_cost, patching_rows, prepare_patching

__all__ = [
    "DEFAULT_KINDS", "DEFAULT_ROLES", "DIRECTIONS", "PATCHES", "ROLES", "SITES", "SPANS", "TABLES", "Cost", "Pair",
    "PatchResult", "Plan", "Subject", "Subjects", "Work", "causal_patch", "describe", "offered_sites", "offsets",
    "part_cost", "patching_rows", "places", "prepare_patching", "probe", "roles_of", "subjects",
]  # fmt: skip
