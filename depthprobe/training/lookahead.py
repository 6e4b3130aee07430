"""Training a lookahead head: what the gate will say after the next loop, from the state after this one.

    depthprobe train lookahead follow-demo --data stories:follow --out lookahead.safetensors

The model and its gate, the teacher, stay as they are, as in Continuous Depth Batching (arXiv 2608.09444). At every loop
d that has two more behind it the head gives λ̂_{d+1}; the loss is the cross-entropy to the gate's λ_{d+1} and the mean
|CDF − CDF of the teacher| at d + 1, with the CDF as it is served: the gate's own survival up to d, and λ̂ for the next
loop. λ of the last loop is no target, since nobody stays after it.

The text is the project's stories. The head is tested on stories whose chains were held out from the training of the
package's models too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting import log_survival, q_exit
from depthprobe.halting.distribution import reached
from depthprobe.halting.head import LookaheadHead
from depthprobe.models import LoopedForCausalLM
from depthprobe.tasks.generate import Generator
from depthprobe.tasks.items import TASKS
from depthprobe.training.recipes import RECIPES

#: Loops below which nothing can be decided ahead: the first has no prediction, and the last stops for certain.
LEAST_LOOPS = 3


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """What decides, next to model and data, what a head becomes.

    Attributes:
        stories, heldout: stories to train on and to test on, each with one question.
        longest: hops of the longest question.
        share: of the tokens that no answer follows, how many are kept. An answer's token counts as all others of its
            row together.
        steps: of L-BFGS, over all tokens at once.
        rows: stories of a forward.
        seed: of the stories and of the tokens kept.
    """

    stories: int = 2000
    heldout: int = 500
    longest: int = 6
    share: float = 0.25
    steps: int = 200
    rows: int = 50
    seed: int = 0


class Row(NamedTuple):
    """Token ids of a story, a question and its answer, and the index of the token that the answer follows."""

    ids: list[int]
    asked: int


@dataclass(frozen=True, slots=True)
class Traces:
    """What n tokens did at every loop of a forward over all loops.

    Attributes:
        states: float32 `[n, U, d]`, normed loop states.
        gates: float32 `[n, U]`, logits of λ.
        asked: bool `[n]`, whether an answer follows the token.
        stories: how many stories they are of.
    """

    states: Tensor
    gates: Tensor
    asked: Tensor
    stories: int


def parse_data(data: str) -> tuple[str, ...]:
    """The tasks whose stories `data` names: "stories" or "stories:TASK".

    Raises:
        UserError: another text.
    """
    kind, _, task = data.partition(":")
    if kind != "stories" or (task and task not in TASKS):
        remedy = f"give stories, or {' or '.join(f'stories:{name}' for name in TASKS)}"
        raise UserError("a lookahead head is trained on the project's stories", where=data, remedy=remedy)
    return (task,) if task else TASKS


def story_rows(
    tokenizer: Any, tasks: Sequence[str], split: str, n: int, longest: int, seed: int, order: str | None = None
) -> Iterator[Row]:
    """`n` stories, of each task in turn, with a question of rising hops and around again.

    Args:
        order: of the facts; None: that of the recipe of the package's model of the task.

    Raises:
        UserError: the stories have words that the tokenizer does not know.
    """
    made = [
        Generator(task, hops=range(1, longest + 1), orders=order or RECIPES[task].order, split=split, seed=seed)
        for task in tasks
    ]
    for number in range(n):
        generator = made[number % len(made)]
        ladder = generator.story(number // len(made))
        item = ladder[(number // len(made)) % len(ladder)]
        prompt = tokenizer(item.text).input_ids
        ids = tokenizer(item.text + item.continuation(item.answer)).input_ids
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            remedy = "take the stories of the task that the model was trained on"
            raise UserError("the stories have words that the tokenizer does not know", remedy=remedy)
        yield Row(ids, len(prompt) - 1)


@torch.no_grad()
def traces(model: LoopedForCausalLM, rows: Sequence[Row], share: float, seed: int, batch: int) -> Traces:
    """Run every row through all loops, and keep the token before each answer and a `share` of the others."""
    generator = torch.Generator().manual_seed(seed)
    states: list[Tensor] = []
    gates: list[Tensor] = []
    asked: list[Tensor] = []
    for first in range(0, len(rows), batch):
        some = rows[first : first + batch]
        longest = max(len(row.ids) for row in some)
        ids = torch.zeros(len(some), longest, dtype=torch.int64)
        real, last = torch.zeros(2, len(some), longest, dtype=torch.bool)
        for i, row in enumerate(some):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            real[i, : len(row.ids)] = True
            last[i, row.asked] = True
        kept = real & (last | (torch.rand(real.shape, generator=generator) < share))
        out = model(
            ids.to(model.device), real.long().to(model.device), output_loop_states=True, skip_logits=True
        )
        assert out.loop_states is not None and out.gate_logits is not None
        loops = torch.stack([model.normed(state)[kept] for state in out.loop_states], dim=1)
        states.append(loops.float().cpu())
        gates.append(out.gate_logits[kept].float().cpu())
        asked.append(last[kept])
    return Traces(torch.cat(states), torch.cat(gates), torch.cat(asked), len(rows))


def head_loss(predicted: Tensor, gates: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy to the next loop's λ plus mean |CDF − CDF of the gate|, see the module.

    Args:
        predicted: float `[n, U − 2]`, logits of λ̂ at depths 2…U − 1, from the states at 1…U − 2.
        gates: float `[n, U]`, the gate's logits.
        weights: float `[n]`.

    Returns:
        scalar, nats and shares added up.
    """
    survived = log_survival(gates)[:, :-1]  # at depths 1…U − 1
    entropy = F.binary_cross_entropy_with_logits(predicted, gates[:, 1:-1].sigmoid(), reduction="none")
    served = survived[:, :-1] + F.logsigmoid(-predicted)
    distance = (survived[:, 1:].exp() - served.exp()).abs()
    return ((entropy + distance).mean(-1) * weights).sum() / weights.sum()


def fit_head(model: LoopedForCausalLM, seen: Traces, steps: int) -> LookaheadHead:
    """The head that fits the traces best; it begins as a copy of the gate.

    Raises:
        UserError: no gate, or fewer than three loops.
    """
    head = LookaheadHead.start(model)
    _check_loops(seen.gates.shape[1])
    weight = head.weight.cpu().clone().requires_grad_()
    bias = head.bias.cpu().clone().requires_grad_()
    others = (~seen.asked).sum().clamp_min(1) / seen.asked.sum().clamp_min(1)
    weights = torch.where(seen.asked, others, 1.0)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = head_loss(seen.states[:, :-2] @ weight + bias, seen.gates, weights)
        loss.backward()
        return loss

    optimiser.step(closure)  # pyright: ignore[reportArgumentType]
    return replace(head, weight=weight.detach(), bias=bias.detach())


def ahead_exits(seen: Traces, head: LookaheadHead, q: float) -> Tensor:
    """Depths at which `Lookahead(QExit(q), head)` lets the tokens go, int64 `[n]`, 2…U."""
    survived = log_survival(seen.gates)[:, :-2]
    served = survived + F.logsigmoid(-head(seen.states[:, :-2]))  # at depths 2…U − 1
    met = torch.zeros(seen.gates.shape, dtype=torch.bool)
    met[:, 1:-1] = reached(served, q)
    met[:, -1] = True
    return met.to(torch.uint8).argmax(-1) + 1


def late_exits(seen: Traces, q: float) -> Tensor:
    """Depths of the gate's own decision, carried out one loop late, int64 `[n]`, 2…U: what no head at all gives."""
    return (q_exit(gate_logits=seen.gates, q=q) + 1).clamp_max(seen.gates.shape[1])


def agreement(seen: Traces, head: LookaheadHead, q: float) -> dict[str, Any]:
    """How the head's exits compare with the gate's, from depth 2 on (the head has none at 1).

    Returns:
        for "answers" (the tokens that an answer follows) and "tokens" (all kept): n, mean depth of the gate's exits
        (of the gate alone, too), of the head's and of the gate's decision one loop late; and the shares of exits that
        equal the gate's, and are within one loop of it, for the head and for the late decision.
    """
    n_loops = seen.gates.shape[1]
    free = q_exit(gate_logits=seen.gates, q=q)
    teacher = q_exit(gate_logits=seen.gates, q=q, min_depth=min(2, n_loops))
    found: dict[str, Any] = {"q": q}
    kinds = {"answers": seen.asked, "tokens": torch.ones_like(seen.asked)}
    for kind, chosen in kinds.items():
        told: dict[str, float] = {
            "n": int(chosen.sum()),
            "gate_depth": _mean(free[chosen]),
            "gate_depth_from_2": _mean(teacher[chosen]),
        }
        for name, exits in (("head", ahead_exits(seen, head, q)), ("late", late_exits(seen, q))):
            off = (exits - teacher)[chosen].abs()
            told[f"{name}_depth"] = _mean(exits[chosen])
            told[f"{name}_equal"] = _mean(off == 0)
            told[f"{name}_within_one"] = _mean(off <= 1)
        found[kind] = told
    return found


def train_head(
    model: LoopedForCausalLM,
    tokenizer: Any,
    tasks: Sequence[str],
    recipe: HeadRecipe,
    order: str | None = None,
    say: Callable[[str], None] = print,
) -> LookaheadHead:
    """Train a head beside the frozen gate and measure it on held-out stories; `about` has the figures.

    Raises:
        UserError: no gate, too few loops, or words that the tokenizer does not know.
    """
    LookaheadHead.start(model)  # refuses a model without a gate before any story is made
    _check_loops(model.config.n_loops)
    seen: dict[str, Traces] = {}
    for split, n in (("train", recipe.stories), ("heldout", recipe.heldout)):
        say(f"{split}: {n:,} stories")
        rows = list(story_rows(tokenizer, tasks, split, n, recipe.longest, recipe.seed, order))
        seen[split] = traces(model, rows, recipe.share, recipe.seed, recipe.rows)
    head = fit_head(model, seen["train"], recipe.steps)
    q = model.config.exit_q
    measured = [agreement(seen["heldout"], head, x) for x in sorted({0.5, 0.7, 0.9, q})]
    about = {
        "data": f"stories:{','.join(tasks)}", "order": order, "recipe": asdict(recipe), "exit_q": q,
        "tokens": len(seen["train"].asked), "heldout": measured,
    }  # fmt: skip
    return replace(head, about=about)


def _check_loops(n_loops: int) -> None:
    if n_loops < LEAST_LOOPS:
        what = f"with {n_loops} loops there is no exit to decide ahead"
        raise UserError(what, where="config field n_loops", remedy=f"a head needs {LEAST_LOOPS} loops or more")


def _mean(x: Tensor) -> float:
    return x.double().mean().item()
