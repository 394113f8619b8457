"""The contracts of GLM-5: ``glm5/v1`` with an FP8 KV cache, ``glm5/v1-bf16kv`` with a bf16 one; else the same."""

from __future__ import annotations

from typing import Final

from vime_core.numerics import DENSE_V1, Contract, Definition
from vime_glm5.numerics.latent_codec import CacheKind


def _define(operation: str, computes: str, module: str | None = None) -> Definition:
    return Definition(operation, computes, f"vime_glm5.numerics.{module or operation}")


_DENSE: Final = ("embedding", "linear", "add_rms_norm", "rms_norm", "rope_interleaved", "attention", "swiglu")
_SCORING: Final = ("log_softmax", "keep_mask")
_OWN: Final = (
    _define(
        "quantise",
        "128 x 128 weight blocks, 1 x 128 activation groups, e4m3, fp32 scales amax / 448; stacked projections apart",
        "e4m3",
    ),
    _define(
        "block_linear",
        "rn(ordered sum over K blocks of (fp32(exact dot) * sx) * sw); gradient: bf16 linear of master and input",
    ),
    _define("absorbed_weights", "rn(dequantise(quantise(kv_b))), heads apart; straight through", "absorbed"),
    _define("head_linear", "the dense linear with one matrix a head", "absorbed"),
    _define("layer_norm", "rn((x - m) / sqrt(v + eps) * w + b), sums in lanes"),
    _define("index_quantise", "e4m3 over the head dim, scale 2^ceil(log2(max(amax, 1e-4) / 448))", "index_keys"),
    _define("index_scores", "(sum over heads of relu(exact dot) * w) * sk, w = (proj * sq) * (H D)^-1/2"),
    _define("top_k", "score descending, index ascending, -0 = +0; the set ascending, -1 behind it"),
    _define("sparse_attention", "attention over the chosen keys ascending; value = the key's latent"),
    _define("route", "sigmoid of fp32 logits; best of score + bias; unbiased, renormalised + 1e-20", "router"),
    _define("experts", "fc2(swiglu(fc1(x))) a route, block_linear; gradient by bf16 linears, fc1 recomputed"),
    _define("combine", "fma over slots in order, rn; rn(shared + factor * routed)"),
)


def _contract(name: str, kind: CacheKind) -> Contract:
    dense = tuple(d for d in DENSE_V1.operations if d.operation in (*_DENSE, *_SCORING))
    cache = {
        "fp8": "latent as 1 x 128 groups of e4m3 with fp32 scales, rotated key bf16 (656 bytes for 512 + 64)",
        "bf16": "latent and rotated key bf16 (1152 bytes for 512 + 64)",
    }[kind]
    return Contract(name, (*dense, *_OWN, _define("cached_keys", cache, "latent_codec")))


GLM5_V1: Final = _contract("glm5/v1", "fp8")
GLM5_V1_BF16KV: Final = _contract("glm5/v1-bf16kv", "bf16")
CACHE_KINDS: Final[dict[str, CacheKind]] = {GLM5_V1.id: "fp8", GLM5_V1_BF16KV.id: "bf16"}
