"""One trainer rank: log-probs, train step, weights, checkpoints, on this process's device."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vime_core.alignment.taps import recording
from vime_core.backends import LossFunction, Microbatches, Ranks, StateObserver, Taps, TrainerContext
from vime_core.errors import BackendError, PolicyError
from vime_core.types import (
    Drawn,
    Float32Array,
    ProcessReport,
    SampleKey,
    SampleRequest,
    TrainSequence,
    TrainStepResult,
)
from vime_megatron.accumulate import ScoredTokens, StepTotals, score_tokens
from vime_megatron.aligned.draws import draw_again
from vime_megatron.aligned.holding import hold_contract
from vime_megatron.aligned.model import AlignedModel
from vime_megatron.aligned.recompute import recomputed_modules, recomputing
from vime_megatron.aligned.side import ExpertLayout
from vime_megatron.checkpoint import identity, load_checkpoint, save_checkpoint
from vime_megatron.cpu_bridge import backend, device
from vime_megatron.data_parallel import by_microbatch, companion, own_share
from vime_megatron.determinism import deterministic, process_settings
from vime_megatron.mapping import to_hf
from vime_megatron.model import PolicyModel, build_model
from vime_megatron.model_directory import read_model_directory
from vime_megatron.optimization import Optimization
from vime_megatron.options import MegatronOptions
from vime_megatron.packing import PackedMicrobatch, pack_microbatch
from vime_megatron.parallel import process_groups, ranks_of_process
from vime_megatron.report import process_report
from vime_megatron.sharding import refuse_indivisible, shard, whole
from vime_megatron.structures.registry import find_structure
from vime_megatron.structures.spec import of_spec

REFERENCE: Final = "reference.safetensors"
"""The reference model's weights in a checkpoint, by Megatron's names; absent where there is none."""


class TrainerRank:
    """A `vime_core.backends.Trainer`. Holds the process's groups and torch settings until `close`."""

    gives_entropy: Final = True

    def __init__(self, context: TrainerContext, options: MegatronOptions, ranks: Ranks) -> None:
        self._context = context
        self._options = options
        self._ranks = ranks
        self._temperature = context.config.sampling.temperature
        self._deterministic = deterministic(context.policy.trainer.flags)
        experts = ExpertLayout(options.expert_parallel, options.expert_dispatcher)
        self._held = hold_contract(context.alignment, options.spec, options.tensor_parallel, experts)
        self._spec = "aligned" if self._held else "te" if options.spec == "te" else "local"
        directory = read_model_directory(context.model_directory)
        structure = find_structure(directory.model_type, context.config.plugins)
        self._blueprint = of_spec(structure.blueprint(directory.config), options.spec)
        refuse_indivisible(self._blueprint, options.tensor_parallel)
        trainer = context.config.trainer
        with ExitStack() as stack:
            stack.enter_context(process_settings(deterministic=self._deterministic, threads=trainer.threads))
            stack.enter_context(process_groups(ranks, options.tensor_parallel, options.expert_parallel))
            self._model = build_model(
                directory,
                self._blueprint,
                dtype=trainer.dtype,
                context=context.config.rollout.context_length,
                tensor_parallel=options.tensor_parallel,
                deterministic=self._deterministic,
                make=PolicyModel if self._held is None else self._held.model,
            )
            recomputed_modules(self._model, options.recompute)  # refuses what cannot be recomputed
            self._contract_settings()  # refuses a model that computes outside the contract
            self._identity = identity(directory.model_type, dict(self._model.named_parameters()), trainer)
            self._optimization = Optimization(self._model, trainer)
            self._reference: dict[str, Tensor] = {}
            self._release = weakref.finalize(self, stack.pop_all().close)  # also when the interpreter ends

    def log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """See `vime_core.backends.Trainer`."""
        found: list[tuple[PackedMicrobatch, Tensor]] = []
        with torch.no_grad():
            for index in own_share(len(microbatches)):
                batch = self._pack(microbatches[index])
                found.append((batch, self._model(batch, self._temperature)))
            if (extra := companion(len(microbatches))) is not None:
                self._model(self._pack(microbatches[extra]), self._temperature)
        scored = [batch.split(values) for batch, values in found]  # only now does the host wait
        return [values for microbatch in by_microbatch(scored) for values in microbatch]

    def keep_reference(self) -> None:
        """See `vime_core.backends.ReferenceTrainer`."""
        self._reference = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    def reference_log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """See `vime_core.backends.ReferenceTrainer`.

        Raises:
            BackendError: no reference is kept.
        """
        if not self._reference:
            raise BackendError(
                "log-probs of a reference model were asked for, and none is kept",
                remedy="Call keep_reference first.",
                code="VIME-BACKEND-024",
            )
        with _held_instead(dict(self._model.named_parameters()), self._reference):
            return self.log_probs(microbatches)

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        """See `vime_core.backends.Trainer`."""
        with recomputing(self._model, self._options.recompute):
            totals = self._accumulate(microbatches, loss)
        observer.gradients(self._optimization.gradients())
        norm, learning_rate = self._optimization.step()
        self._optimization.require_finite()
        return totals.result(norm, learning_rate)

    def gradients(
        self, microbatches: Microbatches, loss: LossFunction, *, recompute: bool = False
    ) -> dict[str, Tensor]:
        """See `vime_core.backends.AlignedTrainer`.

        Args:
            microbatches: as for `train_step`.
            loss: per-token loss.
            recompute: run each layer's forward again in the backward instead of keeping what it computed.
        """
        try:
            with recomputing(self._model) if recompute else nullcontext():
                self._accumulate(microbatches, loss)
            copies = {name: gradient.clone() for name, gradient in self._optimization.gradients()}
        finally:
            self._optimization.zero_gradients()
        return self.by_hf_name(copies)

    def by_hf_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `vime_core.backends.AlignedTrainer`."""
        rules = [rule for rule in self._blueprint.rules if rule.target in tensors]
        known = {rule.target for rule in rules}
        return dict(to_hf(tensors, rules)) | {name: one for name, one in tensors.items() if name not in known}

    def record_taps(self, sequence: TrainSequence) -> Taps:
        """See `vime_core.backends.AlignedTrainer`.

        Raises:
            PolicyError: the run keeps no contract, so the model's modules have no taps.
        """
        if self._held is None:
            raise _no_contract("taps")
        with torch.no_grad(), recording() as taps:
            self._model(self._pack([sequence]), self._temperature)
        return taps.tensors()

    def draw_again(self, microbatches: Microbatches, requests: Mapping[SampleKey, SampleRequest]) -> list[Drawn]:
        """See `vime_core.backends.DrawingTrainer`.

        Raises:
            PolicyError: the run keeps no contract, so nothing says how its engine draws.
        """
        model = self._model
        if not isinstance(model, AlignedModel):
            raise _no_contract("draws")
        drawn: list[list[Drawn]] = []
        with torch.no_grad():
            for index in own_share(len(microbatches)):
                sequences = microbatches[index]
                drawn.append(draw_again(model, self._pack(sequences), [requests[s.key] for s in sequences]))
            if (extra := companion(len(microbatches))) is not None:
                model.response_logits(self._pack(microbatches[extra]))
        return [one for microbatch in by_microbatch(drawn) for one in microbatch]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `vime_core.backends.Trainer`. Tensors may be views of live weights: read them before the next step."""
        return to_hf(self._whole(), self._blueprint.rules)

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """See `vime_core.backends.Trainer`. Views of live state, named by Megatron parameter."""
        return self._optimization.state()

    def save(self, directory: Path) -> None:
        """See `vime_core.backends.Trainer`."""
        save_checkpoint(directory, self._optimization, self._identity)
        reference = self._whole(self._reference) if self._reference else {}
        if reference and self._ranks.rank == 0:
            save_file({n: t.contiguous().cpu() for n, t in reference.items()}, directory / REFERENCE)

    def load(self, directory: Path) -> None:
        """See `vime_core.backends.Trainer`."""
        load_checkpoint(directory, self._optimization, self._identity)
        if (directory / REFERENCE).is_file():
            parameters, stored = dict(self._model.named_parameters()), load_file(directory / REFERENCE)
            self._reference = {name: shard(parameters[name], t).to(device()) for name, t in stored.items()}

    def processes(self) -> list[ProcessReport]:
        """See `vime_core.backends.Trainer`."""
        settings = {
            "dtype": self._context.config.trainer.dtype,
            "spec": self._spec,
            "tensor_parallel": self._options.tensor_parallel,
            "data_parallel": self._options.data_parallel,
            "expert_parallel": self._options.expert_parallel,
            **ranks_of_process(),
            "recompute": self._options.recompute,
            "collectives": backend(),
            "deterministic_mode": self._deterministic,
            **self._contract_settings(),
        }
        return [process_report(self._ranks.rank, self._context.policy.trainer.environment, settings)]

    def close(self) -> None:
        """Give back process groups and torch settings. Further calls do nothing."""
        self._release()

    def _accumulate(self, microbatches: Microbatches, loss: LossFunction) -> StepTotals:
        """Leave the step's gradients in the buffers, summed over microbatches and ranks."""
        own, totals = list[ScoredTokens](), StepTotals()
        self._optimization.zero_gradients()
        for index in own_share(len(microbatches)):
            sequences = microbatches[index]
            batch = self._pack(sequences)
            scored: Tensor = self._optimization.model(batch, self._temperature, **_asked_of_the_model(loss))
            tokens = score_tokens(index, sequences, batch, scored, loss)
            tokens.weighted_loss.backward()
            own.append(replace(tokens, weighted_loss=tokens.weighted_loss.detach()))
        if (extra := companion(len(microbatches))) is not None:
            (self._optimization.model(self._pack(microbatches[extra]), self._temperature) * 0.0).sum().backward()
        # Only now does the host wait: until here it was ahead of a GPU, which never ran dry between microbatches.
        for tokens in by_microbatch([tokens.on_host() for tokens in own]):
            totals.add(tokens)
        self._optimization.reduce_gradients()
        _require_finite(self._optimization.gradients())
        return totals

    def _whole(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Whole tensors by Megatron's names, of ``values`` or of the weights; a collective."""
        parameters = dict(self._model.named_parameters())
        held = values if values is not None else {name: p.detach() for name, p in parameters.items()}
        if self._ranks.world_size == 1:
            return dict(held)
        return {name: whole(parameters[name], tensor) for name, tensor in held.items()}

    def _contract_settings(self) -> Mapping[str, Any]:
        return {} if self._held is None else self._held.settings(self._model)

    def _pack(self, sequences: Sequence[TrainSequence]) -> PackedMicrobatch:
        limit, vocabulary = self._context.config.rollout.context_length, self._blueprint.vocabulary
        for sequence in sequences:
            if len(sequence.tokens) > limit or max(sequence.tokens) >= vocabulary or min(sequence.tokens) < 0:
                raise BackendError(
                    f"sequence {sequence.key} has {len(sequence.tokens)} tokens with ids up to {max(sequence.tokens)};"
                    f" the trainer holds {limit} positions and a vocabulary of {vocabulary}",
                    remedy="Raise rollout.context_length, or use the tokenizer of this model.",
                    code="VIME-BACKEND-021",
                )
        return pack_microbatch(sequences, device())


def _asked_of_the_model(loss: LossFunction) -> dict[str, bool]:
    return {"entropy": True} if getattr(loss, "needs_entropy", False) else {}


def _no_contract(what: str) -> PolicyError:
    return PolicyError(
        f"{what} were asked of a trainer that keeps no contract: alignment.contract is empty",
        remedy="Set alignment.contract, such as dense/v1.",
        code="VIME-ALIGN-038",
    )


@contextmanager
def _held_instead(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Generator[None]:
    """Let parameters hold other values meanwhile; their own memory, which gradient buffers share, is not touched."""
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _require_finite(gradients: Iterator[tuple[str, Tensor]]) -> None:
    """Raise BackendError before the weights change, naming the first tensor."""
    names, tensors = zip(*gradients, strict=True)
    norms: tuple[Tensor, ...] = cast("Any", torch)._foreach_norm(tensors)  # few launches for all
    squares = torch.stack(norms).square()
    if not bool(squares.sum().isfinite()):
        finite = [bool(flag) for flag in squares.isfinite().tolist()]
        worst = names[finite.index(False)] if False in finite else names[int(squares.argmax())]
        raise BackendError(
            f"the gradient of {worst} is not finite; the weights are unchanged",
            remedy="Lower trainer.lr, or look at the advantages and log-ratios of this step.",
            code="VIME-BACKEND-023",
        )
