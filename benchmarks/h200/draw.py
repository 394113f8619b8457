"""Microseconds of one draw (kernels in a CUDA graph, and as launched), beside vLLM's own, and bits against reference."""
import sys, time
sys.path.insert(0, "benchmarks/h200")
import torch
from measure import attempt, graph_us, table
from vime_core.numerics import draw as definition, load_provider
from vime_core.numerics.truncation import reference as keep_reference

ops, cpu, V = load_provider("cuda"), load_provider("reference"), 151936
torch.manual_seed(0)


def launched_us(call, n=50):
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(n):
        call()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    return host / n * 1e6, (time.perf_counter() - begun) / n * 1e6


rows = []
for m in (1, 16, 64, 256):
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(m, V, device="cuda") * 3).to(dtype)
        t, seeds, places = torch.full((m,), 0.8, device="cuda"), torch.arange(m, device="cuda") << 33, torch.arange(m, device="cuda")
        u = ops.draw_numbers(seeds, places)
        assert torch.equal(u.cpu(), definition.reference_numbers(seeds.cpu(), places.cpu()))
        wrong = int((ops.kernels.draw(logits, t, u) != definition.reference(logits, t, u)).sum())
        on_cpu = int((ops.kernels.draw(logits[:8], t[:8], u[:8]).cpu() != definition.reference(logits[:8].cpu(), t[:8].cpu(), u[:8].cpu())).sum())
        whole = lambda: ops.draw(logits, ops.draw_numbers(seeds, places), t)
        attempt("warm", whole)
        host, both = launched_us(whole)
        reference_us = launched_us(lambda: definition.reference(logits, t, u), 5)[1]
        stock = float("nan")
        try:
            from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
            at = torch.arange(m, device="cuda", dtype=torch.int32)
            stock = launched_us(lambda: gumbel_sample(logits, at, t, seeds, places, apply_temperature=False))[1]
        except Exception as error:
            print("gumbel:", error)
        cut = launched_us(lambda: ops.keep_mask(logits, t, 50, torch.full((m,), 0.9, device="cuda")), 3)[1]
        rows.append([m, str(dtype)[6:], wrong, on_cpu, graph_us([whole] * 4), host, both, reference_us, stock, cut])
head = ["rows", "dtype", "unequal to reference", "of 8 to CPU", "us in a graph", "us host", "us launched", "us torch ops", "us vLLM gumbel", "us keep_mask"]
table("the draw of 151,936 tokens", head, rows)
print("memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
