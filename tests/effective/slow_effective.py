"""What the columns of `effective` mean, one forward at a time, with module hooks of its own and nothing of `resume`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthprobe.depth import Coordinate, LoopedModel
from depthprobe.depth.tapped import TappedModel
from depthprobe.tasks.items import Item

#: (point, tokens or None for all, what stands there: a state [S, d], or None for what the layer got)
Change = tuple[Coordinate, slice, Tensor | None]


def layers(model: TappedModel) -> list[Coordinate]:
    return [c for c in model.axis if c.site == "resid_post"]


def first(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else first(value[0])


@contextmanager
def changed(model: TappedModel, change: Change | None) -> Iterator[None]:
    """A forward in which one call of one module returns something else for some tokens."""
    if change is None:
        yield
        return
    point, tokens, state = change
    tap, count = model.taps[point], 0
    assert not tap.before

    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        if count != tap.call + 1:
            return None
        new = first(output).clone()
        entered = first(args) if args else first(kwargs["hidden_states"])
        new[:, tokens] = (entered if state is None else state[None, : new.shape[1]])[:, tokens]
        return new if isinstance(output, Tensor) else (new, *output[1:])

    with model.model.get_submodule(tap.path).register_forward_hook(hook, with_kwargs=True):
        yield


def states(model: TappedModel, ids: list[int], change: Change | None = None) -> dict[Coordinate, Tensor]:
    """Every point of one forward, [S, d] each, by hooks that count calls."""
    found: dict[Coordinate, Tensor] = {}
    counts: dict[tuple[str, bool], int] = {}
    handles = []
    with changed(model, change):
        for path, before in {(tap.path, tap.before) for tap in model.taps.values()}:
            calls = {t.call: c for c, t in model.taps.items() if (t.path, t.before) == (path, before)}

            def keep(value: Tensor, place: tuple[str, bool], calls: dict[int, Coordinate]) -> None:
                count = counts.get(place, 0)
                counts[place] = count + 1
                if count in calls:
                    found[calls[count]] = value[0].clone()

            module = model.model.get_submodule(path)
            if before:

                def enter(_m: Any, args: Any, kwargs: Any, p: Any = (path, before), c: Any = calls) -> None:
                    keep(first(args) if args else first(kwargs["hidden_states"]), p, c)

                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            else:

                def leave(_m: Any, _args: Any, out: Any, p: Any = (path, before), c: Any = calls) -> None:
                    keep(first(out), p, c)

                handles.append(module.register_forward_hook(leave))
        with torch.no_grad():
            model.model(input_ids=torch.tensor([ids]))
        for handle in handles:
            handle.remove()
    return found


def logprobs(model: TappedModel, ids: list[int], change: Change | None = None) -> Tensor:
    """[V] float64, of the token behind `ids`."""
    with changed(model, change), torch.no_grad():
        return model.model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)


class Slow:
    """One item of one model."""

    def __init__(self, model: TappedModel, item: Item, spared: int = 0) -> None:
        self.model, self.item, self.spared = model, item, spared
        bos = [1] if model.tokenizer.bos_token_id is not None else []
        plain = model.tokenizer(item.text, add_special_tokens=False)["input_ids"]
        self.prompt = [*bos, *plain]
        self.paths = {
            word: tuple(model.tokenizer(item.text + " " + word, add_special_tokens=False)["input_ids"][len(plain) :])
            for word in dict.fromkeys((*item.candidates, *item.plausible))
        }
        self.clean = states(model, self.prompt)
        self.final = logprobs(model, self.prompt)

    def begins(self, loop: int) -> Tensor:
        """[S, d] where a loop of `LoopedForCausalLM` begins."""
        core = next(c for c in self.model.axis if c.loop == 1)
        at = self.model.axis.index(core)
        return self.clean[self.model.axis[at - 1] if loop == 1 else self.model.loop_ends[loop - 2]]

    def row(self, coordinate: Coordinate, site: str) -> dict[str, Any]:
        model, order = self.model, layers(self.model)
        if site == "resid_post":
            entered, left = self.clean[coordinate._replace(site="resid_pre")], coordinate
            later = order[order.index(coordinate) + 1 :]
            put: Tensor | None = None
        else:
            own = [layer for layer in order if layer.loop == coordinate.loop]
            later = order[order.index(own[-1]) + 1 :]
            if isinstance(model, LoopedModel):
                entered, left = self.begins(coordinate.loop), coordinate
                zero = model.config.input_injection == "add" and coordinate.loop == 1
                put = torch.zeros_like(entered) if zero else entered
            else:
                entered, left = self.clean[own[0]._replace(site="resid_pre")], own[-1]
                put = entered
        delta = self.clean[left] - entered
        ratio, cosine = delta.norm(dim=-1) / entered.norm(dim=-1), torch.cosine_similarity(delta, entered, dim=-1)
        end, spared = len(self.prompt) - 1, self.spared
        skipped = self.skip(coordinate, site, left, put, slice(spared, None))
        said = {path: score(self.paths, path, skipped) for path in self.paths.values()}
        best = max(self.item.candidates, key=lambda word: said[self.paths[word]])
        answer = self.paths[self.item.answer]
        lens = model.readout(self.clean[coordinate][-1], coordinate).double().log_softmax(-1)
        return {
            "contribution": float(ratio[-1]),
            "cosine": float(cosine[-1]),
            "contribution_all": float(ratio[spared:].mean()),
            "cosine_all": float(cosine[spared:].mean()),
            "skip_kl": kl(self.final, skipped(())),
            "skip_top5": overlap(self.final, skipped(())),
            "skip_logprob": sum(float(skipped(answer[:n])[token]) for n, token in enumerate(answer)),
            "skip_correct": best == self.item.answer,
            "later_same": self.later(later, (left, slice(end, end + 1), put)),
            "later_others": self.later(later, (left, slice(spared, end), put)),
            "lens_kl": kl(self.final, lens),
            "lens_top5": overlap(self.final, lens),
        }

    def skip(self, coordinate: Coordinate, site: str, left: Coordinate, put: Tensor | None, tokens: slice) -> Any:
        """suffix → log-probabilities behind prompt and suffix, with the part skipped at all of these tokens."""

        def said(suffix: tuple[int, ...]) -> Tensor:
            ids, state = [*self.prompt, *suffix], put
            if put is not None and suffix:  # the loop's start behind the prompt as well
                state = Slow.__new__(Slow)._with(self, ids).begin_of(coordinate, site)
            return logprobs(self.model, ids, (left, tokens, state))

        return said

    def _with(self, other: Slow, ids: list[int]) -> Slow:
        self.model, self.prompt, self.clean = other.model, ids, states(other.model, ids)
        return self

    def begin_of(self, coordinate: Coordinate, site: str) -> Tensor:
        assert site == "loop"
        if not isinstance(self.model, LoopedModel):
            own = [layer for layer in layers(self.model) if layer.loop == coordinate.loop]
            return self.clean[own[0]._replace(site="resid_pre")]
        entered = self.begins(coordinate.loop)
        zero = self.model.config.input_injection == "add" and coordinate.loop == 1
        return torch.zeros_like(entered) if zero else entered

    def later(self, later: list[Coordinate], change: Change) -> float | None:
        if not later:
            return None
        run, changes = states(self.model, self.prompt, change), []
        for layer in later:
            before = layer._replace(site="resid_pre")
            clean = (self.clean[layer] - self.clean[before])[-1]
            changes.append(float((run[layer] - run[before])[-1].sub(clean).norm() / clean.norm()))
        return sum(changes) / len(changes)


def kl(final: Tensor, other: Tensor) -> float:
    return float((final.exp() * (final - other)).sum())


def overlap(a: Tensor, b: Tensor) -> float:
    return len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) / 5


def score(paths: dict[str, tuple[int, ...]], path: tuple[int, ...], said: Any) -> float:
    """Product over the places at which another word turns off this word's path, and of the first token."""
    total = 1.0
    for place in range(len(path) + 1):
        here = [other for other in paths.values() if other[:place] == path[:place]]
        nexts = {other[place] for other in here if len(other) > place}
        ends = any(len(other) == place for other in here)
        if place and len(nexts) + ends < 2:
            continue
        p = said(path[:place]).exp()
        total *= float(p[path[place]]) if place < len(path) else 1.0 - sum(float(p[token]) for token in nexts)
    return total
