"""Router, experts and combine: choices, slot order, empty experts, duplicate tokens, one token; their gradients."""

from __future__ import annotations

import pytest
import torch
from glm5_support import assert_same, check_gradients, check_rows, gradients, normal, unequal

from vime_glm5.numerics import Glm5Operations
from vime_glm5.numerics.experts import one_expert, over_slots

E, H, F, K = 8, 160, 96, 3


def test_router_against_fp64(every: Glm5Operations) -> None:
    x, w, bias = normal(0, 40, H), normal(1, E, H, scale=0.1), normal(2, E, scale=0.1, dtype=torch.float32)
    experts, weights = every.route(x, w, bias, K)
    scores = (x.double() @ w.double().T).sigmoid()
    wanted = (scores + bias).topk(K, -1).indices
    assert experts.tolist() == wanted.tolist()
    chosen = scores.gather(1, wanted)
    assert (weights - chosen / chosen.sum(1, keepdim=True)).abs().max() < 1e-6


def test_ties_of_experts_go_to_the_first(every: Glm5Operations) -> None:
    w = normal(1, E, H, scale=0.1)
    w[3] = w[6] = w[1]
    x = normal(0, 40, H)
    experts, _ = every.route(x, w, torch.zeros(E), E)
    places = [[row.index(e) for e in (1, 3, 6)] for row in experts.tolist()]
    assert all(a + 1 == b == c - 1 for a, b, c in places)
    assert unequal(every.route(x, w, torch.zeros(E), E)[1], every.route(x, w.flip(0), torch.zeros(E), E)[1]) == 0


def test_the_bias_chooses_and_does_not_weigh(ops: Glm5Operations) -> None:
    x, w = normal(0, 40, H), normal(1, E, H, scale=0.1)
    bias = torch.zeros(E)
    bias[5] = 10.0
    experts, weights = ops.route(x, w, bias, K)
    assert (experts[:, 0] == 5).all()
    assert (weights < 0.9).all()


def test_router_rows(every: Glm5Operations) -> None:
    w, bias = normal(1, E, H, scale=0.1), normal(2, E, dtype=torch.float32)
    check_rows(lambda x: every.route(x, w, bias, K)[1], normal(0, 33, H))
    check_rows(lambda x: every.route(x, w, bias, K)[0].float(), normal(0, 33, H))


def test_router_gradients(ops: Glm5Operations) -> None:
    x, w = normal(3, 20, H, dtype=torch.float32), normal(4, E, H, scale=0.1, dtype=torch.float32)
    bias = normal(5, E, dtype=torch.float32)
    experts, _ = ops.route(x, w, bias, K)

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        chosen = (x @ w.T).sigmoid().gather(1, experts)
        return chosen / (chosen.sum(1, keepdim=True) + 1e-20)

    check_gradients(lambda x, w: ops.route(x, w, bias, K)[1], exact, [x, w], 1e-5)


def _weights(dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    first = [normal(10 + e, 2 * F, H, scale=0.1, dtype=dtype) for e in range(E)]
    return first, [normal(30 + e, H, F, scale=0.1, dtype=dtype) for e in range(E)]


CHOICES = {
    "mixed": torch.tensor([[0, 3, 5], [5, 0, 1], [7, 5, 0], [0, 3, 5]]),
    "all to one": torch.tensor([[2, 4, 6]] * 5),
    "one token": torch.tensor([[6, 1, 0]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_route_is_its_expert_alone(name: str, every: Glm5Operations) -> None:
    """Empty experts, every token to one expert, one token, duplicate tokens."""
    choice, (first, second) = CHOICES[name], _weights()
    x = normal(6, len(choice), H)
    x[-1] = x[0]
    rows = every.run_experts(x, choice, first, second)
    for token, slots in enumerate(choice.tolist()):
        for slot, expert in enumerate(slots):
            assert_same(rows[token, slot], one_expert(every, x[token : token + 1], first[expert], second[expert])[0])
    quantised = [[every.quantise_weight(w, n) for w in weights] for n, weights in ((2, first), (1, second))]
    assert_same(every.run_experts(x, choice, *quantised), rows)


def _expert_exact(choice: torch.Tensor):
    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, slots in enumerate(choice.tolist()):
            for expert in slots:
                gate, up = (weights[expert] @ x[token]).chunk(2)
                rows.append(weights[E + expert] @ (torch.nn.functional.silu(gate) * up))
        return torch.stack(rows).view(*choice.shape, H)

    return run


def test_expert_gradients(ops: Glm5Operations) -> None:
    """Straight through: the gradient of the unquantised expert. An expert without tokens has the gradient zero."""
    choice = CHOICES["mixed"]
    first, second = _weights(torch.float32)
    x = normal(6, len(choice), H, dtype=torch.float32)

    def ours(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return ops.run_experts(x, choice, weights[:E], weights[E:])

    inputs = [x, *first, *second]
    found = gradients(ours, inputs)
    assert_same(found, gradients(ours, inputs))
    exact = gradients(_expert_exact(choice), [t.double() for t in inputs])
    for ours_, wanted in zip(found, exact, strict=True):
        assert (ours_.double() - wanted).norm() <= 1e-5 * wanted.norm()
    assert [bool(g.any()) for g in found[1 : 1 + E]] == [e in {0, 1, 3, 5, 7} for e in range(E)]


def test_grouped_gradients_are_those_of_each_expert(ops: Glm5Operations) -> None:
    choice, (first, second) = CHOICES["mixed"], _weights()
    x = normal(6, len(choice), H)

    def masked(expert: int):
        only = torch.where(choice == expert, choice, E)  # an index outside belongs to nobody
        return lambda x, *w: ops.run_experts(x, only, w[:E], w[E:])

    grouped = gradients(lambda x, *w: ops.run_experts(x, choice, w[:E], w[E:]), [x, *first, *second])
    for expert in (0, 3, 5):
        alone = gradients(masked(expert), [x, *first, *second])
        assert_same(alone[1 + expert], grouped[1 + expert])
        assert_same(alone[1 + E + expert], grouped[1 + E + expert])


def test_combine_adds_in_slot_order(every: Glm5Operations) -> None:
    rows, weights, shared = normal(7, 30, K, H), normal(8, 30, K, dtype=torch.float32).abs(), normal(9, 30, H)
    out = every.combine(rows, weights, shared, 2.5)
    exact = shared.double() + 2.5 * (rows.double() * weights.double()[..., None]).sum(1)
    assert (out.double() - exact).abs().max() < 2.0**-6 * exact.abs().max()

    def of(tokens: torch.Tensor) -> torch.Tensor:
        at = tokens.long() % 30
        return every.combine(rows[at], weights[at], shared[at], 2.5)

    check_rows(of, torch.arange(30))
    wide = [
        every.combine(r.float(), w, shared.float(), 2.5) for r, w in ((rows, weights), (rows.flip(1), weights.flip(1)))
    ]
    assert unequal(*wide) > 1000, "the order of slots shows in no bit, so the test proves nothing"
    assert unequal(every.combine(rows, weights * 2.5, shared, 2.5), out) > 3000


def test_combine_rounds_the_routed_sum_first(ops: Glm5Operations) -> None:
    rows, weights, shared = normal(7, 30, K, H), normal(8, 30, K, dtype=torch.float32).abs(), normal(9, 30, H)
    routed = ops.glm.combine(rows, weights)
    assert_same(ops.combine(rows, weights, shared, 2.5), (shared.float() + 2.5 * routed.float()).bfloat16())


def test_combine_gradients(ops: Glm5Operations) -> None:
    inputs = [normal(7, 9, K, H, dtype=torch.float32), normal(8, 9, K, dtype=torch.float32)]
    inputs.append(normal(9, 9, H, dtype=torch.float32))

    def exact(rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return shared + 2.5 * (rows * weights[..., None]).sum(1)

    check_gradients(lambda *t: ops.combine(*t, 2.5), exact, inputs, 1e-5)


def test_sum_over_slots_is_ordered() -> None:
    rows = normal(1, 20, K, H)
    total = (rows[:, 0].float() + rows[:, 1].float()) + rows[:, 2].float()
    assert_same(over_slots(rows), total.bfloat16())
