"""How fast a CUDA device digests its own tensors, beside a copy and a sum of the same tensors on the same device.

    python benchmarks/h200/digest.py [--sweep]

Random bf16 weights with the shapes of Qwen2.5-0.5B and Qwen2.5-7B, one tensor of 4 GiB, and one of 8 GiB and 3 bytes
whose hash is compared with the host's. Medians; TB are 10**12 bytes; a copy counts bytes read and bytes written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from vime_core.record import hash128_cuda
from vime_core.record.digest import bytes_hash, digest_tensors, implementation, tensor_digest
from vime_core.record.hash128_triton import Shape, hash_jobs

from measure import table

CUDA = torch.device("cuda", 0)
Named = dict[str, torch.Tensor]
SHAPES = [(16, 2, 4), (16, 2, 2), (16, 2, 8), (16, 1, 4), (16, 4, 1), (16, 4, 2), (8, 2, 4), (32, 2, 4)]


def qwen(hidden: int, layers: int, inner: int, kv: int, vocabulary: int, tied: bool) -> Named:
    """Random weights, bf16, with the published names and shapes of Qwen2.5."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        for name, width in (("q", hidden), ("k", kv), ("v", kv)):
            shapes |= {f"{layer}.{name}.weight": (width, hidden), f"{layer}.{name}.bias": (width,)}
        shapes |= {f"{layer}.o": (hidden, hidden), f"{layer}.down": (hidden, inner)}
        shapes |= {f"{layer}.{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("input_norm", "post_norm")}
    shapes |= {} if tied else {"lm_head": (vocabulary, hidden)}
    return {name: torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for name, shape in shapes.items()}


def device_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time between events around the work; everything is launched first, behind a pause of the device."""
    marks = []
    for _ in range(repeats + 3):
        torch.cuda._sleep(20_000_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        marks.append(start.elapsed_time(end))
    return statistics.median(marks[3:])


def wall_ms(work: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def kernel(tensors: Sequence[torch.Tensor], shape: Shape = hash128_cuda.SHAPE) -> Callable[[], object]:
    """The launch alone, of all tensors as one group."""
    hash128_cuda.SHAPE, usual = shape, hash128_cuda.SHAPE
    jobs = torch.as_tensor(hash128_cuda.plan([tensor.nbytes for tensor in tensors])).to(CUDA)
    hash128_cuda.SHAPE = usual
    rows = torch.tensor([[tensor.data_ptr(), tensor.nbytes, 0, 0] for tensor in tensors], device=CUDA)
    keys = hash128_cuda.device_keys(CUDA)
    return lambda: hash_jobs(rows, jobs, keys, shape)


def device_rows(name: str, tensors: Sequence[torch.Tensor]) -> list[list[object]]:
    size = sum(tensor.nbytes for tensor in tensors)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    works: list[tuple[str, Callable[[], object], int]] = [
        ("hash, kernel alone", kernel(tensors), size),
        ("hash, kernel alone, again", kernel(tensors), size),
        ("copy of each", lambda: [copy.copy_(tensor) for copy, tensor in zip(copies, tensors, strict=True)], 2 * size),
        ("torch.sum of each", lambda: [tensor.sum() for tensor in tensors], size),
    ]
    times = [(label, device_ms(work), moved) for label, work, moved in works]
    return [[name, label, time, moved / time / 1e9] for label, time, moved in times]


def wall_rows(name: str, weights: Named) -> list[list[object]]:
    size = sum(tensor.nbytes for tensor in weights.values())
    queued = wall_ms(lambda: _queued(weights))
    whole = wall_ms(lambda: digest_tensors(weights.items()))
    single = wall_ms(lambda: [tensor_digest(key, tensor) for key, tensor in weights.items()], 3)
    rows = [("hashes (`HashQueue`)", queued), ("`digest_tensors`", whole), ("`tensor_digest` of each", single)]
    return [[name, len(weights), size / 1e9, label, time, size / time / 1e9] for label, time in rows]


def step_rows(name: str, weights: Named) -> list[list[object]]:
    """All that a step digests: weights, and in fp32 gradients, masters and both moments (one memory for the four)."""
    wide = {key: tensor.float() for key, tensor in weights.items()}
    kinds = ("gradient", "master", "exp_avg", "exp_avg_sq")
    step = weights | {f"{key}.{kind}": tensor for key, tensor in wide.items() for kind in kinds}
    size = sum(tensor.nbytes for tensor in step.values())
    taken = wall_ms(lambda: digest_tensors(step.items()), 5)
    return [[name, len(step), size / 1e9, "`digest_tensors` of a whole step", taken, size / taken / 1e9]]


def _queued(weights: Named) -> list[bytes]:
    queue = hash128_cuda.HashQueue(CUDA)
    found = [queue.add(tensor) for tensor in weights.values()]
    return [hashed() for hashed in found]


def check_host(weights: Named) -> None:
    """Same digests from the host; and the host's time, for comparison."""
    found = digest_tensors(weights.items())
    begin = time.perf_counter()
    host = digest_tensors((name, tensor.cpu()) for name, tensor in weights.items())
    seconds = time.perf_counter() - begin
    unequal = [name for name in host if host[name] != found[name]]
    print(f"0.5B on the host ({implementation()}): {seconds * 1e3:.0f} ms; unequal: {len(unequal)} of {len(host)}")


def check_large() -> None:
    """More words than 32 bits count."""
    tensor = torch.randint(0, 256, ((8 << 30) + 3,), dtype=torch.uint8, device=CUDA)
    queue = hash128_cuda.HashQueue(CUDA)
    found, host = queue.add(tensor)(), bytes_hash(tensor.cpu().numpy())
    tensor[-1] ^= 1
    changed = queue.add(tensor)()
    print(f"{tensor.nbytes} bytes: equal to the host: {found == host}; one bit changed: equal: {changed == host}")


def small_rows() -> list[list[object]]:
    one = {"x": torch.randn(896, device=CUDA, dtype=torch.bfloat16)}
    many = {str(number): torch.randn(896, device=CUDA, dtype=torch.bfloat16) for number in range(300)}
    odd = {str(number): torch.randn(897, device=CUDA, dtype=torch.bfloat16)[1:] for number in range(300)}
    sets = (("one of 1,792 bytes", one), ("300 of 1,792 bytes", many), ("300 at odd addresses (copied first)", odd))
    return [[name, wall_ms(lambda w=weights: digest_tensors(w.items()), 50) * 1e3] for name, weights in sets]


def sweep(tensors: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
    sizes = [sum(tensor.nbytes for tensor in group) for group in (tensors, more)]
    rows = []
    for shape in (Shape(*cut) for cut in SHAPES):
        rates = [
            size / device_ms(kernel(group, shape), 10) / 1e9 for group, size in zip((tensors, more), sizes, strict=True)
        ]
        rows.append([*shape, *rates])
    table("Cuts of the kernel, TB/s", ["job", "rows", "unroll", "4 GiB", "0.5B"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also time other cuts of the kernel")
    begin = time.perf_counter()
    state = implementation(CUDA)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, numpy {np.__version__}, digests: {state}")
    print(f"compiling and testing the kernel: {time.perf_counter() - begin:.1f} s", flush=True)
    large = [torch.randn(1 << 31, device=CUDA, dtype=torch.bfloat16)]
    small = qwen(896, 24, 4864, 128, 151_936, True)
    if parser.parse_args().sweep:
        sweep(large, list(small.values()))
    rows = device_rows("4 GiB", large) + device_rows("0.5B", list(small.values()))
    del large
    check_host(small)
    seven = qwen(3584, 28, 18_944, 512, 152_064, False)
    rows += device_rows("7B", list(seven.values()))
    table("On the device", ["tensors", "work", "ms", "TB/s"], rows)
    walls = wall_rows("0.5B", small) + step_rows("0.5B", small) + wall_rows("7B", seven) + step_rows("7B", seven)
    table("As the caller waits", ["set", "tensors", "GB", "call", "ms", "TB/s"], walls)
    del seven
    table("Small tensors, as the caller waits", ["tensors", "us"], small_rows())
    check_large()


if __name__ == "__main__":
    main()
