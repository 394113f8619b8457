"""Both model runners of vLLM draw, cut and score alike, request by request, whoever stands beside or is preempted.

V2 runs on this CPU in Triton's interpreter: vLLM's own bookkeeping of real engine steps, and the contract's sampler.
Each engine and its driver are processes of their own, since vLLM asks once, when it is imported, what Triton can do.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_answers import Answers
from aligned_reference import Reference, compare
from safetensors.torch import load_file

from vime_core.backends import RolloutContext
from vime_core.numerics import load_provider, masked
from vime_core.numerics.draw import numbers
from vime_core.types import Completion, SampleRequest
from vime_vllm.options import VllmOptions

pytestmark = [pytest.mark.engine, pytest.mark.slow]
if find_spec("vllm") is None:
    pytest.fail("vLLM is not installed, so its tests cannot run", pytrace=False)
pytest.importorskip("triton", reason="model runner V2 needs Triton")

MODEL = "qwen3-bf16"
SUPPORT = Path(__file__).parent / "support"
SMALL_CACHE = VllmOptions(kv_cache_gib=0.0006, max_num_seqs=8, engine_args={"block_size": 16})
ALONE = (2, 6)
SAMPLERS = {
    "V1": "vime_vllm.aligned.sampler.AlignedSampler",
    "V2": "vime_vllm.aligned.sampler_v2.AlignedSamplerV2",
}


@pytest.fixture(scope="module")
def requests(requests_of: Callable[..., list[SampleRequest]], reference: Reference) -> list[SampleRequest]:
    """Greedy and random, whole and cut; seeds of one word and of two."""
    cuts: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}, {}]
    made = requests_of(15, reference.config["vocab_size"], max_tokens=40)
    made = [replace(r, seed=r.seed << (32 * (i % 2))) for i, r in enumerate(made)]
    return [replace(r, **cuts[i % 5]) if r.temperature else r for i, r in enumerate(made)]


@pytest.fixture(scope="module")
def reference(model_of: Callable[[str], Path]) -> Reference:
    directory = model_of(MODEL)
    config = json.loads((directory / "config.json").read_text())
    return Reference(load_provider("cpu"), config, load_file(directory / "model.safetensors"))


@pytest.fixture(scope="module")
def answers(
    make_aligned: Callable[..., RolloutContext],
    model_of: Callable[[str], Path],
    requests: list[SampleRequest],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Answers]:
    """What engines on V1 and V2 answered, started side by side."""
    given = pickle.dumps((make_aligned(model_of(MODEL), options=SMALL_CACHE), requests, ALONE))
    files = {runner: tmp_path_factory.mktemp(runner) / "answers" for runner in SAMPLERS}
    interpreted = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{SUPPORT / 'triton_on_cpu'}"}
    settings = {"V1": {}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", **interpreted}}
    for runner, file in files.items():
        command = [sys.executable, str(SUPPORT / "aligned_answers.py"), str(file)]
        environment = {**os.environ, **settings[runner]}
        done = subprocess.run(command, input=given, env=environment, capture_output=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
    return {runner: pickle.loads(file.read_bytes()) for runner, file in files.items()}


def drawn_again(reference: Reference, request: SampleRequest, completion: Completion) -> tuple[list[int], list[int]]:
    """Tokens, and how many were left to draw each from, by the whole-sequence forward and the definition."""
    op, first = reference.operations, len(request.prompt_tokens) - 1
    logits = reference.logits([*request.prompt_tokens, *completion.tokens])[first:-1]
    keep = op.keep_mask(logits, request.temperature, request.top_k, request.top_p)
    u = numbers(request.seed, len(logits), torch.device("cpu"))
    return op.draw(masked(logits, keep), u, request.temperature).tolist(), keep.sum(-1).tolist()


def is_cut(request: SampleRequest) -> bool:
    return request.top_k > 0 or request.top_p < 1


@pytest.mark.parametrize("runner", SAMPLERS)
def test_tokens_are_those_that_the_definition_draws(
    answers: dict[str, Answers], reference: Reference, requests: list[SampleRequest], runner: str
) -> None:
    given = answers[runner]
    assert (given.settings["model_runner_version"], given.settings["sampler"]) == (runner, SAMPLERS[runner])
    assert given.draws_by_contract
    assert given.preempted, "nobody was preempted, so nothing is shown of those who are"
    found = compare(reference, requests, given.together)
    assert (found.unequal, found.tokens > 400) == (0, True)
    for request, completion in zip(requests, given.together, strict=True):
        tokens, left = drawn_again(reference, request, completion)
        assert list(completion.tokens) == tokens
        assert list(completion.kept.counts) == (left if is_cut(request) else [])
    moved = [replace(r, seed=r.seed + 1) for r in requests if r.temperature > 0]
    theirs = [c for r, c in zip(requests, given.together, strict=True) if r.temperature > 0]
    assert all(list(c.tokens) != drawn_again(reference, r, c)[0] for r, c in zip(moved, theirs, strict=True))


@pytest.mark.parametrize("runner", SAMPLERS)
def test_company_changes_no_draw(answers: dict[str, Answers], runner: str) -> None:
    given = answers[runner]
    assert set(given.alone) == set(ALONE)
    assert all(same(alone, given.together[place]) for place, alone in given.alone.items())


def test_both_runners_answer_alike(answers: dict[str, Answers]) -> None:
    assert all(same(*pair) for pair in zip(answers["V1"].together, answers["V2"].together, strict=True))


def same(a: Completion, b: Completion) -> bool:
    return (a.tokens, a.kept, a.log_probs.tobytes()) == (b.tokens, b.kept, b.log_probs.tobytes())
