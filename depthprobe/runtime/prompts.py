"""Requests made of whatever callers have: token ids of any kind, text, or a request."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from depthprobe.errors import UserError
from depthprobe.runtime.live import Decodes
from depthprobe.runtime.requests import Request, Sampling


def as_request(prompt: Sequence[int] | str | Request, sampling: Sampling | None, tokenizer: Decodes | None) -> Request:
    """A request, as yet unchecked against any engine.

    Raises:
        UserError: a request with a further sampling, text without a tokenizer, neither text nor token ids.
    """
    if isinstance(prompt, Request):
        if sampling is not None:
            raise UserError("a whole request has its own sampling", where="sampling", remedy="leave it out")
        return prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("the prompt is text and there is no tokenizer", where="prompt",
                            remedy="give token ids, or Engine(…, tokenizer=…)")  # fmt: skip
        ids: Sequence[int] = tokenizer(prompt)["input_ids"]  # type: ignore[operator]
    else:
        ids = prompt
    try:
        # numpy's and torch's integers are taken for what they are; a bool is no token
        whole = tuple(token if isinstance(token, bool) else operator.index(token) for token in ids)
    except TypeError:
        what = f"the prompt is a {type(prompt).__name__}, not text or a list of token ids"
        raise UserError(what, where="prompt") from None
    return Request(whole, sampling or Sampling())
