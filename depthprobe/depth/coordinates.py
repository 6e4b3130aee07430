"""Names of depths: (loop, layer, site) on the axis along which a model computes."""

from __future__ import annotations

from typing import NamedTuple

SITES = ("embed", "resid_post", "loop_state")


class Coordinate(NamedTuple):
    """One readable depth.

    Attributes:
        loop: 0 for the embedding and the prelude, r = 1…R for the core's r-th run, R+1 for the coda. An
            ordinary transformer has loop 1 alone.
        layer: 1-based within its group; 0 only for the embedding.
        site: "embed", what the first layer reads; "resid_post", the residual after that layer and before any
            final norm; "loop_state", the state that a norm after each loop hands to the next one, where a
            model has it.
    """

    loop: int
    layer: int
    site: str = "resid_post"

    def __str__(self) -> str:
        if self.site == "embed":
            return "embed"
        return f"r{self.loop}.state" if self.site == "loop_state" else f"r{self.loop}.l{self.layer}"
