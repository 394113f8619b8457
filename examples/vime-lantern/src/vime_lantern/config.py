"""``config.json`` of the structure, as transformers and vLLM read it."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig


class LanternConfig(PretrainedConfig):
    """Sizes as Llama has them; ``window`` keys in even layers, ``score_cap`` on attention, ``logit_cap`` on logits."""

    model_type = "lantern"

    def __init__(
        self,
        vocab_size: int = 509,
        hidden_size: int = 96,
        intermediate_size: int = 200,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 32,
        max_position_embeddings: int = 256,
        rms_norm_eps: float = 1e-5,
        window: int = 21,
        score_cap: float = 9.0,
        logit_cap: float = 12.0,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.max_position_embeddings, self.rms_norm_eps = max_position_embeddings, rms_norm_eps
        self.window, self.score_cap, self.logit_cap = window, score_cap, logit_cap
        super().__init__(**{"tie_word_embeddings": True, **others})


AutoConfig.register("lantern", LanternConfig, exist_ok=True)
