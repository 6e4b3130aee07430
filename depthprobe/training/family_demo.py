"""The recipes of the embedded models: small looped language models over family stories, from scratch.

    depthprobe train kinship-demo --seed 0 --out DIR
    depthprobe train follow-demo --seed 0 --out DIR

One model for each task: together, in the time that there is, kinship stays far behind. A curriculum over the hop
ladder: training moves from k to k + 1 when the questions of k hops are answered. The loss is that of the answers, read
after the last loop while the ladder is climbed, and from then on half of it after every loop alike, so that every loop
is readable; plus a little of the language model's. Nothing ties a loop to a hop. At the end the gate alone is trained,
on the frozen model's own losses (`depthprobe.halting.objectives`).
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from depthprobe.errors import UserError
from depthprobe.halting.objectives import future_gain_labels, gate_loss
from depthprobe.models import LoopedConfig, LoopedForCausalLM
from depthprobe.models.core import Rotary
from depthprobe.models.loops import dense_loops
from depthprobe.training.family_tokenizer import END, PAD, family_tokenizer
from depthprobe.training.packed import PackedAttend
from depthprobe.training.packing import NONE, Batch, Pool, ladder_pool
from depthprobe.training.starts import start_associative


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what comes out, next to the seed.

    Attributes:
        steps: optimiser steps, a batch each.
        rows, questions: stories in a batch, and questions behind each.
        stories: in the pool of each longest k.
        longest: K, the ladder's last rung.
        climb: share of the steps after which the loss is also read after every loop, at the full number of loops.
        cool: share of the steps at the end over which the learning rates fall to 0.
        pass_mark: running share of right answers at k hops with which a task goes on to k + 1.
        patience: steps on one rung after which kinship goes on if two of five answers are right.
        first_patience: the same for follow's first rung (three of five); its others have to be passed, since k hops and
            k + 1 are one skill, and half of it is none.
        forget: share of a follow question's tokens that are not told their previous tokens, once one hop is learned:
            the only way to the person before is then the state of the token before, which is also the way of every
            further hop.
        language: weight of the next-token loss beside the answers'.
        matrix_lr, other_lr: of Muon (torch's, matched to AdamW's update size) and of AdamW.
        gate_batches, gate_margin: batches of frozen states for the gate, and by how much (nats) a later loop has to be
            better to be worth waiting for.
        threads: torch threads. With one the result does not depend on how the machine adds.
    """

    steps: int = 2400
    rows: int = 16
    questions: int = 8
    stories: int = 1500
    longest: int = 6
    climb: float = 0.8
    cool: float = 0.3
    pass_mark: float = 0.88
    patience: int = 250
    first_patience: int = 600
    forget: float = 0.5
    language: float = 0.05
    matrix_lr: float = 0.0025
    other_lr: float = 0.001
    gate_batches: int = 60
    gate_margin: float = 0.05
    threads: int = 1


RECIPES = {"kinship": Recipe(steps=3200, rows=20, questions=10), "follow": Recipe(steps=2400, rows=16, questions=8)}


def demo_config(tokenizer: PreTrainedTokenizerFast) -> LoopedConfig:
    """The shape: d = 128, two core layers, eight loops, neither prelude nor coda; 0.46 M parameters."""
    d = 128
    vocabulary = tokenizer.get_vocab()
    return LoopedConfig(
        vocab_size=len(vocabulary),
        hidden_size=d,
        intermediate_size=336,
        num_attention_heads=4,
        n_core=2,
        n_loops=8,
        rope_theta=100.0,
        partial_rotary_factor=0.25,
        n_previous_tokens=2,
        attention_bias=True,
        embedding_multiplier=math.sqrt(d),
        norm_per_loop=True,
        input_injection="add",
        initializer_range=d**-0.5,
        exit_q=0.9,
        max_position_embeddings=512,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
    )


class Pools:
    """The pools of every longest k of a task, made one after the other in a process of their own.

    That process is deaf to Ctrl-C, which is the trainer's to act on; it ends with `close`, or when the trainer is gone.
    """

    def __init__(self, task: str, recipe: Recipe, seed: int) -> None:
        self._maker = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent)
        self._made: dict[int, Future[Pool]] = {}
        self._processes: list[BaseProcess] = []
        others = active_children()
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process inherits it
            try:
                for longest in range(1, recipe.longest + 1):
                    self._made[longest] = self._maker.submit(make_pool, task, longest, recipe, seed)
                self._processes = [child for child in active_children() if child not in others]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, longest: int) -> Pool:
        """The pool of a longest k, waited for where it is not made yet.

        Raises:
            UserError: the process that makes pools has ended before its time.
        """
        try:
            return self._made[longest].result()
        except BrokenProcessPool as error:
            raise UserError(
                "the process that makes the stories has ended",
                remedy="see that there is memory for it; a script calls `train` under `if __name__ == '__main__':`",
            ) from error

    def close(self) -> None:
        """End the process at once, whatever it still has to make."""
        for process in self._processes:
            process.terminate()
        self._maker.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """In the pools' process: leave when the trainer is gone, which may have had no time to say so."""
    trainer = parent_process()
    assert trainer is not None

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_pool(task: str, longest: int, recipe: Recipe, seed: int) -> Pool:
    """The training pool of one task and one longest k. Seeds of the generator are apart from analysis' default."""
    return ladder_pool(task, longest, family_tokenizer(), recipe.stories, recipe.questions, seed, "train")


class Ladder:
    """Where a task stands on the hop ladder, from running shares of right answers."""

    def __init__(self, task: str, recipe: Recipe) -> None:
        self.task, self.recipe = task, recipe
        self.rung, self.since = 1, 0
        self.right = dict.fromkeys(range(1, recipe.longest + 1), 0.0)
        self.forgetting = False

    def note(self, right: Tensor, hops: Tensor) -> None:
        """Take in the answers of a step: bool `[n]` and int64 `[n]`, 0 where an answer does not count."""
        for k in hops[hops > 0].unique().tolist():
            share = right[hops == k].float().mean().item()
            self.right[k] += 0.05 * (share - self.right[k])
        self.forgetting |= self.task == "follow" and self.right[1] > 0.93
        self.since += 1
        level = self.right[self.rung]
        if self.task == "kinship":
            waited = level > 0.4 and self.since > self.recipe.patience
        else:
            waited = level > 0.6 and self.since > self.recipe.first_patience and self.rung == 1
        if self.rung < self.recipe.longest and (level > self.recipe.pass_mark or waited):
            self.rung, self.since = self.rung + 1, 0

    def draw(self, rng: np.random.Generator) -> int:
        """The longest k of the next batch: the present rung in seven cases of ten, else one up to it."""
        return self.rung if rng.random() < 0.7 else int(rng.integers(1, self.rung + 1))

    def __str__(self) -> str:
        return " ".join(f"{share:.2f}" for share in self.right.values())


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
    task: str, seed: int, recipe: Recipe | None = None, say: Callable[[str], None] = print
) -> tuple[LoopedForCausalLM, PreTrainedTokenizerFast]:
    """Train the model of one task from scratch, in well under an hour on two CPU cores (one makes stories, then idles).

    The same seed, recipe, versions and kind of processor give the same weights.
    """
    recipe = recipe or RECIPES[task]
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = family_tokenizer()
    model = LoopedForCausalLM(demo_config(tokenizer))
    start_associative(model, tokenizer)
    pools = Pools(task, recipe, seed)
    try:
        _climb(model, Ladder(task, recipe), pools, recipe, rng, say)
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
    n_loops, began = model.config.n_loops, time.monotonic()
    for step in range(recipe.steps):
        done = step / recipe.steps
        warmth = min(1.0, (step + 1) / 30, (1.0 - done) / recipe.cool)
        for optimiser, rate in optimisers:
            optimiser.param_groups[0]["lr"] = rate * warmth
        climbing = done < recipe.climb
        k = ladder.draw(rng)
        batch = pools[k].draw(rng, recipe.rows)
        loops = min(n_loops, k + 2) if climbing else n_loops
        forget = recipe.forget * max(0.0, 1.0 - 1.3 * done) if ladder.forgetting else 0.0
        with torch.autocast("cpu", torch.bfloat16):
            loss, right, hops = _loss(model, batch, loops, forget, climbing, recipe.language)
        loss.backward()
        ladder.note(right, hops)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, _ in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if step % 100 == 99 or step == recipe.steps - 1:
            say(f"step {step + 1}/{recipe.steps}  {time.monotonic() - began:.0f} s  right at k = 1, 2, …: {ladder}")


def _loss(
    model: LoopedForCausalLM, batch: Batch, loops: int, forget: float, climbing: bool, language: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and for the ladder which answers were right (bool `[n]`) and their hops (int64 `[n]`)."""
    states = loop_states(model, batch, loops, forget)
    asked = batch.answers != NONE
    answers, hops = batch.answers[asked], batch.hops[asked]
    logits = model.lm_head(states[-1][asked]).float()
    loss = F.cross_entropy(logits, answers)
    if not climbing:
        every = [F.cross_entropy(model.lm_head(state[asked]).float(), answers) for state in states[:-1]]
        loss = 0.5 * loss + 0.5 * torch.stack([*every, loss]).mean()
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
            batch = pools[int(rng.integers(2, recipe.longest + 1))].draw(rng, recipe.rows)
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
