"""Weights between HF names and Megatron names: one list of rules, read in both directions.

A rule joins HF tensors into one Megatron parameter and splits it again; both only move elements, so a round trip is
exact. The list is in the order of the model's layers, which is the order in which weights leave the trainer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_core.errors import ConfigError

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Rule:
    """``join`` of the HF ``sources``, in order, is the Megatron parameter ``target``; ``split`` undoes it."""

    target: str
    sources: tuple[str, ...]
    join: Join
    split: Split


def same(target: str, source: str) -> Rule:
    """A parameter that both sides hold alike."""
    return Rule(target, (source,), lambda tensors: tensors[0], lambda tensor: (tensor,))


def stacked(target: str, sources: tuple[str, ...]) -> Rule:
    """Equal parts, one below the other: gate and up projection."""
    return Rule(target, sources, lambda tensors: torch.cat(list(tensors)), lambda tensor: tensor.chunk(len(sources)))


def grouped_qkv(target: str, sources: tuple[str, str, str], heads: int, groups: int, head_dim: int) -> Rule:
    """Query, key and value projections as Megatron interleaves them: per key-value head its queries, key, value.

    Args:
        target: weight [(heads + 2 groups) x head_dim, hidden], or bias without the last dimension.
        sources: the HF projections of query, key and value.
        heads: query heads.
        groups: key-value heads.
        head_dim: elements of one head.
    """
    rows = (heads // groups * head_dim, head_dim, head_dim)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        parts = [t.reshape(groups, n, *t.shape[1:]) for t, n in zip(tensors, rows, strict=True)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(tensor: Tensor) -> Sequence[Tensor]:
        by_group = tensor.view(groups, sum(rows), *tensor.shape[1:])
        return [part.flatten(0, 1) for part in by_group.split(rows, dim=1)]

    return Rule(target, sources, join, split)


def to_megatron(weights: Mapping[str, Tensor], rules: Iterable[Rule]) -> Iterator[tuple[str, Tensor]]:
    """HF weights as Megatron parameters, in the order of the rules."""
    for rule in rules:
        yield rule.target, rule.join([weights[name] for name in rule.sources])


def to_hf(parameters: Mapping[str, Tensor], rules: Iterable[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Megatron parameters as HF weights, contiguous, in the order of the rules."""
    for rule in rules:
        for name, tensor in zip(rule.sources, rule.split(parameters[rule.target]), strict=True):
            yield name, tensor.contiguous()


def check_complete(weights: Iterable[str], rules: Iterable[Rule], where: str) -> None:
    """Raise ConfigError unless the rules use every weight, and every weight that the rules use is there."""
    held = set(weights)
    used = {name for rule in rules for name in rule.sources}
    if held != used:
        absent, unknown = sorted(used - held), sorted(held - used)
        raise ConfigError(
            f"the weights in {where!r} do not fit its config.json: absent {_few(absent)}; unknown {_few(unknown)}",
            remedy="Use the weights and the config.json of one model.",
            code="VIME-CONFIG-051",
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) + more) or "none"
