"""How the embedded model's weights start: with a bias towards looking things up.

From a plain random start a looped model of this size learns within the budget which relation a question names, and
not whose: matching one of 96 names in two roles is slow to appear. Biases of the start bring it within minutes;
none of them says anything about loops, hops or answers, and training is free to undo each:

* queries and keys start equal, so that a token first attends to tokens that share its content;
* values pass through the output projection (in part) unchanged, so that what is attended to can be copied;
* the mixed-in embeddings of the previous tokens keep part of their own direction, and a word that names a relation in
  one spelling starts near the same relation in the others (" son", "'s son", " is the son of");
* where asked for, two heads of the first core layer start by attending one token back.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from depthprobe.models import LoopedForCausalLM
from depthprobe.models.core import Block
from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.names import NAMES

SHARE = 0.7  # of a direction that is kept, or shared between spellings
SHARPER = 1.3  # queries and keys, against the initializer range
BACK = 6.0  # strength of the look one token back


@torch.no_grad()
def start_associative(
    model: LoopedForCausalLM, tokenizer: PreTrainedTokenizerFast, copy: float, look_back: bool
) -> None:
    """Set the start described above, in place. The model is freshly initialised, with attention biases and a mix.

    Args:
        copy: strength of the copying start: the output projection is so much of the values', transposed.
        look_back: whether two heads start by attending one token back.
    """
    config = model.config
    d = config.hidden_size
    assert model.mix is not None and model.gate is not None
    model.mix.weight.normal_(std=SHARE * model.mix.in_features**-0.5)
    for previous in range(config.n_previous_tokens):
        model.mix.weight[:, previous * d : (previous + 1) * d].diagonal().add_(SHARE)
    model.gate.weight.zero_()

    vocabulary, table = tokenizer.get_vocab(), model.embed_tokens.weight
    spellings = {f" {relation}": (f"'s {relation}", f" is the {relation} of") for relation in RELATIONS}
    spellings |= {f" {name}": (f" {name}'s",) for name in NAMES}
    for word, others in spellings.items():
        for other in others:
            table[vocabulary[other]].mul_(SHARE).add_(SHARE * table[vocabulary[word]])

    q, kv = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
    for block in model.core:
        assert isinstance(block, Block)
        block.mlp_down.weight.zero_()
        block.qkv.weight[:q].mul_(SHARPER)
        block.qkv.weight[q : q + kv].copy_(block.qkv.weight[:q])
        block.out.weight.copy_(copy * block.qkv.weight[q + kv :].T)

    if not look_back:
        return
    # score of a biased head ∝ Σ_f cos(f · (distance − 1)), over the two fastest frequencies
    first_block, half = model.core[0], config.rotary_dim // 2
    assert isinstance(first_block, Block)
    bias = first_block.qkv.bias
    frequencies = config.rope_theta ** (-torch.arange(half) / half)
    for head in (0, 1):
        for i in range(2):
            first = head * config.head_size + i
            bias[first], bias[first + half] = BACK * frequencies[i].cos(), -BACK * frequencies[i].sin()
            bias[q + first] = BACK
