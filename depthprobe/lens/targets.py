"""From an item to token ids: the prompt, the answer, and what it takes to tell the candidate answers apart.

The answer's tokens are found in context: prompt and prompt + answer are tokenised and compared. A tokenizer
that merges the end of the prompt with the beginning of the answer has no token at which the answer begins,
and is refused.

Candidates are told apart by their first token where that is enough. Where two of them share it ("father" and
"father-in-law" under most byte-pair tokenizers), the words form a tree, and a word's score multiplies the
probabilities of the right turn at each branching:

    father         p(" father") · (1 − p("-" | " father"))
    father-in-law  p(" father") · p("-" | " father")

so that the scores of all candidates are disjoint events and add up to at most 1. A branching is read by one
more state, at the last token of the common part (`Target.nodes`).

BOS: by default ("tokenizer") whatever the tokenizer puts before a text is kept (and stored: `bos`,
`prompt_ids`), what it puts behind is dropped, and a prompt that spells out its BOS does not get a second one.
"always" puts one in front where there is none, "never" takes away what is there.

A chat template, on request, makes the prompt the user's turn and lets the answer begin the assistant's, without
a space before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from depthprobe.errors import UserError
from depthprobe.tasks.items import Item

Path = tuple[int, ...]
BOS = ("tokenizer", "always", "never")
_CHUNK = 64  # items tokenised together


@dataclass(frozen=True, slots=True)
class Node:
    """A place where words part: after `suffix`, one of `tokens` comes next.

    `stops`: a word ends here while others go on; its share is what the tokens leave over.
    """

    suffix: Path
    tokens: tuple[int, ...]
    stops: bool


@dataclass(frozen=True, slots=True)
class Target:
    """One item as token ids.

    Attributes:
        item: the item.
        prompt_ids: of `item.text`, with BOS if the tokenizer adds one.
        bos: whether the prompt begins with a BOS token.
        text_start: the first token of `item.text` in it, behind BOS and what a chat template writes.
        words: candidates, then plausible answers that are none of them.
        paths: token ids of each word after this prompt.
        n_candidates: the first so many words are the candidates.
        answer: index of the answer in `words`.
        plausible: indices of the plausible answers in `words`.
        nodes: the root (suffix ()) and every later place where words part.
        turns: for each word, its turns as (index of node, index of token in the node; −1 for the stop).
    """

    item: Item
    prompt_ids: Path
    bos: bool
    text_start: int
    words: tuple[str, ...]
    paths: tuple[Path, ...]
    n_candidates: int
    answer: int
    plausible: tuple[int, ...]
    nodes: tuple[Node, ...]
    turns: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def answer_ids(self) -> Path:
        return self.paths[self.answer]

    @property
    def n_collisions(self) -> int:
        """Candidates whose first token another candidate shares."""
        firsts = [path[0] for path in self.paths[: self.n_candidates]]
        return sum(firsts.count(first) > 1 for first in firsts)

    @property
    def first_token_only(self) -> bool:
        """Whether first tokens alone tell all words apart."""
        return len(self.nodes) == 1

    @property
    def n_positions(self) -> int:
        """Most tokens that the model is given for this item: the prompt and the beginnings that are read."""
        longest = max([len(node.suffix) for node in self.nodes] + [len(self.answer_ids) - 1])
        return len(self.prompt_ids) + longest


def resolve(
    tokenizer: Any, items: Sequence[Item], *, bos: str = "tokenizer", chat: bool = False
) -> Iterator[Target]:
    """Targets of items, in order.

    Args:
        bos: what stands in front of a prompt, of `BOS`.
        chat: whether prompts go through the tokenizer's chat template.

    Raises:
        UserError: no tokenizer; a prompt or an answer that it cannot express; tokens that merge across the
            boundary; two candidates with the same tokens; a BOS or a chat template that it does not have.
    """
    if tokenizer is None:
        raise UserError("the model has no tokenizer", remedy="put one beside the weights")
    check_bos(tokenizer, bos)
    if chat:
        check_chat(tokenizer)
    rest = iter(items)
    while chunk := list(islice(rest, _CHUNK)):
        words = [_words(item) for item in chunk]
        texts = [
            chat_prompt(tokenizer, item.text, f"item {item.id}") if chat else item.text for item in chunk
        ]
        prompts = encode(tokenizer, texts)
        # a template writes its special tokens itself
        framed = prompts if chat else encode(tokenizer, texts, special=True)
        whole = iter(
            encode(
                tokenizer,
                [
                    text + (word if chat else item.continuation(word))
                    for text, item, kinds in zip(texts, chunk, words, strict=True)
                    for word in kinds
                ],
            )
        )
        for item, text, kinds, plain, full in zip(chunk, texts, words, prompts, framed, strict=True):
            before = _tokens_before(tokenizer, text, item.text) if chat else 0
            yield _target(tokenizer, item, kinds, plain, full, list(islice(whole, len(kinds))), bos, before)


def check_bos(tokenizer: Any, bos: str) -> None:
    """Raise UserError unless `bos` is one of `BOS` and the tokenizer can do it."""
    if bos not in BOS:
        raise UserError(f"there is no '{bos}'", where="bos", remedy=f"one of {', '.join(BOS)}")
    if bos == "always" and tokenizer.bos_token_id is None:
        raise UserError("the tokenizer has no BOS token", where="bos", remedy="ask for 'tokenizer' or 'never'")


def with_bos(tokenizer: Any, ids: Path, bos: str) -> Path:
    """A prompt's ids with the BOS tokens that are asked for in front."""
    own = tokenizer.bos_token_id
    if own is None or bos == "tokenizer":
        return ids
    first = next((place for place, token in enumerate(ids) if token != own), len(ids))
    return (own, *ids[first:]) if bos == "always" else ids[first:]


def check_chat(tokenizer: Any) -> None:
    """Raise UserError unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        remedy = "ask without it, or take a chat model"
        raise UserError("the tokenizer has no chat template", where="chat", remedy=remedy)


def chat_prompt(tokenizer: Any, text: str, where: str) -> str:
    """A text as the user's turn, up to where the assistant's begins; `where` is for an error."""
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # whatever a template's own code raises
        what = f"the tokenizer's chat template fails: {' '.join(str(error).split())}"
        raise UserError(what, where=where, remedy="ask without it") from error


def branchings(paths: Sequence[Path]) -> tuple[tuple[Node, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """Where the words with these (distinct, non-empty) paths part, and the turns of each. See `Target`."""
    nexts: dict[Path, list[int]] = {}
    for path in paths:
        for depth, token in enumerate(path):
            tokens = nexts.setdefault(path[:depth], [])
            if token not in tokens:
                tokens.append(token)
    ends = set(paths)
    nodes = [
        Node(suffix, tuple(tokens), suffix in ends)
        for suffix, tokens in nexts.items()
        if not suffix or len(tokens) > 1 or suffix in ends
    ]
    index = {node.suffix: number for number, node in enumerate(nodes)}
    turns = []
    for path in paths:
        steps = [
            (index[path[:depth]], nodes[index[path[:depth]]].tokens.index(token))
            for depth, token in enumerate(path)
            if path[:depth] in index
        ]
        turns.append((*steps, (index[path], -1)) if path in index else tuple(steps))
    return tuple(nodes), tuple(turns)


def _words(item: Item) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*item.candidates, *item.plausible, item.answer)))


def _target(
    tokenizer: Any,
    item: Item,
    words: tuple[str, ...],
    plain: list[int],
    full: list[int],
    whole: list[list[int]],
    bos: str,
    before: int,
) -> Target:
    """before: tokens of `plain` that a chat template puts before the text of the item."""
    where = f"item {item.id}"
    # a tokenizer that can write every text has an unknown token all the same, which is another one's name then
    unknown = None if tokenizer.unk_token_id in (tokenizer.eos_token_id, None) else tokenizer.unk_token_id
    if not plain or unknown in plain:
        unknown_word = _unknown_word(tokenizer, item.text) if plain else ""
        what = f"the tokenizer cannot express the question{unknown_word}" if plain else "the question has no tokens"
        raise UserError(
            what, where=where, remedy="give data in words that this model knows, or another model"
        )
    paths: list[Path] = []
    for word, ids in zip(words, whole, strict=True):
        path = tuple(ids[len(plain) :])
        if ids[: len(plain)] != plain:
            raise UserError(
                f"the tokenizer merges the end of the question with the answer '{word}'",
                where=where,
                remedy="give another question form, or a model whose tokenizer begins words with their space",
            )
        if not path or unknown in path:
            remedy = "give data whose answers this model knows, or another model"
            raise UserError(f"the tokenizer cannot express the answer '{word}'", where=where, remedy=remedy)
        paths.append(path)
    twins: dict[Path, str] = {}
    for word, path in zip(words, paths, strict=True):
        if path in twins:
            what = f"the tokenizer gives the answers '{twins[path]}' and '{word}' the same tokens"
            raise UserError(what, where=where, remedy="give other candidates, or another model")
        twins[path] = word
    prompt = with_bos(tokenizer, frame(tokenizer, plain, full), bos)
    if not prompt:
        raise UserError("the question has no tokens", where=where, remedy="give it a text")
    nodes, turns = branchings(paths)
    return Target(
        item=item,
        prompt_ids=prompt,
        bos=tokenizer.bos_token_id is not None and prompt[0] == tokenizer.bos_token_id,
        text_start=len(prompt) - len(plain) + before,
        words=words,
        paths=tuple(paths),
        n_candidates=len(dict.fromkeys(item.candidates)),
        answer=words.index(item.answer),
        plausible=tuple(words.index(word) for word in dict.fromkeys(item.plausible)),
        nodes=nodes,
        turns=turns,
    )


def _tokens_before(tokenizer: Any, whole: str, text: str) -> int:
    """How many tokens of `whole` end before `text` begins in it."""
    at = max(whole.find(text), 0)
    if not getattr(tokenizer, "is_fast", False):
        return len(encode(tokenizer, [whole[:at]])[0]) if at else 0
    ends = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return next((number for number, (_, end) in enumerate(ends) if end > at), 0)


def _unknown_word(tokenizer: Any, text: str) -> str:
    """Which piece of a text comes out as the unknown token, for a message; "" where the tokenizer has no offsets."""
    if not getattr(tokenizer, "is_fast", False):
        return ""
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(out["input_ids"], out["offset_mapping"], strict=True)
    missing = [text[start:end].strip() for token, (start, end) in pairs if token == tokenizer.unk_token_id]
    return f": it has no '{missing[0]}'" if missing else ""


def frame(tokenizer: Any, plain: list[int], full: list[int]) -> Path:
    """The prompt with what the tokenizer puts in front (and without what it puts behind)."""
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            front = full[:start]
            if front and plain[0] == front[-1] == tokenizer.bos_token_id:
                front = front[:-1]
            return (*front, *plain)
    return tuple(plain)  # special tokens change the text's own tokens: leave them out


def encode(tokenizer: Any, texts: list[str], *, special: bool = False) -> list[list[int]]:
    out = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return out["input_ids"]
