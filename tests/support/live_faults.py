"""Faults for a live aligned engine that vime-vllm's own tests don't need: ``rollout.call("live_faults:...")``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vime_vllm.aligned.testing import replace_kernel


def heat(worker: Any, factor: float) -> None:
    """Score sampled tokens at another temperature than the one that they were drawn at."""

    def make(score: Any) -> Any:
        return lambda logits, ids, temperatures: score(logits, ids, temperatures * factor)

    replace_kernel(worker, "token_log_probs", make)


def draw_the_likeliest(worker: Any) -> None:
    """Take the likeliest token whatever the temperature, and score it as if it had been drawn."""
    replace_kernel(worker, "draw", lambda _draw: lambda logits, _temperatures, _u: logits.argmax(-1))


def draw_hotter(worker: Any, factor: float) -> None:
    """Draw at another temperature than tokens are scored at."""
    replace_kernel(worker, "draw", lambda draw: lambda logits, temperatures, u: draw(logits, temperatures * factor, u))


def draw_from_one_stream(worker: Any) -> None:
    """Give every request in company the random numbers of the first."""
    replace_kernel(
        worker,
        "draw",
        lambda draw: lambda logits, temperatures, u: draw(logits, temperatures, u[:1].expand(len(u)).contiguous()),
    )


def keep_more(worker: Any, more: int) -> None:
    """Leave more tokens than top-k was asked for, and report them."""
    replace_kernel(
        worker, "keep_mask", lambda keep: lambda logits, t, top_k, top_p: keep(logits, t, top_k + more, top_p)
    )


def score_one_ulp_up(worker: Any) -> None:
    """Another log-softmax than the contract's."""

    def make(score: Any) -> Any:
        return lambda *arguments: torch.nextafter(score(*arguments), torch.zeros(()))

    replace_kernel(worker, "token_log_probs", make)


def read_the_last_request(worker: Any) -> None:
    """The first request of a batch reads a page of the last one in the place of its own last page."""

    def make(attend: Any) -> Any:
        def wrong(q: Tensor, cache: Any, batch: Any, spec: Any, result: Tensor) -> None:
            table = batch.block_table.clone()
            column = (int(batch.seq_lens[0]) - 1) // cache.keys.shape[2]
            table[0, column] = table[len(batch.seq_lens) - 1, column]
            attend(q, cache, replace(batch, block_table=table), spec, result)

        return wrong

    replace_kernel(worker, "attention_paged", make)


def nudge_late_positions(worker: Any, first: int) -> None:
    """Attention is one ulp off in one element of every query at position ``first`` or later, and right before."""

    def make(attend: Any) -> Any:
        def wrong(q: Tensor, cache: Any, batch: Any, spec: Any, result: Tensor) -> None:
            attend(q, cache, batch, spec, result)
            for number, length in enumerate(batch.seq_lens.tolist()):
                begin, end = batch.query_start[number : number + 2].tolist()
                late = max(begin, end - max(0, length - first))
                bits = torch.int16 if result.dtype == torch.bfloat16 else torch.int32
                result[late:end].view(bits).flatten(1)[:, 0] += 1

        return wrong

    replace_kernel(worker, "attention_paged", make)


def score_nan(worker: Any) -> None:
    """Every log-prob that the engine reports is NaN."""

    def make(score: Any) -> Any:
        return lambda *arguments: torch.full_like(score(*arguments), torch.nan)

    replace_kernel(worker, "token_log_probs", make)


def count_rows(worker: Any, least: int) -> None:
    """The activation changes by one ulp as soon as an engine step has ``least`` tokens, as a kernel's tile would."""

    def make(swiglu: Any) -> Any:
        def changed(gate_up: Tensor) -> Tensor:
            result = swiglu(gate_up)
            if len(result) >= least:
                result.view(torch.int16).view(-1)[0] += 1
            return result

        return changed

    replace_kernel(worker, "swiglu", make)


def keep_all_out(worker: Any) -> None:
    """The model drops every update and says nothing."""
    model = worker.model_runner.get_model()
    names = {name for name, _ in model.named_parameters()}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
        for _ in weights:
            pass
        return names

    model.load_weights = load_weights
