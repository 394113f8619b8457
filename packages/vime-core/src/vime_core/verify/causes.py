"""A small catalogue of what usually lies behind a first difference, by the stage where it shows."""

from __future__ import annotations

from typing import Final, Literal

Cause = Literal[
    "config",
    "initial weights",
    "ended early",
    "record",
    "data order",
    "seed",
    "engine",
    "draw",
    "weight version",
    "detokenizer",
    "reward",
    "advantage",
    "trainer forward",
    "minibatches",
    "loss",
    "backward",
    "norm",
    "schedule",
    "optimizer",
    "after optimizer",
    "metrics",
]

_CATALOGUE: Final[dict[Cause, str]] = {
    "config": "the configuration itself",
    "initial weights": "another model directory, another conversion, or weights changed while loading",
    "ended early": "one run was stopped or failed before the other",
    "record": "a record that contradicts itself: it was damaged or edited after the run",
    "data order": "the order of the data: another dataset file, shuffle seed, or an order taken from completion times",
    "seed": "another sampling seed: seeds that depend on more than run seed, step, prompt and sample",
    "engine": (
        "the rollout engine's forward gave other bits for equal inputs: requests admitted in other batches, a"
        " prefix-cache hit against a miss, or a kernel that changes with the number of rows (fused residual norms,"
        " split-K matrix products, attention whose decode differs from prefill)"
    ),
    "draw": (
        "the draw of this token: a random stream that requests share instead of a seed for each, ties in top-k or"
        " top-p, or logits that differ from this position on (batch composition, cache hits)"
    ),
    "weight version": "the engine generated with other weights: an update that it kept out, or that came late",
    "detokenizer": "equal tokens became another text: another tokenizer or version of it",
    "reward": "a reward that depends on more than its response: time, order, randomness, a time limit, outside state",
    "advantage": "the advantage estimator: its order of samples or of summation",
    "trainer forward": (
        "the trainer's forward gave other bits for equal tokens: another packing into microbatches, another number of"
        " threads, or a matrix product that splits its sum by heuristics"
    ),
    "minibatches": "samples were split over optimizer steps in another way",
    "loss": "equal log-probs gave another loss: an order of reduction that varies, or other old log-probs or weights",
    "backward": (
        "the backward pass adds in varying order: atomics (attention, scatter, embedding kernels; torch's"
        " deterministic flag does not see those of Triton or CUDA extensions), or an all-reduce whose ring changed"
    ),
    "norm": "equal gradients gave another norm: a sum whose order varies with threads, shards or kernels",
    "schedule": "the learning-rate schedule counted other steps",
    "optimizer": "equal gradients gave another update: a fused optimizer kernel, or state that differed before",
    "after optimizer": (
        "optimizer state is equal, so the weights changed after or beside the optimizer step: a live edit, a memory"
        " fault, or a cast that differs"
    ),
    "metrics": "everything that decides the run is equal, so this number alone was computed otherwise, or edited",
}


def likely_cause(cause: Cause) -> str:
    """The catalogue's words. A hint for where to look, not a finding."""
    return _CATALOGUE[cause]
