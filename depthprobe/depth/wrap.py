"""`wrap`: a model that is already in memory → a `DepthModel`, by any of three routes.

    depthprobe.depth.wrap(model)                              # a transformers model, or one of this package
    depthprobe.depth.wrap(model, route="transformer-lens")    # through a bridge over a copy of it
    depthprobe.depth.wrap(bridge)                             # a TransformerBridge, as it is
    depthprobe.depth.wrap(NNsight(model))                     # through nnsight traces

What a library's object is is seen from its type; neither library is imported for it.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from torch import nn

from depthprobe.depth.decoder import DecoderModel
from depthprobe.depth.looped import LoopedModel
from depthprobe.depth.model import DepthModel
from depthprobe.depth.tapped import TappedModel
from depthprobe.errors import UserError
from depthprobe.models import LoopedForCausalLM

Route = Literal["native", "transformer-lens", "nnsight"]
ROUTES: tuple[Route, ...] = ("native", "transformer-lens", "nnsight")


def parse_route(route: str) -> Route:
    """Raises UserError for an unknown route."""
    if route not in ROUTES:
        raise UserError(f"unknown route '{route}'", remedy=f"one of {', '.join(ROUTES)}")
    return cast("Route", route)


def wrap(
    model: Any, tokenizer: Any = None, name: str | None = None, route: str | None = None
) -> DepthModel:
    """Open a model in memory along its depth axis. The model is put into eval mode and otherwise not changed.

    Args:
        model: a causal language model of transformers, a `LoopedForCausalLM`, a `TransformerBridge`, an
            nnsight wrapper around one of the first two, or a `DepthModel` to be opened by another route.
        tokenizer: default: the one that the bridge or wrapper brings, or none.
        name: how reports and errors call it; default: the configuration's name or the class.
        route: default: that of the object, "native" for a plain module.

    Raises:
        UserError: an object that is none of these, a route that it does not fit, or a model that cannot be
            opened, with the reason.
    """
    asked = None if route is None else parse_route(route)
    if isinstance(model, DepthModel):
        if asked in (None, model.route) and tokenizer is None and name is None:
            return model
        if asked is None and model.route != "native":
            what = f"{model.name} is already open by route {model.route}"
            raise UserError(what, remedy="name a route too, or wrap the module with that tokenizer and name")
        return wrap(model.model, tokenizer or model.tokenizer, name or model.name, route)
    library = _library_of(model)
    if library == "transformer_lens" and hasattr(model, "original_model"):
        from depthprobe.depth.bridge import BridgeModel

        _fits(asked, "transformer-lens", type(model).__name__)
        tokenizer = tokenizer or getattr(model, "tokenizer", None)
        return BridgeModel(model, tokenizer, name or _name(model.original_model))
    if library == "nnsight":
        from depthprobe.depth.nnsight import NNsightModel, unwrap

        _fits(asked, "nnsight", type(model).__name__)
        tokenizer = tokenizer or getattr(model, "tokenizer", None)
        return NNsightModel(model, _native(unwrap(model), tokenizer, name))
    if asked == "transformer-lens":
        from depthprobe.depth.bridge import bridge_model

        native = _native(model, tokenizer, name)
        return bridge_model(native.model, tokenizer, native.name)
    native = _native(model, tokenizer, name)
    if asked == "nnsight":
        from depthprobe.depth.nnsight import nnsight_model

        return nnsight_model(native)
    return native


def _native(model: Any, tokenizer: Any, name: str | None) -> TappedModel:
    if isinstance(model, LoopedForCausalLM):
        return LoopedModel(model, tokenizer, name or _name(model))
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return DecoderModel(model, tokenizer, name or _name(model))
    remedy = "give a causal language model of transformers, a TransformerBridge or an nnsight wrapper"
    raise UserError(f"a {type(model).__name__} has no depth axis", remedy=remedy)


def _library_of(model: Any) -> str | None:
    tops = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return next((top for top in ("transformer_lens", "nnsight") if top in tops), None)


def _fits(asked: Route | None, own: Route, kind: str) -> None:
    if asked not in (None, own):
        raise UserError(f"a {kind} is read by route '{own}', not '{asked}'", remedy="give the plain module")


def _name(model: Any) -> str:
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
