"""What the engine holds of a weight: its master, and what is derived from it once."""

from __future__ import annotations

import pytest
import torch
from glm5_support import normal
from torch import nn

from vime_glm5.numerics import Glm5Operations
from vime_glm5.vllm.modules import AbsorbedLinear, BlockLinear, derive_all


def held_bytes(module: nn.Module) -> int:
    """Bytes of parameters and derived tensors; one storage counts once."""
    derived = module.derived().values() if isinstance(module, BlockLinear | AbsorbedLinear) else ()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*module.parameters(), *derived)}
    return sum(storages.values())


@pytest.mark.parametrize(("name", "each"), [("block", 3), ("absorbed", 4)])
def test_bytes_of_an_element(name: str, each: int, ops: Glm5Operations) -> None:
    made = BlockLinear(ops, 512, 256) if name == "block" else AbsorbedLinear(ops, 512, 2, 64, 64)
    module: nn.Module = made.to(torch.bfloat16)
    elements = module.get_parameter("weight").numel()
    with torch.no_grad():
        module.get_parameter("weight").copy_(normal(0, *module.get_parameter("weight").shape))
    for _ in range(2):
        derive_all(module)
        scales = 4 * 2 * 4 if name == "block" else 0
        assert held_bytes(module) == each * elements + scales
