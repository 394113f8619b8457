"""An own vLLM model class with its own attention backend: full decode CUDA graphs, both runners, shared log-prob.

    python engine_probe.py DIRECTORY [--cases NAME ...]

Writes a randomly initialised model of the Qwen2.5-0.5B shape into DIRECTORY, starts one engine per case side by side
on one GPU, and compares bits: alone or in company, fresh or from the prefix cache, and against one packed pass over
the whole sequences by the same operations (the trainer's view). Timings are taken one case at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
REQUESTS, ANSWER, ALONE = 64, 96, 4
VOCABULARY = 151936
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": VOCABULARY, "use_sliding_window": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One engine. `attention` and `linear` None: vLLM's stock class. `runner` None: what vLLM chooses.

    `sampler`: what the model class gives to model runner V2. `worker`: a worker_cls that replaces V1's sampler.
    """

    attention: str | None = "fa3"
    linear: str | None = "deepgemm"
    runner: str | None = None
    eager: bool = False
    sampler: str = "shared"
    worker: bool = False


CASES = {
    "stock": Case(attention=None, linear=None),
    "own": Case(),
    "own eager": Case(eager=True),
    "own V1 worker_cls": Case(runner="0", worker=True),
    "own V2 worker_cls only": Case(worker=True, sampler="stock"),
    "own Triton": Case(attention="triton", linear="triton"),
    "own, stock FA3 tiles": Case(attention="fa3-stock"),
}


def make_model(folder: Path) -> None:
    """Random weights of a realistic scale, so that log-probs are far from uniform."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hidden, ffn, kv = 896, 4864, 128
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
              "mlp.down_proj": (hidden, ffn)}  # fmt: skip
    normal = lambda *shape, scale: (torch.randn(*shape, device="cuda") * scale).bfloat16().cpu()  # noqa: E731
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=0.08), "model.norm.weight": one(hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = normal(*shape, scale=shape[1] ** -0.5)
        for name in ("q", "k", "v"):
            size = shapes[f"self_attn.{name}_proj"][0]
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = normal(size, scale=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = one(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def one(size: int) -> Any:
    import torch

    return (1 + 0.1 * torch.randn(size)).bfloat16()


def prompts() -> list[list[int]]:
    """Three out of four share a long prefix, so that the second run hits the prefix cache."""
    draw = random.Random(0)
    prefix = [draw.randrange(VOCABULARY) for _ in range(150)]
    tail = lambda: [draw.randrange(VOCABULARY) for _ in range(draw.randrange(5, 200))]  # noqa: E731
    return [(prefix if i % 4 else []) + tail() for i in range(REQUESTS)]


def temperature(index: int) -> float:
    return 1.0 if index % 2 else 0.7


def start_engine(case: Case, folder: Path) -> Any:
    from vllm import LLM, ModelRegistry

    extra: dict[str, Any] = {}
    if case.attention:
        from probe_model import ProbeDecoder

        ModelRegistry.register_model("ProbeDecoder", ProbeDecoder)
        extra["hf_overrides"] = {"architectures": ["ProbeDecoder"]}
        extra["additional_config"] = {
            "attention": case.attention,
            "linear": case.linear,
            "sampler": case.sampler,
        }
    if case.worker:
        extra["worker_cls"] = "probe_model.SharedWorker"
    mode = {"enforce_eager": True} if case.eager else {"compilation_config": GRAPHS}
    return LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=REQUESTS, seed=0,
        max_num_batched_tokens=1024, gpu_memory_utilization=0.1, kv_cache_memory_bytes=3 * 2**30,
        logprobs_mode="processed_logprobs", enable_prefix_caching=True, **mode, **extra,
    )  # fmt: skip


def generate(llm: Any, indices: list[int]) -> dict[int, tuple[list[int], list[float]]]:
    """Index to (tokens, log-probs)."""
    from vllm import SamplingParams

    every = prompts()
    params = [
        SamplingParams(temperature=temperature(i), seed=i, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
        for i in indices
    ]
    outs = llm.generate([{"prompt_token_ids": every[i]} for i in indices], params, use_tqdm=False)
    return {i: tokens_and_log_probs(out.outputs[0]) for i, out in zip(indices, outs, strict=True)}


def tokens_and_log_probs(answer: Any) -> tuple[list[int], list[float]]:
    tokens = list(answer.token_ids)
    return tokens, [step[t].logprob for step, t in zip(answer.logprobs, tokens, strict=True)]


def tokens_per_second(llm: Any) -> float:
    """64 requests x 128 tokens after a 64-token prompt; the better of two runs after a warm one."""
    from vllm import SamplingParams

    draw, rates = random.Random(1), []
    params = SamplingParams(temperature=1.0, max_tokens=128, logprobs=0, ignore_eos=True)
    for _ in range(3):
        batch = [{"prompt_token_ids": [draw.randrange(VOCABULARY) for _ in range(64)]} for _ in range(REQUESTS)]
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        rates.append(REQUESTS * 128 / (time.perf_counter() - start))
    return max(rates[1:])


def differing(left: dict[int, Any], right: dict[int, Any]) -> str:
    """Requests whose tokens or log-probs differ anywhere (floats compared exactly; NaN differs)."""
    both = [i for i in left if i in right]
    count = sum(left[i] != right[i] for i in both)
    return f"{count}/{len(both)}" if both else "nothing compared"


def against_packed(llm: Any, answers: dict[int, tuple[list[int], list[float]]]) -> dict[str, str]:
    import torch

    from probe_model import packed_log_probs

    every, order = prompts(), sorted(answers)
    model = model_of(llm)
    heat = [temperature(i) for i in order]
    got = packed_log_probs(model, [every[i] for i in order], [answers[i][0] for i in order], heat)
    want = torch.cat(got)
    have = torch.tensor([p for i in order for p in answers[i][1]], dtype=torch.float32)
    wrong = (want != have) | want.isnan() | have.isnan()
    spread = f"{float(have.mean()):.2f} +- {float(have.std()):.2f}"
    return {
        "engine != packed": f"{int(wrong.sum())}/{len(have)}",
        "largest": f"{float((want - have).abs().max()):.1e}",
        "log-probs": spread,
        "prompt log-probs != packed": prompt_log_probs(llm, model, every[0]),
    }


def prompt_log_probs(llm: Any, model: Any, prompt: list[int]) -> str:
    import torch
    from vllm import SamplingParams

    from probe_model import packed_log_probs

    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, seed=0)
    llm.reset_prefix_cache()
    out = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    have = torch.tensor([step[t].logprob for step, t in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)])
    want = packed_log_probs(model, [prompt[:1]], [prompt[1:]], [1.0])[0]
    return f"{int((have != want).sum())}/{len(have)}"


def model_of(llm: Any) -> Any:
    return runner_of(llm).get_model()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def describe(llm: Any) -> dict[str, str]:
    runner = runner_of(llm)
    config = runner.vllm_config
    module = type(runner).__module__
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "runner class": f"{module}.{type(runner).__name__}",
        "sampler": type(runner.sampler).__name__,
        "graphs": str(config.compilation_config.cudagraph_mode.name),
    }


def run_case(name: str, folder: Path) -> None:
    case = CASES[name]
    llm = start_engine(case, folder / "model")
    found = {"case": name, **describe(llm)}
    (folder / f"ready-{name}").touch()
    wait_for_others(folder)
    with one_at_a_time(folder):
        company = generate(llm, list(range(REQUESTS)))
        cached = generate(llm, list(range(REQUESTS)))
        alone: dict[int, Any] = {}
        for i in range(ALONE):
            llm.reset_prefix_cache()
            alone |= generate(llm, [i])
        found |= {"cached != fresh": differing(company, cached), "alone != company": differing(alone, company)}
        found |= {"tok/s": f"{tokens_per_second(llm):.0f}"}
        if case.attention:
            found |= against_packed(llm, company)
            from probe_model import CALLS

            found["calls"] = str(CALLS)
    (folder / f"answers-{name}.json").write_text(json.dumps({str(i): v for i, v in company.items()}))
    (folder / f"found-{name}.json").write_text(json.dumps(found))


def wait_for_others(folder: Path, seconds: float = 240) -> None:
    """Until every case has started or ended, so that no timing runs beside another engine's start."""
    names, limit = json.loads((folder / "cases.json").read_text()), time.time() + seconds
    while time.time() < limit and not all(
        (folder / f"ready-{n}").exists() or (folder / f"ended-{n}").exists() for n in names
    ):
        time.sleep(0.2)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def temperature_division() -> str:
    """vLLM's V2 temperature kernel, and PyTorch's division by a number, against IEEE division in fp32."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    z = torch.randn(64, VOCABULARY, device="cuda") * 3
    heat, mapping = torch.full((64,), 0.7, device="cuda"), torch.arange(64, dtype=torch.int32, device="cuda")
    exact, by_number = z / heat[:, None], z / 0.7
    apply_temperature(z, mapping, heat)
    return f"kernel {int((z != exact).sum())}, number {int((by_number != exact).sum())} of {z.numel()} elements differ"


def launch(name: str, folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
           "VLLM_DEEP_GEMM_WARMUP": "skip", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    if CASES[name].runner is not None:
        env["VLLM_USE_V2_MODEL_RUNNER"] = CASES[name].runner or ""
    log = (folder / f"log-{name}.txt").open("wb")
    command = [sys.executable, __file__, str(folder), "--one", name]
    return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def kernel_groups() -> list[list[tuple[str, int, int, int]]]:
    """(kind, N, K, M) of every DeepGEMM call that the engines make."""
    buckets = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
    shapes = {"fp32": [(1152, 896)], "nt": [(896, 896), (9728, 896), (896, 4864), (VOCABULARY, 896)]}
    tasks = [(kind, n, k, m) for kind, sizes in shapes.items() for n, k in sizes for m in buckets]
    return [[task] for task in tasks if task[3] < 4096 or task[1] < 100_000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--compiled", action="store_true", help="DeepGEMM's kernels are in its cache already")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_case(args.one, args.folder)
        return
    make_model(args.folder / "model")
    (args.folder / "cases.json").write_text(json.dumps(args.cases))
    if not args.compiled:
        from linear_rows import warm

        warm(kernel_groups(), 14)
    run_all(args.folder, args.cases)
    report(args.folder, args.cases)


def run_all(folder: Path, cases: list[str]) -> None:
    running = {name: launch(name, folder) for name in cases}
    while running:
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            (folder / f"ended-{name}").touch()
            if process.returncode:
                tail = (folder / f"log-{name}.txt").read_text(errors="replace")[-1500:]
                print(f"NOT RUN {name}: exit {process.returncode}\n{tail}", flush=True)
        time.sleep(0.2)


def report(folder: Path, cases: list[str]) -> None:
    from measure import table

    done = [n for n in cases if (folder / f"found-{n}.json").exists()]
    found = [json.loads((folder / f"found-{n}.json").read_text()) for n in done]
    keys = list(dict.fromkeys(key for one_case in found for key in one_case))
    table("engines", ["", *done], [[key, *(f.get(key, "-") for f in found)] for key in keys if key != "case"])
    answers = {n: json.loads((folder / f"answers-{n}.json").read_text()) for n in done}
    pairs = [(a, b) for i, a in enumerate(done) for b in done[i + 1 :]]
    rows = [[a, b, differing(answers[a], answers[b])] for a, b in pairs]
    table("requests whose tokens or log-probs differ between cases", ["case", "case", "differ"], rows)
    if {"stock", "own"} <= set(done):
        print(f"sanity, first tokens of stock and own: {first_tokens(answers['stock'], answers['own'])}")
    print(f"division by T = 0.7 against IEEE: {temperature_division()}")


def first_tokens(left: dict[str, Any], right: dict[str, Any]) -> str:
    """The two classes are the same network: first sampled tokens mostly agree, and their log-probs nearly."""
    same = [i for i in left if left[i][0][0] == right[i][0][0]]
    gaps = [abs(left[i][1][0] - right[i][1][0]) for i in same]
    return f"{len(same)}/{len(left)} equal, mean log-prob gap {sum(gaps) / max(len(gaps), 1):.1e}"


if __name__ == "__main__":
    main()
