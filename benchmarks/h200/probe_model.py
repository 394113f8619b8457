"""A Qwen2 structure as an own vLLM model class: explicit attention backend, own operations, own sampler hook.

The same layer functions serve a packed whole-sequence pass (`packed_log_probs`), as a trainer would run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler as SamplerV1
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu_worker import Worker

from fa3 import QUERY_BOUND_FLOOR, Fa3, Paged
from linear_rows import deep_gemm_nt
from triton_ops import attention, bias_rope, log_softmax, matmul, residual_norm, silu_mul, token_log_probs

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CALLS = {"v1 log-prob": 0, "v2 log-prob": 0}
_FUSED = {
    "q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1), "o_proj": ("o", 0), "down_proj": ("down", 0),
}  # fmt: skip


class FixedTilesBuilder(FlashAttentionMetadataBuilder):
    """No ahead-of-time schedule, one split, and a query bound that always selects the same key blocks."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        del fast_build
        built = super().build(common_prefix_len, common_attn_metadata, fast_build=True)
        return replace(built, max_query_len=max(built.max_query_len, QUERY_BOUND_FLOOR), max_num_splits=1)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class FixedTilesBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[FixedTilesBuilder]:
        return FixedTilesBuilder


class OwnTritonBuilder(FixedTilesBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        built = super().build(common_prefix_len, common_attn_metadata)
        return replace(built, max_query_len=common_attn_metadata.max_query_len)


class OwnTritonImpl(FlashAttentionImpl):
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):  # type: ignore[no-untyped-def]
        if attn_metadata is None:
            return output.fill_(0)
        m = attn_metadata
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        batch = Paged(m.query_start_loc, m.seq_lens, m.block_table, m.max_query_len, m.max_seq_len)
        n = m.num_actual_tokens
        attention(query[:n], k, v, output[:n], batch)
        return output


class OwnTritonBackend(FixedTilesBackend):
    @staticmethod
    def get_builder_cls() -> type[OwnTritonBuilder]:
        return OwnTritonBuilder

    @staticmethod
    def get_impl_cls() -> type[OwnTritonImpl]:
        return OwnTritonImpl


BACKENDS = {"fa3": FixedTilesBackend, "fa3-stock": FlashAttentionBackend, "triton": OwnTritonBackend}


def padded_deep_gemm(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows padded to a bucket, so that few kernels are compiled; a row-invariant kernel does not notice."""
    largest = BUCKETS[-1]
    if x.shape[0] > largest:
        return torch.cat([padded_deep_gemm(part, w, out_dtype) for part in x.split(largest)])
    extra = next(b for b in BUCKETS if b >= x.shape[0]) - x.shape[0]
    y = deep_gemm_nt(nn.functional.pad(x, (0, 0, 0, extra)) if extra else x, w, out_dtype)
    return y[: x.shape[0]]


LINEARS: dict[str, Callable[..., torch.Tensor]] = {
    "deepgemm": padded_deep_gemm,
    "triton": lambda x, w, out_dtype=torch.bfloat16: matmul(x, w, out_dtype=out_dtype),
}


def parameter(*shape: int, parts: Sequence[int] = ()) -> nn.Parameter:
    """A parameter with the loader that vLLM's reload wraps; `parts` are the row counts of fused pieces."""
    made = nn.Parameter(torch.empty(*shape), requires_grad=False)
    starts = [sum(parts[:i]) for i in range(len(parts) + 1)]

    def weight_loader(param: torch.Tensor, loaded: torch.Tensor, shard: int = 0) -> None:
        target = param[starts[shard] : starts[shard + 1]] if parts else param
        target.copy_(loaded)

    made.weight_loader = weight_loader  # type: ignore[attr-defined]
    return made


class Layer(nn.Module):
    def __init__(self, config: Any, cache_config: Any, prefix: str, backend: type[FlashAttentionBackend]) -> None:
        super().__init__()
        hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.size, self.heads, self.kv = hidden // heads, heads, kv
        parts = (heads * self.size, kv * self.size, kv * self.size)
        self.qkv_weight, self.qkv_bias = parameter(sum(parts), hidden, parts=parts), parameter(sum(parts), parts=parts)
        self.o_weight = parameter(hidden, heads * self.size)
        ffn = config.intermediate_size
        self.gate_up_weight, self.down_weight = parameter(2 * ffn, hidden, parts=(ffn, ffn)), parameter(hidden, ffn)
        self.input_layernorm_weight, self.post_attention_layernorm_weight = parameter(hidden), parameter(hidden)
        scale = self.size**-0.5
        self.attn = Attention(
            heads, self.size, scale, num_kv_heads=kv, cache_config=cache_config, prefix=prefix, attn_backend=backend
        )


Attend = Callable[[Layer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def engine_attend(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return layer.attn(q, k, v)


class ProbeState(DefaultModelState):
    """Model runner V2 asks this object for a sampler."""

    def custom_sampler(self, sampler: SamplerV2) -> tuple[SamplerV2, None] | None:
        if self.vllm_config.additional_config["sampler"] == "stock":
            return None
        shared = SharedSamplerV2.__new__(SharedSamplerV2)
        shared.__dict__.update(sampler.__dict__)
        shared.sampling_states.apply_temperature = partial(divide_exactly, shared.sampling_states)
        return shared, None


def divide_exactly(states: Any, logits: torch.Tensor, mapping: torch.Tensor, _: Any) -> None:
    """z = logits / T by IEEE division in fp32 (Triton's `/` is an approximation); T = 0 counts as 1."""
    temperature = states.temperature.gpu[mapping]
    logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])


class SharedSamplerV2(SamplerV2):
    """Scores tokens by the shared log-softmax of exactly the logits that were sampled from."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, self.processed = super().sample(*args, **kwargs)
        return sampled, self.processed

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        out = super().__call__(logits, input_batch)
        found = out.logprobs_tensors
        if found is not None:
            CALLS["v2 log-prob"] += 1
            scores = token_log_probs(self.processed, found.logprob_token_ids)
            out.logprobs_tensors = found._replace(logprobs=scores)
        return out


class SharedTopKTopP(TopKTopPSampler):
    def __init__(self) -> None:
        super().__init__("processed_logits")
        self.stock = self.forward
        self.forward = self.shared  # the base class sets `forward` on the instance: a method alone is ignored

    def shared(self, logits: Any, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled, processed = self.stock(logits, generators, k, p)
        CALLS["v1 log-prob"] += 1
        return sampled, log_softmax(processed)


class SharedSamplerV1(SamplerV1):
    def __init__(self, logprobs_mode: Any) -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler = SharedTopKTopP()

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        CALLS["v1 log-prob"] += 1
        return log_softmax(logits.float())


class SharedWorker(Worker):
    """Model runner V1 reads the sampler that this worker puts in place; V2 builds its own later."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.sampler = SharedSamplerV1("processed_logprobs")


class ProbeDecoder(nn.Module):
    """Qwen2 with tied embeddings, TP 1. `additional_config` names the attention and linear providers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        del prefix
        self.config = config = vllm_config.model_config.hf_config
        choice = vllm_config.additional_config
        self.linear, self.attention_name = LINEARS[choice["linear"]], choice["attention"]
        self.embed_tokens_weight = parameter(config.vocab_size, config.hidden_size)
        self.norm_weight = parameter(config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, vllm_config.cache_config, f"model.layers.{i}.attn", BACKENDS[self.attention_name])
            for i in range(config.num_hidden_layers)
        )
        self.table = rope_table(config, vllm_config.model_config.max_model_len)

    @staticmethod
    def get_model_state_cls() -> type[ProbeState]:
        return ProbeState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input_ids, self.embed_tokens_weight)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **_):  # type: ignore[no-untyped-def]
        return self.hidden(input_ids, positions, engine_attend)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        x, residual = self.embed_input_ids(ids), None
        for layer in self.layers:
            x, residual = residual_norm(x, residual, layer.input_layernorm_weight, eps)
            x = self.linear(self.attend_one(layer, x, positions, attend), layer.o_weight)
            x, residual = residual_norm(x, residual, layer.post_attention_layernorm_weight, eps)
            x = self.linear(silu_mul(self.linear(x, layer.gate_up_weight)), layer.down_weight)
        return residual_norm(x, residual, self.norm_weight, eps)[0]

    def attend_one(self, layer: Layer, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        projected = self.linear(x, layer.qkv_weight, out_dtype=torch.float32)
        qkv = bias_rope(projected, layer.qkv_bias, self.table, positions, layer.heads + layer.kv, layer.size)
        q, k, v = qkv.split([layer.heads * layer.size, layer.kv * layer.size, layer.kv * layer.size], dim=1)
        return attend(layer, q.contiguous(), k.contiguous(), v.contiguous())

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden, self.embed_tokens_weight).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, done = dict(self.named_parameters()), set()
        for name, loaded in weights:
            target, shard = own_name(name)
            own[target].weight_loader(own[target], loaded, shard)  # type: ignore[attr-defined]
            done.add(target)
        self.warm_up()
        return done

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile every kernel before a graph is captured."""
        layer = self.layers[0]
        for size in BUCKETS:
            for w in (layer.o_weight, layer.gate_up_weight, layer.down_weight, self.embed_tokens_weight):
                if size < 4096 or w.shape[0] < 100_000:
                    self.linear(torch.zeros(size, w.shape[1], dtype=w.dtype, device=w.device), w)
            x = torch.zeros(size, self.config.hidden_size, dtype=torch.bfloat16, device="cuda")
            self.linear(x, layer.qkv_weight, out_dtype=torch.float32)


def rope_table(config: Any, length: int) -> torch.Tensor:
    """(positions, cos | sin) fp32 from fp64 angles."""
    size = config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, size, 2, dtype=torch.float64, device="cpu")
    frequency = config.rope_parameters["rope_theta"] ** (-steps / size)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequency
    return torch.cat([angles.cos(), angles.sin()], 1).float().cuda()


def own_name(name: str) -> tuple[str, int]:
    """HF tensor name to (own parameter, piece of a fused one)."""
    parts = name.removeprefix("model.").split(".")
    kind, module, shard = parts[-1], parts[-2], 0
    if module in _FUSED:
        module, shard = _FUSED[module]
    return ".".join([*parts[:2], f"{module}_{kind}"]) if parts[0] == "layers" else f"{module}_{kind}", shard


@torch.inference_mode()
def packed_log_probs(
    model: ProbeDecoder, prompts: list[list[int]], answers: list[list[int]], temperatures: list[float]
) -> list[torch.Tensor]:
    """Log-probs of the answers from one packed pass over the whole sequences, no cache: the trainer's view."""
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    ids = torch.tensor([t for p, a in zip(prompts, answers, strict=True) for t in p + a], device="cuda")
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
    starts_t = torch.tensor(starts, dtype=torch.int32, device="cuda")
    hidden = model.hidden(ids, positions, packed_attend(model.attention_name, starts_t, lengths))
    return [
        answer_log_probs(model, hidden[start + len(p) - 1 : start + len(p) + len(a) - 1], a, t)
        for start, p, a, t in zip(starts, prompts, answers, temperatures, strict=False)
    ]


def answer_log_probs(model: ProbeDecoder, hidden: torch.Tensor, answer: list[int], temperature: float) -> torch.Tensor:
    # Division by a tensor is IEEE; PyTorch divides by a Python number with a reciprocal, which gives other bits.
    z = model.compute_logits(hidden) / torch.full((1, 1), temperature or 1.0, device="cuda")
    return token_log_probs(z, torch.tensor(answer, device="cuda")[:, None])[:, 0].cpu()


def packed_attend(name: str, starts: torch.Tensor, lengths: list[int]) -> Attend:
    keys = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    width = torch.arange(max(lengths), dtype=torch.int32, device="cuda")
    table = (starts[:-1, None] + width[None, :]).clamp(max=int(starts[-1]) - 1)  # pages of one key: packed as it is
    batch = Paged(starts, keys, table, max(lengths), max(lengths))

    def attend(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(len(t), -1, layer.size) for t in (q, k, v))
        if name == "triton":
            return attention(q, k[:, None], v[:, None], torch.empty_like(q), batch).flatten(1)
        return Fa3(floor=QUERY_BOUND_FLOOR).packed(q, k, v, batch).flatten(1)

    return attend
