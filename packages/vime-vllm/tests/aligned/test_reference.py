"""The whole-sequence reference of these tests against transformers: right, and not only equal to the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_core.numerics import load_provider


@pytest.mark.parametrize("name", ["qwen3-bf16", "llama-fp32", "qwen2-bf16"])
def test_it_computes_what_transformers_computes(name: str, model_of: Any) -> None:
    from aligned_reference import Reference
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    directory: Path = model_of(name)
    weights = {n: t.float() for n, t in load_file(directory / "model.safetensors").items()}
    reference = Reference(load_provider("cpu"), json.loads((directory / "config.json").read_text()), weights)
    tokens = [3 + (k * 37) % 500 for k in range(150)]
    with torch.inference_mode():
        ours = reference.logits(tokens)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        theirs = model(torch.tensor([tokens])).logits[0]
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() < 2e-3
