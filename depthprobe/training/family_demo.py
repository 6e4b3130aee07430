"""Training an embedded model: a small looped language model over family stories, from scratch.

    depthprobe train kinship-demo --seed 0 --out DIR
    depthprobe train follow-demo --seed 0 --out DIR

One model for each task: together, in the time that there is, kinship stays far behind. A curriculum over the hop
ladder (`Ladder`); the loss is that of the answers, plus a little of the language model's. Nothing ties a loop to a hop.
At the end the gate alone is trained, on the frozen model's own losses (`depthprobe.halting.objectives`). What differs
between the two models stands in `recipes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from depthprobe.halting.objectives import future_gain_labels, gate_loss
from depthprobe.models import LoopedForCausalLM
from depthprobe.models.core import Rotary
from depthprobe.models.loops import dense_loops
from depthprobe.training.family_tokenizer import family_tokenizer
from depthprobe.training.ladder import Ladder
from depthprobe.training.packed import PackedAttend
from depthprobe.training.packing import NONE, Batch
from depthprobe.training.pools import Pools
from depthprobe.training.recipes import Recipe, demo_config
from depthprobe.training.starts import start_associative


def loop_states(model: LoopedForCausalLM, batch: Batch, n_loops: int, forget: float = 0.0) -> list[Tensor]:
    """Loop states of a packed batch, `n_loops` tensors `[B, S, d]`, normed; `forget` as in `Recipe`."""
    previous, told = batch.previous, batch.story_length
    if forget:
        lost = torch.rand(previous.shape[:2]) < forget
        lost[:, :told] = False
        previous = previous.masked_fill(lost.unsqueeze(-1), -1)
    attend = PackedAttend(told, batch.n_questions, (batch.ids.shape[1] - told) // batch.n_questions)
    entry = model.embed(batch.ids, previous)
    run = dense_loops(model, entry, Rotary.of(batch.positions, model.config), attend, n_loops, True, False)
    return [model.normed(state) for state in run.states]


def train(
    recipe: Recipe, seed: int, say: Callable[[str], None] = print
) -> tuple[LoopedForCausalLM, PreTrainedTokenizerFast]:
    """Train a model from scratch, in under half an hour of one core; another makes stories at first.

    The same seed, recipe, versions and kind of processor give the same weights.
    """
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = family_tokenizer()
    model = LoopedForCausalLM(demo_config(recipe, tokenizer))
    start_associative(model, tokenizer, recipe.copy, recipe.look_back)
    pools = Pools(recipe, seed)
    try:
        _climb(model, Ladder(recipe), pools, recipe, rng, say)
        _train_gate(model, pools, recipe, rng, say)
    finally:
        pools.close()
    return model.eval(), tokenizer


def _climb(
    model: LoopedForCausalLM,
    ladder: Ladder,
    pools: Pools,
    recipe: Recipe,
    rng: np.random.Generator,
    say: Callable[[str], None],
) -> None:
    optimisers = _optimisers(model, recipe)
    if not pools.ready(ladder.rung):
        say(f"making {recipe.stories:,} stories")
    n_loops, began = model.config.n_loops, time.monotonic()
    for step in range(recipe.steps):
        done = step / recipe.steps
        warmth = min(1.0, (step + 1) / 30, (1.0 - done) / recipe.cool)
        for optimiser, rate in optimisers:
            optimiser.param_groups[0]["lr"] = rate * warmth
        climbing = done < recipe.climb
        k = ladder.draw(rng)
        batch = pools[k].draw(rng, recipe.rows, k)
        if recipe.answers_only and climbing:
            batch = batch.answers_only()
        loops = min(n_loops, k + 2) if climbing else n_loops
        forget = recipe.forget * max(0.0, 1.0 - 1.3 * done) if ladder.one_hop else 0.0
        every = recipe.every_loop[0 if climbing else 1]
        with torch.autocast("cpu", torch.bfloat16):
            loss, right, hops = _loss(model, batch, loops, forget, every, recipe.language)
        loss.backward()
        ladder.note(right, hops)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, _ in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if step % 100 == 99 or step == recipe.steps - 1:
            say(f"step {step + 1}/{recipe.steps}  {time.monotonic() - began:.0f} s  right at k = 1, 2, …: {ladder}")


def _loss(
    model: LoopedForCausalLM, batch: Batch, loops: int, forget: float, every: float, language: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and for the ladder which answers were right (bool `[n]`) and their hops (int64 `[n]`)."""
    states = loop_states(model, batch, loops, forget)
    asked = batch.answers != NONE
    answers, hops = batch.answers[asked], batch.hops[asked]
    logits = model.lm_head(states[-1][asked]).float()
    loss = F.cross_entropy(logits, answers)
    if every:
        each = [F.cross_entropy(model.lm_head(state[asked]).float(), answers) for state in states[:-1]]
        loss = (1.0 - every) * loss + every * torch.stack([*each, loss]).mean()
    known = batch.nexts != NONE
    loss = loss + language * F.cross_entropy(model.lm_head(states[-1][known]).float(), batch.nexts[known])
    if batch.prefixes:  # the last token of a question only copies what the relation before it found
        hops = hops * (batch.nexts[asked] != NONE)
    return loss, logits.argmax(-1) == answers, hops


def _optimisers(model: LoopedForCausalLM, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith(("core.", "mix."))]
    held = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in held]
    muon = torch.optim.Muon(
        matrices, lr=recipe.matrix_lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, recipe.matrix_lr), (adamw, recipe.other_lr)]


def _train_gate(
    model: LoopedForCausalLM, pools: Pools, recipe: Recipe, rng: np.random.Generator, say: Callable[[str], None]
) -> None:
    """Fit the gate alone to the frozen model's losses, at the answers and at every other token."""
    assert model.gate is not None
    seen: list[Tensor] = []  # [n, U, d]
    labels: list[Tensor] = []  # [n, U], whether a later loop is worth it
    weights: list[Tensor] = []
    with torch.no_grad():
        for _ in range(recipe.gate_batches):
            k = int(rng.integers(2, recipe.longest + 1))
            batch = pools[k].draw(rng, recipe.rows, k)
            states = torch.stack(loop_states(model, batch, model.config.n_loops), dim=2)  # [B, S, U, d]
            for targets, weight in ((batch.answers, 1.0), (batch.nexts, 0.1)):
                known = targets != NONE
                logits = model.lm_head(states[known])  # [n, U, V]
                losses = F.cross_entropy(
                    logits.transpose(1, 2), targets[known, None].expand(-1, logits.shape[1]), reduction="none"
                )
                seen.append(states[known])
                labels.append(future_gain_labels(losses, recipe.gate_margin))
                weights.append(torch.full((len(losses),), weight))
    x, y, w = torch.cat(seen), torch.cat(labels), torch.cat(weights)
    gate = model.gate
    optimiser = torch.optim.LBFGS(gate.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = gate_loss(gate(x).squeeze(-1), y, w)
        loss.backward()
        return loss

    optimiser.step(closure)  # pyright: ignore[reportArgumentType]
    say(f"gate: {len(x)} tokens, loss {closure().item():.4f}")
