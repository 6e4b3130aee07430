"""Every rule on an example worked by hand, at its boundaries, at mixed depths, and against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthprobe.errors import UserError
from depthprobe.halting import (
    ACT,
    Confidence,
    EntropyChange,
    ExitRule,
    FixedDepth,
    FullDepth,
    GivenExits,
    HazardThreshold,
    OutputEntropy,
    OutputKL,
    Purpose,
    QExit,
    RandomExit,
    RelativeL2,
    Replay,
    SampledExit,
    SecondOrder,
    act_weights,
    q_exit,
    stopping_distribution,
    uniforms,
)
from tests.halting.loops import exits, signal

N, U, D, V = 60, 5, 3, 7
GENERATOR = torch.Generator().manual_seed(1)
GATES = torch.randn(N, U, generator=GENERATOR)
STATES = torch.randn(N, U, D, generator=GENERATOR).cumsum(1) + 3.0
OUTPUTS = torch.randn(N, U, V, generator=GENERATOR).cumsum(1)
UNIFORM = uniforms(11, torch.arange(N), Purpose.EXIT)
GIVEN = torch.randint(1, U + 1, (N,), generator=GENERATOR)
EVERYTHING = {"states": STATES, "gates": GATES, "outputs": OUTPUTS, "uniform": UNIFORM, "given": GIVEN}


def logits(*lambdas: float) -> Tensor:
    """Gate logits [1, U] of stop probabilities; 0 and 1 become ∓inf."""
    return torch.logit(torch.tensor([lambdas]))


def nothing(n_loops: int, n: int = 1) -> Tensor:
    return torch.ones(n, n_loops, 1)


def gate_exit(rule: ExitRule, *lambdas: float) -> int:
    return int(exits(rule, nothing(len(lambdas)), gates=logits(*lambdas)))


def test_q_exit_on_the_worked_example() -> None:
    # CDF = (0.2, 0.6, 1)
    assert [gate_exit(QExit(q), 0.2, 0.5, 0.9) for q in (0.1, 0.5, 0.59, 0.7, 0.9, 1.0)] == [1, 2, 2, 3, 3, 3]
    found = QExit(0.5).criterion(signal(2, states=nothing(3), gates=logits(0.2, 0.5, 0.9)))
    assert found.item() == pytest.approx(0.6)


def test_hazards_are_compared_one_by_one() -> None:
    # the CDF passes 0.5 at depth 2, no hazard does before depth 3
    assert gate_exit(HazardThreshold(0.5), 0.3, 0.4, 0.5, 0.1) == 3
    assert gate_exit(QExit(0.5), 0.3, 0.4, 0.5, 0.1) == 2
    assert HazardThreshold(0.5).criterion(signal(1, states=nothing(2), gates=logits(0.3, 0.4))).item() == pytest.approx(
        0.3
    )


@pytest.mark.parametrize("rule", [QExit(1.0), HazardThreshold(1.0), QExit(1e-9), HazardThreshold(1e-9)])
def test_gates_that_are_sure(rule: ExitRule) -> None:
    assert gate_exit(rule, 0.0, 1.0, 0.0) == 2
    assert gate_exit(rule, 0.0, 0.0, 0.0) == 3
    assert gate_exit(rule, 1.0, 1.0, 1.0) == 1


def test_thresholds_of_one_leave_a_gate_that_is_almost_sure_running() -> None:
    gates = torch.full((1, 4), 30.0)  # σ rounds to 1 in float32
    for rule in (QExit(1.0), HazardThreshold(1.0)):
        assert int(exits(rule, nothing(4), gates=gates)) == 4


def test_act_on_the_worked_example() -> None:
    # sums 0.3, 0.8, 1.2: the third reaches 0.99, and gets what is left
    assert gate_exit(ACT(0.01), 0.3, 0.5, 0.4, 0.9) == 3
    weights, depth = act_weights(torch.tensor([0.3, 0.5, 0.4, 0.9]), 0.01)
    assert torch.allclose(weights, torch.tensor([0.3, 0.5, 0.2, 0.0])) and int(depth) == 3
    # the last loop takes the remainder, and 1 − ε itself is enough
    weights, depth = act_weights(torch.tensor([0.1, 0.1, 0.1]))
    assert torch.allclose(weights, torch.tensor([0.1, 0.1, 0.8])) and int(depth) == 3
    assert act_weights(torch.tensor([0.75, 0.25, 0.5]), 0.25)[1] == 1
    # mass used up before the least depth
    weights, depth = act_weights(torch.tensor([0.9, 0.9, 0.9, 0.9]), min_depth=3)
    assert torch.allclose(weights, torch.tensor([0.9, 0.1, 0.0, 0.0])) and int(depth) == 3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.integers(1, U))
def test_act_loop_by_loop_equals_its_closed_form_and_sums_to_one(seed: int, epsilon: float, least: int) -> None:
    gates = 2 * torch.randn(N, U, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    rule = ACT(epsilon, min_depth=least)
    expected, depths = act_weights(gates.sigmoid(), epsilon, least)
    assert torch.equal(exits(rule, nothing(U, N), gates=gates), depths)
    weights = []
    for d in range(1, U + 1):
        seen = signal(d, states=nothing(U, N), gates=gates)
        weights.append(rule.weight(seen, depths == d).masked_fill(d > depths, 0.0))
    assert torch.allclose(torch.stack(weights, 1), expected, atol=1e-12)
    assert torch.allclose(expected.sum(-1), torch.ones(N, dtype=torch.float64)) and bool((expected >= 0).all())


def test_relative_l2_on_a_worked_example() -> None:
    # steps of 3, 1, 0.1 along one axis: 3/4, 1/5, 0.1/5.1
    states = torch.tensor([[1.0, 4.0, 5.0, 5.1, 5.1]])[..., None]
    assert [int(exits(RelativeL2(t), states)) for t in (0.8, 0.75, 0.3, 0.1, 0.01)] == [2, 3, 3, 4, 5]
    assert RelativeL2().criterion(signal(3, states=states)).item() == pytest.approx(0.2)
    assert RelativeL2().criterion(signal(1, states=states)).item() == math.inf


def test_second_order_on_a_worked_example() -> None:
    # steps 2, 2, 1, so that their change is 0 at depth 3; then (5 − 6) is −1 − 1
    states = torch.tensor([[1.0, 3.0, 5.0, 6.0, 5.0]])[..., None]
    rule = SecondOrder(0.1)
    assert [rule.criterion(signal(d, states=states)).item() for d in (1, 2)] == [math.inf] * 2
    found = [rule.criterion(signal(d, states=states)).item() for d in (3, 4, 5)]
    assert found == pytest.approx([0.0, 1 / 6, 2 / 5])
    assert int(exits(rule, states)) == 3


def test_states_that_are_zero_or_half_precision_are_compared_all_the_same() -> None:
    zero = torch.zeros(1, 4, 2)
    assert int(exits(RelativeL2(0.03), zero)) == 2 and int(exits(SecondOrder(0.03), zero)) == 3
    large = torch.tensor([[300.0, 301.0, 301.0]], dtype=torch.float16)[..., None].expand(1, 3, 64)  # squares overflow
    assert RelativeL2().criterion(signal(2, states=large)).item() == pytest.approx(1 / 301)


def probabilities(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor([rows]).log()  # [1, U, V]


def test_rules_on_outputs_on_a_worked_example() -> None:
    outputs = probabilities((0.5, 0.5), (0.9, 0.1), (0.91, 0.09))
    seen = [signal(d, states=nothing(3), outputs=outputs) for d in (1, 2, 3)]
    kl = [0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)]
    kl.append(0.9 * math.log(0.9 / 0.91) + 0.1 * math.log(0.1 / 0.09))
    assert [OutputKL().criterion(s).item() for s in seen] == pytest.approx([math.inf, *kl], rel=1e-4)
    entropies = [-sum(p * math.log(p) for p in row) for row in ((0.5, 0.5), (0.9, 0.1), (0.91, 0.09))]
    assert [OutputEntropy(0.5).criterion(s).item() for s in seen] == pytest.approx(entropies)
    changes = [math.inf, entropies[0] - entropies[1], entropies[1] - entropies[2]]
    assert [EntropyChange().criterion(s).item() for s in seen] == pytest.approx(changes, rel=1e-4)
    assert [Confidence(0.9).criterion(s).item() for s in seen] == pytest.approx([0.5, 0.9, 0.91])

    def leaves(rule: ExitRule) -> int:
        return int(exits(rule, nothing(3), outputs=outputs))

    assert [leaves(OutputKL(t)) for t in (1.0, 0.1, 5e-4)] == [2, 3, 3]
    assert [leaves(OutputEntropy(t)) for t in (1.0, 0.5, 0.31)] == [1, 2, 3]
    assert [leaves(EntropyChange(t)) for t in (0.5, 0.1)] == [2, 3]
    assert [leaves(Confidence(t)) for t in (0.4, 0.6, 0.95)] == [1, 2, 3]


def test_outputs_that_exclude_words_are_compared_all_the_same() -> None:
    outputs = torch.tensor([[[0.0, 0.0, -math.inf]] * 3])
    assert int(exits(OutputKL(1e-6), nothing(3), outputs=outputs)) == 2
    assert OutputEntropy(1.0).criterion(signal(1, states=nothing(3), outputs=outputs)).item() == pytest.approx(
        math.log(2)
    )


def test_planned_rules() -> None:
    assert exits(FullDepth(), STATES).tolist() == [U] * N
    assert exits(FixedDepth(2), STATES).tolist() == [2] * N
    assert torch.equal(exits(GivenExits(GIVEN), STATES), GIVEN)
    assert torch.equal(exits(Replay(), STATES, given=GIVEN), GIVEN)
    drawn = exits(RandomExit((0.5, 0.0, 0.3, 0.2)), nothing(4, 4), uniform=torch.tensor([0.01, 0.49, 0.5, 0.99]))
    assert drawn.tolist() == [1, 1, 3, 4]


def test_random_exits_have_their_distribution() -> None:
    n, p = 20_000, (0.4, 0.3, 0.2, 0.1)
    uniform = uniforms(5, torch.arange(n), Purpose.EXIT)
    share = torch.bincount(exits(RandomExit(p), nothing(4, n), uniform=uniform), minlength=5)[1:] / n
    assert torch.allclose(share, torch.tensor(p), atol=4 * 0.5 / math.sqrt(n))
    least = torch.bincount(exits(RandomExit(p, min_depth=3), nothing(4, n), uniform=uniform), minlength=5)[1:] / n
    assert torch.allclose(least, torch.tensor((0.0, 0.0, 0.9, 0.1)), atol=4 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize("least", [1, 2])
def test_sampled_exits_follow_the_stopping_distribution(least: int) -> None:
    n, lambdas = 20_000, torch.tensor([0.2, 0.5, 0.3, 0.9])
    uniform = uniforms(torch.arange(n), 17, Purpose.EXIT)
    gates = torch.logit(lambdas).expand(n, 4)
    share = torch.bincount(exits(SampledExit(least), nothing(4, n), gates=gates, uniform=uniform), minlength=5)[1:] / n
    lambdas[: least - 1] = 0.0
    assert torch.allclose(share, stopping_distribution(lambdas), atol=4 * 0.5 / math.sqrt(n))


def test_sampled_exits_at_sure_gates() -> None:
    assert int(exits(SampledExit(), nothing(3), gates=logits(0.0, 1.0, 0.0), uniform=torch.tensor([1 - 2.0**-53]))) == 2
    assert int(exits(SampledExit(), nothing(3), gates=logits(0.0, 0.0, 0.0), uniform=torch.tensor([2.0**-53]))) == 3


RULES: list[ExitRule] = [
    QExit(0.5, 2), HazardThreshold(0.6), SampledExit(2), ACT(0.2, 2), RelativeL2(0.4), RelativeL2(0.4, 4),
    SecondOrder(0.6), OutputKL(0.3), OutputEntropy(1.5, 2), EntropyChange(0.2), Confidence(0.4), FullDepth(),
    FixedDepth(3), GivenExits(GIVEN), Replay(), RandomExit((0.2,) * 5, 2),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rows_at_mixed_depths_answer_as_rows_at_one(rule: ExitRule) -> None:
    assert isinstance(rule, ExitRule) and rule.horizon == 0
    at = torch.randint(1, U + 1, (N,), generator=torch.Generator().manual_seed(3))
    mixed = signal(at, **EVERYTHING)  # pyright: ignore[reportArgumentType]
    answer, compared = rule(mixed), rule.criterion(mixed)
    assert answer.dtype == torch.bool and compared.is_floating_point() and compared.shape == answer.shape == (N,)
    assert not bool(compared.isnan().any())
    some = False  # the example is not an empty one
    for d in range(1, U + 1):
        one = signal(d, **EVERYTHING)  # pyright: ignore[reportArgumentType]
        assert torch.equal(answer[at == d], rule(one)[at == d])
        assert torch.equal(compared[at == d].double(), rule.criterion(one)[at == d].double())
        some = some or bool(rule(one).any())
    assert some
    assert int(exits(rule, **EVERYTHING).min()) >= rule.least_depth()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: QExit(0.01, a, b), lambda a, b: HazardThreshold(0.01, a, b), lambda a, b: ACT(1.0, a, b),
        lambda a, b: SampledExit(a, None, b), lambda a, b: RelativeL2(1e9, a, b), lambda a, b: SecondOrder(1e9, a, b),
        lambda a, b: OutputKL(1e9, a, b), lambda a, b: OutputEntropy(1e9, a, b), lambda a, b: Confidence(1e-9, a, b),
        lambda a, b: EntropyChange(1e9, a, b), lambda a, b: RandomExit((1.0, 0.0, 0.0, 0.0, 0.0), a, b),
    ],
)  # fmt: skip
def test_least_depths_of_prompt_and_decode_tokens_apart(make: Callable[[int, int | None], ExitRule]) -> None:
    eager = {**EVERYTHING, "gates": torch.full((N, U), 40.0)}  # every criterion is met at once
    prompt = torch.arange(N) % 3 == 0
    rule = make(4, 2)
    assert (rule.least_depth(), rule.least_depth(prompt=True)) == (4, max(2, rule.first_depth))
    left = exits(rule, **eager, is_prompt=prompt)  # pyright: ignore[reportArgumentType]
    assert set(left[~prompt].tolist()) == {4} and set(left[prompt].tolist()) == {rule.least_depth(prompt=True)}
    for mark, depth in ((None, 4), (False, 4), (True, rule.least_depth(prompt=True))):
        assert set(exits(rule, **eager, is_prompt=mark).tolist()) == {depth}  # pyright: ignore[reportArgumentType]
    assert set(exits(make(5, None), **eager, is_prompt=True).tolist()) == {5}  # pyright: ignore[reportArgumentType]
    for impossible in (make(6, None), make(1, 6)):
        with pytest.raises(UserError, match="least depth is 6"):
            impossible.check(U)
    with pytest.raises(UserError, match="min_depth_prompt"):
        make(1, 0)


THRESHOLDS: list[tuple[Callable[[float], ExitRule], int]] = [
    (QExit, 1), (HazardThreshold, 1), (Confidence, 1), (RelativeL2, -1), (SecondOrder, -1), (OutputKL, -1),
    (OutputEntropy, -1), (EntropyChange, -1), (ACT, -1),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(THRESHOLDS), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0))
def test_a_stricter_threshold_never_lets_a_token_leave_earlier(
    kind: tuple[Callable[[float], ExitRule], int], a: float, b: float
) -> None:
    make, sign = kind
    lax, strict = sorted((a, b), key=lambda x: sign * x)
    early, late = (exits(make(x), **EVERYTHING) for x in (lax, strict))  # pyright: ignore[reportArgumentType]
    assert bool((early <= late).all())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 1.0), st.integers(1, U))
def test_loop_by_loop_equals_the_closed_form(seed: int, q: float, least: int) -> None:
    gates = 2 * torch.randn(N, U, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(
        exits(QExit(q, least), nothing(U, N), gates=gates), q_exit(gate_logits=gates, q=q, min_depth=least)
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: QExit(1.1), "quantile"),
        (lambda: HazardThreshold(0.0), "hazard"),
        (lambda: HazardThreshold(1.5), "hazard"),
        (lambda: ACT(-0.1), "act"),
        (lambda: RelativeL2(0.0), "l2"),
        (lambda: SecondOrder(-1.0), "second"),
        (lambda: OutputKL(math.nan), "kl"),
        (lambda: OutputEntropy(0.0), "entropy"),
        (lambda: Confidence(2.0), "confidence"),
        (lambda: RandomExit(()), "random"),
        (lambda: RandomExit((0.5, 0.4)), "sum to 0.9"),
        (lambda: RandomExit((1.5, -0.5)), "random"),
        (lambda: RandomExit((0.5, 0.5)).check(3), "2 probabilities and 3 loops"),
        (lambda: RandomExit((0.5, 0.5)).met(signal(1, states=nothing(2))), "exit_seed"),
    ],
)
def test_impossible_rules_are_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        make()
