"""``vime verify routing``: do engine and trainer choose the same experts and keys, layer by layer?

A share a layer: of the (token, slot) routes, and of the (token, rank) chosen keys, that are equal on both sides. Under
the contract each must be 1; the shares say how far a side that breaks it went wrong, where log-probs only say that.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vime_core.alignment.taps import layer_tap
from vime_core.backends import AlignedRollout, AlignedTrainer, Taps
from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError, PluginError
from vime_core.loop.model import read_model_config
from vime_core.loop.sides import Sides, checked_policy, open_sides, ready_parts
from vime_core.plugins.manager import PluginManager
from vime_core.types import SampleRequest, scoring_sequence
from vime_core.verify.live import first_requests
from vime_core.verify.verdict import Coverage, Verdict
from vime_glm5.structure import Glm5Shape, read_shape

NAME: Final = "routing"
SAMPLES: Final = 4
KEYS: Final = "chosen_keys"
ROUTES: Final = "router_slots"
CHOICES: Final = (ROUTES, KEYS)


@dataclass
class Agreement:
    """Of one tap: choices that were compared, and those that are equal."""

    compared: int = 0
    equal: int = 0

    @property
    def share(self) -> float:
        """0 when nothing was compared."""
        return self.equal / self.compared if self.compared else 0.0


@dataclass
class Routing:
    """What the samples so far gave.

    Attributes:
        expected: names of the taps of choices that there must be.
        taps: agreement by name.
        faults: what could not be compared.
        tokens: of the responses.
        longest: tokens of the longest sequence.
        entropy: sum of minus log-probs.
        left_out: choices of keys that had to leave one out; the others are all that a query sees.
    """

    expected: Sequence[str] = ()
    taps: dict[str, Agreement] = field(default_factory=dict[str, Agreement])
    faults: list[str] = field(default_factory=list[str])
    tokens: int = 0
    longest: int = 0
    entropy: float = 0.0
    left_out: int = 0

    def add(self, engine: Taps, trainer: Taps) -> None:
        """Compare every tap of a choice, at all positions that both sides have."""
        shown = (name for name in (*trainer, *engine) if name.endswith(CHOICES))
        for name in dict.fromkeys((*self.expected, *shown)):
            if lacking := [side for side, taps in (("engine", engine), ("trainer", trainer)) if name not in taps]:
                self.faults.append(f"tap {name!r} is missing in the {' and the '.join(lacking)}")
                continue
            (positions, rows), (others, other_rows) = engine[name], trainer[name]
            count = min(len(positions), len(others))
            if not bool((positions[:count] == others[:count]).all()) or count < len(others):
                self.faults.append(f"tap {name!r} has other positions in the engine")
                continue
            if rows.shape[1:] != other_rows.shape[1:]:
                self.faults.append(f"tap {name!r} has rows of another width in the engine")
                continue
            ours, theirs = rows[:count], other_rows[:count]
            if name.endswith(KEYS):
                self.left_out += int((others >= rows.shape[1]).sum())
                made = (ours >= 0) | (theirs >= 0)  # where a query has fewer keys than it may choose, both say -1
                ours, theirs = ours[made], theirs[made]
            agreement = self.taps.setdefault(name, Agreement())
            agreement.compared += ours.numel()
            agreement.equal += int((ours == theirs).sum())


def run(config: RunConfig, plugins: PluginManager) -> Verdict:
    """Start both sides and compare what they choose. See `vime_core.plugins.types.AlignmentCheck`.

    Raises:
        ConfigError: the configuration has no contract of GLM-5.
    """
    if not config.alignment.contract.startswith("glm5/"):
        raise ConfigError(
            f"verify routing compares what GLM-5 chooses, but alignment.contract = {config.alignment.contract!r}",
            remedy="Set alignment.contract = 'glm5/v1'.",
            code="VIME-CONFIG-090",
        )
    with open_sides(ready_parts(config, checked_policy(config, plugins), plugins)) as sides:
        return verify_routing(sides, first_requests(sides.parts, SAMPLES))


def verify_routing(sides: Sides, requests: Sequence[SampleRequest]) -> Verdict:
    """The verdict on live sides."""
    rollout, trainer = sides.rollout, sides.trainer
    if not (isinstance(rollout, AlignedRollout) and isinstance(trainer, AlignedTrainer)):
        raise PluginError(
            "a backend of this configuration shows no taps",
            remedy="Use trainer.backend = 'megatron' and rollout.backend = 'vllm'.",
            code="VIME-PLUGIN-033",
        )
    found = Routing(expected_taps(read_shape(read_model_config(sides.parts.model))))
    for request in requests:
        (completion,) = rollout.generate([request])
        sequence = scoring_sequence(request.key, request.prompt_tokens, completion.tokens)
        found.add(rollout.record_taps(request), trainer.record_taps(sequence))
        found.tokens += len(completion.tokens)
        found.longest = max(found.longest, len(sequence.tokens))
        found.entropy -= float(completion.log_probs.sum())
    return routing_verdict(found, len(requests))


def expected_taps(shape: Glm5Shape) -> tuple[str, ...]:
    """Names of every tap of a choice that a model of this shape makes, in the order of layers."""
    names: list[str] = []
    for layer in range(shape.layers):
        names += [layer_tap(layer, KEYS)] if layer in shape.indexed_layers else []
        names += [] if layer in shape.dense_layers else [layer_tap(layer, ROUTES)]
    return tuple(names)


def routing_verdict(found: Routing, samples: int) -> Verdict:
    """Holds when every choice of every layer is equal; nothing compared, or nothing to choose, is no agreement."""
    compared = sum(one.compared for one in found.taps.values())
    unequal = compared - sum(one.equal for one in found.taps.values())
    evidence: dict[str, Any] = {
        "coverage": Coverage(samples=samples, tokens=found.tokens, tensors=len(found.taps), longest=found.longest),
        "unequal": unequal,
        "entropy": found.entropy / found.tokens if found.tokens else None,
        "details": {
            "agreement": {name: one.share for name, one in found.taps.items()},
            "compared": compared,
            "left_out": found.left_out,
        },
    }
    if found.faults or not compared:
        why = found.faults[0] if found.faults else "no choice was compared"
        return Verdict(NAME, None, f"Routing could not be checked: {why}.", **evidence, first=why)
    if unequal:
        worst = min(found.taps, key=lambda name: found.taps[name].share)
        first = next(name for name, one in found.taps.items() if one.share < 1)
        sentence = (
            f"Routing does not hold: {unequal} of {compared} choices differ, first in {first}; the least agreement is"
            f" {found.taps[worst].share:.2%}, in {worst}."
        )
        return Verdict(NAME, False, sentence, **evidence, first=first)
    if not found.left_out and any(name.endswith(KEYS) for name in found.taps):
        why = f"no query of at most {found.longest} tokens had more keys than it may choose"
        return Verdict(NAME, None, f"Routing could not be checked: {why}.", **evidence, first=why)
    sentence = (
        f"Routing holds: engine and trainer made the same {compared} choices of experts and keys in {len(found.taps)}"
        f" taps of {samples} samples, and {found.left_out} choices of keys left one out:"
        f" {_shares(evidence['details']['agreement'])}."
    )
    return Verdict(NAME, True, sentence, **evidence)


def _shares(agreement: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in agreement.items())
