"""Given names for stories: short, all usable for women and men, so that no gender can be guessed from a name.

No name is a relation word and none is the beginning of another, so that the text of a story can be read back
without ambiguity. Any other list can be handed to the generator; `check_names` says what is wrong with one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UserError
from .items import GENDER_WORDS
from .kinship import RELATIONS

NAMES: tuple[str, ...] = (
    "Alex", "Ali", "Ari", "Ash", "Avery", "Bailey", "Billie", "Blair", "Blake", "Bobby", "Brett", "Briar",
    "Brook", "Cam", "Angel", "Casey", "Charlie", "Chris", "Cody", "Corey", "Dale", "Dana", "Darcy", "Devon",
    "Drew", "Eden", "Ellis", "Emery", "Evan", "Finley", "Flynn", "Frankie", "Gale", "Gray", "Harley",
    "Harper", "Haven", "Hayden", "Hunter", "Ira", "Jackie", "Jamie", "Jan", "Jesse", "Jody", "Jordan",
    "Jules", "Kai", "Kelly", "Kerry", "Kim", "Kit", "Kyle", "Lane", "Lee", "Leslie", "Logan", "Lou", "Luca",
    "Lynn", "Marley", "Max", "Mel", "Micah", "Morgan", "Nico", "Noel", "Oakley", "Parker", "Pat", "Perry",
    "Quinn", "Ray", "Reed", "Remy", "Riley", "River", "Robin", "Rory", "Rowan", "Ryan", "Sage", "Sam",
    "Sasha", "Shane", "Sidney", "Sky", "Spencer", "Stacy", "Taylor", "Terry", "Toby", "Tracy", "Tyler", "Val",
    "Winter",
)  # fmt: skip


def check_names(names: Sequence[str], needed: int) -> tuple[str, ...]:
    """The names as a tuple, or a `UserError` that says which one cannot be used.

    Args:
        names: may be of several words; letters, spaces, hyphens and apostrophes within a word are fine.
        needed: how many people a story has at most.
    """
    taken = {*RELATIONS, *GENDER_WORDS}
    if len(names) < needed:
        raise UserError(
            f"{len(names)} names are too few for stories of up to {needed} people",
            remedy="give a longer list",
        )
    if len(set(names)) != len(names):
        twice = next(n for n in names if list(names).count(n) > 1)
        raise UserError(f"the name '{twice}' is in the list twice", remedy="give every name once")
    for name in names:
        if not name or name != " ".join(name.split()) or any(c in name for c in ".?:"):
            raise UserError(
                f"'{name}' cannot be a name", remedy="no dots, colons, question marks or outer spaces"
            )
        if name.lower() in taken:
            raise UserError(f"the name '{name}' is a word of the task", remedy="take it off the list")
    return tuple(names)
