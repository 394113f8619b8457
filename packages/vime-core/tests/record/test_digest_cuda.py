"""Without a GPU, the kernel's source runs in Triton's interpreter and is compiled; on a GPU the kernel itself runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_core.errors import RecordError
from vime_core.record import digest
from vime_core.record.digest import digest_tensors, implementation, tensor_digest
from vime_core.record.hash128 import BLOCK_BYTES, BLOCK_WORDS, reference_hash

triton = pytest.importorskip("triton", reason="Triton is not installed: tensors on CUDA devices take the host's path")
hash128_cuda = importlib.import_module("vime_core.record.hash128_cuda")

CUDA = torch.device("cuda", 0)
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the compiled kernel is not run here, only its source in the interpreter",
)
interpretable = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="before Triton 3.7 the interpreter fails in loops with numpy 2.5",
)
BYTES = np.random.default_rng(7).integers(0, 256, 40 * BLOCK_BYTES, dtype=np.uint8)
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
]

# Spans of BYTES; jobs of four blocks, so that some tensors have several, and in groups of a few.
SPANS = [(0, n) for n in (0, 1, 2, 3, 4, 5, 511, 512, 513, 516, 8191, 8192, 8193, 4 * 8192, 4 * 8192 + 1, 9 * 8192 + 6)]
SPANS += [(start, 8192 + 37) for start in (1, 2, 3, 4, 8, 15, 16)]
INTERPRETED = """
import json, sys
import numpy as np, torch
from vime_core.record import hash128_cuda as cuda

cuda.SHAPE, cuda.GROUP_BYTES = cuda.Shape(4, 2, 2), 40_000
bytes_, cpu = np.fromfile(sys.argv[1], dtype=np.uint8), torch.device("cpu")
queue = cuda.HashQueue(cpu)
found = [queue.add(torch.as_tensor(bytes_[start : start + size])) for start, size in json.loads(sys.argv[2])]
hashes = [hashed().hex() for hashed in found]
strided = torch.as_tensor(bytes_[:6000]).view(torch.bfloat16).reshape(50, 60).T
launches, hashes = len(queue._launched), [*hashes, queue.add(strided)().hex()]
refused, buffer = "", torch.zeros(3)
try:
    queue.add(buffer), buffer.add_(1), queue.add(buffer)()
except cuda.RecordError as error:
    refused = str(error)
healthy = cuda.fault(cpu)
cuda.fault.cache_clear()
cuda.device_keys(cpu)[3, 2047] ^= 2
print(json.dumps([hashes, launches, refused, healthy, cuda.fault(cpu)]))
"""


@cache
def interpreted(folder: Path) -> tuple[list[str], int, str, str, str]:
    BYTES.tofile(folder / "bytes")
    command = [sys.executable, "-c", INTERPRETED, str(folder / "bytes"), json.dumps(SPANS)]
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interpreted")


@interpretable
def test_interpreted_kernel_equals_the_reference(folder: Path) -> None:
    hashes, launches, *_ = interpreted(folder)
    expected = [reference_hash(BYTES[start : start + size]).hex() for start, size in SPANS]
    strided = np.ascontiguousarray(BYTES[:6000].view(np.uint16).reshape(50, 60).T)
    assert hashes == [*expected, reference_hash(strided.view(np.uint8).reshape(-1)).hex()]
    assert launches > 1


@interpretable
def test_a_buffer_that_is_filled_anew_is_refused(folder: Path) -> None:
    assert "a tensor (3,) of torch.float32 was overwritten while digests were taken" in interpreted(folder)[2]


@interpretable
def test_a_kernel_with_one_wrong_bit_in_a_key_is_not_used(folder: Path) -> None:
    *_, healthy, spoiled = interpreted(folder)
    assert healthy == ""
    assert spoiled == "the compiled kernel disagrees with the reference"


def test_kernel_compiles_for_hopper_with_loads_of_16_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime_core.record.hash128_triton import _hash_jobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"tensors": "*i64", "jobs": "*i32", "keys": "*u32", "JOB": "constexpr", "ROWS": "constexpr"}
    constants = {(index + 3,): value for index, value in enumerate(hash128_cuda.SHAPE)}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    source = ASTSource(_hash_jobs, {**types, "UNROLL": "constexpr"}, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    shape = hash128_cuda.SHAPE
    assert compiled.asm["ptx"].count("ld.global.v4.b32") >= shape.unroll * (shape.rows + 4)
    assert compiled.asm["cubin"]


@given(st.lists(st.integers(0, 70 * BLOCK_BYTES), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_jobs_cover_every_whole_block_once(lengths: list[int]) -> None:
    jobs = hash128_cuda.plan(lengths)
    size = hash128_cuda.SHAPE.job_blocks
    covered = [
        (tensor, block)
        for tensor, job in jobs.tolist()
        for block in range(job * size, min((job + 1) * size, lengths[tensor] // BLOCK_BYTES))
    ]
    assert covered == [(tensor, block) for tensor, size in enumerate(lengths) for block in range(size // BLOCK_BYTES)]
    assert [tensor for tensor, job in jobs.tolist() if job == 0] == list(range(len(lengths)))


def test_without_triton_the_host_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "vime_core.record.hash128_cuda", None)
    monkeypatch.delattr("vime_core.record.hash128_cuda", raising=False)
    with pytest.warns(RuntimeWarning, match=r"tensors on cuda:0 are digested on the host, slowly: Triton cannot be"):
        assert digest._cuda_queue(CUDA) is None
    assert implementation(CUDA).startswith("c, copied to the host (Triton cannot be imported: ")


def test_without_cuda_in_pytorch_the_host_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(RuntimeWarning, match="PyTorch was not built for CUDA"):
        assert digest._cuda_queue(CUDA) is None


def test_tensors_on_the_host_load_no_triton() -> None:
    code = (
        "import sys, torch; from vime_core.record.digest import digest_tensors;"
        "digest_tensors([('x', torch.zeros(3))]); print('vime_core.record.hash128_cuda' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


# From here on a GPU is needed.


@pytest.fixture
def device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's digests, with the host's path closed to tensors of the device."""
    assert implementation(CUDA) == "triton"
    host = digest._host_hash

    def checked(tensor: torch.Tensor) -> bytes:
        assert not tensor.is_cuda, "a tensor on the device took the host's path"
        return host(tensor)

    monkeypatch.setattr(digest, "_host_hash", checked)


def raw(start: int, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    tensor = torch.as_tensor(BYTES[start : start + size].copy())
    return tensor > 127 if dtype == torch.bool else tensor.view(dtype)


def device_hash(tensor: torch.Tensor) -> bytes:
    return hash128_cuda.HashQueue(CUDA).add(tensor)()


@on_gpu
@pytest.mark.usefixtures("device_only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_stride_and_shape(dtype: torch.dtype) -> None:
    whole = raw(0, 9 * BLOCK_BYTES, dtype)[: 60 * 61]
    on_device = whole.to(CUDA)
    views = {
        "whole": lambda t: t,
        "scalar": lambda t: t[3],
        "offset": lambda t: t[1:],
        "steps": lambda t: t[::3],
        "transposed": lambda t: t.reshape(60, 61).T,
        "expanded": lambda t: t[:7].expand(5, 7),
        "empty": lambda t: t[:0],
    }
    host = digest_tensors((name, view(whole)) for name, view in views.items())
    assert digest_tensors((name, view(on_device)) for name, view in views.items()) == host


@on_gpu
@pytest.mark.usefixtures("device_only")
def test_lazily_conjugated_and_negated_tensors_and_parameters() -> None:
    number = torch.randn(1000, dtype=torch.complex64)  # no NaN: negated, its bits differ between GPU and host
    on_device = number.to(CUDA)
    assert tensor_digest("x", on_device.conj()) == tensor_digest("x", number.conj())
    assert tensor_digest("x", on_device.conj().imag) == tensor_digest("x", number.conj().imag)
    parameter = torch.nn.Parameter(raw(0, 8192, torch.float32))
    assert tensor_digest("x", parameter.to(CUDA)) == tensor_digest("x", parameter)


@on_gpu
def test_every_length_near_a_boundary_at_every_offset() -> None:
    near = [k * BLOCK_BYTES + d for k in (1, 2, 3, 15, 16, 17, 32) for d in (-5, -4, -3, -1, 0, 1, 2, 3, 4)]
    data, queue = torch.as_tensor(BYTES).to(CUDA), hash128_cuda.HashQueue(CUDA)
    spans = [(start, size) for start in range(17) for size in (*range(20), 511, 512, 513, *near)]
    found = [queue.add(data[start : start + size]) for start, size in spans]
    unequal = [
        (start, size)
        for (start, size), hashed in zip(spans, found, strict=True)
        if hashed() != reference_hash(BYTES[start : start + size])
    ]
    assert unequal == []
    assert len(spans) == 17 * (20 + 3 + len(near))


@on_gpu
def test_extreme_words() -> None:
    ones = np.full(33 * BLOCK_BYTES + 3, 255, dtype=np.uint8)
    assert device_hash(torch.as_tensor(ones).to(CUDA)) == reference_hash(ones)


@on_gpu
@pytest.mark.parametrize("bit", np.random.default_rng(1).integers(0, 8 * len(BYTES), 20).tolist())
def test_a_flipped_bit_changes_both_halves(bit: int) -> None:
    data = torch.as_tensor(BYTES.copy()).to(CUDA)
    before = device_hash(data)
    data[bit // 8] ^= 1 << (bit % 8)
    after = device_hash(data)
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@on_gpu
def test_swapped_blocks_are_seen() -> None:
    data = torch.as_tensor(BYTES).to(CUDA).view(-1, BLOCK_BYTES)
    assert len({device_hash(torch.roll(data, shift, 0)) for shift in range(40)}) == 40


@on_gpu
@pytest.mark.usefixtures("device_only")
def test_temporaries_in_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is freed once it is handed over, and the next one takes its memory."""
    monkeypatch.setattr(hash128_cuda, "GROUP_BYTES", 1 << 20)
    sizes = [int(size) for size in np.random.default_rng(3).integers(1, 500_000, 60)]

    def drawn(number: int) -> torch.Tensor:
        return torch.randn(sizes[number], generator=torch.Generator().manual_seed(number))

    on_device = digest_tensors((str(number), drawn(number).to(CUDA)) for number in range(60))
    assert on_device == digest_tensors((str(number), drawn(number)) for number in range(60))


@on_gpu
@pytest.mark.usefixtures("device_only")
def test_a_buffer_on_the_device_that_is_filled_anew_is_refused() -> None:
    buffer = torch.zeros(100, device=CUDA)
    with pytest.raises(RecordError, match=r"a tensor \(100,\) of torch\.float32 was overwritten"):
        digest_tensors((str(number), buffer.fill_(number)) for number in range(3))
    with torch.inference_mode():
        assert tensor_digest("x", torch.ones(3, device=CUDA)) == tensor_digest("x", torch.ones(3))


@on_gpu
@pytest.mark.usefixtures("device_only")
def test_devices_may_be_mixed_and_order_is_kept() -> None:
    host = {f"t{number}": raw(number, 3000 + number) for number in range(30)}
    mixed = {name: tensor.to(CUDA) if number % 3 else tensor for number, (name, tensor) in enumerate(host.items())}
    assert list(digest_tensors(mixed.items()).items()) == list(digest_tensors(host.items()).items())


@on_gpu
@pytest.mark.usefixtures("device_only")
def test_work_of_the_current_stream_is_waited_for() -> None:
    side, source = torch.cuda.Stream(), torch.as_tensor(BYTES).to(CUDA)
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        target.copy_(source)
        found = tensor_digest("x", target)
    assert found == tensor_digest("x", torch.as_tensor(BYTES))


@on_gpu
def test_nothing_waits_before_a_value_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hash128_cuda.fault(CUDA) == ""
    monkeypatch.setattr(hash128_cuda, "GROUP_BYTES", 100_000)
    data, queue = torch.as_tensor(BYTES).to(CUDA), hash128_cuda.HashQueue(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [queue.add(data[start : start + 30_000]) for start in range(20)]
        with pytest.raises(RuntimeError, match="synchroniz"):
            found[0]()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found[19]() == reference_hash(BYTES[19:30_019])


@on_gpu
def test_a_wrong_kernel_is_not_used_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = hash128_cuda.device_keys(CUDA)
    keys.view(torch.int32)[0, BLOCK_WORDS - 1] ^= 2
    hash128_cuda.fault.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="the compiled kernel disagrees with the reference"):
            found = tensor_digest("x", torch.as_tensor(BYTES).to(CUDA))
    finally:
        hash128_cuda.device_keys.cache_clear()
        hash128_cuda.fault.cache_clear()
    assert found == tensor_digest("x", torch.as_tensor(BYTES))
    assert implementation(CUDA) == "triton"
