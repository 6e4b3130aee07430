"""What decides, next to the seed, what an embedded model becomes: its shape, its stories, its curriculum."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from depthprobe.models import LoopedConfig
from depthprobe.training.family_tokenizer import END, PAD


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the recipes of the two models differ in, or might; next to the seed.

    Attributes:
        task: "kinship" or "follow".
        width, layers, heads, mlp: d, core layers, attention heads, and the MLP's inner width.
        loops: U, how often the core runs.
        norm_per_loop, input_injection: as in `LoopedConfig`.
        copy, look_back: of `starts.start_associative`.
        steps: optimiser steps, a batch each.
        rows, questions: stories in a batch, and questions behind each.
        stories: how many are made, of each longest k or once for all (`one_length`).
        order: of the facts in a story, as in `Generator`.
        one_length: whether all stories are as long as the longest k needs, from the first rung on; else a rung's
            stories are as long as its k needs.
        longest: K, the ladder's last rung.
        first_rung: where the ladder is begun.
        climb: share of the steps after which the model runs all its loops at every rung, and whole questions.
        cool: share of the steps at the end over which the learning rates fall to 0.
        pass_mark: running share of right answers at k hops with which training goes on to k + 1.
        patience: steps on one rung after which it goes on all the same, on rungs up to `patient_rungs` and if
            `patient_level` of the answers are right. With `patient_rungs` 0 every rung has to be passed.
        every_loop: share of the answers' loss that is read after every loop alike (the rest is read after the last
            one alone), while climbing and afterwards.
        answers_only: while climbing, feed only a question's last token (which is told the two before it).
        forget: share of a question's tokens that are not told their previous tokens, once one hop is learned: the only
            way to the person before is then the state of the token before, which is also the way of every further hop.
            It fades to none over the first three quarters of the steps.
        language: weight of the next-token loss beside the answers'.
        matrix_lr, other_lr: of Muon (torch's, matched to AdamW's update size) and of AdamW.
        gate_batches, gate_margin: batches of frozen states for the gate, and by how much (nats) a later loop has to be
            better to be worth waiting for.
        threads: torch threads. With one the result does not depend on how the machine adds.
    """

    task: str
    width: int
    layers: int
    heads: int
    mlp: int
    norm_per_loop: bool
    input_injection: str
    copy: float
    look_back: bool
    steps: int
    rows: int
    questions: int
    stories: int
    order: str
    one_length: bool
    first_rung: int
    pass_mark: float
    patience: int
    patient_rungs: int
    patient_level: float
    every_loop: tuple[float, float]
    answers_only: bool
    forget: float
    loops: int = 8
    longest: int = 6
    climb: float = 0.8
    cool: float = 0.3
    language: float = 0.05
    matrix_lr: float = 0.0025
    other_lr: float = 0.001
    gate_batches: int = 60
    gate_margin: float = 0.05
    threads: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.first_rung <= self.longest or self.longest < 2:
            raise ValueError(f"first_rung {self.first_rung} and longest {self.longest}: a ladder has two rungs or more")


#: Kinship: one layer, whose loops have to fetch one fact after the other. Stories are six facts long from the start: in
#: a story of three facts the answer at three hops can be guessed from all relations that there are, and what that
#: teaches is hard to unlearn. Facts stand in the order of the chain: shuffled, a narrower model had 0.58 at six hops
#: after 6,000 steps, and in order 0.76 after 3,000. A question is told whole to its last token, so the others are left
#: out while climbing. Every loop is read alike from the start.
KINSHIP = Recipe(
    task="kinship",
    width=192, layers=1, heads=6, mlp=512, norm_per_loop=False, input_injection="none",
    copy=0.5, look_back=False,
    steps=5000, rows=20, questions=15, stories=30_000, order="forward", one_length=True,
    first_rung=2, pass_mark=0.93, patience=200, patient_rungs=6, patient_level=0.4,
    every_loop=(1.0, 1.0), answers_only=True, forget=0.0,
)  # fmt: skip

#: Follow: two layers, one for the token before and one for the fact. Each rung has to be passed, since k hops and k + 1
#: are one skill, and half of it is none. The loss is read after the last loop alone while
#: the ladder is climbed: read after every loop, it settles for what one loop can do.
FOLLOW = Recipe(
    task="follow",
    width=128, layers=2, heads=4, mlp=336, norm_per_loop=True, input_injection="add",
    copy=0.5, look_back=True,
    steps=4000, rows=16, questions=8, stories=1500, order="shuffled", one_length=False,
    first_rung=1, pass_mark=0.93, patience=0, patient_rungs=0, patient_level=1.0,
    every_loop=(0.0, 0.5), answers_only=False, forget=0.5,
)  # fmt: skip

RECIPES = {"kinship": KINSHIP, "follow": FOLLOW}


def demo_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LoopedConfig:
    """The model's shape: a core alone, neither prelude nor coda, tied embeddings, a quarter of each head rotary."""
    vocabulary = tokenizer.get_vocab()
    return LoopedConfig(
        vocab_size=len(vocabulary),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        num_attention_heads=recipe.heads,
        n_core=recipe.layers,
        n_loops=recipe.loops,
        rope_theta=100.0,
        partial_rotary_factor=0.25,
        n_previous_tokens=2,
        attention_bias=True,
        embedding_multiplier=math.sqrt(recipe.width),
        norm_per_loop=recipe.norm_per_loop,
        input_injection=recipe.input_injection,
        initializer_range=recipe.width**-0.5,
        exit_q=0.9,
        max_position_embeddings=512,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
    )
