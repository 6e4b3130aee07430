"""KV layouts: which pages a token has, which one each loop writes and reads, and which are kept when it leaves.

A page holds keys and values of one token at one depth over all core layers. A token in flight has `reserve(U)`
pages, numbered from 0. Loop d writes page `index(d)`. When the token leaves at e, pages from `held(e)` on are
given back, and loops deeper than e read page `alias(e)` instead of one of their own.

| layout | semantics |
|---|---|
| ragged | a query at depth d reads token j at min(d, e_j) (arXiv 2610.09013) |
| depth-indexed | a page for each loop and no early exit: what a full-depth forward has |
| last-exited | the exit's page is copied into the deeper ones: the same numbers as ragged (arXiv 2608.09444) |
| shared | one page, overwritten by each loop (arXiv 2608.09444) |
| first-then-shared | loop 1 has its own page, later loops share one |
| state-copied | the state is copied forward and projected anew for deeper loops (ACT, arXiv 1603.08983) |
"""

from __future__ import annotations

from dataclasses import dataclass

from depthprobe.errors import UserError


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout; see the top of the module. U is the number of loops of the model.

    Fields:
        name: what it is called in options and records.
        mixes_depths: whether one recurrent batch may hold rows at different depths.
        parallel: whether a forward over all positions at once, loop by loop, computes what the layout serves.
            Where it does not, a prompt is prefilled in one piece, and nothing can be replayed: no preemption.
        early: whether tokens may leave before loop U.
        copies: whether the page of the exit is copied into the deeper pages, which are all kept.
        private: pages that have a loop of their own, counted from loop 1; later loops share one more page;
            None: every loop has its own.
        terminal: whether one page more is kept at an exit, for the final state projected anew.
    """

    name: str
    mixes_depths: bool = True
    parallel: bool = True
    early: bool = True
    copies: bool = False
    private: int | None = None
    terminal: bool = False

    def index(self, d: int, U: int) -> int:
        """The page that loop d, 1…U, writes."""
        return d - 1 if self.private is None else min(d - 1, self.private)

    def reserve(self, U: int) -> int:
        """Pages of a token in flight."""
        return U if self.private is None else min(U, self.private + 1)

    def held(self, e: int, U: int) -> int:
        """Pages kept by a token that left at e: the first ones."""
        if self.copies or not self.early:
            return U
        return min(e + 1, U) if self.terminal else self.index(e, U) + 1

    def alias(self, e: int, U: int) -> int | None:
        """The page that loops deeper than e read; None where each has its own. For `terminal` layouts it is the
        page of loop e + 1, into which the final state is projected."""
        return None if self.copies or not self.early else self.held(e, U) - 1

    def allows(self, early: bool) -> None:
        """Raise `UserError` if tokens are to leave early (`early`) and this layout cannot serve that."""
        if early and not self.early:
            what = f"layout {self.name} has no early exits, its deeper pages would stay empty"
            remedy = "use policy full with dense prefill, or another layout, e.g. ragged"
            raise UserError(what, where="kv", remedy=remedy)


LAYOUTS: dict[str, Layout] = {
    one.name: one
    for one in (
        Layout("ragged"),
        Layout("depth-indexed", early=False),
        Layout("last-exited", copies=True),
        Layout("shared", parallel=False, private=0),
        Layout("first-then-shared", parallel=False, private=1),
        Layout("state-copied", terminal=True),
    )
}


def layout(name: str | Layout) -> Layout:
    """The layout of that name (a layout is returned as it is).

    Raises:
        UserError: unknown name.
    """
    if isinstance(name, Layout):
        return name
    if name not in LAYOUTS:
        raise UserError(f"no KV layout is named {name!r}", where="kv", remedy=f"use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
