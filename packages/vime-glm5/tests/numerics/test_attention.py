"""The cache's bytes, and sparse attention over chosen keys."""

from __future__ import annotations

import struct

import pytest
import torch
from glm5_support import assert_same, check_gradients, gradients, normal, unequal

from vime_core.errors import PolicyError
from vime_core.numerics import AttentionSpec
from vime_glm5.numerics import GLM5_V1, GLM5_V1_BF16KV, Glm5Operations, load_operations, sparse_attention
from vime_glm5.numerics.latent_codec import row_bytes

L, R = 256, 64


def test_row_sizes_are_those_of_the_known_layouts() -> None:
    assert row_bytes("fp8", 512, 64) == 656
    assert row_bytes("bf16", 512, 64) == 1152
    with pytest.raises(PolicyError, match="VIME-ALIGN-070"):
        row_bytes("fp8", 192, 64)


def test_bytes_of_an_fp8_row(every: Glm5Operations) -> None:
    latent, rotated = normal(0, 3, 512), normal(1, 3, 64)
    latent[1, 128:256] = 0
    rows = every.pack_keys(latent, rotated)
    assert rows.shape == (3, 656)
    for row, values, key in zip(rows, latent, rotated, strict=True):
        raw = bytes(row.tolist())
        for group in range(4):
            x = values[128 * group : 128 * group + 128].float()
            scale = struct.unpack("<f", raw[512 + 4 * group : 516 + 4 * group])[0]
            assert scale == float(torch.clamp(x.abs().max(), min=2.0**-100) / torch.tensor(448.0))
            q = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert raw[128 * group : 128 * group + 128] == bytes(q.view(torch.uint8).tolist())
        assert raw[528:] == key.contiguous().view(torch.uint8).numpy().tobytes()


def test_round_trip(every: Glm5Operations) -> None:
    latent, rotated = normal(2, 5, 512), normal(3, 5, 64)
    keys = every.cached_keys(latent, rotated)
    assert_same(keys[:, 512:].contiguous(), rotated)
    assert_same(every.unpack_keys(every.pack_keys(latent, rotated), 512, 64), keys)
    assert unequal(keys[:, :512].contiguous(), latent) > 1000
    assert (keys[:, :512].float() - latent.float()).abs().max() <= 2.0**-4 * latent.float().abs().max()
    found = gradients(every.cached_keys, [latent, rotated])
    noise = torch.randn(5, 576, generator=torch.Generator().manual_seed(9), dtype=torch.float64).bfloat16()
    assert_same(torch.cat(found, 1), noise)


def test_a_bf16_row_is_kept_as_it_is() -> None:
    ops = load_operations(GLM5_V1_BF16KV, "cpu")
    latent, rotated = normal(2, 5, 512), normal(3, 5, 64)
    assert_same(ops.cached_keys(latent, rotated), torch.cat([latent, rotated], 1))
    assert ops.pack_keys(latent, rotated).shape == (5, 1152)
    assert ops.digest != load_operations(GLM5_V1, "cpu").digest


def _chosen(queries: int, keys: int, k: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(queries):
        count = int(torch.randint(1, k + 1, (1,), generator=draw))
        picked = torch.randperm(keys, generator=draw)[:count].sort().values
        rows.append(torch.nn.functional.pad(picked, (0, k - count), value=-1))
    return torch.stack(rows).int()


def _exact(chosen: torch.Tensor, scale: float, latent: int):
    def attend(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        picked = keys[chosen.clamp_min(0).long()]
        scores = torch.einsum("thw,tkw->thk", q, picked) * scale
        p = scores.masked_fill((chosen < 0)[:, None], -torch.inf).softmax(-1)
        return torch.einsum("thk,tkl->thl", p, picked[..., :latent])

    return attend


def test_against_fp64(every: Glm5Operations) -> None:
    q, keys, chosen = normal(4, 20, 3, L + R, scale=0.3), normal(5, 40, L + R), _chosen(20, 40, 16, 6)
    exact = _exact(chosen, 0.1, L)(q.double(), keys.double())
    found = every.sparse_attention(q, keys, chosen, 0.1, L)
    assert (found.double() - exact).abs().max() < 2.0**-8 * exact.abs().max()
    assert_same(found, load_operations(GLM5_V1, "reference").sparse_attention(q, keys, chosen, 0.1, L))


def test_the_reference_is_the_paged_walk_and_takes_queries_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load_operations(GLM5_V1, "reference")
    q, keys, chosen = normal(4, 20, 3, L + R, scale=0.3), normal(5, 40, L + R), _chosen(20, 40, 16, 6)
    whole = reference.sparse_attention(q, keys, chosen, 0.1, L)
    assert_same(whole, sparse_attention.paged(reference.kernels, q, keys, chosen, 0.1, L))
    monkeypatch.setattr(sparse_attention, "_REFERENCE_BYTES", 64 * 3 * 16 * 7)
    assert_same(reference.sparse_attention(q, keys, chosen, 0.1, L), whole)


def test_all_keys_chosen_is_the_dense_attention(ops: Glm5Operations) -> None:
    n = 30
    q, keys = normal(7, n, 2, L, scale=0.3), normal(8, n, L)
    chosen = torch.arange(n).expand(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -1).int()
    dense = ops.attention_packed(q, keys[:, None], keys[:, None], torch.tensor([0, n]), AttentionSpec(0.1))[0]
    assert_same(ops.sparse_attention(q, keys, chosen, 0.1, L), dense)


def test_a_query_depends_on_its_chosen_keys_alone(every: Glm5Operations) -> None:
    q, keys, chosen = normal(9, 12, 2, L + R), normal(10, 40, L + R), _chosen(12, 40, 8, 11)
    whole = every.sparse_attention(q, keys, chosen, 0.1, L)
    for t in range(12):
        alone = every.sparse_attention(q[t : t + 1], keys, chosen[t : t + 1], 0.1, L)
        assert_same(alone, whole[t : t + 1])
        mine = chosen[t][chosen[t] >= 0].long()
        poisoned = torch.full_like(keys, torch.nan)
        poisoned[mine] = keys[mine]
        assert_same(every.sparse_attention(q[t : t + 1], poisoned, chosen[t : t + 1], 0.1, L), whole[t : t + 1])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = torch.where(chosen < 0, -1, torch.argsort(order)[chosen.clamp_min(0).long()]).int()
    assert_same(every.sparse_attention(q, keys[order].contiguous(), moved, 0.1, L), whole)


def test_an_index_off_by_one_shows(ops: Glm5Operations) -> None:
    q, keys, chosen = normal(9, 12, 2, L + R), normal(10, 41, L + R), _chosen(12, 40, 8, 11)
    whole = ops.sparse_attention(q, keys, chosen, 0.1, L)
    last = (chosen >= 0).sum(1) - 1
    wrong = chosen.clone()
    wrong[3, last[3]] += 1
    found = ops.sparse_attention(q, keys, wrong, 0.1, L)
    assert unequal(found[3], whole[3]) > L
    assert_same(found[:3], whole[:3])


def test_gradients(ops: Glm5Operations) -> None:
    chosen = _chosen(15, 25, 8, 12)
    q, keys = normal(13, 15, 3, L + R, dtype=torch.float32), normal(14, 25, L + R, dtype=torch.float32)

    def ours(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return ops.sparse_attention(q, keys, chosen, 0.05, L)

    check_gradients(ours, _exact(chosen, 0.05, L), [q, keys], 1e-5)
    check_gradients(ours, _exact(chosen, 0.05, L), [q.bfloat16(), keys.bfloat16()], 1e-2)


def test_a_key_nobody_chose_has_no_gradient(ops: Glm5Operations) -> None:
    chosen = torch.tensor([[0, 2, -1], [2, 3, 4]]).int()
    q, keys = normal(15, 2, 1, L + R), normal(16, 6, L + R)
    _, dkeys = gradients(lambda q, k: ops.sparse_attention(q, k, chosen, 0.05, L), [q, keys])
    assert not dkeys[[1, 5]].any()
    assert dkeys[[0, 2, 3, 4]].any(1).all()
