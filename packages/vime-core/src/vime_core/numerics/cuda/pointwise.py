"""RoPE, SwiGLU and the copy into the KV cache: operations that sum nothing.

See :mod:`vime_core.numerics.rope` and :mod:`vime_core.numerics.swiglu`; exp is Triton's.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.attention import KvCache
from vime_core.numerics.cuda.launch import UNFUSED, remembered
from vime_core.numerics.cuda.sizes import parts, power_of_2

_BLOCK = 1024
_PAIRS, _PAIRS_OF_WARP = 512, 128  # that one program of a rotation turns, if so many lie in a token; 4 a thread


@remembered
@triton.jit
def turn(
    x_ptr, position_ptr, table_ptr, y_ptr, heads, head_dim, half, x_token, x_head,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token; what lies behind the rotary part is copied."""
    token, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    row = table_ptr + tl.load(position_ptr + token).to(tl.int64) * 2 * half
    cosine = tl.load(row + pair, mask=pair < half, other=0.0)
    sine = tl.load(row + half + pair, mask=pair < half, other=0.0)
    sine = -sine if INVERSE else sine
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + half)
    source, target = x_ptr + token * x_token + head * x_head, y_ptr + (token * heads + head) * head_dim
    mask = (head < heads) & (pair < half)
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, (a * cosine - b * sine).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cosine + a * sine).to(y_ptr.dtype.element_ty), mask=mask)
    rest = 2 * half + tl.arange(0, REST)[None, :]
    behind = (head < heads) & (rest < head_dim)
    tl.store(target + rest, tl.load(source + rest, mask=behind, other=0.0), mask=behind)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the division by IEEE 754."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@remembered
@triton.jit
def gated(x_ptr, h_ptr, size, BLOCK: tl.constexpr):
    """BLOCK columns of a row of h = silu(gate) * up."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, source = column < size, x_ptr + row * 2 * size + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    h = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(h_ptr + row * size + column, h.to(h_ptr.dtype.element_ty), mask=mask)


@remembered
@triton.jit
def gated_backward(dh_ptr, x_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    """BLOCK columns of the gradients of gate and up."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, place = column < size, row * 2 * size + column
    gate = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + size, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * size + column, mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    d_gate = (dh * up) * (s * (gate * (1.0 - s) + 1.0))
    tl.store(dx_ptr + place, d_gate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + place + size, (dh * (gate * s)).to(dx_ptr.dtype.element_ty), mask=mask)


@remembered
@triton.jit
def copy_to_slots(
    k_ptr, v_ptr, keys_ptr, values_ptr, slot_ptr, head_dim, page, k_token, k_head, v_token, v_head,
    keys_page, keys_head, keys_slot, values_page, values_head, values_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and value of one head of one token to its slot; a negative slot is padding."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        block, place, column = slot // page, slot % page, tl.arange(0, BLOCK)
        mask = column < head_dim
        key = tl.load(k_ptr + token * k_token + head * k_head + column, mask=mask, other=0.0)
        value = tl.load(v_ptr + token * v_token + head * v_head + column, mask=mask, other=0.0)
        tl.store(keys_ptr + block * keys_page + head * keys_head + place * keys_slot + column, key, mask=mask)
        tl.store(values_ptr + block * values_page + head * values_head + place * values_slot + column, value, mask=mask)


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """The turned x (T, heads, dim); positions (T); table (P, R) in fp32; ``inverse`` turns back."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, head_dim = x.shape
    half, rest = table.shape[1] // 2, head_dim - table.shape[1]
    if y.numel():
        block = power_of_2(half)
        some = min(power_of_2(heads), max(1, _PAIRS // block))
        turn[(tokens, parts(heads, some))](
            x, positions, table, y, heads, head_dim, half, x.stride(0), x.stride(1), INTERLEAVED=interleaved,
            INVERSE=inverse, HEADS=some, BLOCK=block, REST=power_of_2(max(rest, 1)),
            num_warps=max(1, some * block // _PAIRS_OF_WARP), **UNFUSED,
        )  # fmt: skip
    return y


def swiglu(gate_up: Tensor) -> Tensor:
    """h (..., F) of [gate | up] (..., 2F)."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    h = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if h.numel():
        gated[(h.numel() // size, parts(size, _BLOCK))](gate_up, h, size, BLOCK=_BLOCK, **UNFUSED)
    return h


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of [gate | up] (..., 2F)."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    result = torch.empty_like(gate_up)
    if result.numel():
        grid = (result.numel() // (2 * size), parts(size, _BLOCK))
        gated_backward[grid](grad.contiguous(), gate_up, result, size, BLOCK=_BLOCK, **UNFUSED)
    return result


def write_kv(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """Copies k and v (T, KV heads, dim) to ``slots`` without waiting for the device: decode graphs capture it."""
    tokens, (heads, head_dim) = slots.shape[0], k.shape[1:]
    keys, values = cache.keys, cache.values
    if tokens:
        copy_to_slots[(tokens, heads)](
            k, v, keys, values, slots, head_dim, keys.shape[2], k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *keys.stride()[:3], *values.stride()[:3], BLOCK=power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
