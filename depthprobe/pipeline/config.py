"""What `depthprobe analyze` is asked to do: one checked configuration from options and a YAML file.

    # demo.yaml: the names of the options, with _ or - between words
    model: follow-demo
    task: [kinship, follow]
    hops: 1-6
    n: 100
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from depthprobe.errors import UserError
from depthprobe.tasks.splits import HASHED_RELATIONS

__all__ = ["DEFAULT_SEED", "AnalyzeConfig", "parse_bytes", "parse_hops", "read_config"]

TASKS = ("kinship", "follow")
SPLITS = ("heldout", "train", "any")
BOS = ("tokenizer", "always", "never")  # `lens.targets.BOS`, which would import torch
ROUTES = ("native", "transformer-lens", "nnsight")  # `depth.ROUTES`, likewise
LENSES = ("plain", "tuned", "coda")
NAMES = ("lens", "patching", "effective")  # of probes: the lens, and `probes.PROBES`
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "loop_state")  # `patching.SITES`, likewise
MOST_HOPS = 8

#: The recipes of our own models count their seeds from 0. Stories of another seed come from other families.
DEFAULT_SEED = 1000


#: What an embedded model is asked unless told otherwise: the task that it was trained on, told as it was told there.
#: Of kinship more stories, for there are few distinct beginnings of held-out chains, and intervals count these.
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "kinship-demo": {"task": ("kinship",), "order": "forward", "n": 400},
    "follow-demo": {"task": ("follow",)},
}

#: Facts of every story that a model was trained on, in the task it was trained on: of a ladder with fewer rungs the
#: stories stay so long.
OWN_LENGTHS: dict[tuple[str, str], int] = {("kinship-demo", "kinship"): 6}


@dataclass(frozen=True)
class AnalyzeConfig:
    """Everything that the numbers of a run depend on, apart from the software and the model's weights.

    Attributes:
        model: a name, folder or hub id for `depthprobe.load`.
        task: tasks to generate; empty with `data`.
        data: a file of items to ask instead.
        hops: rungs of the ladder; with `data`, keep items of these hops (empty: all).
        n: stories for each task; with `data`, keep the first n stories (None: all).
        split: chains of three or more hops that the package's own models never saw in training ("heldout"),
            those that they may have seen ("train"), or both ("any"). "any" with `data`, and by default where
            all hops are below three: no chain of one or two relations is held out.
        form, template, order, distractors: of the generated stories; None: the task's own default. An
            embedded model that is asked its own task alone has defaults of its own (`OWN_DEFAULTS`).
        device, dtype, revision, route: for `depthprobe.load`.
        batch_size: items run together; a part of the lens table holds one batch.
        seed: of the stories and of the bootstrap.
        skip_too_long: leave out items that exceed the model's context instead of refusing them.
        resamples: bootstrap draws.
        bos: the BOS token in front of a prompt: as the "tokenizer" has it, "always" or "never".
        chat: put prompts through the tokenizer's chat template.
        browse: items that the report's browser shows token by token, 0 for none; None: all that can be read
            cheaply (`lens.tokens`).
        lens: "plain", the model's own norm and head alone; "tuned", behind the translators of a tuned lens; "coda", the
            ends of loops behind the coda, all tokens stopped there, of a model of this package that has one.
        tuned: the tuned lens, a file of `depthprobe lens train`; of lens "tuned" alone.
        probes: what is measured: the lens, always, and what stands beside it.
        probe_items: stories of each task that the probes beside the lens take, at every hop count.
        sites: where they are patched.
        patch_tokens: items of each task and hop count that are also patched token by token, at the first site, for the
            report's browser.
        spare_first: tokens at the front of a prompt that skipped layers are not skipped for; None: one, or none in a
            model with loops (`effective.spared_of`).
    """

    model: str = "follow-demo"
    task: tuple[str, ...] = TASKS
    data: str | None = None
    hops: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    n: int | None = 100
    split: str = "heldout"
    form: str | None = None
    template: str | None = None
    order: str | None = None
    distractors: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    revision: str | None = None
    route: str = "native"
    batch_size: int = 48
    seed: int = DEFAULT_SEED
    skip_too_long: bool = False
    resamples: int = 2000
    bos: str = "tokenizer"
    chat: bool = False
    browse: int | None = None
    lens: str = "plain"
    tuned: str | None = None
    probes: tuple[str, ...] = ("lens",)
    probe_items: int = 8
    sites: tuple[str, ...] = ("resid_post",)
    patch_tokens: int = 1
    spare_first: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AnalyzeConfig:
        """Checked values; None means "not given".

        Raises:
            UserError: an unknown name, a value of the wrong kind or out of range, options that exclude each
                other.
        """
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise UserError(f"unknown option '{name}'", remedy=f"known: {', '.join(sorted(known))}")
        values: dict[str, Any] = {
            name: _READERS[name](f"option {name}", value)
            for name, value in given.items()
            if value is not None
        }
        if (values.get("lens", cls.lens) == "tuned") != ("tuned" in values):
            what = "--tuned says nothing without --lens tuned" if "tuned" in values else "--lens tuned needs a lens"
            raise UserError(what, remedy="give both, --lens tuned --tuned PATH (`depthprobe lens train` makes one)")
        own = OWN_DEFAULTS.get(values.get("model", cls.model))
        if own and "data" not in values and values.get("task", own["task"]) == own["task"]:
            values = {**own, **values}
        if "data" in values:
            for name in ("task", "form", "template", "order", "distractors", "split"):
                if name in values:
                    remedy = f"give --data or --{name}, not both"
                    raise UserError(f"--data brings its own stories, so --{name} says nothing", remedy=remedy)
            values = {"task": (), "hops": (), "n": None, "split": "any", **values}
        elif max(values.get("hops", cls.hops)) < HASHED_RELATIONS:
            if values.get("split") == "heldout":
                what = f"no chain of fewer than {HASHED_RELATIONS} relations is held out"
                remedy = f"ask for {HASHED_RELATIONS} hops or more too, or for --split any"
                raise UserError(what, where="--split heldout", remedy=remedy)
            values.setdefault("split", "any")
        asked = values.get("probes", cls.probes)
        for name, probe in (("sites", "patching"), ("patch_tokens", "patching"), ("spare_first", "effective")):
            if name in values and probe not in asked:
                what = f"--{name.replace('_', '-')} says nothing without the {probe} probe"
                raise UserError(what, remedy=f"ask for --probes lens,{probe}, or leave it out")
        if "probe_items" in values and asked == ("lens",):
            remedy = "ask for --probes lens,patching, or leave it out"
            raise UserError("--probe-items says nothing without a probe beside the lens", remedy=remedy)
        found = cls(**values)
        if "probe_items" in values and found.n is not None and found.probe_items > found.n:
            what = f"--probe-items {found.probe_items} asks for more stories than the {found.n} of --n"
            raise UserError(what, remedy=f"give --n {found.probe_items} or more")
        if found.patch_tokens > found.probe_items:
            what = f"--patch-tokens {found.patch_tokens} asks for more than the {found.probe_items} of --probe-items"
            raise UserError(what, remedy=f"give --probe-items {found.patch_tokens} or more")
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; what a run folder stores and compares."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_hops(text: str) -> tuple[int, ...]:
    """ "1-6", "3" or "1,2,5-6" → hop counts in rising order.

    Raises:
        UserError: anything else, a range that runs backwards, or a count outside 1 … 8.
    """
    remedy = "give a number or a range within 1 to 8, e.g. --hops 1-6"
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:[-–]\s*(\d+)\s*)?", part)
        if match is None:
            raise UserError(f"'{text}' is no range of hops", remedy=remedy)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"the range of hops '{part.strip()}' runs backwards", remedy=remedy)
        if first < 1 or last > MOST_HOPS:
            raise UserError(f"hops '{part.strip()}' are out of range", remedy=remedy)
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def read_config(path: str | Path) -> dict[str, Any]:
    """Options from a YAML file, names with underscores; not yet checked, except that they exist.

    Raises:
        UserError: no such file, not YAML (the line), not a mapping, or an unknown name.
    """
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
        # of a name that stands twice a loader keeps the last; only the tree has both
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = [key for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    except FileNotFoundError:
        raise UserError("no such configuration file", where=str(path), remedy="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration cannot be read: {error}", where=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(path) if mark is None else f"{path}, line {mark.line + 1}"
        what = f"not YAML: {getattr(error, 'problem', None) or error}"
        raise UserError(what, where=where, remedy="write it as name: value") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(
            "the configuration is not a mapping", where=str(path), remedy="write it as name: value"
        )
    first: dict[str, int] = {}
    for key in keys:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if (before := first.setdefault(name, line)) != line:
            what = f"option '{name}' stands there twice"
            raise UserError(what, where=f"{path}, lines {before} and {line}", remedy="keep one of them")
    known = {field.name for field in fields(AnalyzeConfig)} | {"out", "max_memory"}
    options: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            remedy = f"known: {', '.join(sorted(known))}"
            raise UserError(f"unknown option '{key}'", where=str(path), remedy=remedy)
        options[name] = value
    return options


_LARGEST = 2**63 - 1

# -- one reader for each kind of value: (name for messages, value) → checked value ---------------------------


def _text(name: str, value: Any) -> str:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{name} is to be a text, got {value!r}")
    return value


def _whole(least: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{name} is to be a whole number of at least {least}, got {value!r}")
        if value > _LARGEST:  # of what a table can hold
            raise UserError(f"{name} is at most {_LARGEST}, got {value}")
        return value

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} is to be true or false, got {value!r}")
    return value


def _one_of(known: tuple[str, ...]) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in known:
            raise UserError(f"{name}: there is no '{value}'", remedy=f"one of {', '.join(known)}")
        return str(value)

    return read


def _tasks(name: str, value: Any) -> tuple[str, ...]:
    asked = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else None
    if not asked:
        raise UserError(f"{name} is to name one task or more, got {value!r}", remedy=f"of {', '.join(TASKS)}")
    for task in asked:
        _one_of(TASKS)(name, task)
    # in one order, however often and in whatever order asked
    return tuple(task for task in TASKS if task in asked)


def _several(known: tuple[str, ...], first: str | None = None) -> Callable[[str, Any], tuple[str, ...]]:
    """Names, in one order, however often and in whatever order asked; `first` is to be among them."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        asked = value.split(",") if isinstance(value, str) else value
        if not isinstance(asked, (list, tuple)) or not asked or not all(isinstance(one, str) for one in asked):
            raise UserError(f"{name} is to name one or more, got {value!r}", remedy=f"of {', '.join(known)}")
        names = [one.strip() for one in asked]
        for one in names:
            _one_of(known)(name, one)
        if first is not None and first not in names:
            what = f"{name}: '{first}' is missing, which the report and every other probe stand on"
            raise UserError(what, remedy=f"ask for {','.join([first, *names])}")
        return tuple(one for one in known if one in names)

    return read


_UNITS = "give a number in KiB, MiB, GiB or TiB, or of bytes"


def parse_bytes(text: str | int) -> int:
    """ "512M", "2GiB" or a number of bytes → bytes; K, M, G and T are powers of 1024.

    Raises:
        UserError: anything else, or less than 1 MiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = None if match is None else re.fullmatch(r"([KMGT]?)(?:i?B)?", match[2], re.IGNORECASE)
    if match is None or unit is None:
        why = "" if match is None else f": there is no unit '{match[2]}' here"
        raise UserError(f"'{text}' is no amount of memory{why}", remedy=f"{_UNITS}, e.g. --max-memory 2GiB")
    found = int(float(match[1]) * 1024 ** " KMGT".index(unit[1].upper() or " "))
    if found < 1 << 20:
        what = f"'{text}' is no amount of memory for a sweep: it is less than 1 MiB"
        raise UserError(what, remedy=f"{_UNITS}, e.g. --max-memory 2GiB")
    return found


def _hops(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return parse_hops(value)
    asked = list(value) if isinstance(value, (list, tuple, range)) else [value]
    if not asked or any(isinstance(k, bool) or not isinstance(k, int) for k in asked):
        raise UserError(f"{name} are to be whole numbers, got {value!r}", remedy="e.g. 1-6, or [1, 2, 3]")
    return parse_hops(",".join(str(k) if k >= 0 else "?" for k in asked))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "task": _tasks,
    "data": _text,
    "hops": _hops,
    "n": _whole(1),
    "split": _one_of(SPLITS),
    "form": _text,
    "template": _text,
    "order": _text,
    "distractors": _text,
    "device": _text,
    "dtype": _text,
    "revision": _text,
    "route": _one_of(ROUTES),
    "batch_size": _whole(1),
    "seed": _whole(0),
    "skip_too_long": _flag,
    "resamples": _whole(100),
    "bos": _one_of(BOS),
    "chat": _flag,
    "browse": _whole(0),
    "lens": _one_of(LENSES),
    "tuned": _text,
    "probes": _several(NAMES, "lens"),
    "probe_items": _whole(1),
    "sites": _several(SITES),
    "patch_tokens": _whole(0),
    "spare_first": _whole(0),
}
