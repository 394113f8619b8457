"""The contracts between the loop and the backends: what a trainer and a rollout engine must offer.

vime_core imports neither; a plugin registers a factory under a name (see ``vime_core.plugins.specs``) and the
launcher calls it with a frozen context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from vime_core.types import (
    Completion,
    Drawn,
    Float32Array,
    ProcessReport,
    SampleKey,
    SampleRequest,
    TrainSequence,
    TrainStepResult,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vime_core.alignment import Alignment
    from vime_core.config.schema import RunConfig
    from vime_core.determinism.policy import DeterminismPolicy
    from vime_core.rl.losses import TokenBatch, TokenLoss

NamedTensors = Iterator[tuple[str, "Tensor"]]
"""(name, tensor) pairs in a fixed order. Weights carry HF names; state carries the trainer's own names.

A tensor keeps its values until the iterator ends: who reads may do so later than it was handed over.
"""

LossFunction = Callable[["TokenBatch"], "TokenLoss"]
"""Per-token loss: TokenBatch of 1-D fp32 tensors [N] to TokenLoss (loss [N], per-token metrics).

One whose attribute ``needs_entropy`` is true gets the entropy of each token; only an `EntropyTrainer` is given such.
"""

Microbatches = Sequence[Sequence[TrainSequence]]

Taps = Mapping[str, tuple["Tensor", "Tensor"]]
"""By tap name, in the order of computation: positions int64 [T], ascending, and rows [T, width] of one sequence."""


class StateObserver(Protocol):
    """Sees a train step's tensors where they are final: gradients after reduction and before clipping.

    One that does more than hand them to `vime_core.record.digest.digest_tensors` has ``needs_tensors = True``: from a
    trainer in another process only digests come otherwise.
    """

    def gradients(self, tensors: NamedTensors) -> None: ...


@dataclass(frozen=True)
class Ranks:
    """A process's place among the trainer's ranks.

    Args:
        rank: in the whole trainer.
        world_size: ranks of the whole trainer.
        local_rank: index of this rank's GPU on its machine.
        init_method: where the ranks meet (``tcp://host:port`` or ``file:///path``); empty for a single rank, which
            meets nobody.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str = ""


@dataclass(frozen=True)
class TrainerContext:
    """Everything a trainer is built from. ``options`` is the plugin's own validated section.

    With several ``ranks`` each process has a trainer of its own. All are called alike, in one order, with the same
    arguments; they share the work among themselves, and each returns the whole result.
    """

    config: RunConfig
    options: BaseModel
    policy: DeterminismPolicy
    model_directory: Path
    alignment: Alignment | None = None
    ranks: Ranks = Ranks()


@dataclass(frozen=True)
class RolloutContext:
    """Everything a rollout engine is built from. ``options`` is the plugin's own validated section.

    ``engine`` is its number among the run's engines.
    """

    config: RunConfig
    options: BaseModel
    policy: DeterminismPolicy
    model_directory: Path
    alignment: Alignment | None = None
    engine: int = 0


class Trainer(Protocol):
    """The training side of a run; all of its ranks are behind this one object."""

    def log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """Score responses without gradients.

        Returns:
            fp32 [R] a sequence, at the run's sampling temperature, in the order of the flattened microbatches.
        """
        ...

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        """Accumulate gradients over the microbatches in order, clip, and step the optimizer once.

        Raises:
            BackendError: a loss or gradient is not finite, and the weights are then unchanged; or the update made a
                weight that is not finite.
        """
        ...

    def weights(self) -> NamedTensors:
        """Current weights under HF names, in the training dtype, in the order of the model's layers."""
        ...

    def optimizer_state(self) -> NamedTensors:
        """fp32 masters and moments, under stable names: ``PARAMETER.master``, ``PARAMETER.exp_avg``, ..."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, masters, moments, scheduler and RNG state below ``directory`` (which is empty)."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises RecordError when it is incomplete or of another model."""
        ...

    def processes(self) -> list[ProcessReport]:
        """One report a rank."""
        ...

    def close(self) -> None: ...


class Rollout(Protocol):
    """The generating side of a run; all of its engine processes are behind this one object."""

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Generate every request; results in the order of the requests, whatever finished first.

        Raises:
            BackendError: the engine died or did not answer within the configured time.
        """
        ...

    def update_weights(self, weights: NamedTensors, version: int) -> Mapping[str, str]:
        """Install weights, drop every cache computed with old ones, and say what the kernels now read.

        Returns:
            Digest (``vime_core.record.digest.tensor_digest``) of each tensor that kernels read, by HF name.
        """
        ...

    def weight_digests(self) -> Mapping[str, str]:
        """Digest of each tensor that kernels read now, by HF name."""
        ...

    def processes(self) -> list[ProcessReport]:
        """One report for each engine process, read back in that process."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ReferenceTrainer(Trainer, Protocol):
    """A trainer that can keep a frozen second copy of its weights; a KL to a reference model needs one.

    `save` then writes the copy too, and `load` restores it.
    """

    def keep_reference(self) -> None:
        """Make the weights of now the reference."""
        ...

    def reference_log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """`log_probs` under the reference's weights; the trainer's own stay as they are."""
        ...


@runtime_checkable
class EntropyTrainer(Trainer, Protocol):
    """A trainer that gives a loss the entropy of the policy at each token, with its gradient."""

    gives_entropy: Literal[True]


@runtime_checkable
class AlignedTrainer(Trainer, Protocol):
    """A trainer that verdicts can look into; one that keeps an alignment contract offers this."""

    def record_taps(self, sequence: TrainSequence) -> Taps:
        """The taps of one whole-sequence forward without gradients (names: ``vime_core.alignment.taps``)."""
        ...

    def gradients(
        self, microbatches: Microbatches, loss: LossFunction, *, recompute: bool = False
    ) -> Mapping[str, Tensor]:
        """Gradients as `train_step` would use them, fp32, by HF name, before clipping; weights and optimizer stay.

        With ``recompute`` the backward runs each layer's forward again instead of keeping what it computed.
        """
        ...

    def by_hf_name(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """One tensor a parameter, by the trainer's own names and in its shape (a gradient, a moment), by HF name.

        What is absent stays absent, and a name that is no parameter's stays as it is.
        """
        ...


@runtime_checkable
class DrawingTrainer(AlignedTrainer, Protocol):
    """A trainer that can draw again what an engine drew by the contract's draw (``vime_core.numerics.draw``)."""

    def draw_again(self, microbatches: Microbatches, requests: Mapping[SampleKey, SampleRequest]) -> list[Drawn]:
        """What each request's seed draws from the trainer's own logits, after the tokens before.

        Args:
            microbatches: prompts with the responses that were sampled; what they say is kept is not looked at.
            requests: by the key of their sequence: seed, temperature, top-k and top-p.

        Returns:
            In the order of the flattened microbatches.
        """
        ...


@runtime_checkable
class DrawingRollout(Rollout, Protocol):
    """An engine that may draw by the contract's draw."""

    def draws_by_contract(self) -> bool:
        """Whether it does; False where it draws by an operation of its own."""
        ...


@runtime_checkable
class AlignedRollout(Rollout, Protocol):
    """An engine that verdicts can look into; one that keeps an alignment contract offers this."""

    def record_taps(self, request: SampleRequest) -> Taps:
        """The taps of one response, generated alone from an empty prefix cache: prefill and every decode."""
        ...

    def prompt_log_probs(self, tokens: Sequence[int]) -> Float32Array:
        """fp32 [len - 1]: the log-prob of each token but the first, at temperature 1, computed as one prefill."""
        ...

    def keep_prefix_cache(self, keep: bool) -> None:
        """Whether `generate` may use what earlier calls left in the prefix cache, until said otherwise."""
        ...

    def cached_tokens(self) -> list[int]:
        """How many prompt tokens each request of the last `generate` took from the prefix cache."""
        ...

    def prefill_in_chunks(self, tokens: int) -> None:
        """Prefill at most ``tokens`` of a prompt in an engine step, until said otherwise; 0: as many as fit.

        Raises:
            PolicyError: this engine cannot; only greedy requests may follow where seeded ones are refused in chunks.
        """
        ...


TrainerFactory = Callable[[TrainerContext], Trainer]
RolloutFactory = Callable[[RolloutContext], Rollout]
