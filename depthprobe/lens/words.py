"""Token ids as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl


class Words:
    """Token id → text, remembered; ids that the tokenizer does not have read as <id>, as do all without one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = 0 if tokenizer is None else len(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            text = self._tokenizer.decode([token]) if token < self._size else ""
            self._known[token] = text or f"<{token}>"
        return self._known[token]

    def column(self, ids: np.ndarray[Any, Any]) -> pl.Series:
        """Texts of ids, flattened; each distinct id is decoded once."""
        distinct, places = np.unique(ids, return_inverse=True)
        texts = pl.Series([self(int(token)) for token in distinct], dtype=pl.String)
        return texts.gather(places.ravel())
