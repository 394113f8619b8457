"""The verdict *gradient* on a live trainer; no engine is needed."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vime_core.backends import AlignedTrainer, LossFunction, Microbatches, NamedTensors, Trainer
from vime_core.errors import PluginError
from vime_core.loop.algorithm import in_order_of
from vime_core.loop.sides import Parts
from vime_core.plugins.types import load_attribute
from vime_core.record.digest import digest_tensors
from vime_core.rl.packing import pack
from vime_core.types import TrainSequence
from vime_core.verify.gradient import NAME, Backward, GradientEvidence, gradient_verdict
from vime_core.verify.reach import pooled_prompt
from vime_core.verify.taken import clip_factor, first_moments, norm_of, same_norm, taken_gradients
from vime_core.verify.token_loss import of_every_token, trained, with_policies, written_out
from vime_core.verify.verdict import Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from vime_core.verify.reference_model import OpenModel


@dataclass(frozen=True)
class GradientOptions:
    """How much is computed: so many sequences of at most ``prompt`` + ``response`` tokens, the first of ``longest``.

    Of what the context cannot hold, less.
    """

    sequences: int = 6
    prompt: int = 48
    response: int = 16
    longest: int = 1024


@contextmanager
def open_trainer(parts: Parts) -> Generator[Trainer]:
    """The trainer alone. With a learning rate of 0 its steps leave the weights as they are."""
    with ExitStack() as stack:
        stack.callback(parts.launcher.close)
        trainer = parts.launcher.trainer(parts.model, parts.alignment)
        stack.callback(trainer.close)
        yield trainer


def verify_gradient(parts: Parts, trainer: Trainer, options: GradientOptions) -> Verdict:
    """Run the backward several ways over the same microbatches, and once in fp64 by transformers.

    Args:
        parts: whose trainer has a learning rate of 0, so that a step can be repeated.
        trainer: open.
        options: how much.
    """
    sequences = gradient_sequences(parts, options)
    microbatches = _microbatches(sequences, parts.config.trainer.token_budget)
    before = digest_tensors(trainer.weights())
    scored = in_order_of(sequences, microbatches, trainer.log_probs(microbatches))
    sequences = [with_policies(s, values, n) for n, (s, values) in enumerate(zip(sequences, scored, strict=True))]
    microbatches = _microbatches(sequences, parts.config.trainer.token_budget)
    longest = max(len(sequence.tokens) for sequence in sequences)
    evidence = GradientEvidence(parts.config.trainer.dtype, tuple(scored), (), longest=longest)
    passes = [
        _train_step(parts, trainer, sequences, microbatches, name)
        for name in ("a train step", "the same train step again")
    ]
    if digest_tensors(trainer.weights()) != before:
        sentence = "Gradient could not be checked: a train step at learning rate 0 changed the weights."
        return Verdict(NAME, None, sentence, first="weights")
    if not isinstance(trainer, AlignedTrainer):
        missing = replace(evidence, passes=tuple(passes), not_tried="the trainer gives no gradients by HF name")
        return gradient_verdict(missing)
    passes += _gradient_passes(trainer, microbatches, parts.algorithm.loss)
    return gradient_verdict(
        _against_fp64(parts, trainer, sequences, microbatches, replace(evidence, passes=tuple(passes)))
    )


def gradient_sequences(parts: Parts, options: GradientOptions) -> list[TrainSequence]:
    """Sequences cut from the run's prompts laid end to end, of mixed lengths; see `token_loss.of_every_token`."""
    context = parts.config.rollout.context_length
    response = min(options.response, context // 2)
    result: list[TrainSequence] = []
    for number in range(options.sequences):
        usual = max(1, min(options.prompt >> (number % 3), context // 2))
        prompt = usual if number else max(usual, min(options.longest, context) - response)
        tokens = pooled_prompt(parts, prompt + response, number * 37)
        weights = np.full(response, 1.0 / (options.sequences * response), dtype=np.float32)
        sequence = TrainSequence((number, 0), tokens, prompt, np.zeros_like(weights), weights)
        result.append(of_every_token(sequence, number, pooled_prompt(parts, 64)))
    return result


def _microbatches(sequences: Sequence[TrainSequence], token_budget: int) -> list[list[TrainSequence]]:
    """At least two of them, so that gradients are accumulated."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    budget = min(token_budget, max(max(lengths), sum(lengths) // 2))
    return [[sequences[i] for i in microbatch] for microbatch in pack(lengths, budget)]


@dataclass
class _Shown:
    """A `vime_core.backends.StateObserver` that keeps copies of the gradients of one step."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    needs_tensors: ClassVar[bool] = True

    def gradients(self, tensors: NamedTensors) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors}


def _train_step(
    parts: Parts, trainer: Trainer, sequences: Sequence[TrainSequence], microbatches: Microbatches, name: str
) -> Backward:
    shown, before = _Shown(), first_moments(trainer.optimizer_state())
    result = trainer.train_step(microbatches, parts.algorithm.loss, shown)
    after = first_moments(trainer.optimizer_state())
    gradients, before, after = (_by_hf_name(trainer, one) for one in (shown.tensors, before, after))
    section = parts.config.trainer
    norm = norm_of(gradients.values())
    factor = clip_factor(result.grad_norm if same_norm(result.grad_norm, norm) else norm, section.clip_grad)
    return Backward(
        name,
        digest_tensors(gradients.items()),
        {"loss": result.loss.hex(), "gradient norm": result.grad_norm.hex()},
        tuple(in_order_of(sequences, microbatches, result.log_probs)),
        norm,
        taken_gradients(gradients, before, after, section.betas[0], factor) if after else (),
    )


def _by_hf_name(trainer: Trainer, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return trainer.by_hf_name(tensors) if isinstance(trainer, AlignedTrainer) else tensors


def _gradient_passes(trainer: AlignedTrainer, microbatches: Microbatches, loss: LossFunction) -> Iterator[Backward]:
    for name, recompute in (("gradients alone", False), ("gradients with recomputed layers", True)):
        gradients = trainer.gradients(microbatches, loss, recompute=recompute)
        yield Backward(name, digest_tensors(gradients.items()), {})


def _against_fp64(
    parts: Parts,
    trainer: AlignedTrainer,
    sequences: Sequence[TrainSequence],
    microbatches: Microbatches,
    evidence: GradientEvidence,
) -> GradientEvidence:
    """The evidence with errors of each gradient under the loss of `vime_core.verify.token_loss`."""
    from vime_core.verify.reference_model import errors_against_fp64

    ours = trainer.gradients(microbatches, trained)
    weights = {name: tensor.detach().cpu() for name, tensor in trainer.weights()}
    temperature = parts.config.sampling.temperature
    try:
        errors, norm = errors_against_fp64(
            parts.model,
            weights,
            evidence.dtype,
            sequences,
            temperature,
            ours,
            _reference(parts),
            written_out,
            with_policies,
        )
    except PluginError as error:
        return replace(evidence, not_tried=error.message)
    named = f"the reference of {parts.alignment.contract.id}" if parts.alignment and parts.alignment.reference else ""
    return replace(evidence, errors=errors, norm=norm, reference=named or evidence.reference)


def _reference(parts: Parts) -> OpenModel | None:
    """What the contract registered as its reference; None: transformers' model."""
    alignment = parts.alignment
    if alignment is None or not alignment.reference:
        return None
    return partial(load_attribute(alignment.reference, alignment.contract.id), alignment.contract)
