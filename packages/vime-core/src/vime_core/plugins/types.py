"""What registration hooks yield: small frozen records that name code without importing it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

from vime_core.errors import PluginError, VimeError
from vime_core.plugins.foreign import describe_foreign


class Options(BaseModel):
    """Base of every plugin-owned configuration section: frozen, and unknown keys are errors.

    Values are not converted: ``true`` is no 1 and ``"3"`` no number. A path that a user writes is a
    `vime_core.config.paths.UserPath`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def ranks(self) -> int:
        """How many trainer ranks (or GPUs of an engine) these options ask the launcher for."""
        return 1


OWN_VERDICTS: Final = ("repeat", "resume", "batch", "align", "gradient", "all")
"""What ``vime verify`` knows by itself; no plugin's check can take these names."""

EXTRAS: Final[Mapping[str, str]] = {
    "math_verify": "data",
    "ray": "ray",
    "reasoning_gym": "data",
    "tensorboard": "tensorboard",
    "torch": "torch",
    "trackio": "trackio",
    "transformers": "data",
    "wandb": "wandb",
}
"""Modules that extras of vime-core bring."""


@dataclass(frozen=True)
class Registration:
    """A named capability.

    Args:
        name: how a configuration selects it.
        summary: one line for ``vime plugins list``.
        target: ``"package.module:attribute"``, imported on first use.
        options: ``"package.module:Class"`` of an `Options` subclass that types the plugin's section; empty: no keys.
    """

    name: str
    summary: str
    target: str
    options: str = ""

    kind: ClassVar[str] = "registration"

    @property
    def claims(self) -> tuple[tuple[str, ...], ...]:
        """What only one registration may have; the first identifies it."""
        return ((self.kind, self.name),)

    def load(self) -> Any:
        """Import the target. Raises PluginError when that fails, whatever the module raises."""
        return load_attribute(self.target, self.name)

    def options_class(self) -> type[BaseModel]:
        """The class that types this plugin's configuration section."""
        return load_attribute(self.options, self.name) if self.options else Options


def load_attribute(target: str, name: str) -> Any:
    """Import ``module:attribute``; an absent optional package becomes one clear error."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise _absent(name, error.name or module, error) from error
    except VimeError:
        raise
    except AttributeError as error:
        raise PluginError(
            f"plugin {name!r} names {target!r}, but {module!r} has no {attribute!r}",
            remedy="Correct the target in the plugin's registration.",
            code="VIME-PLUGIN-004",
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {name!r} needs {module!r}, which fails when it is imported: {describe_foreign(error)}",
            remedy=f"Correct {module!r}, or choose another plugin.",
            code="VIME-PLUGIN-003",
        ) from error


def _absent(name: str, module: str, error: ImportError) -> PluginError:
    extra = EXTRAS.get(module.partition(".")[0])
    if extra:
        return PluginError(
            f"plugin {name!r} needs {module!r}, which cannot be imported: {error}",
            remedy=f"Install it with: pip install 'vime-core[{extra}]', or choose another plugin.",
            code="VIME-PLUGIN-003",
        )
    return PluginError(
        f"plugin {name!r} needs {module!r}, which cannot be imported: {error}",
        remedy=f"Install the package that provides {module!r}, or choose another plugin.",
        code="VIME-PLUGIN-003",
    )


@dataclass(frozen=True)
class TrainerBackend(Registration):
    """``target`` is a `vime_core.backends.TrainerFactory`."""

    kind: ClassVar[str] = "trainer"


@dataclass(frozen=True)
class RolloutEngine(Registration):
    """``target`` is a `vime_core.backends.RolloutFactory`."""

    kind: ClassVar[str] = "rollout"


@dataclass(frozen=True)
class ModelStructure(Registration):
    """A structure by its HF ``model_type``; ``target`` describes it to the trainer named in ``backend``."""

    backend: str = ""

    kind: ClassVar[str] = "structure"

    @property
    def claims(self) -> tuple[tuple[str, ...], ...]:
        return ((self.kind, self.name, self.backend),)


@dataclass(frozen=True)
class ModelSource(Registration):
    """``target`` is ``(options, cache directory) -> HF model directory``: where a model comes from."""

    kind: ClassVar[str] = "model source"


@dataclass(frozen=True)
class DeterminismPolicyEntry(Registration):
    """``target`` is a `vime_core.determinism.policy.DeterminismPolicy`."""

    kind: ClassVar[str] = "policy"


@dataclass(frozen=True)
class ContractEntry(Registration):
    """``target`` is a `vime_core.numerics.contract.Contract`; ``name`` is its id, such as ``dense/v1``.

    Args:
        operations: ``"module:function"`` of ``(contract, provider name) -> vime_core.numerics.Operations``, where the
            contract's operations are more than those of ``dense/v1``; empty: they are those.
        reference: ``"module:function"`` of ``(contract, directory, weights, dtype) -> model``, against which gradients
            are checked (`vime_core.verify.reference_model.open_reference` says what a model is); empty: transformers'.
    """

    operations: str = ""
    reference: str = ""

    kind: ClassVar[str] = "contract"


@dataclass(frozen=True)
class AlignedSide(Registration):
    """How one backend keeps one contract for some structures; ``target`` is what that backend asks for.

    Args:
        backend: name of the trainer or rollout plugin.
        contract: id of the contract.
        structures: HF ``model_type`` names that it covers.
    """

    backend: str = ""
    contract: str = ""
    structures: tuple[str, ...] = ()

    kind: ClassVar[str] = "aligned side"

    @property
    def claims(self) -> tuple[tuple[str, ...], ...]:
        covered = ((self.kind, f"{self.contract} {self.backend} {structure}") for structure in self.structures)
        return ((self.kind, self.name), *covered)


@dataclass(frozen=True)
class KernelEntry(Registration):
    """Faster kernels for one operation of one provider of a contract's operations.

    ``target`` is ``() -> offer``: a `vime_core.numerics.offers.LinearOffer` or `AttentionOffer`, or a string that says
    why it cannot run in the process that asks. Every computing process of both sides asks.

    Args:
        provider: whose kernels they stand in for, such as ``cuda``.
        operation: ``linear`` or ``attention``.
    """

    provider: str = ""
    operation: str = ""

    kind: ClassVar[str] = "kernels"

    @property
    def claims(self) -> tuple[tuple[str, ...], ...]:
        return ((self.kind, f"{self.provider} {self.operation} {self.name}"),)


@dataclass(frozen=True)
class ContractModel(Registration):
    """A small random model that a contract is tried on; ``target`` is ``(directory, dtype, seed) -> None``.

    It writes a HF model directory that does not exist yet (`vime_core.testing.models.write_random_model` helps) in
    ``dtype`` ``bf16`` or ``fp32``.

    Args:
        contract: id of the contract.
    """

    contract: str = ""

    kind: ClassVar[str] = "contract model"


@dataclass(frozen=True)
class AlignmentCheck(Registration):
    """``target`` is ``(RunConfig, PluginManager) -> vime_core.verify.verdict.Verdict``: ``vime verify NAME CONFIG``.

    Args:
        contracts: those under which ``vime verify all`` runs it; empty: always.

    Raises:
        PluginError: its name is that of a verdict of vime's own, which no plugin replaces.
    """

    contracts: tuple[str, ...] = ()

    kind: ClassVar[str] = "check"

    def __post_init__(self) -> None:
        if self.name in OWN_VERDICTS:
            raise PluginError(
                f"a check is named {self.name!r}, which is a verdict of vime's own",
                remedy="Rename the check, or disable the plugin (plugins.disable).",
                code="VIME-PLUGIN-006",
            )


@dataclass(frozen=True)
class Reward(Registration):
    """``target`` is ``(options) -> reward function`` (see ``vime_core.rewards``)."""

    kind: ClassVar[str] = "reward"


@dataclass(frozen=True)
class DatasetSource(Registration):
    """``target`` is ``(options) -> vime_core.data.Dataset``."""

    kind: ClassVar[str] = "dataset"


@dataclass(frozen=True)
class AdvantageEstimator(Registration):
    """``target`` is ``(rewards fp32 [P, G], options) -> advantages fp32 [P, G]``."""

    kind: ClassVar[str] = "advantage"


@dataclass(frozen=True)
class Loss(Registration):
    """``target`` is ``(TokenBatch, options) -> TokenLoss``."""

    kind: ClassVar[str] = "loss"


@dataclass(frozen=True)
class MetricSink(Registration):
    """``target`` is ``(options, record directory) -> sink`` with ``log(step, metrics)`` and ``close()``."""

    kind: ClassVar[str] = "sink"


@dataclass(frozen=True)
class LauncherEntry(Registration):
    """``target`` is a `vime_core.launch.Launcher` factory: where trainer ranks and engines run."""

    kind: ClassVar[str] = "launcher"


@dataclass(frozen=True)
class Command(Registration):
    """``target`` is a typer application or a function that becomes ``vime NAME``."""

    kind: ClassVar[str] = "command"
