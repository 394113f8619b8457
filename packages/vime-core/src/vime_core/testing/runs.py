"""Configurations and requests for verdicts on small models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vime_core.rl.seeds import sample_seed
from vime_core.types import SampleRequest

if TYPE_CHECKING:
    from vime_core.config.schema import RunConfig
    from vime_core.plugins.manager import PluginManager

CONTEXT: Final = 192
PAGE: Final = 16
MAX_TOKENS: Final = 12
PROMPT_LENGTHS: Final = (1, 2, 15, 16, 17, 33, 70, 129)
"""From one token to several pages, around the edges of a page."""


def write_run(model: Path, dtype: str, contract: str, **sections: Mapping[str, Any]) -> Path:
    """A small run over a model directory, as ``run.toml`` beside its weights, with questions of its own.

    Args:
        model: the directory.
        dtype: ``trainer.dtype``.
        contract: ``alignment.contract``.
        sections: keys of sections that are set besides, such as ``sampling={"temperature": 0.7}``.
    """
    questions = [{"question": f"{a} + {b} = ?", "answer": f"#### {a + b}"} for a in range(4) for b in range(4)]
    (model / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": model.name, "seed": 7, "output": str(model / "record")},
        "model": {"source": "directory"},
        "model.directory": {"path": str(model)},
        "data": {"source": "jsonl"},
        "data.jsonl": {"path": str(model / "questions.jsonl")},
        "reward": {"name": "length"},
        "sampling": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": MAX_TOKENS},
        "rollout": {"context_length": CONTEXT, "threads": 1},
        "rollout.vllm": {"kv_cache_gib": 0.02},
        "rollout.vllm.engine_args": {"block_size": PAGE},
        "trainer": {"dtype": dtype, "token_budget": 256, "threads": 1},
        "alignment": {"contract": contract},
    }
    for name, keys in sections.items():
        tables[name] = {**tables.get(name, {}), **keys}
    text = "".join(f"[{name}]\n{_lines(keys)}\n" for name, keys in tables.items())
    (model / "run.toml").write_text(text)
    return model / "run.toml"


def load_run(file: Path) -> tuple[RunConfig, PluginManager]:
    """The configuration that `write_run` wrote, with the installed plugins."""
    from vime_core.config.load import load_config

    return load_config([file])


def mixed_requests(config: RunConfig, vocabulary: int) -> list[SampleRequest]:
    """A request for each of `PROMPT_LENGTHS`, of random tokens; the longest begins like the second longest."""
    draw = np.random.default_rng(config.run.seed)
    sampling = config.sampling
    prompts = [tuple(int(token) for token in draw.integers(3, vocabulary, length)) for length in PROMPT_LENGTHS]
    prompts[-1] = prompts[-2] + prompts[-1][len(prompts[-2]) :]
    return [
        SampleRequest(
            prompt_index=number,
            sample_index=0,
            prompt_tokens=prompt,
            seed=sample_seed(config.run.seed, 0, number, 0),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        for number, prompt in enumerate(prompts)
    ]


def _lines(keys: Mapping[str, Any]) -> str:
    """TOML of plain values, which JSON writes alike."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
