"""The contract's sampler of model runner V2, from vLLM's own states: what one kernel prepares, and whole steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("vllm") is None:
    pytest.fail("vLLM is not installed, so its tests cannot run", pytrace=False)
triton = pytest.importorskip("triton", reason="model runner V2 needs Triton")
SUPPORT = Path(__file__).parent / "support"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the compiled kernel is not run here")


@cache
def found() -> dict[str, float]:
    """In a process of its own, since vLLM asks once, when it is imported, what Triton can do."""
    if torch.cuda.is_available():
        pytest.skip("vLLM keeps its states on the GPU here")
    interpreted = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{SUPPORT / 'triton_on_cpu'}"}
    command = [sys.executable, str(SUPPORT / "aligned_steps.py")]
    environment = {**os.environ, **interpreted}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def judged(kind: str, count: int) -> None:
    some = {name: value for name, value in found().items() if kind in name}
    assert len(some) == count
    assert {name: value for name, value in some.items() if value != 0} == {}


def test_one_kernel_prepares_what_vllm_and_the_operations_would() -> None:
    for field in ("temperatures", "u", "num_sampled"):
        judged(f": {field}", 3)
    judged("prompts not at their end", 1)


def test_another_place_or_a_seed_cut_in_half_would_be_seen() -> None:
    judged("control", 6)


def test_a_step_gives_what_the_operations_of_each_provider_give_one_by_one() -> None:
    for what in ("logits", "tokens", "counts", "cut"):
        judged(f": {what}", 10)
    for what in ("log-probs", "scored ids", "columns"):
        judged(f": {what}", 8)
    judged(": kept ids", 2)
    judged(": no scores", 2)


def test_settings_are_looked_at_one_by_one_only_where_requests_differ() -> None:
    judged("requests looked at one by one", 2)
    judged("nobody left to look at", 2)


def test_settings_are_copied_only_where_requests_came() -> None:
    judged("copied anew", 2)


def test_what_a_step_returned_stays_while_the_next_runs() -> None:
    judged(": kept", 4)  # tokens, and ids of kept tokens
    judged(": ranks", 2)


def test_a_request_with_several_rows_is_refused() -> None:
    judged("drafted rows are refused", 1)


def made(rows: int, slots: int, index: torch.dtype, keep: Callable[[Tensor], Tensor]) -> tuple[Any, Any, Any]:
    """A batch, sampling states and request states as vLLM has them; ``keep`` puts a state where the GPU reads it."""
    some = torch.Generator().manual_seed(rows)

    def below(end: int, *size: int) -> Tensor:
        return torch.randint(0, end, size, generator=some, dtype=torch.int32)

    device = keep(below(1, 1)).device
    slot, prompt = torch.randperm(slots, generator=some)[:rows], below(50, slots)
    lengths = {"prompt_len": prompt, "prefill_len": prompt + below(9, slots)}
    seq_lens = prompt[slot] + below(12, rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (slots,), generator=some)
    last = torch.arange(rows) * 3 + 2
    positions = torch.full((3 * rows,), -7).index_put((last,), seq_lens.long() - 1)
    tensors = {
        "idx_mapping": slot.to(index), "logits_indices": last.to(index), "positions": positions, "seq_lens": seq_lens,
    }  # fmt: skip
    batch = SimpleNamespace(num_reqs=rows, **{name: tensor.to(device) for name, tensor in tensors.items()})
    states = {"temperature": below(3, slots) * 0.5, "seeds": seeds}
    return batch, *(
        SimpleNamespace(**{name: SimpleNamespace(gpu=keep(tensor)) for name, tensor in each.items()})
        for each in (states, lengths)
    )


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 33, 256])
def test_the_compiled_kernel_reads_states_in_the_host_s_memory(rows: int) -> None:
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    from vime_core.numerics.draw import reference_numbers
    from vime_vllm.aligned.step_kernel import prepare

    pinned: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        pinned.append(tensor.pin_memory())
        return get_accelerator_view_from_cpu_tensor(pinned[-1])

    for index in (torch.int32, torch.int64):
        batch, states, lengths = made(rows, 300, index, keep)
        found = prepare(batch, states, lengths)
        torch.cuda.synchronize()
        slot, length = batch.idx_mapping.cpu().long(), batch.seq_lens.cpu()
        temperature, seed, prompt, prefill = (tensor[slot] for tensor in pinned[-4:])
        places = (length - prompt).long()
        assert torch.equal(found.temperatures.cpu(), temperature)
        assert torch.equal(found.u.cpu(), reference_numbers(seed, places))
        assert not torch.equal(found.u.cpu(), reference_numbers(seed, places + 1))
        assert torch.equal(found.num_sampled.cpu(), (length >= prefill).int())


def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the types of vLLM's tensors; what it computes is not looked at."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    from vime_core.numerics.cuda.launch import Remembered
    from vime_vllm.aligned.step_kernel import prepare

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cubins: list[bytes] = []

    def compiled(launched: Remembered, _grid: object, /, *args: Any, **options: Any) -> None:
        kernel: Any = launched.function
        types = {p.name: mangle_type(value) for p, value in zip(kernel.params, args, strict=True)}
        asm = triton.compile(ASTSource(kernel, types, {}), target=GPUTarget("cuda", 90, 32), options=options).asm
        cubins.append(asm["cubin"])

    monkeypatch.setattr(Remembered, "_launch", compiled)
    for index in (torch.int32, torch.int64):
        step = prepare(*made(4, 5, index, lambda tensor: tensor))
        assert [tensor.dtype for tensor in step] == [torch.float32, torch.int64, torch.int32]
    assert len(cubins) == 2
    assert all(cubins)
