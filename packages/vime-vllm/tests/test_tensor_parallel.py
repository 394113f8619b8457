"""Two tensor parallel ranks hold shards; the digests are of the whole tensors, the same as of one rank's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from torch import Tensor

from vime_core.backends import RolloutContext
from vime_core.errors import ContractViolation
from vime_core.loop.weights import require_equal_weights
from vime_core.record.digest import digest_tensors
from vime_core.types import SampleRequest
from vime_vllm.options import VllmOptions
from vime_vllm.rollout import VllmRollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_two_ranks(
    make_context: Callable[..., RolloutContext],
    opened: Callable[[RolloutContext], AbstractContextManager[VllmRollout]],
    make_requests: Callable[..., list[SampleRequest]],
    model_directory: Path,
    weights: dict[str, Tensor],
) -> None:
    options = VllmOptions(kv_cache_gib=0.25, tensor_parallel_size=2)
    with opened(make_context(options, directory=model_directory)) as rollout:
        assert [report.rank for report in rollout.processes()] == [0, 0, 1]
        require_equal_weights(digest_tensors(weights.items()), rollout.weight_digests(), 0)
        new = {name: tensor * 2 for name, tensor in weights.items()}
        require_equal_weights(digest_tensors(new.items()), rollout.update_weights(iter(new.items()), 1), 1)
        assert {c.weight_version for c in rollout.generate(make_requests())} == {1}
        rollout.call("vime_vllm.testing:keep_out_on_rank", 1, "model.layers.0.mlp.up_proj.weight")
        held = rollout.update_weights(iter(weights.items()), 2)
        with pytest.raises(ContractViolation, match="up_proj"):
            require_equal_weights(digest_tensors(weights.items()), held, 2)
