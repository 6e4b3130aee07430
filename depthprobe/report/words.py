"""The report's standing words: what the tasks are, how to read it, and what the numbers do not say."""

from __future__ import annotations

from collections.abc import Iterable

from depthprobe.analysis import MIN_CLUSTERS
from depthprobe.report.data import Axis, Task

__all__ = ["ABOUT", "ROLES", "SHORTCUTS", "limits", "probes", "reading", "shortcut_name"]

#: task -> one sentence
ABOUT = {
    "kinship": "Name the relation at the end of a chain of k stated facts (“Carl is Ann's …”). "
    "Composition of kinship is nearly free of order, so shortcuts are strong here: read this task together "
    "with follow.",
    "follow": "Name the person at the end of a path of k relations (“the brother of the wife of the son of "
    "Ann is …”). Order matters, and the story holds decoys that carry the same relation words.",
}


#: role of a fact -> what it does in its story
ROLES = {
    "chain": "on the question's chain, with its hop",
    "branch": "hangs off a person of the chain",
    "decoy": "has the chain's relation words elsewhere",
    "offchain": "told for another question of the story",
    "gender": "says who is a man or a woman",
}

#: name in the shortcuts table -> its words, and what it answers from
SHORTCUTS = {
    "majority": ("majority", "the commonest answer"),
    "last_fact": ("last fact", "the relation of the fact told last"),
    "last_relation": ("last relation", "the chain's last relation"),
    "first_last": ("first + last relation", "the chain's first and last relation"),
    "generation_last": ("generations + last relation", "the sum of generations and the last relation"),
    "multiset_last": ("relations unordered + last", "all relations without their order, and the last one"),
    "word_in_story": ("word in story", "the relation words that stand in the story"),
    "random_person": ("random person", "anybody in the story but the person asked about"),
    "right_gender": ("right gender", "anybody of the right gender"),
    "last_mentioned": ("last mentioned", "the person named last"),
    "random_walk": ("random walk", "k random steps along stated facts"),
    "last_word": ("last word", "the question's last word alone"),
    "last_two_words": ("last two words", "the question's last two words alone"),
    "bag_of_words": ("bag of words", "a logistic regression on the words of story and question"),
    "random_candidate": ("random candidate", "any candidate"),
}


def shortcut_name(name: str) -> str:
    """The words for a shortcut; an unknown one keeps its own."""
    return SHORTCUTS[name][0] if name in SHORTCUTS else name.replace("_", " ")


#: probe -> its term and what it means
_PROBES = {
    "patching": (
        "Patch, effect, flip",
        "A state of one story's run stands in for that of another, at some tokens and one depth; what follows is "
        "computed from it. Effect = (clean − patched) / (clean − donor), of the difference of the log-probabilities of "
        "the answer and the donor's answer. A pair flips when the best candidate changes from the one to the other.",
    ),
    "windows": (
        "Window",
        "Source: until which depth the changed word's state decides. Destination: from which depth the last token's "
        "does. Both are where the effect crosses ½, linear between depths; area is that under the effect, clipped to "
        "0 … 1.",
    ),
    "knockout": (
        "Knock-out",
        "The last token's attention to some words is cut in a window of layers, in every head. The centre of the harm "
        "is the mean depth of the cuts, each weighted by the log-probability that the answer loses.",
    ),
    "effective": (
        "Contribution, skipping",
        "Δ is what a layer or loop adds to the state h. Skipping leaves it out and lets the rest run.",
    ),
}


def probes(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The interventions that a run has tables of, in the order of the page."""
    tables = {
        "patching": "patching_by_role", "windows": "windows", "knockout": "knockout_by_depth",
        "effective": "effective_by_hops",
    }  # fmt: skip
    own = list(tasks)
    return tuple(probe for probe, name in tables.items() if any(getattr(task, name).height for task in own))


def reading(
    axis: Axis, gate: bool, shortcuts: Iterable[str], probed: Iterable[str] = (), lens: str = "plain"
) -> list[tuple[str, str]]:
    """Terms and their meaning, those that this run needs."""
    step = "loop" if axis.looped else "layer"
    through = {
        "plain": "the model's own final norm and head (the logit lens).",
        "tuned": "an affine map that was trained to make it say what the model says in the end, and then through the "
        "model's own final norm and head (the tuned lens). The last depth has no such map.",
        "coda": "the coda, all tokens stopped there, and the model's own final norm and head (the coda lens): the "
        "model run with so many loops. Depths within a loop, and before and behind the loops, are read without that.",
    }
    found = [
        (
            "Hops and stories",
            "k is the number of facts that a question chains. Each story is asked at every k, so length "
            "and content are the "
            "same for easy and hard questions; slopes are fitted within a story and averaged over stories.",
        ),
        (
            "Reading a depth",
            f"At the position that predicts the answer, the state after a {step} is sent through {through[lens]}",
        ),
        (
            "Right",
            "The right answer has more probability than any other candidate answer. It need not be the top "
            "token.",
        ),
        (
            "p(correct), p(plausible)",
            "Probability, over the whole vocabulary, of the right answer, and of all answers of the right kind "
            "(right gender and generation, or right type of person), the right one among them. An answer "
            "counts with its first token, and with later ones where answers that begin alike part.",
        ),
        (
            "Settling depth",
            f"The first {step} from which on the top token stays the final one – whether or not that is "
            "right. Correct and "
            "plausible depth: likewise for the leading candidate being right, or plausible.",
        ),
    ]
    if gate:
        found.append(
            (
                "Q-exit and mixture",
                "The gate leaves at the first loop at which its cumulative chance of stopping reaches q. "
                "The dotted line is "
                "what leaving at random after one of the two nearest fixed loops gives at the same mean; a "
                "gate earns its "
                "keep above that line.",
            )
        )
    found += [_PROBES[probe] for probe in probed]
    known = [SHORTCUTS[name] for name in shortcuts if name in SHORTCUTS]
    if known:
        listed = "; ".join(f"{name}: {meaning}" for name, meaning in known)
        found.append(("Shortcuts", f"Baselines that do not follow the chain. They answer from – {listed}."))
    found.append(
        (
            "Intervals",
            "95 %, over clusters. Kinship stories whose chains begin with the same three relations ask nearly "
            "the same and are one cluster (at one or two hops: those of the same chain); elsewhere each story "
            "is its own. A difference counts as measured when its interval excludes 0; they are "
            "not corrected for how many are shown.",
        )
    )
    return found


_CAUTIONS = {
    "patching": "A patch shows that a state carries what differs between two stories and that the rest of the model "
    "uses it in the other's run. It does not show how it was computed, nor that no other state would have done; where "
    "information lies in several places, each alone may show no effect.",
    "windows": "Windows are told for pairs that the model answers right on both stories: that is a selection by the "
    "outcome, and a harder one at more hops.",
    "knockout": "A cut, a zero or a skipped layer puts the model where training never took it. Harm shows that the "
    "path is used; its size is not the size of what went along it.",
}


def limits(axis: Axis, gate: bool, probed: Iterable[str] = (), lens: str = "plain") -> list[str]:
    """What a reader might take from the page and should not."""
    probed = tuple(probed)
    found = [
        "The lens is correlational. It shows what can be decoded at a depth, not what the model uses; that "
        "takes interventions"
        + (
            ", which stand in blocks of their own."
            if probed
            else " (causal patching), which this report does not contain."
        ),
        *(_CAUTIONS[probe] for probe in probed if probe in _CAUTIONS),
        "The groups “answered right” and “every rung right” are selected by their outcome: harder k lose more of "
        "the first, and the second holds only stories that the model answers at every k. Their slopes are read "
        "beside those of all questions, never instead of them.",
        f"A change per hop from fewer than {MIN_CLUSTERS} clusters of stories is not told: ask for more stories with "
        "--n.",
        "Correct and plausible depth exist only for questions that end there; the others stand under "
        "“never” and are left "
        "out of means and slopes.",
        "Where a shortcut is as accurate as the model, a deeper settling is no evidence of step-by-step "
        "composition.",
    ]
    if axis.looped:
        found.append(
            "Selected depth is not executed depth. Every question ran all loops; "
            + ("exits were read off afterwards, " if gate else "")
            + "nothing was skipped and no time was saved here."
        )
    if axis.coordinates[-1].loop > axis.n_loops:
        found.append(
            "Behind the coda a loop's end says what the model says when all tokens stop there, not when each leaves "
            "where its gate lets it."
            if lens == "coda"
            else "This model has a coda behind its loops. A loop's readout skips it, so it is not what the model would "
            "say if it really left there (--lens coda reads that)."
        )
    found.append(
        "In kinship different clusters may share the first one or two of their relations. Slopes and "
        "differences over several k treat them as independent, so their intervals are a little narrow."
    )
    found.append(
        "One model and one sample of questions: intervals speak of other stories, not of other training "
        "seeds."
    )
    return found
