"""`depthprobe tasks`: make items, check them with the solver, look at one.

    depthprobe tasks generate --task follow --n 500 --out follow.jsonl
    depthprobe tasks check follow.jsonl --donors --against train.jsonl
    depthprobe tasks show --task kinship --hops 4
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthprobe.errors import UserError

if TYPE_CHECKING:
    from rich.text import Text

    from depthprobe.tasks.clutrr import Finding
    from depthprobe.tasks.generate import Generator
    from depthprobe.tasks.items import Item

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Generate, check and show kinship and follow questions.",
)

Tasks = Annotated[
    list[str] | None, typer.Option("--task", help="kinship or follow; may be repeated. Default: both.")
]
Hops = Annotated[str, typer.Option("--hops", help="Hop counts of each ladder within 1-8, e.g. 1-6 or 2,4.")]
Orders = Annotated[
    list[str] | None,
    typer.Option(
        "--order", help="forward, reverse or shuffled (the default); each story draws one of several."
    ),
]
Distractors = Annotated[
    list[str] | None,
    typer.Option(
        "--distractors", help="none (kinship's default), offchain, branch, decoy (follow's); repeatable."
    ),
]
Templates = Annotated[
    list[str] | None,
    typer.Option("--template", help="How facts are told: subject-first (the default), object-first, has."),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help="How questions are asked. Kinship: statement, question, qa. "
        "Follow: possessive, of, question, possessive-question.",
    ),
]
Facts = Annotated[int | None, typer.Option("--facts", help="Facts of every story, gender facts apart.")]
Names = Annotated[
    Path | None, typer.Option("--names", help="A file of given names, one a line.", dir_okay=False)
]
GenderFacts = Annotated[
    bool, typer.Option("--gender-facts", help="Also state genders that the facts leave open.")
]
SplitOption = Annotated[
    str | None, typer.Option("--split", help="Only chains of relations of this split: train or heldout.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the stories.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

#: a colour for each role, and for the hops of the chain in turn
ROLE_STYLES = {"branch": "yellow", "decoy": "magenta", "offchain": "dim", "gender": "dim italic"}
HOP_STYLES = ("bold green", "bold cyan", "bold blue", "bold red")


def _generators(
    task: Sequence[str] | None,
    hops: str,
    order: Sequence[str] | None,
    distractors: Sequence[str] | None,
    template: Sequence[str] | None,
    form: Sequence[str] | None,
    facts: int | None,
    names: Path | None,
    gender_facts: bool,
    split: str | None,
    seed: int,
) -> list[Generator]:
    """One generator for each task; all settings are checked before anything is made."""
    from depthprobe.pipeline.config import parse_hops
    from depthprobe.tasks.generate import Generator
    from depthprobe.tasks.items import TASKS

    settings: dict[str, Any] = {
        "orders": order,
        "distractors": distractors,
        "fact_template": template,
        "form": form,
        "n_facts": facts,
        "split": split,
        "names": None if names is None else _read_names(names),
    }
    given = {name: value for name, value in settings.items() if value}
    given |= {"hops": parse_hops(hops), "gender_facts": gender_facts, "seed": seed}
    return [Generator(name, **given) for name in dict.fromkeys(task or TASKS)]


def _read_names(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("cannot read the names", where=str(path), remedy=str(error)) from None
    return [line.strip() for line in lines if line.strip()]


def _only_the_file(context: typer.Context, file: Path) -> None:
    """Refuse what would shape generated items beside a file of items: it would be ignored without a word."""
    for name in context.params.keys() & {
        "task", "hops", "n", "order", "distractors", "template", "form", "facts", "names", "gender_facts",
        "split", "seed",
    }:  # fmt: skip
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            what = f"the file brings its own items, so {option} says nothing"
            raise UserError(what, where=str(file), remedy=f"give the file or {option}, not both")


def _stories(n: int) -> int:
    if n < 1:
        raise UserError(f"{n} stories", where="--n", remedy="ask for one at least")
    return n


@app.command()
def generate(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write, one item a line.", dir_okay=False)
    ],
    task: Tasks = None,
    hops: Hops = "1-6",
    n: Annotated[int, typer.Option("--n", help="Stories for each task, each asked at every k.")] = 100,
    questions: Annotated[
        int, typer.Option("--questions", help="Further questions about each story, as far as it has some.")
    ] = 0,
    order: Orders = None,
    distractors: Distractors = None,
    template: Templates = None,
    form: Forms = None,
    facts: Facts = None,
    names: Names = None,
    gender_facts: GenderFacts = False,
    split: SplitOption = None,
    seed: Seed = 0,
) -> None:
    """Write items as JSON lines: hop ladders, the same story asked at every number of hops.

    The same options and seed give the same file. The file appears when it is complete.
    """
    from depthprobe.tasks.io import write_items

    generators = _generators(
        task, hops, order, distractors, template, form, facts, names, gender_facts, split, seed
    )
    if questions < 0:
        raise UserError(f"{questions} further questions", where="--questions", remedy="give 0 or more")
    _stories(n)
    items = (
        item
        for generator in generators
        for i in range(n)
        for item in (*generator.story(i), *(generator.questions(i, questions) if questions else ()))
    )
    count = write_items(out, items)
    print(f"{count} items about {n * len(generators)} stories written", file=sys.stderr)
    typer.echo(out)


@app.command()
def check(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Items as JSON lines, or a CLUTRR csv. Default: items made by the options below."
        ),
    ] = None,
    task: Tasks = None,
    hops: Hops = "1-6",
    n: Annotated[int, typer.Option("--n", help="Stories for each task if no file is given.")] = 100,
    order: Orders = None,
    distractors: Distractors = None,
    template: Templates = None,
    form: Forms = None,
    facts: Facts = None,
    names: Names = None,
    gender_facts: GenderFacts = False,
    split: SplitOption = None,
    seed: Seed = 0,
    donors: Annotated[
        bool, typer.Option("--donors", help="Also count the items that have a donor for causal patching.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="A file of training items: also count what is new against it."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that every item has exactly its one answer, and print the shortcut baselines by hops.

    The solver knows the stated facts alone. Every item that it finds wrong is named; the exit code is then 1.
    """
    from depthprobe.tasks.shortcuts import default_shortcuts
    from depthprobe.tasks.solver import wrong_answers

    findings: list[Finding] = []
    training = None if against is None else _training(against)
    if file is not None:
        _only_the_file(context, file)
    if file is None:
        generators = _generators(
            task, hops, order, distractors, template, form, facts, names, gender_facts, split, seed
        )
        items = [item for generator in generators for item in generator.items(_stories(n))]
    elif file.suffix.lower() == ".csv":
        from depthprobe.tasks.clutrr import check_rows, clutrr_items, read_clutrr

        rows = read_clutrr(file)
        findings = check_rows(rows)
        right = {finding.number for finding in findings if finding.kind == "right"}
        items = clutrr_items(row for row in rows if row.number in right)
    else:
        from depthprobe.tasks.io import read_items

        items = read_items(file)
    bad = {} if findings else wrong_answers(items)
    wrong = [str(finding) for finding in findings if finding.kind != "right"] or list(bad.values())
    report = {
        "items": len(findings) or len(items),
        "verified": len(items) - len(wrong) if not findings else len(items),
        "unverifiable": sum(not item.facts for item in items) if not findings else 0,
        "findings": dict(Counter(finding.kind for finding in findings)),
        "wrong": wrong,
        "shortcuts": default_shortcuts(items) if items else [],
    }
    report["verified"] -= report["unverifiable"]
    if donors:
        from depthprobe.tasks.donors import CONTROLS, find_donors

        counts = find_donors(item for item in items if item.facts and item.id not in bad).counts
        report["donors"] = [row | {"control": row["kind"] in CONTROLS} for row in counts]
    if training is not None:
        from depthprobe.tasks.heldout import novelty_counts

        report["novelty"] = novelty_counts(items, training)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, indent=1))
    else:
        _print_check(report)
    if wrong:
        raise typer.Exit(1)


def _training(file: Path) -> list[Item]:
    """Items to compare with; those that state no chain of relations have nothing to compare."""
    from depthprobe.tasks.io import read_data

    items = read_data(file, remark=lambda line: print(line, file=sys.stderr))
    if not any(item.chain_relations for item in items):
        remedy = "give a file that `depthprobe tasks generate` wrote"
        raise UserError("no training item states its chain of relations", where=str(file), remedy=remedy)
    return items


def _print_check(report: dict[str, Any]) -> None:
    from rich.console import Console

    from depthprobe.cli.tasks_tables import donor_table, novelty_table, shortcut_table

    console = Console()
    for line in report["wrong"]:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    unchecked = report["unverifiable"]
    console.print(
        f"{report['verified']} of {report['items']} items have exactly one answer, the one given"
        + (f"; {unchecked} have no facts to check" if unchecked else ""),
        highlight=False,
    )
    tables = {"shortcuts": shortcut_table, "donors": donor_table, "novelty": novelty_table}
    for part, table in tables.items():
        rows = report.get(part, [])
        for task in dict.fromkeys(row["task"] for row in rows):
            console.print(table(task, [row for row in rows if row["task"] == task]))


@app.command()
def show(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="Items as JSON lines. Default: a story made by the options below.")
    ] = None,
    item: Annotated[str | None, typer.Option("--item", help="Show the item with this id alone.")] = None,
    task: Tasks = None,
    hops: Hops = "1-6",
    story: Annotated[int, typer.Option("--story", help="The number of the story, from 0.")] = 0,
    order: Orders = None,
    distractors: Distractors = None,
    template: Templates = None,
    form: Forms = None,
    facts: Facts = None,
    names: Names = None,
    gender_facts: GenderFacts = False,
    split: SplitOption = None,
    seed: Seed = 0,
) -> None:
    """Print a story with its questions; facts are coloured by what they are to the longest question."""
    from rich.console import Console

    if file is None:
        generators = _generators(
            task, hops, order, distractors, template, form, facts, names, gender_facts, split, seed
        )
        ladders = [generator.story(story) for generator in generators]
    else:
        from depthprobe.tasks.io import read_data

        _only_the_file(context, file)
        by_story: dict[str, list[Item]] = {}
        for one in read_data(file, remark=lambda line: print(line, file=sys.stderr)):
            by_story.setdefault(one.story_id, []).append(one)
        if item is None and not 0 <= story < len(by_story):
            remedy = f"it has {len(by_story)}, counted from 0"
            raise UserError(f"there is no story {story}", where=str(file), remedy=remedy)
        ladders = list(by_story.values())[story : story + 1] if item is None else list(by_story.values())
    if item is not None:
        ladders = [[one] for ladder in ladders for one in ladder if one.id == item]
        if not ladders:
            raise UserError(f"there is no item {item}", where=str(file or "--item"), remedy="see the ids")
    console = Console()
    for number, ladder in enumerate(ladders):
        if number:
            console.print()
        _print_ladder(console, ladder)


def _print_ladder(console: Any, ladder: Sequence[Item]) -> None:
    from rich.text import Text

    longest = max(ladder, key=lambda one: one.hops)
    head = (longest.story_id, longest.task, f"order {longest.order}", f"distractors {longest.distractors}")
    console.print(Text(" · ".join(head), style="dim"), soft_wrap=True)
    console.print(_coloured(longest))
    for one in ladder:
        line = Text(f"k={one.hops}  ", style="dim")
        line.append(one.question or one.text, style="default")
        line.append(one.continuation(), style="bold reverse")
        line.append(f"   plausible: {', '.join(one.plausible)}", style="dim")
        console.print(line)
    if longest.facts:
        legend = Text("facts: ")
        legend.append("chain, hop by hop", style=HOP_STYLES[0])
        for role, style in ROLE_STYLES.items():
            if any(fact.role == role for fact in longest.facts):
                legend.append(" · ")
                legend.append(role, style=style)
        console.print(legend)


def _coloured(item: Item) -> Text:
    """The story with a colour for each role; hops carry their number, for those who see no colours."""
    from rich.text import Text

    text, at = Text(), 0
    for fact in item.facts:
        text.append(item.story[at : fact.span.start])
        style = ROLE_STYLES.get(fact.role, "")
        if fact.hop is not None:
            style = HOP_STYLES[(fact.hop - 1) % len(HOP_STYLES)]
            text.append(f"{fact.hop}:", style=f"{style} not bold")
        text.append(item.story[fact.span.start : fact.span.end], style=style)
        at = fact.span.end
    text.append(item.story[at:])
    return text
