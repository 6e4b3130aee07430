"""Random looped models of every shape, and batches of sequences padded on either side."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from depthprobe.models import LoopedConfig, LoopedForCausalLM

VOCABULARY = 17


def configs(**fixed: object) -> st.SearchStrategy[LoopedConfig]:
    """Small configurations with at least two core layers, over every option of the architecture."""
    shape = {
        "num_attention_heads": st.sampled_from([2, 4]),
        "num_key_value_heads": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([4, 8]),
        "n_prelude": st.integers(0, 2),
        "n_core": st.integers(2, 3),
        "n_coda": st.integers(0, 2),
        "n_loops": st.integers(1, 4),
        "partial_rotary_factor": st.sampled_from([0.0, 0.5, 1.0]),
        "n_previous_tokens": st.integers(0, 2),
        "norm": st.sampled_from(["pre", "sandwich"]),
        "norm_per_loop": st.booleans(),
        "input_injection": st.sampled_from(["none", "add", "concat"]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "embedding_multiplier": st.sampled_from([1.0, 3.0]),
    }
    shape |= {name: st.just(value) for name, value in fixed.items()}
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "initializer_range": 0.25}
    return st.fixed_dictionaries(shape).map(lambda chosen: LoopedConfig(**small, **chosen))


def random_model(config: LoopedConfig, seed: int, dtype: torch.dtype = torch.float64) -> LoopedForCausalLM:
    """A model with random norms and a gate biased towards staying, so that exits are spread.

    In float64 by default: an error of meaning is told from rounding, however ill-conditioned the model.
    """
    torch.manual_seed(seed)
    model = LoopedForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("qkv.bias"):
                p.normal_()
        if model.gate is not None:
            model.gate.bias.fill_(-0.5)
    return model.to(dtype)


def random_rows(seed: int, rows: int, longest: int = 7) -> list[list[int]]:
    """Token ids of sequences of 1 to `longest` tokens, the first of full length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, *torch.randint(1, longest + 1, (rows - 1,), generator=generator).tolist()]
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def pad(rows: list[list[int]], side: str, fill: int = 3) -> tuple[Tensor, Tensor]:
    """ids and mask, int64 `[B, S]`; the pad id is an ordinary word, so that a leak of padding shows."""
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        gap = longest - len(row)
        before, after = (gap, 0) if side == "left" else (0, gap)
        ids.append([fill] * before + row + [fill] * after)
        mask.append([0] * before + [1] * len(row) + [0] * after)
    return torch.tensor(ids), torch.tensor(mask)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to `tolerance` relative to the largest expected number."""
    scale = expected.abs().max().clamp_min(1e-12)
    error = (actual.double() - expected.double()).abs().max() / scale
    assert error <= tolerance, f"relative error {float(error):.2e}"
