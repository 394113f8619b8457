"""The rollout ``vllm``: requests to completions in order, weights in with digests out, reports read back."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch

from vime_core.backends import NamedTensors, RolloutContext
from vime_core.errors import BackendError, ConfigError, ContractViolation, PolicyError
from vime_core.types import Completion, ProcessReport, SampleRequest
from vime_vllm import compat
from vime_vllm.aligned.arguments import aligned_environment, prepare, side_environment
from vime_vllm.arguments import engine_arguments, policy_flags, uses_compiler
from vime_vllm.client import EngineClient
from vime_vllm.engine_log import EngineLog
from vime_vllm.environment import engine_environment, removed_variables
from vime_vllm.gpus import VISIBLE, visible_order
from vime_vllm.memory import CudaBucket
from vime_vllm.options import VllmOptions
from vime_vllm.prefix_witness import PrefixWitness
from vime_vllm.reports import process_reports, require_effective
from vime_vllm.sampling import check_requests, completion, sampling_params, served, unusable
from vime_vllm.sender import TensorForm, send_weights
from vime_vllm.wire import Chunk

_RESET_ATTEMPTS: Final = 400
_RESET_PAUSE_S: Final = 0.005


def open_rollout(context: RolloutContext) -> VllmRollout:
    """Start a vLLM engine with the weights of the context's model directory, as weight version 0.

    Raises:
        PluginError: vLLM is not installed.
        PolicyError: its version, the environment or an option cannot keep the policy, or the engine did not take it.
        ConfigError: an option contradicts another one or what the engine needs.
        BackendError: the engine did not start.
    """
    compat.require_vllm()
    log = EngineLog(context.config.run.output, context.engine)
    try:
        return _start(context, cast("VllmOptions", context.options), policy_flags(context.policy), log)
    except (ConfigError, PolicyError):
        log.remove()
        raise


def _start(context: RolloutContext, options: VllmOptions, flags: dict[str, bool], log: EngineLog) -> VllmRollout:
    config, policy = context.config, context.policy
    cpu = compat.is_cpu()
    arguments = engine_arguments(context, options, flags, cpu=cpu, known=compat.argument_names())
    compiler = context.alignment is None and uses_compiler(options, cpu=cpu)
    environment = engine_environment(config, policy, compiler=compiler, owner=os.getpid())
    if context.alignment is not None:
        environment |= aligned_environment(context.alignment, cpu=cpu)
        prepare(context.alignment, context.model_directory)
        environment |= side_environment(context.alignment)
    if options.gpus:
        environment[VISIBLE] = visible_order(options.gpus, os.environ.get(VISIBLE), torch.cuda.device_count())
    removed = removed_variables(config, policy, environment)
    engine = EngineClient(arguments, environment, removed, config.rollout.timeout_s, log)
    try:
        rollout = _rollout_class(context)(engine, context, options, flags)
        require_effective(rollout.processes(), arguments)
    except BaseException:
        engine.close()
        raise
    return rollout


def _rollout_class(context: RolloutContext) -> type[VllmRollout]:
    if context.alignment is None:
        return VllmRollout
    from vime_vllm.aligned.rollout import AlignedVllmRollout

    return AlignedVllmRollout


class VllmRollout:
    """One vLLM engine. See `vime_core.backends.Rollout` for what each method promises.

    Args:
        engine: the running engine, with weight version 0.
        context: what it was started from.
        options: the context's options.
        flags: the policy's switches.
    """

    def __init__(
        self, engine: EngineClient, context: RolloutContext, options: VllmOptions, flags: Mapping[str, bool]
    ) -> None:
        self.engine = engine
        self._options = options
        self._context_length = context.config.rollout.context_length
        self._paused_admission = flags.get("paused_admission", False)
        self._drops_prefix_cache = self._paused_admission
        self._version: int | None = 0
        self._bucket = CudaBucket(options.tensor_parallel_size)
        forms: dict[str, list[Any]] = engine.agreed("vime_weight_forms")
        self._forms = {name: TensorForm(dtype, tuple(shape)) for name, (dtype, shape) in forms.items()}
        self._buffers: dict[str, str] = engine.agreed("vime_buffer_digests")
        engine.call("set_weight_version", lambda: compat.set_weight_version(engine.llm, 0))
        self._stop_ids: list[int] = engine.call("start", lambda: compat.stop_token_ids(engine.llm))
        self._reports = process_reports(engine, self._stop_ids)
        self._witness = PrefixWitness(self._setting("block_size"))

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Generate every request; completions in the order of the requests.

        The log-probs are of the distribution that was sampled from: after temperature, top-k and top-p. At
        temperature 0 vLLM takes the most likely token and reports its log-prob at temperature 1. A response ends
        with a token of ``stop_token_ids``, of the tokenizer's or of generation_config.json's (which is part of the
        response), or at ``max_tokens``, or where the context is full.

        Under the policy's ``paused_admission`` the prefix cache is dropped first and all requests are queued before
        the first is scheduled, so that the result is a function of weights and requests alone.

        Raises:
            BackendError: the engine died, did not answer in time, or answered something unusable.
            ContractViolation: it holds another weight version than the last update's, or used a stale cache.
            DataError: a prompt is empty or fills the context.
        """
        version = self._require_version("generate")
        check_requests(requests, self._context_length)
        if not requests:
            return []
        outputs = self.engine.call("generate", lambda: self._run(requests))
        self._require_held(version)
        self._witness.check([served(output) for output in outputs])
        return [
            completion(r, output, version, kept=self._wants_kept(r))
            for r, output in zip(requests, outputs, strict=True)
        ]

    def update_weights(self, weights: NamedTensors, version: int) -> Mapping[str, str]:
        """Send the weights, reset the prefix cache, and read digests back, in the order in which they were sent.

        After a failure the rollout has no version and generates no more.

        Raises:
            BackendError: the engine died or did not answer in time.
            ContractViolation: names, dtypes or shapes are not the engine's; it did not take the version; a buffer
                that no update may touch has changed; a derived tensor belongs to other weights.
        """
        self._require_version("update_weights")
        self._version = None
        order: list[str] = []
        held = self._transfer(_noting(weights, order), version)
        self._reset_prefix_cache()
        if held["version"] != version:
            raise _wrong_version(held["version"], version)
        self.engine.call("set_weight_version", lambda: compat.set_weight_version(self.engine.llm, version))
        self._check_buffers(held["buffers"], version)
        _require_fresh(held["stale"])
        self._version = version
        digests: dict[str, str] = held["weights"]
        return {name: digests[name] for name in order}

    def weight_digests(self) -> Mapping[str, str]:
        """Digest of each tensor that kernels read now, computed in the engine's processes, by HF name.

        Raises:
            ContractViolation: a tensor that is derived from weights (a quantised copy, an absorbed weight) belongs to
                other weights.
        """
        self._require_version("weight_digests")
        held = self.engine.agreed("vime_held")
        _require_fresh(held["stale"])
        digests: dict[str, str] = held["weights"]
        return digests

    def processes(self) -> list[ProcessReport]:
        """One report a process of the engine, as it was read back after the start."""
        return list(self._reports)

    def call(self, target: str, *args: Any) -> list[Any]:
        """Call an installed ``"module:function"`` as ``function(worker, *args)`` in each worker; plain data only."""
        return self.engine.on_workers("vime_call", target, *args)

    def close(self) -> None:
        """End the engine's processes. Idempotent."""
        self.engine.close()
        self._bucket.release()

    def _run(self, requests: Sequence[SampleRequest]) -> list[Any]:
        llm = self.engine.llm
        if self._drops_prefix_cache:
            self._drop_prefix_cache()
        if self._paused_admission:
            compat.pause_scheduler(llm)
        for request in requests:
            compat.enqueue(llm, request.prompt_tokens, sampling_params(request, kept=self._wants_kept(request)))
        if self._paused_admission:
            compat.resume_scheduler(llm)
        outputs = compat.wait_for_all(llm)
        if [tuple(output.prompt_token_ids) for output in outputs] != [r.prompt_tokens for r in requests]:
            raise unusable(f"{len(outputs)} answers do not match {len(requests)} requests")
        return outputs

    def _wants_kept(self, request: SampleRequest) -> bool:
        """Whether the engine is asked which tokens a request could choose from; vLLM's own sampler cannot say."""
        del request
        return False

    def _transfer(self, weights: NamedTensors, version: int) -> Mapping[str, Any]:
        """Send the weights; what the workers say after the last chunk that they hold."""
        held: dict[str, Any] = {}

        def deliver(chunk: Chunk) -> None:
            held.update(self.engine.agreed("vime_update_weights", chunk.fields()))

        send_weights(weights, version, self._forms, deliver, self._bucket)
        return held

    def _reset_prefix_cache(self) -> None:
        self.engine.call("reset_prefix_cache", self._drop_prefix_cache)

    def _drop_prefix_cache(self) -> None:
        for _ in range(_RESET_ATTEMPTS):
            if self.engine.llm.reset_prefix_cache():
                self._witness.reset()
                return
            # An engine that schedules ahead holds the blocks of finished requests for one more step.
            time.sleep(_RESET_PAUSE_S)
        raise unusable("the prefix cache could not be reset, because requests still hold it")

    def _check_buffers(self, now: Mapping[str, str], version: int) -> None:
        if changed := [name for name in {**self._buffers, **now} if self._buffers.get(name) != now.get(name)]:
            raise ContractViolation(
                f"the update to weight version {version} changed {changed[0]!r}, which is no weight"
                f" ({len(changed)} such tensors)",
                remedy="The engine damages this model while it reloads weights; use another vLLM version.",
                code="VIME-ALIGN-064",
            )

    def _require_version(self, what: str) -> int:
        if self._version is None:
            raise BackendError(
                f"{what}: the engine holds no known weights since an update to it failed",
                remedy="Start the run again from its last checkpoint.",
                code="VIME-BACKEND-065",
            )
        return self._version

    def _require_held(self, version: int) -> None:
        if (held := self.engine.agreed("vime_weight_version")) != version:
            raise _wrong_version(held, version)

    def _setting(self, name: str) -> Any:
        return next(report.settings[name] for report in self._reports if name in report.settings)


def _noting(weights: NamedTensors, order: list[str]) -> NamedTensors:
    for name, tensor in weights:
        order.append(name)
        yield name, tensor


def _require_fresh(stale: Sequence[str]) -> None:
    if stale:
        raise ContractViolation(
            f"the engine's kernels read {stale[0]!r}, which is not what the weights that it holds give"
            f" ({len(stale)} such tensors)",
            remedy="An update left a derived tensor behind; the run stops before generating with it.",
            code="VIME-ALIGN-065",
        )


def _wrong_version(held: int | None, expected: int) -> ContractViolation:
    return ContractViolation(
        f"the engine holds weight version {held}, but the last update sent version {expected}",
        remedy="The engine kept an update out, or somebody else updates it; the run stops before using its samples.",
        code="VIME-ALIGN-061",
    )
