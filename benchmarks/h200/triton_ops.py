"""Small Triton kernels whose order of summation is written in the code: attention, linear, norm, log-prob."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attention(
    q_ptr, k_ptr, v_ptr, out_ptr, query_starts, seq_lens, block_table, scale, table_stride, q_token, q_head, k_page,
    k_slot, k_head, v_page, v_slot, v_head, out_token, out_head,
    PAGE: tl.constexpr, HEAD: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M // GROUP queries x the GROUP heads of one KV head, walking key blocks from position 0 up."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - first
    if block * TOKENS >= count:
        return
    keys = tl.load(seq_lens + seq)
    row = tl.arange(0, BLOCK_M)
    token = tl.minimum(block * TOKENS + row // GROUP, count - 1)
    valid = (row < TOKENS * GROUP) & (block * TOKENS + row // GROUP < count)
    head = kv_head * GROUP + row % GROUP
    dim, slot = tl.arange(0, HEAD), tl.arange(0, BLOCK_N)
    q = tl.load(q_ptr + (first + token)[:, None] * q_token + head[:, None] * q_head + dim[None, :])
    position = keys - count + token
    high = keys - count + tl.minimum((block + 1) * TOKENS, count)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    for start in range(0, high, BLOCK_N):
        key = start + slot
        seen = key < high
        page = tl.load(block_table + seq * table_stride + key // PAGE, mask=seen, other=0).to(tl.int64)
        k = tl.load(
            k_ptr + (page * k_page + (key % PAGE) * k_slot)[:, None] + kv_head * k_head + dim[None, :],
            mask=seen[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(q, k.T) * (scale * LOG2E)
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        prob = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(
            v_ptr + (page * v_page + (key % PAGE) * v_slot)[:, None] + kv_head * v_head + dim[None, :],
            mask=seen[:, None], other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(prob, 1)
        acc = tl.dot(prob.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + (first + token)[:, None] * out_token + head[:, None] * out_head + dim[None, :], out,
        mask=valid[:, None],
    )  # fmt: skip


def attention(q, k, v, out, batch, block_m=None, block_n=64, num_warps=None, num_stages=3):  # type: ignore[no-untyped-def]
    """Causal paged attention with one walk over key blocks of `block_n`; see fa3.Paged for the batch.

    By default BLOCK_M is 128 for prefill and 64 for decode: both are whole 64-row tensor-core tiles, one warp per 16
    rows, so that a row's arithmetic is the same instruction sequence in both.
    """
    group = q.shape[1] // k.shape[2]
    block_m = block_m or (64 if batch.max_query * group <= 64 else 128)
    tokens = block_m // group
    grid = (triton.cdiv(batch.max_query, tokens), k.shape[2], batch.seq_lens.shape[0])
    _attention[grid](
        q, k, v, out, batch.query_starts, batch.seq_lens, batch.block_table, q.shape[-1] ** -0.5,
        batch.block_table.stride(0), q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0),
        v.stride(1), v.stride(2), out.stride(0), out.stride(1), PAGE=k.shape[1], HEAD=q.shape[-1], GROUP=group,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps or block_m // 16, num_stages=num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _matmul(
    x_desc, w_desc, y_ptr, bias_ptr, M, N, k_tiles, chunk_tiles, y_row, y_chunk,
    HAS_BIAS: tl.constexpr, X_T: tl.constexpr, W_T: tl.constexpr, WALK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y tile = sum over K ascending; WALK adds whole chunks one after the other, else one chunk per program_id(2)."""
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    first = tl.program_id(2) * chunk_tiles
    last = k_tiles if WALK else tl.minimum(first + chunk_tiles, k_tiles)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for chunk in range(first, last, chunk_tiles):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for tile in range(chunk, tl.minimum(chunk + chunk_tiles, k_tiles)):
            k = tile * BLOCK_K
            x = x_desc.load([k, m]).T if X_T else x_desc.load([m, k])
            w = w_desc.load([k, n]) if W_T else w_desc.load([n, k]).T
            acc = tl.dot(x, w, acc)
        total = total + acc if WALK else acc
    rows, cols = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    place = y_ptr + tl.program_id(2).to(tl.int64) * y_chunk + rows.to(tl.int64)[:, None] * y_row + cols[None, :]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_chunks(part_ptr, bias_ptr, y_ptr, N, size, CHUNKS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(part_ptr + chunk * size + place, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + place % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=mask)


def matmul(x, w, bias=None, *, x_t=False, w_t=False, chunks=1, spread=None, out_dtype=torch.bfloat16):  # type: ignore[no-untyped-def]
    """y (M, N) = x (M, K) @ w (N, K).T, or with x stored as (K, M) / w as (K, N); K in `chunks` fixed parts.

    `chunks` is part of the definition and depends on (N, K) only. `spread` (chunks computed by different programs) and
    the tile sizes are not: every choice gives the same bits.
    """
    (rows, depth) = x.shape[::-1] if x_t else x.shape
    cols = w.shape[1] if w_t else w.shape[0]
    small = rows <= 64
    block_m, block_n, warps = (64, 64, 4) if small else (128, 128 if cols < 4096 or chunks > 1 else 256, 8)
    tiles = triton.cdiv(depth, 64)
    chunk_tiles = triton.cdiv(tiles, chunks)
    chunks = triton.cdiv(tiles, chunk_tiles)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(cols, block_n), 1)
    if spread is None:
        spread = chunks > 1 and grid[0] * grid[1] < 132
    y = torch.empty(rows, cols, dtype=out_dtype, device=x.device)
    target = torch.empty(chunks, rows, cols, dtype=torch.float32, device=x.device) if spread else y
    _matmul[(grid[0], grid[1], chunks if spread else 1)](
        TensorDescriptor.from_tensor(x, [64, block_m] if x_t else [block_m, 64]),
        TensorDescriptor.from_tensor(w, [64, block_n] if w_t else [block_n, 64]),
        target, bias, rows, cols, tiles, chunk_tiles, cols, rows * cols,
        HAS_BIAS=bias is not None and not spread, X_T=x_t, W_T=w_t, WALK=chunks > 1 and not spread,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, num_warps=warps, num_stages=4 if block_n < 256 else 3,
    )  # fmt: skip
    if spread:
        grid_1d = (triton.cdiv(rows * cols, 1024),)
        _sum_chunks[grid_1d](target, bias, y, cols, rows * cols, CHUNKS=chunks, HAS_BIAS=bias is not None, BLOCK=1024)
    return y


@triton.jit
def _residual_norm(x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, eps, H, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = col < H
    x = tl.load(x_ptr + row * H + col, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(r_ptr + row * H + col, mask=mask, other=0.0).to(tl.float32)
        x = x.to(s_ptr.dtype.element_ty).to(tl.float32)
        tl.store(s_ptr + row * H + col, x.to(s_ptr.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    w = tl.load(w_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * H + col, (x * scale * w).to(y_ptr.dtype.element_ty), mask=mask)


def residual_norm(x, residual, weight, eps):  # type: ignore[no-untyped-def]
    """(normed, stream): stream = rn16(x + residual); normed = rn16(stream * rsqrt(mean square + eps) * weight)."""
    y = torch.empty_like(x)
    stream = x if residual is None else torch.empty_like(x)
    _residual_norm[(x.shape[0],)](
        x, residual, weight, y, stream, eps, x.shape[1], HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=4,
    )  # fmt: skip
    return y, stream


@triton.jit
def _bias_rope(d_ptr, bias_ptr, table_ptr, position_ptr, y_ptr, WIDTH, ROTARY, HALF: tl.constexpr):
    """One program: one head of one token. y = rn16(rotate(rn16(d + bias))); heads from ROTARY on are not rotated."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = head * 2 * HALF + tl.arange(0, HALF)
    place = token * WIDTH + col
    low = (tl.load(d_ptr + place) + tl.load(bias_ptr + col).to(tl.float32)).to(tl.bfloat16)
    high = (tl.load(d_ptr + place + HALF) + tl.load(bias_ptr + col + HALF).to(tl.float32)).to(tl.bfloat16)
    if head < ROTARY:
        row = table_ptr + tl.load(position_ptr + token) * 2 * HALF + tl.arange(0, HALF)
        cos, sin = tl.load(row), tl.load(row + HALF)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low, high = (a * cos - b * sin).to(tl.bfloat16), (b * cos + a * sin).to(tl.bfloat16)
    tl.store(y_ptr + place, low)
    tl.store(y_ptr + place + HALF, high)


def bias_rope(d, bias, table, positions, rotary_heads, head_size):  # type: ignore[no-untyped-def]
    """fp32 projections d (tokens, width) to bf16 with bias and rotary embedding; table (positions, cos | sin) fp32."""
    y = torch.empty(d.shape, dtype=torch.bfloat16, device=d.device)
    grid = (d.shape[0], d.shape[1] // head_size)
    _bias_rope[grid](d, bias, table, positions, y, d.shape[1], rotary_heads, HALF=head_size // 2, num_warps=1)
    return y


@triton.jit
def _silu_mul(x_ptr, y_ptr, F, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < F
    gate = tl.load(x_ptr + row * 2 * F + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * F + col, (gate / (1 + tl.exp(-gate)) * up).to(y_ptr.dtype.element_ty), mask=mask)


def silu_mul(x):  # type: ignore[no-untyped-def]
    """rn16(silu(gate) * up) for x (tokens, gate | up)."""
    size = x.shape[1] // 2
    y = torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device)
    _silu_mul[(x.shape[0], triton.cdiv(size, 1024))](x, y, size, BLOCK=1024)
    return y


@triton.jit
def _log_sum(z_ptr, peak_ptr, sum_ptr, z_row, V, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + row * z_row + start + lane, mask=start + lane < V, other=float("-inf"))
        peaks = tl.maximum(peaks, z)
    peak = tl.max(peaks, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + row * z_row + start + lane, mask=start + lane < V, other=float("-inf"))
        sums += tl.exp(z - peak)
    tl.store(peak_ptr + row, peak)
    tl.store(sum_ptr + row, tl.log(tl.sum(sums, 0)))


def log_sum(z):  # type: ignore[no-untyped-def]
    """(peak, log sum exp(z - peak)), each (rows, 1), of z (rows, V) fp32: per lane ascending, then one tree."""
    if z.dtype != torch.float32 or z.stride(1) != 1:
        raise TypeError(f"z must be float32 with contiguous rows, not {z.dtype} with strides {z.stride()}")
    peak, total = (torch.empty(z.shape[0], 1, dtype=torch.float32, device=z.device) for _ in range(2))
    _log_sum[(z.shape[0],)](z, peak, total, z.stride(0), z.shape[1], BLOCK=4096, num_warps=8)
    return peak, total


def token_log_probs(z, ids):  # type: ignore[no-untyped-def]
    """Log-softmax of z (rows, V) fp32 at ids (rows, n)."""
    peak, total = log_sum(z)
    return z.gather(1, ids.long()) - peak - total


def log_softmax(z):  # type: ignore[no-untyped-def]
    """Log-softmax of z (rows, V) fp32; the same bits as token_log_probs at every id."""
    peak, total = log_sum(z)
    return z - peak - total
