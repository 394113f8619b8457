"""What one draw from 151,936 logits costs a decode step, beside vLLM's own, and whether it is the reference's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from vime_core.numerics import draw as definition
from vime_core.numerics import load_provider
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from measure import graph_us, table

VOCABULARY = 151936
OPERATIONS = load_provider("cuda")


def launched_us(call: Callable[[], object], count: int = 50) -> float:
    """Microseconds a call, launched one after another."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count * 1e6


def measure(rows: int, dtype: torch.dtype) -> list[object]:
    """Rows, dtype, unequal tokens, microseconds in a graph, launched, and of vLLM's own."""
    logits = (torch.randn(rows, VOCABULARY, device="cuda") * 3).to(dtype)
    temperatures = torch.full((rows,), 0.8, device="cuda")
    places = torch.arange(rows, device="cuda")
    seeds = places << 33

    def ours() -> torch.Tensor:
        return OPERATIONS.draw(logits, OPERATIONS.draw_numbers(seeds, places), temperatures)

    def stock() -> torch.Tensor:
        return gumbel_sample(logits, places.int(), temperatures, seeds, places, apply_temperature=False)

    numbers = OPERATIONS.draw_numbers(seeds, places)
    expected = definition.reference(logits, temperatures, numbers)
    wrong = OPERATIONS.kernels.draw(logits, temperatures, numbers) != expected
    return [rows, str(dtype)[6:], int(wrong.sum()), graph_us([ours] * 4), launched_us(ours), launched_us(stock)]


def main() -> None:
    torch.manual_seed(0)
    found = [measure(rows, dtype) for rows in (1, 16, 64, 256) for dtype in (torch.float32, torch.bfloat16)]
    head = ["rows", "dtype", "unequal to reference", "us in a graph", "us launched", "us vLLM, launched"]
    table("the draw of 151,936 tokens", head, found)


if __name__ == "__main__":
    main()
