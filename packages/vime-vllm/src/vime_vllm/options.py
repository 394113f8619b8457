"""The table ``[rollout.vllm]``: what a user may say about the engine. No vLLM here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from vime_core.plugins.types import Options

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DECIDED_ELSEWHERE: Final[Mapping[str, str]] = {
    "model": "the [model] section",
    "tokenizer": "the [model] section",
    "skip_tokenizer_init": "nobody: the tokenizer says which token ends a response",
    "dtype": "trainer.dtype, because both sides hold the same bits",
    "seed": "run.seed",
    "max_model_len": "rollout.context_length",
    "max_num_seqs": "rollout.vllm.max_num_seqs",
    "max_num_batched_tokens": "rollout.vllm.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_gib",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_prefix_caching": "rollout.vllm.enable_prefix_caching",
    "attention_backend": "rollout.vllm.attention_backend",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "logprobs_mode": "vime: log-probs are of the distribution that was sampled from",
    "worker_cls": "vime: its worker keeps the weights that kernels read visible",
    "worker_extension_cls": "vime: its worker extension reads weights and settings back",
    "weight_transfer_config": "vime: weights arrive through its transfer engine",
    "distributed_executor_backend": "vime: the engine runs on this machine, in processes that vime watches",
    "pipeline_parallel_size": "nobody: a pipeline is not supported",
    "data_parallel_size": "nobody: use several engines instead of data parallelism inside one",
    "speculative_config": "nobody: a draft model's weights would be neither updated nor checked",
    "disable_log_stats": "vime",
}
"""Engine arguments that ``engine_args`` may not hold, and who decides them."""


class VllmOptions(Options):
    """Options of the vLLM engine; everything else goes through ``engine_args``."""

    max_num_seqs: PositiveInt = Field(64, description="Most sequences in one engine step.")
    max_num_batched_tokens: PositiveInt | None = Field(
        None, description="Most tokens in one engine step; None: vLLM's own, and on a CPU enough for a whole context."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of a GPU's memory that the engine may take; without meaning where kv_cache_gib is set."
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None, description="Size of the KV cache; None: 2 GiB on a CPU, what fits on a GPU."
    )
    enforce_eager: bool | None = Field(
        None, description="No graphs, no compiler; None: eager on a CPU, CUDA graphs of decode steps on a GPU."
    )
    enable_prefix_caching: bool = True
    attention_backend: str | None = Field(None, description="Such as FLASH_ATTN or TRITON_ATTN; None: vLLM chooses.")
    tensor_parallel_size: PositiveInt = 1
    gpus: tuple[NonNegativeInt, ...] = Field(
        (),
        description="GPUs of the engine, one a tensor parallel rank, by their numbers among the visible ones; the"
        " inline launcher's trainer has number 0. Empty: from 0 on, so beside the trainer.",
    )
    engine_args: Mapping[str, JsonValue] = Field(
        default_factory=dict[str, JsonValue], description="More of vLLM's EngineArgs, by their own names."
    )

    @property
    def ranks(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel_size

    @model_validator(mode="after")
    def _one_gpu_a_rank(self) -> Self:
        if self.gpus and (len(set(self.gpus)), len(self.gpus)) != (self.tensor_parallel_size,) * 2:
            raise ValueError(
                f"gpus = {list(self.gpus)} must name {self.tensor_parallel_size} different GPUs, as"
                " tensor_parallel_size says"
            )
        return self

    @field_validator("engine_args")
    @classmethod
    def _leaves_the_rest_alone(cls, value: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        for name in value:
            if name in DECIDED_ELSEWHERE:
                raise ValueError(f"engine_args may not hold {name!r}: it is decided by {DECIDED_ELSEWHERE[name]}")
        return value
