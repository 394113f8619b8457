"""The kernels of the provider ``cuda`` against the reference: on a GPU as compiled, elsewhere in Triton's interpreter.

Run as a program it prints a JSON object {case: largest relative error or number of unequal elements}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, PagedBatch, load_provider, rope_table
from vime_core.numerics.cuda.provider import kernels

SPECS = {
    "plain": AttentionSpec(0.125),
    "window and cap": AttentionSpec(0.2, window=5, soft_cap=3.0),
    "long window": AttentionSpec(0.2, window=70),
}
CU = [0, 2, 2, 100, 133]
SCHEDULE = ([(0, 50), (1, 1)], [(0, 1), (1, 20)], [(0, 40)], [(1, 12), (0, 7)])
PAGE = 8


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


def copied(x: Tensor) -> Tensor:
    """With the same strides, gaps among them."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


class Cases:
    """Inputs by seed, ours and the reference's kernels, on one device in one dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)
        self.ours, self.reference = kernels(), load_provider("reference").kernels
        self.found: dict[str, float] = {}

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def any_finite(self, *shape: int) -> Tensor:
        """Of every exponent, subnormal numbers among them."""
        drawn = torch.randint(-(1 << 31), 1 << 31, shape, generator=self.generator).int().view(torch.float32)
        x = drawn.to(self.device, self.dtype)
        return torch.where(x.isfinite(), x, 0.0)

    def near(self, name: str, a: Tensor | tuple[Tensor, ...], b: Tensor | tuple[Tensor, ...]) -> None:
        pairs = [(a, b)] if isinstance(a, Tensor) else zip(a, b, strict=True)
        for index, (left, right) in enumerate(pairs):
            assert isinstance(left, Tensor)
            assert isinstance(right, Tensor)
            assert (left.shape, left.dtype) == (right.shape, right.dtype), name
            error = (left.double() - right.double()).abs().max() / right.double().abs().max()
            self.found[f"{name} {index}"] = float("inf") if error.isnan() else float(error)

    def same(self, name: str, a: Tensor, b: Tensor) -> None:
        assert a.numel() > 0
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        self.found[f"equal: {name}"] = float(((a != b) | a.isnan() | b.isnan()).sum())

    def rows(self, name: str, operation: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """A row alone, all rows reversed, and beside rows of NaN, as the padding of a step may be."""
        whole = operation(rows)
        self.same(f"{name}, alone", torch.cat([operation(rows[i : i + 1]) for i in (0, len(rows) - 1)]), whole[[0, -1]])
        self.same(f"{name}, reversed", operation(rows.flip(0)).flip(0), whole)
        spoiled = torch.where(torch.arange(len(rows), device=self.device)[:, None] % 3 > 0, rows, torch.nan)
        self.same(f"{name}, beside NaN", operation(spoiled)[1::3], whole[1::3])


def linear(c: Cases) -> None:
    x, w, b = c.normal(70, 100), c.normal(33, 100), c.normal(33)
    for wide in (False, True):
        c.near(f"linear wide={wide}", c.ours.linear(x, w, b, 1, wide), c.reference.linear(x, w, b, 1, wide))
    c.near("partials", c.ours.linear_partials(x, w, 1), c.reference.linear_partials(x, w, 1))
    c.rows("linear", lambda rows: c.ours.linear(rows, w, b, 1, False), x)
    x, w, b = c.normal(330, 264), c.normal(200, 264), c.normal(200)
    large = c.ours.linear(x, w, b, 1, False)
    c.near("large linear", large, c.reference.linear(x, w, b, 1, False))
    c.rows("large linear", lambda rows: c.ours.linear(rows, w, b, 1, False), x)
    for name, left, right in (("x", True, False), ("w", False, True), ("both", True, True)):
        turned = [matrix.t().contiguous().t() if turn else matrix for matrix, turn in ((x, left), (w, right))]
        c.same(f"linear of transposed views, {name}", c.ours.linear(*turned, b, 1, False), large)
    tall = c.normal(600, 20, dtype=torch.float32)
    c.near("column sum", c.ours.column_sum(tall), c.reference.column_sum(tall))
    c.near("column sum of a row", c.ours.column_sum(x[:1]), c.reference.column_sum(x[:1]))
    order = torch.zeros(600, 2, device=c.device, dtype=c.dtype)  # 1 if added ascending: 1 is lost beside 2^40
    for column, step in enumerate((1, 256)):
        order[::step, column][:3] = torch.tensor([2.0**40, -(2.0**40), 1.0])
    one = torch.ones(2, device=c.device)
    far, whole = order[:, 1:].t(), torch.ones(1, 600, device=c.device, dtype=c.dtype)
    c.same("linear ascends", c.ours.linear(far, whole, None, 1, True)[0], one[:1])
    c.same("column sum ascends", c.ours.column_sum(order), one)
    alone = x[:1].bfloat16()
    c.same("column sum of one bf16 row", c.ours.column_sum(alone), alone[0].float())


def embedding(c: Cases) -> None:
    ids, dy = torch.tensor([3, 5, 3, 0, 3, 16, 5] * 3, device=c.device), c.normal(21, 1030)
    found, expected = c.ours.embedding_backward(dy, ids, 17), c.reference.embedding_backward(dy, ids, 17)
    c.same("embedding backward", found, expected)
    c.found["control: another order"] = float(torch.equal(c.ours.embedding_backward(dy.flip(0), ids, 17), found))


def norm(c: Cases) -> None:
    x, residual, w = c.normal(9, 70), c.normal(9, 70), c.normal(70)
    for stream in (None, residual):
        y, r = c.ours.add_rms_norm(x, stream, w, 1e-5)
        c.near(f"norm residual={stream is not None}", (y, r), c.reference.add_rms_norm(x, stream, w, 1e-5))
        dy = c.normal(9, 70)
        back = c.ours.add_rms_norm_backward(dy, stream, r, w, 1e-5)
        c.near(
            f"norm backward stream={stream is not None}", back,
            c.reference.add_rms_norm_backward(dy, stream, r, w, 1e-5),
        )  # fmt: skip
    c.rows("norm", lambda rows: c.ours.add_rms_norm(rows, None, w, 1e-5)[0], x)
    a, b = (c.any_finite(9, 70) for _ in range(2))
    assert c.ours.adds_as_torch
    c.same("torch's own residual sum", bits(a + b), bits(c.ours.add_rms_norm(a, b, w, 1e-5)[1]))
    heads = c.normal(9, 5, 70)
    by_head, by_column = c.normal(4, 9, 70).transpose(0, 1), c.normal(9, 70, 6).mT
    for part in (heads[:, :3], heads[:, 3:4], heads[:, :, 10:60], by_head, by_column):
        gain, whole = w[: part.shape[-1]], part.clone(memory_format=torch.contiguous_format)
        y, want = (c.ours.add_rms_norm(x, None, gain, 1e-5)[0] for x in (part, whole))
        c.same(f"norm of heads {part.shape[1:]}", y, want)
    wide, gain = c.normal(3, 1000), c.normal(1001)
    moved, y = torch.cat([gain[:1], wide.flatten()])[1:].view(3, 1000), c.ours.add_rms_norm(wide, None, gain[1:], 1e-5)
    c.same("norm at another address", c.ours.add_rms_norm(moved, None, gain[1:].clone(), 1e-5)[0], y[0])


def pointwise(c: Cases) -> None:
    table, positions, x = rope_table(64, 32, 1e4).to(c.device), torch.arange(9, device=c.device) * 7, c.normal(9, 3, 48)
    for interleaved in (False, True):
        for inverse in (False, True):
            options = (positions, table, interleaved, inverse)
            c.near(f"rope {interleaved} {inverse}", c.ours.rope(x, *options), c.reference.rope(x, *options))
    qkv, options = c.normal(9, 7, 48), (positions, table, False, False)
    apart = torch.cat([c.ours.rope(part.clone(), *options) for part in qkv[:, :5].split([4, 1], 1)], 1)
    many = c.normal(9, 40, 32)  # more heads than one program turns
    c.near("rope of many heads", c.ours.rope(many, *options), c.reference.rope(many, *options))
    apart_40 = torch.cat([c.ours.rope(many[:, head : head + 1], *options) for head in range(40)], 1)
    c.same("rope of many heads, each alone", c.ours.rope(many, *options), apart_40)
    c.same("rope of queries and keys side by side", c.ours.rope(qkv[:, :5], *options), apart)
    by_head = c.normal(5, 9, 48).transpose(0, 1)
    c.same("rope of heads that lie apart", c.ours.rope(by_head, *options), c.ours.rope(by_head.contiguous(), *options))
    gate_up, dh = c.normal(9, 70), c.normal(9, 35)
    c.near("swiglu", c.ours.swiglu(gate_up), c.reference.swiglu(gate_up))
    c.near("swiglu backward", c.ours.swiglu_backward(dh, gate_up), c.reference.swiglu_backward(dh, gate_up))
    gate_up, dh = c.normal(2, 2100), c.normal(2, 1050)
    c.near("wide swiglu", c.ours.swiglu(gate_up), c.reference.swiglu(gate_up))
    c.near("wide swiglu backward", c.ours.swiglu_backward(dh, gate_up), c.reference.swiglu_backward(dh, gate_up))


def writing(c: Cases) -> None:
    """Keys and values of different strides, padding among their slots, into caches alike and unlike."""
    joint, slots = c.normal(9, 6, 24), torch.tensor([7, -1, 0, 39, 8, -1, 12], device=c.device)
    k, v, both = joint[:, 1:3], c.normal(9, 2, 24), c.normal(5, 2, 2 * PAGE, 24)
    unlike = c.normal(5, 2, PAGE, 24), c.normal(5, PAGE, 3, 24).transpose(1, 2)[:, 1:]
    for name, caches in (("alike", both.chunk(2, 2)), ("unlike", unlike)):
        found, expected = (KvCache(*map(copied, caches)) for _ in range(2))
        c.ours.write_kv(k, v, found, slots)
        c.reference.write_kv(k, v, expected, slots)
        c.same(f"keys in a cache {name}", found.keys, expected.keys)
        c.same(f"values in a cache {name}", found.values, expected.values)
        c.found[f"control: nothing written, {name}"] = float(torch.equal(found.values, caches[1]))


def scoring(c: Cases) -> None:
    logits, temperatures = c.normal(5, 5000) * 5, torch.tensor([1.0, 0.7, 1.3, 0.0, 0.5], device=c.device)
    logits[1, :4000] = -torch.inf
    logits[2, -1], logits[3, 0], logits[4, 4095], logits[0, 4096] = 40.0, 40.0, 40.0, 40.0  # at the ends of a walk
    ids, grad = torch.tensor([1, 4999, 7, 4096, 0], device=c.device), c.normal(5, dtype=torch.float32)
    everything = c.ours.log_softmax(logits, temperatures)
    expected = c.reference.log_softmax(logits, temperatures)
    finite = expected.isfinite()
    c.found["equal: tokens without probability"] = float((everything.isfinite() != finite).sum())
    c.near("log-softmax", everything[finite], expected[finite])
    chosen = c.ours.token_log_probs(logits, ids, temperatures)
    c.same("token log-probs are the log-softmax's", chosen, everything.gather(1, ids[:, None])[:, 0])
    c.same("log-probs of widened logits", c.ours.token_log_probs(logits.float(), ids, temperatures), chosen)
    inputs = (grad, logits, ids, temperatures)
    c.near("scoring backward", c.ours.token_log_probs_backward(*inputs), c.reference.token_log_probs_backward(*inputs))


def draws(c: Cases) -> None:
    """Rows of many shapes of probability, greedy ones too, and shares at which a token ends and the next begins."""
    words = torch.tensor([0, 1, -1, 2**32 - 1, 2**63 - 1, -(2**63), 2**62 + 5], device=c.device)
    seeds, places = (t.contiguous().view(-1) for t in torch.meshgrid(words, words[:4].abs(), indexing="ij"))
    c.same("random numbers", c.ours.draw_numbers(seeds, places), c.reference.draw_numbers(seeds, places))
    for size in (5, 700, 9000):
        logits, temperatures = c.normal(40, size) * 4, torch.full((40,), 0.7, device=c.device)
        logits[:9] = logits[:9].round()
        logits[9:12, : size // 2], logits[12], logits[13, 2] = -torch.inf, torch.nan, torch.nan
        logits[14, 1:], logits[14, size // 2 :], logits[15, 3], temperatures[16:20] = -30.0, -90.0, torch.inf, 1.0
        u = c.ours.draw_numbers(torch.arange(40, device=c.device), torch.arange(40, device=c.device))
        u[::5], u[3], u[4], u[14] = -1, 0, 2**63 - 1, 2**63 - 1
        logits[4, [1, 3]], temperatures[3:7] = 20.0, 0.0  # greedy whatever the number
        expected = c.reference.draw(logits, temperatures, u)
        c.same(f"draw of {size}", c.ours.draw(logits, temperatures, u), expected)
        assert len(set(expected.tolist())) > 3
    flat, ones = torch.zeros(8, 8192, device=c.device, dtype=c.dtype), torch.ones(8, device=c.device)
    edges = torch.arange(8, device=c.device) << 60  # where the first token of every eighth begins
    c.same("draw at edges", c.ours.draw(flat, ones, edges), torch.arange(8, device=c.device) * 1024)
    c.found["control: another number"] = float(torch.equal(c.ours.draw(logits, temperatures, u.flip(0)), expected))


def attention(c: Cases) -> None:
    cu = torch.tensor(CU, device=c.device)
    for name, spec in SPECS.items():
        q, k, v, dy = (c.normal(CU[-1], heads, 24) for heads in (6, 2, 2, 6))
        o, lse = c.ours.attention_packed(q, k, v, cu, spec)
        c.near(f"attention {name}", (o, lse), c.reference.attention_packed(q, k, v, cu, spec))
        gradient = c.reference.attention_backward(dy, q, k, v, o, lse, cu, spec)
        c.near(f"attention backward {name}", c.ours.attention_backward(dy, q, k, v, o, lse, cu, spec), gradient)
        c.same(f"paged in chunks, {name}", paged(c, q, k, v, spec), o[CU[1] :])
        moved = paged(c, q, k, v, AttentionSpec(spec.scale * (1 + 2**-20), spec.window, spec.soft_cap))
        c.found[f"control: another scale, {name}"] = float(torch.equal(moved, o[CU[1] :]))


def paged(c: Cases, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The last two sequences of CU in the chunks of SCHEDULE, through shuffled pages whose unused slots hold NaN."""
    keys, values = (torch.full((40, 2, PAGE, 24), torch.nan, device=c.device, dtype=c.dtype) for _ in range(2))
    pages = (torch.randperm(39, generator=c.generator) + 1).int()
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[0, :13], table[1, :5] = pages[:13], pages[13:18]
    cache, done, parts = KvCache(keys, values), [0, 0], ([], [])
    for step in SCHEDULE:
        positions = [torch.arange(done[s], done[s] + n) for s, n in step]
        slots = [table[s][p // PAGE] * PAGE + p % PAGE for (s, _), p in zip(step, positions, strict=True)]
        at = torch.cat([CU[2 + s] + p for (s, _), p in zip(step, positions, strict=True)])
        padded, slot = torch.cat([at, at[:1]]), torch.cat([*slots, torch.tensor([-1])])
        queries, new_keys, new_values = q[padded], k[padded], v[padded]
        for tensor in (queries, new_keys, new_values):
            tensor[len(at) :] = torch.nan
        c.ours.write_kv(new_keys, new_values, cache, slot.to(c.device))
        for s, n in step:
            done[s] += n
        starts = torch.tensor([0, *(n for _, n in step)]).cumsum(0)
        batch = PagedBatch(*(t.to(c.device) for t in (starts, torch.tensor([done[s] for s, _ in step]),
                                                      table[[s for s, _ in step]])))  # fmt: skip
        o = torch.full((len(at) + 1, *q.shape[1:]), 7.0, device=c.device, dtype=c.dtype)
        c.ours.attention_paged(queries, cache, batch, spec, o)
        assert bool((o[len(at) :] == 7).all()), "a row that no request asks was written"
        for (s, n), part in zip(step, o[: len(at)].split([n for _, n in step]), strict=True):
            parts[s].append((done[s], part[:n]))
    return torch.cat([part for sequence in parts for _, part in sorted(sequence, key=lambda p: p[0])])


def run(device: str, dtype: torch.dtype) -> dict[str, float]:
    cases = Cases(device, dtype)
    for case in (linear, embedding, norm, pointwise, writing, scoring, draws, attention):
        case(cases)
    return cases.found


if __name__ == "__main__":
    print(json.dumps(run("cpu", getattr(torch, sys.argv[1]))))
