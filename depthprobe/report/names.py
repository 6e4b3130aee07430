"""Words and colours for what the causal tables name: roles, sites, donors, patches, quantities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["DONORS", "MARKS", "PATCHES", "ROLES", "SITES", "donor_name", "known_first", "patch_name", "role_name",
           "site_name"]  # fmt: skip

#: role of the positions that are changed or cut -> its words
ROLES = {
    "changed_word": "changed word",
    "changed_fact": "rest of its fact",
    "other_facts": "other facts",
    "question_names": "names asked about",
    "last": "last token",
    "all": "all tokens",
}
#: role -> colour token, symbol, dash of its line
MARKS = {
    "changed_word": ("rival", "circle", "solid"),
    "changed_fact": ("role-gender", "square", "solid"),
    "other_facts": ("other", "diamond", "dot"),
    "question_names": ("gate", "triangle-up", "dash"),
    "last": ("model", "circle", "solid"),
    "all": ("accent", "x", "dashdot"),
}
SITES = {
    "resid_post": "residual after a block",
    "resid_pre": "residual before a block",
    "attn_out": "attention output",
    "mlp_out": "MLP output",
    "loop_state": "loop state",
    "embed": "embedding",
}
DONORS = {
    "relation": "another relation on the chain",
    "name": "another name on the chain",
    "distractor": "another relation beside the chain",
    "distractor_name": "another name beside the chain",
    "same_answer": "another relation, same answer",
}
#: direction, kind, span -> what is done
PATCHES = {
    "donor_to_item.set.one": "donor's state into the item's run",
    "item_to_donor.set.one": "item's state into the donor's run",
    "donor_to_item.set.window": "donor's, a window of layers",
    "donor_to_item.set.later": "donor's, this and all later loops",
    "donor_to_item.zero.one": "zeros",
    "donor_to_item.mean.one": "the mean state",
}


def role_name(role: str) -> str:
    """In words; an unknown one keeps its own."""
    return ROLES.get(role, role.replace("_", " "))


def site_name(site: str) -> str:
    return SITES.get(site, site.replace("_", " "))


def donor_name(kind: str) -> str:
    return DONORS.get(kind, kind.replace("_", " "))


def patch_name(patch: str) -> str:
    """`patch` is direction.kind.span."""
    if patch in PATCHES:
        return PATCHES[patch]
    direction, kind, span = patch.split(".")
    words = {"donor_to_item": "into the item's run", "item_to_donor": "into the donor's run"}
    what = {"set": "the other's state", "zero": "zeros", "mean": "the mean state"}.get(kind, kind)
    where = {"one": "", "window": ", a window of layers", "later": ", this and all later loops"}.get(span, f", {span}")
    return f"{what} {words.get(direction, direction)}{where}"


def known_first(found: Iterable[str], order: Iterable[str]) -> list[str]:
    """Those that are known in their order, then the others by name."""
    own: Sequence[str] = sorted(set(found))
    known = [name for name in order if name in own]
    return [*known, *(name for name in own if name not in known)]
