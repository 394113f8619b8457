"""How fast tensors are digested on the CPU, beside blake3 over the same bytes and a plain read of memory.

    python benchmarks/digest.py [--mib 512]

One thread. The best of several passes over one buffer that is larger than the caches; GB are 10**9 bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from vime_core.record.digest import array_digest, implementation
from vime_core.record.hash128 import reference_hash
from vime_core.record.hash128_native import native


def rate(work: Callable[[], object], size: int, passes: int) -> float:
    """Best GB/s over the passes."""
    best = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    data = np.random.default_rng(0).integers(0, 256, parser.parse_args().mib << 20, dtype=np.uint8)
    compiled = native().hash
    rows: list[tuple[str, Callable[[], object] | None, int]] = [
        ("read (sum of 64-bit words)", lambda: data.view(np.uint64).sum(), 5),
        ("tensor hash, C", (lambda: compiled(data)) if compiled else None, 5),
        ("whole digest, as records use it", lambda: array_digest("buffer", data), 5),
        ("tensor hash, numpy", lambda: reference_hash(data), 2),
        ("blake3, one thread", lambda: blake3(data).digest(), 2),
    ]
    print(f"{data.size >> 20} MiB, implementation: {implementation()}\n")
    print(f"{'':<34}{'GB/s':>8}")
    for name, work, passes in rows:
        print(f"{name:<34}{rate(work, data.size, passes):8.1f}" if work else f"{name:<34}{'absent':>8}")


if __name__ == "__main__":
    main()
