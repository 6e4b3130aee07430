"""A question of a task's section, as plain data for the template."""

from __future__ import annotations

from dataclasses import dataclass

from depthprobe.report.figures import Choice, Figure, Grid

__all__ = ["Block", "Chip"]


@dataclass(frozen=True, slots=True)
class Chip:
    k: int
    token: str


@dataclass(frozen=True, slots=True)
class Block:
    """A question of the section with its figures and findings."""

    title: str
    about: str
    figures: tuple[Figure, ...] = ()
    hops: tuple[Chip, ...] = ()
    table: Grid | None = None
    table_title: str = ""
    after: str = ""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What can be picked for all figures of the block at once: their choices with more than one option."""
        found: dict[str, Choice] = {}
        for choice in (choice for figure in self.figures for choice in figure.choices):
            own = found.setdefault(choice.key, choice)
            found[choice.key] = Choice(own.key, own.name, tuple(dict.fromkeys((*own.options, *choice.options))))
        return tuple(choice for choice in found.values() if len(choice.options) > 1)
