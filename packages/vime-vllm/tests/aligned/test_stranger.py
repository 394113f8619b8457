"""A structure from outside: its class is found by name, and windows, soft caps and interleaved rope hold their bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_reference import add
from torch import Tensor

from vime_core.backends import RolloutContext
from vime_core.errors import PolicyError
from vime_core.numerics import AttentionSpec, Operations, load_provider, rope_table
from vime_core.types import SampleRequest
from vime_vllm.aligned.registration import architecture
from vime_vllm.aligned.rollout import AlignedVllmRollout
from vime_vllm.rollout import open_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 509,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "stranger_window": 21,
    "stranger_cap": 9.0,
    "stranger_logit_cap": 12.0,
    "stranger_scale": 0.25,
}


def make_weights() -> dict[str, Tensor]:
    torch.manual_seed(3)
    hidden, size, dim = 96, 200, 32
    shapes = {"embed": (509, hidden), "norm": (hidden,)}
    for layer in range(3):
        at = f"layers.{layer}."
        shapes |= {f"{at}{n}": (hidden,) for n in ("before_attention", "after_attention", "before_mlp", "after_mlp")}
        shapes |= {f"{at}q": (4 * dim, hidden), f"{at}k": (2 * dim, hidden), f"{at}v": (2 * dim, hidden)}
        shapes |= {f"{at}o": (hidden, 4 * dim), f"{at}down": (hidden, size)}
        shapes |= {f"{at}gate": (size, hidden), f"{at}up": (size, hidden)}
    made = {f"{name}.weight": torch.randn(shape) * (0.12 if len(shape) == 2 else 0.2) for name, shape in shapes.items()}
    return {name: (t if t.ndim == 2 else 1 + t).bfloat16() for name, t in made.items()}


def whole_sequence(op: Operations, w: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """(T, V) logits, apart from the engine's class."""
    table, positions = rope_table(len(tokens), 32, 10000.0), torch.arange(len(tokens))
    x = w["embed.weight"][torch.tensor(tokens)]
    for layer in range(3):
        at = f"layers.{layer}."

        def norm(x: Tensor, name: str, at: str = at) -> Tensor:
            return op.rms_norm(x, w[f"{at}{name}.weight"], 1e-5)

        h = norm(x, "before_attention")
        q, k, v = (op.linear(h, w[f"{at}{n}.weight"]).unflatten(-1, (-1, 32)) for n in "qkv")
        q, k = (op.rope(t, positions, table, True) for t in (q, k))
        spec = AttentionSpec(0.25, 21 if layer % 2 == 0 else None, 9.0)
        a = op.attention_packed(q, k, v, torch.tensor([0, len(tokens)]), spec)[0].flatten(1)
        x = add(x, norm(op.linear(a, w[f"{at}o.weight"]), "after_attention"))
        h = norm(x, "before_mlp")
        gate_up = torch.cat([op.linear(h, w[f"{at}gate.weight"]), op.linear(h, w[f"{at}up.weight"])], -1)
        x = add(x, norm(op.linear(op.swiglu(gate_up), w[f"{at}down.weight"]), "after_mlp"))
    return op.soft_cap(op.linear(op.rms_norm(x, w["norm.weight"], 1e-5), w["embed.weight"]), 12.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Path:
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("stranger")
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file(make_weights(), made / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def rollout(
    directory: Path,
    make_aligned: Callable[..., RolloutContext],
    opened: Callable[[RolloutContext], AbstractContextManager[Any]],
) -> Iterator[AlignedVllmRollout]:
    with opened(make_aligned(directory, side="aligned_stranger:Stranger")) as made:
        yield made


def test_its_class_runs_under_a_name_of_its_own(rollout: AlignedVllmRollout) -> None:
    settings = rollout.processes()[1].settings
    assert settings["model_class"] == "aligned_stranger.Stranger"
    assert settings["side"] == "aligned_stranger:Stranger"
    assert settings["census"]["ran"]["aligned_stranger.StrangeLayer"] == 6
    assert settings["census"]["foreign"] == []
    assert architecture("aligned_stranger:Stranger") == "Vime_aligned_stranger_Stranger"


def test_its_bits_are_those_of_a_whole_sequence_forward(
    rollout: AlignedVllmRollout, requests_of: Callable[..., list[SampleRequest]]
) -> None:
    op, weights = load_provider("cpu"), make_weights()
    requests = requests_of(20, 509)
    completions = rollout.generate(requests)
    tokens = unequal = 0
    for request, completion in zip(requests, completions, strict=True):
        first = len(request.prompt_tokens) - 1
        logits = whole_sequence(op, weights, [*request.prompt_tokens, *completion.tokens])[first:-1]
        expected = op.token_log_probs(logits, torch.tensor(completion.tokens), request.temperature)
        tokens += len(expected)
        unequal += int((expected.view(torch.int32) != torch.from_numpy(completion.log_probs).view(torch.int32)).sum())
    assert tokens > 400
    assert torch.cat([torch.from_numpy(c.log_probs) for c in completions]).std() > 0.5
    assert unequal == 0
    alone = [rollout.generate([request])[0] for request in requests[:6]]
    assert all(a.tokens == b.tokens for a, b in zip(alone, completions, strict=False))
    assert all(a.log_probs.tobytes() == b.log_probs.tobytes() for a, b in zip(alone, completions, strict=False))


def test_its_weights_are_updated_by_its_own_names(rollout: AlignedVllmRollout) -> None:
    weights = make_weights()
    before = rollout.weight_digests()
    assert set(before) == set(weights)
    doubled = {name: tensor * 2 for name, tensor in weights.items()}
    after = rollout.update_weights(iter(doubled.items()), 1)
    assert all(after[name] != before[name] for name in weights)
    rollout.update_weights(iter(weights.items()), 0)
    assert rollout.weight_digests() == before


def test_what_its_class_refuses_is_refused_before_an_engine_starts(
    directory: Path, make_aligned: Callable[..., RolloutContext], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "stranger_window": 0}))
    with pytest.raises(PolicyError, match="VIME-STRANGER-001"):
        open_rollout(make_aligned(tmp_path, side="aligned_stranger:Stranger"))
