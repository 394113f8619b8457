"""What each rank of a test computes; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(rank: int, size: int, place: str, task: str, model: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=size)
    try:
        result = globals()[task](rank, size, model)
        torch.save(result, f"{place}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def choices(rank: int) -> dict[str, Any]:
    """Duplicate tokens, empty experts, every token to one expert, one token, and one rank without any route."""
    import torch

    draw = torch.Generator().manual_seed(50 + rank)
    mixed = torch.stack([torch.randperm(8, generator=draw)[:3] for _ in range(9 + 4 * rank)])
    return {
        "mixed": mixed,
        "all to one": torch.tensor([[6, 1, 0]]).expand(5, 3),
        "one token": torch.tensor([[3, 7, 2]]),
        "one side only": torch.tensor([[0, 1, 2], [2, 3, 0]]),
    }


def expert_weights() -> tuple[list[Any], list[Any]]:
    from glm5_support import normal

    first = [normal(10 + e, 192, 160, scale=0.1) for e in range(8)]
    return first, [normal(30 + e, 160, 96, scale=0.1) for e in range(8)]


def providers() -> dict[str, Any]:
    """Both providers over gloo; DeepEP's rows go through a buffer that means the same."""
    import torch.distributed as dist
    from glm5_buffer import GlooBuffer

    from vime_glm5.ranks.deep_ep import DeepEp
    from vime_glm5.ranks.providers import open_ranks

    group: Any = dist.group.WORLD
    return {"collective": open_ranks("collective", group, 8, 160), "deep_ep": DeepEp(group, 8, GlooBuffer(group))}


def experts(rank: int, size: int, model: str) -> dict[str, Any]:
    """Rows and gradients over the ranks by each provider, and those of one rank that holds every expert."""
    import torch
    import torch.distributed as dist
    from glm5_support import normal

    from vime_glm5.numerics import GLM5_V1, load_operations
    from vime_glm5.ranks.experts import run_experts_over_ranks, share

    assert not model
    ops = load_operations(GLM5_V1, "cpu")
    first, second = expert_weights()
    found: dict[str, Any] = {}
    for name, choice in choices(rank).items():
        x = normal(70 + rank, len(choice), 160)
        x[-1] = x[0]
        weights = normal(90 + rank, *choice.shape, dtype=torch.float32).abs()
        noise = normal(80 + rank, *choice.shape, 160)
        results = {}
        for provider, ranks in (*providers().items(), ("alone", None)):
            leaf = x.clone().requires_grad_()
            held = [ws if ranks is None else share(ranks, ws) for ws in (first, second)]
            mine = [[w.clone().requires_grad_() for w in ws] for ws in held]
            if ranks is None:
                rows = ops.run_experts(leaf, choice, *mine)
            else:
                rows = run_experts_over_ranks(ops, ranks, leaf, choice, weights, *mine)
            rows.backward(noise)
            results[provider] = (rows.detach(), leaf.grad, [w.grad for ws in mine for w in ws])
        found[name] = (choice, results)
    assert size == dist.get_world_size()
    assert torch.is_grad_enabled()
    return found


def refused(rank: int, size: int, model: str) -> dict[str, str]:
    """What DeepEP's provider says of a buffer that brings other routes, and every provider of an uneven share."""
    import torch.distributed as dist
    from glm5_buffer import GlooBuffer
    from glm5_support import normal

    from vime_core.errors import VimeError
    from vime_glm5.ranks.deep_ep import DeepEp
    from vime_glm5.ranks.providers import open_ranks

    group: Any = dist.group.WORLD
    choice = choices(rank)["mixed"]
    x, weights = normal(70 + rank, len(choice), 160), normal(1, *choice.shape).float().abs()

    def said(act: Any) -> str:
        try:
            act()
        except VimeError as error:
            return f"{error.code}: {error.message}"
        return "nothing"

    faults = model.split(",")
    assert size == 2
    return {
        **{f: said(lambda f=f: DeepEp(group, 8, GlooBuffer(group, f)).dispatch(x, choice, weights)) for f in faults},
        "uneven, collective": said(lambda: open_ranks("collective", group, 7, 160)),
        "uneven, deep_ep": said(lambda: DeepEp(group, 7, GlooBuffer(group))),
    }


def whole_model(rank: int, size: int, model: str) -> Any:
    """Log-probs of this rank's sequence with experts over the ranks, and with all of them here."""
    import json

    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from vime_core.numerics import rope_table
    from vime_glm5.numerics import GLM5_V1, load_operations
    from vime_glm5.ranks.experts import run_experts_over_ranks
    from vime_glm5.ranks.providers import open_ranks
    from vime_glm5.reference import Glm5Reference, forced
    from vime_glm5.structure import read_shape, rope_theta

    config = json.loads((Path(model) / "config.json").read_text())
    shape, ops = read_shape(config), load_operations(GLM5_V1, "cpu")
    weights, ranks = (
        load_file(Path(model) / "model.safetensors"),
        open_ranks("collective", dist.group.WORLD, shape.experts, shape.hidden),
    )

    class OverRanks(Glm5Reference):
        def _experts(self, at: str, x: Any, choice: Any) -> Any:
            names = [f"{at}experts.{expert}." for expert in ranks.held]
            first = [torch.cat([weights[f"{n}gate_proj.weight"], weights[f"{n}up_proj.weight"]]) for n in names]
            second = [weights[f"{n}down_proj.weight"] for n in names]
            rows = run_experts_over_ranks(ops, ranks, x.value, choice, torch.ones(choice.shape), first, second)
            return forced(rows, rows.double())

    table = rope_table(shape.positions, shape.rotary, rope_theta(config))
    tokens = torch.randint(3, 500, (30 + 13 * rank,), generator=torch.Generator().manual_seed(rank))
    found = []
    with torch.no_grad():
        for kind in (OverRanks, Glm5Reference):
            logits = kind(ops, shape, weights, table, torch.float64)(tokens[None, :-1]).logits[0].bfloat16()
            found.append(ops.token_log_probs(logits, tokens[1:]))
    assert size == 2
    return found
