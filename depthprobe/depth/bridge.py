"""The route over TransformerLens: states come from the hook points of a `TransformerBridge`.

The bridge rewires the transformers model that it is built over, in place, so `bridge_model` gives it a copy.
Both stay the same model: the bridge's own forward runs transformers' code with hook points in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth.coordinates import Coordinate
from depthprobe.depth.decoder import DecoderModel
from depthprobe.depth.tapped import Collected
from depthprobe.depth.taps import Tap, hidden
from depthprobe.depth.watch import kind_of
from depthprobe.errors import UserError

_INSTALL = "`pip install 'depthprobe[interp]'`"
_NATIVE = "take route='native'"
#: Site → the hook point of a block, by its own name: aliases of TransformerLens move behind post-norms.
_HOOKS = {
    "resid_pre": "hook_in",
    "attn_out": "attn.hook_out",
    "mlp_out": "mlp.hook_out",
    "resid_post": "hook_out",
}


class BridgeModel(DecoderModel):
    """A model inside a `TransformerBridge`.

    The readable states are those of the blocks' `hook_in` and `hook_out`; "attn_out" and "mlp_out" those of
    `attn.hook_out` and `mlp.hook_out`, where the bridge has them. Norm and head are the bridge's. A bridge
    whose weights were folded is read as it is then: its final norm and head are the folded ones.

    Raises:
        UserError: as `DecoderModel`; or a model that runs layers more than once, for which TransformerLens has
            one name where there are several states.
    """

    route = "transformer-lens"

    def __init__(self, bridge: Any, tokenizer: Any, name: str) -> None:
        self._bridge = bridge
        super().__init__(bridge.original_model, tokenizer, name)
        if self.loop_ends:
            raise UserError(
                f"{name} runs its layers more than once, and TransformerLens keeps the last time alone",
                where=f"route {self.route}", remedy=_NATIVE,
            )  # fmt: skip
        self.can_continue = self.bridges_gaps = False  # its attention neither fills a cache nor reads one
        numbers = {id(block): number for number, block in enumerate(bridge.blocks)}
        known = self._heard()
        paths = {id(module): path for path, module in self.model.named_modules()}
        native, self._taps, self._hooks = self._taps, {}, dict[Coordinate, str]()
        for coordinate in self.axis:
            depth = Coordinate(1, 1) if coordinate.site == "embed" else coordinate._replace(site="resid_post")
            number = numbers.get(id(self.model.get_submodule(native[depth].path)))
            for site in ("embed",) if coordinate.site == "embed" else _HOOKS:
                point, hook = coordinate._replace(site=site), f"blocks.{number}.{_HOOKS.get(site, 'hook_in')}"
                if hook in known:
                    # the part itself may not show as a module, but its hook point is one, and an edit lands there
                    inner = paths.get(id(self._bridge.hook_dict[hook])) if site in ("attn_out", "mlp_out") else None
                    tap = native.get(point) or (Tap(inner) if inner else native[coordinate])
                    self._taps[point], self._hooks[point] = tap, hook
            if coordinate not in self._taps or coordinate.site == "final_state":
                where = f"{coordinate}, {native[coordinate].path}"
                raise UserError(f"the bridge of {name} has no hook point there", where=where, remedy=_NATIVE)

    def _heard(self) -> set[str]:
        """The hook points at which a hidden state [B, S, d] comes by, on a tiny forward."""
        heard: set[str] = set()

        def hear(name: str) -> Callable[..., None]:
            def hook(value: Any, *, hook: Any) -> None:
                del hook
                if isinstance(value, Tensor) and value.shape == (1, 2, self.width):
                    heard.add(name)

            return hook

        offered = self._bridge.hook_dict
        names = (f"blocks.{n}.{hook}" for n in range(len(self._bridge.blocks)) for hook in _HOOKS.values())
        hooks = [(name, hear(name)) for name in names if name in offered]
        with self._bridge.hooks(fwd_hooks=hooks), torch.inference_mode():
            self.model(input_ids=torch.ones(1, 2, dtype=torch.long, device=self.device))
        return heard

    @contextmanager
    def _tapped(self, collected: Collected) -> Iterator[None]:
        wanted: dict[str, list[Coordinate]] = {}
        for coordinate in collected.taps:
            wanted.setdefault(self._hooks[coordinate], []).append(coordinate)

        def keep(coordinates: list[Coordinate]) -> Callable[..., None]:
            def hook(value: Any, *, hook: Any) -> None:
                del hook
                for coordinate in coordinates:
                    collected.take(coordinate, hidden(value))

            return hook

        hooks = [(name, keep(coordinates)) for name, coordinates in wanted.items()]
        with self._bridge.hooks(fwd_hooks=hooks):
            yield


def bridge_model(model: nn.Module, tokenizer: Any, name: str) -> BridgeModel:
    """A `BridgeModel` over a copy of a transformers model.

    Raises:
        UserError: TransformerLens is not installed, has no adapter for the architecture, or its adapter fails.
    """
    sources, formats = _library()
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # of a model that was built here, nothing is written there
    try:
        architecture = formats.determine_architecture_from_hf_config(config)
    except ValueError as error:
        raise UserError(
            f"TransformerLens has no adapter for {name}", where=kind_of(model), remedy=_NATIVE
        ) from error
    try:
        bridge = sources.build_bridge_from_module(copy.deepcopy(model), architecture, hf_config=config)
    except Exception as error:
        # whatever an adapter of another library trips over
        what = f"TransformerLens' adapter {architecture} cannot open {name}: {type(error).__name__}: {error}"
        raise UserError(what[:400], where=kind_of(model), remedy=_NATIVE) from error
    try:
        return BridgeModel(bridge, tokenizer, name)
    except UserError as error:
        what = f"TransformerLens' adapter {architecture} cannot open {name}: {error.what}"
        raise UserError(what, where=error.where, remedy=_NATIVE) from error


def _library() -> tuple[Any, Any]:
    try:
        from transformer_lens.model_bridge import sources
        from transformer_lens.model_bridge.sources import _hf_format
    except ImportError as error:
        raise UserError("TransformerLens is not installed", where="route transformer-lens", remedy=_INSTALL) from error
    return sources, _hf_format
