"""Random streams that are functions of names, never of state: the same run seed and index give the same value
on every machine, in any order of asking, after any resume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from vime_core.types import Sample, in_sample_order

SEED_BITS = 63
"""Seeds are in [0, 2**63): what a signed 64-bit field and ``torch.Generator.manual_seed`` both hold."""


def derive_key(purpose: str, run_seed: int) -> bytes:
    """A 32-byte key for one use of a run seed, so that two uses never share a stream.

    Source: blake3's derive-key mode; ``purpose`` is the context string, the decimal run seed the key material.
    """
    return blake3(str(run_seed).encode(), derive_key_context=f"vime {purpose} v1").digest()


def keyed_hash(key: bytes, *counters: int) -> int:
    """64 bits that are a function of the key and the counters.

    Source: blake3's keyed mode over the counters in decimal, joined by commas (decimal text is unambiguous and
    has no width); the first 8 bytes of the digest, little-endian.
    """
    text = ",".join(map(str, counters)).encode()
    return int.from_bytes(blake3(text, key=key).digest(length=8), "little")


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The sampling seed of one response, in [0, 2**63).

    torch's generator on the CPU uses only the low 32 bits of a seed, so two samples of a group share a stream there
    with probability 2**-32; `duplicate_groups` compares the seeds as that generator sees them.
    """
    key = derive_key("sample seed", run_seed)
    return keyed_hash(key, step, prompt_index, sample_index) >> (64 - SEED_BITS)


@dataclass(frozen=True)
class DuplicateGroup:
    """Samples of one prompt whose responses are the same tokens.

    ``equal_seeds`` is the alarm: two of them were sampled with the same random stream. Without it the model is
    merely certain of its answer.
    """

    prompt_index: int
    sample_indices: tuple[int, ...]
    equal_seeds: bool


def duplicate_groups(samples: Iterable[Sample]) -> list[DuplicateGroup]:
    """Sets of two or more samples of a prompt with equal response tokens, in sample order."""
    by_response: dict[tuple[int, tuple[int, ...]], list[Sample]] = {}
    for sample in in_sample_order(list(samples)):
        by_response.setdefault((sample.prompt_index, sample.response_tokens), []).append(sample)
    return [
        DuplicateGroup(prompt, tuple(s.sample_index for s in group), _share_a_stream(group))
        for (prompt, _), group in by_response.items()
        if len(group) > 1
    ]


def _share_a_stream(group: list[Sample]) -> bool:
    return len({sample.seed % 2**32 for sample in group}) < len(group)
