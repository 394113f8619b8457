"""Steps of V2's sampler on this CPU, in Triton's interpreter: vLLM's own states and batches, against vLLM's own kernel
and the operations one by one.

Run as a program it prints a JSON object {case: number of unequal elements}; of a control, 1 where nothing differs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.cpu import shm  # noqa: F401 - lets V2 do without pinned memory, as vLLM's worker for the CPU
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vime_core.numerics import Operations, load_provider, masked
from vime_core.numerics.cuda.provider import kernels
from vime_vllm.aligned.sampler_v2 import AlignedSamplerV2
from vime_vllm.aligned.step_kernel import Step, prepare

VOCABULARY, MOST = 700, 12
CPU = torch.device("cpu")
SEEDS = [0, 1, 7 + 2**32, 2**63 - 1, 2**62 + 5, 2**40, -(2**63), -1, 2**31, 3, 4, 5]
TEMPERATURES = [1.0, 0.0, 0.7, 1.3]
WHOLE, UNSCORED = {"logprobs": 0}, {"logprobs": None}
CUT = [{"logprobs": 0, "top_p": 0.6}, {"logprobs": 0, "top_k": 5}, {"logprobs": -1, "top_k": 5}]


class Engine:
    """What V2's model runner holds: requests in slots, out of order, and the contract's sampler."""

    def __init__(self, operations: Operations) -> None:
        config = VllmConfig()
        self.requests = RequestState(MOST, 64, 128, 0, VOCABULARY, CPU)
        self.buffers = InputBuffers(MOST, 128, CPU)
        stock = Sampler(config, MOST, VOCABULARY, CPU, self.requests)
        self.sampler = AlignedSamplerV2(stock, operations)

    def add(self, number: int, prompt: int, more: int = 0, **sampling: Any) -> None:
        """A request whose prefill is ``more`` tokens longer than its prompt, as after a preemption."""
        self.requests.add_request(str(number), prompt, [1] * (prompt + more), 0, 20)
        slot = self.requests.req_id_to_index[str(number)]
        settings = {"temperature": TEMPERATURES[number % 4], "seed": max(SEEDS[number], 0), **WHOLE, **sampling}
        self.sampler.add_request(slot, SamplingParams(**settings))
        self.sampler.sampling_states.seeds.np[slot] = SEEDS[number]

    def batch(self, ids: list[int], lengths: list[int]) -> InputBatch:
        """A step after which each request has ``lengths`` tokens computed, some of several new tokens."""
        self.requests.apply_staged_writes()
        self.sampler.apply_staged_writes()
        made = InputBatch.make_dummy(len(ids), 3 * len(ids), self.buffers)
        slots = np.array([self.requests.req_id_to_index[str(i)] for i in ids], made.idx_mapping_np.dtype)
        mapping = torch.from_numpy(slots).to(made.idx_mapping.dtype)
        self.buffers.seq_lens.fill_(-5)
        self.buffers.seq_lens[: len(ids)] = torch.tensor(lengths)
        self.buffers.positions.fill_(-7)
        last = torch.arange(len(ids)) * 3 + 2
        self.buffers.positions[last] = torch.tensor(lengths) - 1
        return replace(
            made, idx_mapping=mapping, expanded_idx_mapping=mapping, idx_mapping_np=slots, logits_indices=last,
            positions=self.buffers.positions, seq_lens=self.buffers.seq_lens[: len(ids) + 2],
        )  # fmt: skip


def one_by_one(engine: Engine, batch: Any, operations: Operations, *, later: int = 0, word: int = -1) -> Step:
    """The step without `prepare`; ``later`` and ``word`` change places and seeds, for controls."""
    rows, states, requests = batch.idx_mapping, engine.sampler.sampling_states, engine.requests
    places = batch.positions[batch.logits_indices] + 1 - requests.prompt_len.gpu[rows] + later
    u = operations.draw_numbers(states.seeds.gpu[rows] & word, places)
    return Step(states.temperature.gpu[rows], u, counted(engine, batch)[0])


def counted(engine: Engine, batch: Any) -> tuple[Tensor, Tensor]:
    """How many tokens each request gets and how many are taken back, as vLLM's own kernel counts them."""
    ones = batch.seq_lens.new_ones(batch.num_reqs)
    return get_num_sampled_and_rejected(
        ones, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, engine.requests.prefill_len.gpu
    )


def unequal(left: Tensor, right: Tensor) -> int:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.numel()
    return int((left != right).sum())


def make_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


def preparing(operations: Operations, found: dict[str, float]) -> None:
    """Slots given back and taken again, prompts begun, at their end, and behind it."""
    engine = Engine(operations)
    for number in range(MOST):
        engine.add(number, 4 + number, more=3 * (number % 2))
    for number in (3, 8):
        engine.requests.remove_request(str(number))
        engine.add(number, 20)
    steps = {
        "all": (list(range(MOST))[::-1], [40 - n for n in range(MOST)]),
        "some in prefill": ([5, 0, 3, 8, 1, 7], [10, 4, 19, 20, 8, 14]),
        "one": ([6], [10]),
    }
    for name, (ids, lengths) in steps.items():
        batch = engine.batch(ids, lengths)
        step = prepare(batch, engine.sampler.sampling_states, engine.requests)
        whole = one_by_one(engine, batch, operations)
        places = batch.positions[batch.logits_indices] + 1 - engine.requests.prompt_len.gpu[batch.idx_mapping]
        for field, ours, theirs in zip(Step._fields, step, whole, strict=True):
            some = places >= 0 if field == "u" else places == places  # before the prompt's end there is no place
            found[f"{name}: {field}"] = unequal(ours[some], theirs[some])
        if name == "some in prefill":
            found["prompts not at their end"] = unequal(step.num_sampled, torch.tensor([0, 1, 0, 1, 1, 1]).int())
        after = places >= 0
        for control, changes in {
            "a place off by one": {"later": 1},
            "a seed's lower word": {"word": 2**32 - 1},
        }.items():
            wrong = one_by_one(engine, batch, operations, **changes).u
            found[f"control: {name}, {control}"] = float(torch.equal(step.u[after], wrong[after]))


def sampling(operations: Operations, name: str, found: dict[str, float]) -> None:
    """Whole steps: nobody cut, some cut, cut ones reported, nobody scored, and nobody cut again."""
    engine = Engine(operations)
    reported = [WHOLE, CUT[2], {"logprobs": -1}]
    kinds = {"whole": [WHOLE] * 3, "cut": [*CUT[:2], WHOLE], "reported": reported, "unscored": [UNSCORED] * 3}
    number, kept = 0, []
    for kind, settings in kinds.items():
        for each in settings:
            engine.add(number, 5, **each)
            number += 1
        ids = list(range(number - 3, number))
        output, ours = sampled(engine, ids, operations, f"{name}, {kind}", found)
        kept.append((output, ours))
    found[f"{name}: requests looked at one by one"] = float(
        engine.sampler._unlike != slots(engine, (3, 4, 7, 8, 9, 10, 11))
    )
    for gone in range(3, 12):
        engine.requests.remove_request(str(gone))
    engine.add(11, 5)  # in the place of one that was looked at
    engine.sampler.apply_staged_writes()
    copied = engine.sampler.sampling_states.temperature.gpu.data_ptr()
    kept.append(sampled(engine, [2, 0, 1], operations, f"{name}, whole again", found))
    found[f"{name}: copied anew"] = float(engine.sampler.sampling_states.temperature.gpu.data_ptr() != copied)
    found[f"{name}: nobody left to look at"] = float(len(engine.sampler._unlike))
    # what earlier steps returned is still what it was, since it is copied while later ones run
    found[f"{name}: kept"] = sum(unequal(a.sampled_token_ids, b) for a, b in kept)
    ranks = [a.logprobs_tensors.selected_token_ranks for a, _ in kept if a.logprobs_tensors is not None]
    found[f"{name}: ranks"] = sum(unequal(rank, torch.zeros(3, dtype=rank.dtype)) for rank in ranks)


def slots(engine: Engine, numbers: Any) -> set[int]:
    return {engine.requests.req_id_to_index[str(n)] for n in numbers}


def sampled(
    engine: Engine, ids: list[int], operations: Operations, name: str, found: dict[str, float]
) -> tuple[Any, Tensor]:
    """One step against the operations one by one."""
    batch, logits = engine.batch(ids, [9 + i for i in ids]), make_logits(len(ids))
    step = one_by_one(engine, batch, operations)
    top_k, top_p = engine.sampler.sampling_states.get_top_k_top_p(batch.idx_mapping, batch.idx_mapping_np)
    cut = (0 if top_k is None else top_k), (1.0 if top_p is None else top_p)
    keep = operations.keep_mask(logits, step.temperatures, *cut)
    found[f"{name}: cut"] = float((name.endswith(("cut", "reported"))) == bool(keep.all()))
    left = masked(logits, keep)
    tokens = operations.draw(left, step.u, step.temperatures)
    given = logits.clone()
    output = engine.sampler(given, batch)
    found[f"{name}: logits"] = unequal(given, logits)
    found[f"{name}: tokens"] = unequal(output.sampled_token_ids, tokens.unsqueeze(-1))
    counts = output.num_sampled, output.num_rejected
    found[f"{name}: counts"] = sum(map(unequal, counts, counted(engine, batch)))
    scores = output.logprobs_tensors
    wanted = max(engine.sampler.sampling_states.num_logprobs[batch.idx_mapping_np])
    if wanted < 0:
        found[f"{name}: no scores"] = float(scores is not None)
        return output, tokens.unsqueeze(-1).clone()
    log_probs = operations.token_log_probs(left, tokens, step.temperatures)
    found[f"{name}: log-probs"] = sum(unequal(column, log_probs) for column in scores.logprobs.unbind(-1))
    found[f"{name}: scored ids"] = unequal(scores.logprob_token_ids[:, 0].long(), tokens)
    found[f"{name}: columns"] = float((scores.logprobs.shape[1] > 1) != (wanted > 0))
    if wanted > 0:
        kept = [sorted(set(row)) for row in scores.logprob_token_ids[:, 1:].tolist()]
        expected = [[-1] if bool(row.all()) else row.nonzero()[:, 0].tolist() for row in keep]
        found[f"{name}: kept ids"] = float(kept != expected)
    return output, tokens.unsqueeze(-1).clone()


def several_rows(operations: Operations, found: dict[str, float]) -> None:
    engine = Engine(operations)
    engine.add(0, 5)
    try:
        engine.sampler(make_logits(2), engine.batch([0], [9]))
    except ValueError as error:
        found["drafted rows are refused"] = float("cannot have 2 rows" not in str(error))


def run() -> dict[str, float]:
    found: dict[str, float] = {}
    cpu = load_provider("cpu")
    preparing(cpu, found)
    sampling(cpu, "cpu", found)
    sampling(replace(cpu, kernels=kernels()), "cuda", found)
    several_rows(cpu, found)
    return found


if __name__ == "__main__":
    print(json.dumps(run()))
