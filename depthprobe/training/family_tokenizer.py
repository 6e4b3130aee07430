"""The word tokenizer of the embedded models: one token a name, a relation word, or a whole " is the son of".

Words carry the space before them, as in other language models' tokenizers, so an answer is " son" or " Ann". That a
fact's link is one token is what lets two previous-token embeddings gather a whole fact at its last name.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from depthprobe.tasks.kinship import RELATIONS
from depthprobe.tasks.names import NAMES

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
#: every other word and mark that stories and questions of any template and form are made of
_MARKS = (".", "?", ":", ",", "'s")
_WORDS = (
    "is", "a", "an", "the", "of", "has", "named", "man", "woman", "who", "Who", "It", "The", "How", "related", "to",
    "Question", "Answer", "and",
)  # fmt: skip

#: what is one token, the first that fits. None depends on how a text goes on after " is" or "'s" by just one more word,
#: so the tokens of a question are also the first ones of the question with its answer.
_PIECES = (
    r"'s [a-z-]+(?='s| is|\?)",  # "Ann's son's wife is": the relation with its 's, the person without
    r" [A-Z][a-z]+'s(?! [a-z-]+(?:'s| is|\?))",  # "Bob is Ann's": the person with it
    r"'s",
    r" is the [a-z-]+ of(?= )",
    r"[.?:,]",
    r" [A-Za-z-]+",
)


def family_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for family stories; unknown words become `<unk>`, which targets refuse as answers."""
    vocabulary = [PAD, UNKNOWN, END, *_MARKS]
    vocabulary += [f" {name}" for name in NAMES]
    vocabulary += [f" {name}'s" for name in NAMES]
    vocabulary += [f" {relation}" for relation in RELATIONS]
    vocabulary += [f" is the {relation} of" for relation in RELATIONS]
    vocabulary += [f"'s {relation}" for relation in RELATIONS]
    vocabulary += [f" {word}" for word in _WORDS]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    core.normalizer = normalizers.Replace(Regex("^ ?"), " ")  # the first word has its space too
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(_PIECES)), "isolated")
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False, "model_max_length": 512}
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, **settings)
