"""Training of a tuned lens: KL(final output ‖ translated readout) at all depths, from one capture of the frozen model.

    lens = train_tuned(model, rows, steps=200, seed=0)        # rows: token ids of each text
    lens.save("model.tuned.safetensors")

The divergence is over the whole vocabulary and never sampled, but no more than a block of logits is held: a block is
made, its loss and the gradient with respect to the normed states are taken at once, and it is dropped. What is left is
the gradient of a norm and an affine map. The depths do not share parameters, so that their sum of losses trains each
as if it were alone; the last depth's log-probabilities serve them all.

The parameters that Adam moves are those of x + σ·(A'·(x / s) + b'), with s the root mean square of each dimension at
that depth and σ the typical size of a state, both measured on the first capture. Residuals differ by orders of
magnitude over dimensions and depths, and this gives all of them one learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthprobe.depth import Capture, DepthModel
from depthprobe.depth.tail import Tail
from depthprobe.errors import UserError
from depthprobe.lens.reads import check_logits, pad_id, padded
from depthprobe.lens.tuned import TunedLens, head_digest
from depthprobe.lens.tuned_start import Start

#: Logits of a block, in elements (32 MiB of float32), and the states of one depth that it is made of, at most.
_BLOCK, _STATES = 1 << 23, 1024
Row = Sequence[int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a lens is trained.

    Attributes:
        warm: positions, as a multiple of the width, on which least squares find where training begins
            (`tuned_start`); 0: it begins at the identity, the logit lens.
        steps: of the optimiser.
        rows: texts of a step.
        reads: positions of each text that a step reads, drawn at random; all of them in a shorter text.
        rate: learning rate of b'; that of A' is this over √d. It falls linearly to nothing.
        betas: of Adam.
        seed: of the order of the texts and of the positions.
    """

    warm: int = 16
    steps: int = 200
    rows: int = 8
    reads: int = 8
    rate: float = 0.02
    betas: tuple[float, float] = (0.9, 0.99)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("warm", 0), ("steps", 0), ("rows", 1), ("reads", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}", remedy=f"give at least {least}")
        if not self.warm and not self.steps:
            raise UserError("neither least squares nor steps are asked for", remedy="give steps of at least 1")
        if not 0 < self.rate <= 1:
            raise UserError(f"the learning rate is {self.rate}", remedy="give a number above 0 and up to 1, e.g. 0.02")


def train_tuned(
    model: DepthModel,
    rows: Iterable[Row],
    recipe: Recipe | None = None,
    *,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> TunedLens:
    """Find translators for every depth but the last.

    Args:
        model: frozen; its weights get no gradients.
        rows: token ids of each text, with BOS if there is to be one. No more are taken than are needed, and they are
            gone through again if there are fewer.
        recipe: how; default `Recipe()`.
        about: what the file is to say of the data.
        progress: called after each step with its number, their number, and the mean KL over depths in nats.

    Returns:
        The lens, on the model's device. The same arguments on the same machine and threads give the same lens.

    Raises:
        UserError: no texts, one beyond the context or without tokens, a model whose logits are not numbers, whose
            readout does not reproduce it, that has no depth but the last, or a training that diverges.
    """
    recipe = recipe or Recipe()
    if len(model.axis) < 2:
        raise UserError(f"{model.name} has no depth before its last", remedy="there is nothing to tune")
    texts = _texts(model, rows, recipe)
    draw = torch.Generator().manual_seed(recipe.seed)
    order = _order(len(texts), recipe, draw)
    # without a step there is no order, and the scales are those of the texts that the least squares begin with
    first = [texts[number] for number in order[: recipe.rows] or range(min(recipe.rows, len(texts)))]
    trainer = Trainer(model, captured(model, first, max(map(len, first)), draw, check=True), recipe)
    warm = _warm(model, trainer, texts, recipe, draw)
    done = 0
    for step in range(recipe.steps):
        chosen = [texts[number] for number in order[step * recipe.rows : (step + 1) * recipe.rows]]
        states = captured(model, chosen, recipe.reads, draw)
        loss = trainer.step(states, step)
        done += states.shape[1]
        if not math.isfinite(loss):
            what = f"the training diverges in step {step + 1}"
            raise UserError(what, where=model.name, remedy="take a smaller --rate")
        if progress is not None:
            progress(step + 1, recipe.steps, loss)
    weight, bias = trainer.translators()
    made = {
        **(about or {}), "seed": recipe.seed, "steps": recipe.steps, "rows": recipe.rows, "reads": recipe.reads,
        "rate": recipe.rate, "texts": len(texts), "warm_positions": warm, "positions": done,
    }  # fmt: skip
    return TunedLens(model.name, model.axis[:-1], weight, bias, head_digest(model), made)


def captured(
    model: DepthModel, rows: Sequence[Row], reads: int, draw: torch.Generator, *, check: bool = False
) -> Tensor:
    """States of all depths at random positions of some texts, float32 [D, N, d].

    Args:
        reads: positions of each text, at most.
        check: whether the readout identity is to be checked, too.

    Raises:
        UserError: see `train_tuned`.
    """
    ids, mask = padded(rows, pad_id(model), "right")
    most = min(reads, max(map(len, rows)))
    places = [torch.randperm(len(row), generator=draw)[:most].tolist() for row in rows]
    index = torch.tensor([[*some, *[some[-1]] * (most - len(some))] for some in places])
    kept = torch.tensor([number < len(some) for some in places for number in range(most)], device=model.device)
    capture = model.capture(ids, mask, index, model.axis, logits=check)
    states = {c: state.flatten(0, 1)[kept] for c, state in capture.states.items()}
    if check:
        assert capture.logits is not None
        own = capture.logits.flatten(0, 1)[kept]
        check_logits(model, own, "position {} of the first step".format, states)
        model.check_identity(Capture(states, own, None, mask))
    # out of inference mode, in which they could not take part in a gradient
    return torch.stack([states[c].float() for c in model.axis]).clone()


class Trainer:
    """Parameters, their scales and the optimiser. T depths have a translator; N positions make a step.

    Args:
        states: float32 [T + 1, N, d] of a first batch, from which the scales are taken; the last depth stands last.
    """

    def __init__(self, model: DepthModel, states: Tensor, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._normed = [model.is_normed(c) for c in model.axis[:-1]]
        square = states[:-1].square()
        d = model.width
        # the median, for the first token of a text may be a thousand times as large as all others
        size = square.mean(-1).median(-1).values.sqrt().clamp(min=1e-12)  # [T]
        self.inner = square.mean(1).sqrt().maximum(1e-3 * size[:, None])  # s, [T, d]
        self.outer = size[:, None]  # σ, [T, 1]
        self.weight = torch.zeros(len(size), d, d, device=states.device, requires_grad=True)  # A'
        self.bias = torch.zeros(len(size), d, device=states.device, requires_grad=True)  # b'
        groups = [
            {"params": [self.weight], "lr": recipe.rate / math.sqrt(d)},
            {"params": [self.bias], "lr": recipe.rate},
        ]
        self.start = Start(model, states, self.inner, self.outer)
        self._adam = torch.optim.Adam(groups, betas=recipe.betas)
        self._rates = [float(group["lr"]) for group in groups]

    @torch.no_grad()
    def begin(self) -> None:
        """Set A' and b' to what least squares have found."""
        weight, bias = self.start.solve()
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def step(self, states: Tensor, number: int) -> float:
        """One step of the optimiser on states [T + 1, N, d]; returns the mean KL before it, in nats."""
        losses, weight, bias = self.gradients(states)
        # there all gradients are rounding, which Adam would blow up to steps of full size
        exact = torch.tensor(self.start.exact, device=weight.device)
        weight[exact], bias[exact] = 0.0, 0.0
        self.weight.grad, self.bias.grad = weight, bias
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * (1.0 - number / self._recipe.steps)
        self._adam.step()
        return float(losses.mean())

    def gradients(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean KL over positions of each depth, [T], and the gradients of its sum by A' and b'."""
        model, tail = self._model, self._model.tail32
        weight, bias = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        n, v = states.shape[1], tail.vocab_size
        rows = max(1, min(_STATES, _BLOCK // v, n))
        losses = weight.new_zeros(len(self._normed))
        for start in range(0, n, rows):
            part = states[:, start : start + rows]
            with torch.no_grad():
                final = tail(part[-1], normed=model.is_normed(model.axis[-1])).float()
                final = final.clamp(min=torch.finfo(torch.float32).min).log_softmax(-1)  # [N, V]
            for some in self._blocks(max(1, _BLOCK // (v * part.shape[1]))):
                a, b = self.weight[some], self.bias[some]
                state = self._translate(part[some], a, b, some)
                normed = state if self._normed[some.start] else tail.normed(state)
                loss, slope = kl_slope(tail, normed.detach(), final)
                losses[some] += loss.sum(-1) / n
                found = torch.autograd.grad(normed, (a, b), slope / n)
                weight[some] += found[0]
                bias[some] += found[1]
        return losses, weight, bias

    def _blocks(self, most: int) -> Iterable[slice]:
        """Depths that are read together: neighbours that are normed alike, so many at most."""
        start = 0
        while start < len(self._normed):
            stop = start + 1
            while stop < min(start + most, len(self._normed)) and self._normed[stop] == self._normed[start]:
                stop += 1
            yield slice(start, stop)
            start = stop

    def _translate(self, state: Tensor, weight: Tensor, bias: Tensor, some: slice) -> Tensor:
        """[T', N, d] → [T', N, d]."""
        moved = torch.baddbmm(bias[:, None], state / self.inner[some, None], weight.mT)
        return state + self.outer[some, None] * moved

    @torch.no_grad()
    def translators(self) -> tuple[Tensor, Tensor]:
        """A [T, d, d] and b [T, d] of x + A·x + b."""
        return self.outer[:, None] * self.weight / self.inner[:, None], self.outer * self.bias


@torch.no_grad()
def kl_slope(tail: Tail, normed: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """KL(final ‖ readout) and its gradient by the normed states, without a graph over the logits.

    Args:
        normed: float32 [..., N, d], as `Tail.tiles` takes them.
        final: float32 [N, V], log-probabilities.

    Returns:
        [..., N] in nats, and [..., N, d].
    """
    if not tail.plain:
        return _slope_by_graph(tail, normed, final)
    logits = tail(normed, normed=True)
    probs = final.exp()
    lognorm = logits.logsumexp(-1, keepdim=True)
    loss = torch.linalg.vecdot(probs, final) - torch.linalg.vecdot(probs.expand_as(logits), logits) + lognorm[..., 0]
    slope = (logits - lognorm).exp_().sub_(probs)
    if tail.softcap is not None:
        slope.mul_(1.0 - (logits / tail.softcap).square_())
    if tail.scale != 1.0:
        slope.mul_(tail.scale)
    weight: Any = tail.head.weight
    return loss, slope @ weight.float()


def _slope_by_graph(tail: Tail, normed: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """`kl_slope` of a head that is more than a matrix."""
    with torch.enable_grad():
        normed = normed.detach().requires_grad_()
        logits = tail(normed, normed=True).float().clamp(min=torch.finfo(torch.float32).min)
        loss = (final.exp() * (final - logits.log_softmax(-1))).sum(-1)
        (slope,) = torch.autograd.grad(loss.sum(), normed)
    return loss.detach(), slope


def _warm(
    model: DepthModel, trainer: Trainer, texts: Sequence[Row], recipe: Recipe, draw: torch.Generator
) -> int:
    """Begin at the least-squares translators of some texts; returns how many positions they were."""
    if not recipe.warm:
        return 0
    for start in range(0, len(texts), recipe.rows):
        if trainer.start.count >= recipe.warm * model.width:
            break
        some = texts[start : start + recipe.rows]
        trainer.start.add(captured(model, some, max(map(len, some)), draw))
    trainer.begin()
    return trainer.start.count


def _texts(model: DepthModel, rows: Iterable[Row], recipe: Recipe) -> list[tuple[int, ...]]:
    """As many texts as are needed, or all there are."""
    texts: list[tuple[int, ...]] = []
    tokens = 0
    for row in rows:
        if len(texts) >= recipe.steps * recipe.rows and tokens >= recipe.warm * model.width:
            break
        texts.append(tuple(map(int, row)))
        tokens += len(row)
    if not texts:
        raise UserError("there are no texts to train on", remedy="give at least one")
    for number, row in enumerate(texts):
        if not row:
            raise UserError(f"text {number} has no tokens", remedy="leave it out")
        if model.context_length is not None and len(row) > model.context_length:
            what = f"text {number} has {len(row)} tokens, the context of {model.name} {model.context_length}"
            raise UserError(what, remedy="cut it")
    return texts


def _order(texts: int, recipe: Recipe, draw: torch.Generator) -> list[int]:
    """Numbers of the texts of all steps: one permutation after the other."""
    needed, order = recipe.steps * recipe.rows, list[int]()
    while len(order) < needed:
        order += torch.randperm(texts, generator=draw).tolist()
    return order[:needed]
