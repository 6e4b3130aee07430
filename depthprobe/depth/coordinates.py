"""Names of depths: (loop, layer, site) on the axis along which a model computes."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from depthprobe.errors import UserError

if TYPE_CHECKING:
    from depthprobe.depth.model import DepthModel

#: Every site that there is; `DepthModel.sites` are those that a model offers.
SITES = ("embed", "resid_pre", "attn_out", "mlp_out", "resid_post", "loop_state", "final_state")

#: What picks captured names: one name, several, a pattern with `*`, or a function of the name.
NamesFilter = str | Sequence[str] | Callable[[str], bool]


class Coordinate(NamedTuple):
    """One depth. Loops and layers count from one, as in the tables; names (`point_name`) count from zero.

    Attributes:
        loop: 0 for the embedding and the prelude, r = 1…R for the core's r-th run, R+1 for the coda. An
            ordinary transformer has loop 1 alone.
        layer: 1-based within its group; 0 only for the embedding.
        site: "embed", what the first layer reads; "resid_post", the residual after that layer and before any
            final norm; "loop_state", the state that a norm after each loop hands to the next one, where a
            model has it; "final_state", what the final norm reads where that is more than the last layer's
            residual. These make up a model's axis. Beside it: "resid_pre", what the layer reads;
            "attn_out" and "mlp_out", what its attention and its feed-forward module return, before any norm
            or multiplier that the layer puts between them and the residual.
    """

    loop: int
    layer: int
    site: str = "resid_post"

    def __str__(self) -> str:
        if self.site == "embed":
            return "embed"
        if self.site == "loop_state":
            return f"r{self.loop}.state"
        if self.site == "final_state":
            return "final"
        place = f"r{self.loop}.l{self.layer}"
        return place if self.site == "resid_post" else f"{place}.{self.site}"


def layer_points(model: DepthModel) -> tuple[Coordinate, ...]:
    """The layers of a model in the order of execution, by their resid_post."""
    return tuple(point for point in model.axis if point.site == "resid_post")


def point_name(coordinate: Coordinate, n_loops: int, looped: bool) -> str:
    """The name under which a cache keeps a coordinate; everything in it counts from zero, as in TransformerLens.

    "hook_embed", what the first layer reads (TransformerLens' is the token embedding alone);
    "blocks.0.hook_resid_post" in an ordinary transformer, as TransformerLens calls it; in a looped model
    "prelude.blocks.0.hook_resid_post", "loops.0.blocks.1.hook_resid_post", "loops.0.hook_loop_state" and
    "coda.blocks.0.hook_resid_post".
    """
    loop, layer, site = coordinate
    if site == "embed":
        return "hook_embed"
    if site == "final_state":
        return "hook_final_state"
    if not looped:
        return f"blocks.{layer - 1}.hook_{site}"
    group = "prelude" if loop == 0 else "coda" if loop > n_loops else f"loops.{loop - 1}"
    return f"{group}.hook_{site}" if site == "loop_state" else f"{group}.blocks.{layer - 1}.hook_{site}"


def select_names(names: Sequence[str], names_filter: NamesFilter, owner: str) -> tuple[str, ...]:
    """The names that a filter picks, in their own order.

    Args:
        names: all that there are.
        names_filter: a name, a pattern with `*`, several of these, or a function name → bool.
        owner: whose names they are, for an error.

    Raises:
        UserError: a name or pattern, or the whole filter, picks nothing.
    """
    if callable(names_filter):
        picked = {name for name in names if names_filter(name)}
        if not picked:
            remedy = f"its names are like {names[0]}, {names[-1]}"
            raise UserError(f"names_filter picks none of {owner}'s {len(names)} names", remedy=remedy)
        return tuple(name for name in names if name in picked)
    picked = set()
    if not isinstance(names_filter, Iterable) or not all(isinstance(name, str) for name in names_filter):
        what = f"names_filter is {names_filter!r}"
        raise UserError(what[:200], remedy="give a name, several, or a function of a name")
    patterns = (names_filter,) if isinstance(names_filter, str) else tuple(names_filter)
    for pattern in patterns:
        found = fnmatch.filter(names, pattern) if "*" in pattern else [n for n in names if n == pattern]
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3) or [names[0], names[-1]]
            raise UserError(
                f"{owner} has nothing named '{pattern}'", where="names_filter", remedy=f"it has {', '.join(near)}"
            )
        picked.update(found)
    if not picked:
        raise UserError("names_filter is empty", remedy="leave it out, or name something")
    return tuple(name for name in names if name in picked)
