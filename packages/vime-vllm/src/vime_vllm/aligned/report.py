"""What an aligned worker reads back of itself: contract, provider, sampler, as plain data."""

from __future__ import annotations

from typing import Any

from torch import nn

from vime_core.alignment import KERNELS
from vime_core.numerics import Operations
from vime_vllm.aligned.census import counted
from vime_vllm.aligned.installed import installed
from vime_vllm.compat import class_path
from vime_vllm.engine_side.weights import submodules


def aligned_settings(worker: Any) -> dict[str, Any]:
    """Settings of a worker that keeps a contract.

    ``provider`` and ``provider_digest`` are those of the operations that model and sampler hold. Where they hold
    others than the contract's, that is said, and no comparison with another side succeeds.
    """
    here, runner = installed(worker.vllm_config), worker.model_runner
    held = held_operations(runner.get_model(), runner.sampler)
    return {
        "contract": here.contract.id,
        "contract_digest": here.contract.digest,
        "provider": ", ".join(sorted({operations.provider for operations in held})),
        "provider_digest": ", ".join(o.digest if o is here.operations else f"{o.digest} altered" for o in held),
        "provider_details": dict(here.operations.details),
        KERNELS: dict(here.operations.kernels.choices()),
        "side": here.side,
        "sampler": class_path(runner.sampler),
        "logits_processors": logits_processors(runner),
        "tensor_parallel_size": int(worker.vllm_config.parallel_config.tensor_parallel_size),
        "census": counted(worker),
    }


def held_operations(model: nn.Module, sampler: Any) -> list[Operations]:
    """The distinct operations objects that model, attention layers and sampler compute with."""
    modules: list[Any] = [sampler, *(module for _, module in submodules(model))]
    holders = [*modules, *(module.impl for module in modules if hasattr(module, "impl"))]
    held: list[object] = [getattr(holder, "operations", None) for holder in holders]
    return list({id(each): each for each in held if isinstance(each, Operations)}.values())


def logits_processors(runner: Any) -> list[str]:
    """Classes that may change logits before a token is drawn, beyond those of vLLM itself."""
    batch = getattr(runner, "input_batch", None)
    known = getattr(batch, "logitsprocs", None)
    processors: list[Any] = [] if known is None else list(known.all)
    processors += getattr(getattr(runner, "sampler", None), "logits_processors", [])
    paths = {class_path(processor) for processor in processors}
    return sorted(path for path in paths if not path.startswith("vllm."))
