"""The gates of GLM-5.2: both sides of the tiny model at the scale of this machine, and what they compare."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import glm52_trainer_faults
import numpy as np
import torch
from command import ROOT

from vime_core.config.load import load_config
from vime_core.determinism.environment import exactly
from vime_core.loop.sides import Sides, checked_policy, open_sides, ready_parts
from vime_core.record.digest import digest_tensors
from vime_core.types import Float32Array, SampleRequest
from vime_core.verify.layers import TapComparison
from vime_core.verify.live import UPDATE_LR, first_requests, take_step, with_learning_rate
from vime_core.verify.suspects import taps_of
from vime_glm5.structure import Glm5Shape, read_shape

CONFIG = ROOT / "configs" / "glm5-tiny.toml"
CONTRACTS = {"fp8": "glm5/v1", "bf16": "glm5/v1-bf16kv"}
FAULTS = "glm52_faults"
SENTENCE = "Count the apples in the basket and answer with the number alone. "
GPU_PROVIDER = "GLM52_GATE_PROVIDER"
"""Environment variable: the provider that the gates use on a GPU, ``reference`` where it is not set."""
LARGER = {
    "hidden": 512,
    "intermediate": 1024,
    "heads": 8,
    "q_lora": 256,
    "nope": 128,
    "value": 128,
    "experts": 16,
    "experts_per_token": 4,
    "expert_intermediate": 256,
    "index_heads": 4,
    "index_top_k": 64,
}


@dataclass(frozen=True)
class Scale:
    """How large a gate runs here, and what of it cannot run.

    ``repeats``: how often prompts begin with `SENTENCE`; ``own_data``: questions that need no package; ``spreads``:
    whether the gate's tokens reach every expert, and none of them has half of the probability.
    """

    name: str
    sets: tuple[str, ...]
    not_run: tuple[str, ...]
    repeats: int = 1
    own_data: bool = False
    spreads: bool = True


def scale_of_this_machine() -> Scale:
    gpus = torch.cuda.device_count()
    not_run = ["experts over ranks: test_glm5_expert_parallel_e2e", "the FP8 checkpoint of GLM-5.2: no weights here"]
    if not gpus:
        return Scale("tiny, on CPU", (), (*not_run, "anything on a GPU: there is none"))
    provider = os.environ.get(GPU_PROVIDER, "reference")
    sets = [f"model.random-glm5.{name}={size}" for name, size in LARGER.items()]
    sets += [f"alignment.provider='{provider}'", "trainer.token_budget=2048"]
    name = f"larger, on 1 of {gpus} GPUs ({torch.cuda.get_device_name()}), provider {provider}"
    return Scale(name, tuple(sets), tuple(not_run), repeats=2, own_data=True, spreads=False)


def data_of_its_own(place: Path) -> tuple[str, ...]:
    """Settings for a file of sums."""
    sums = [{"question": f"{n} + {7 * n + 3} = ?", "answer": str(8 * n + 3)} for n in range(1, 65)]
    (place / "sums.jsonl").write_text("\n".join(json.dumps(one) for one in sums))
    return "data.source='jsonl'", f"data.jsonl.path='{place / 'sums.jsonl'}'", "data.jsonl.label_marker=''"


@dataclass
class Gate:
    """Two live sides that hold the same weights, and where the trainer's first state lies."""

    sides: Sides
    shape: Glm5Shape
    state: Path
    kind: str

    @property
    def trainer(self) -> Any:
        return self.sides.trainer

    @property
    def rollout(self) -> Any:
        return self.sides.rollout

    def requests(self, count: int) -> list[SampleRequest]:
        return first_requests(self.sides.parts, count)

    def plant(self, name: str, *arguments: Any) -> None:
        """A fault in the engine's worker."""
        self.rollout.call(f"{FAULTS}:{name}", *arguments)

    def plant_in_trainer(self, name: str, *arguments: Any) -> None:
        getattr(glm52_trainer_faults, name)(self.trainer, *arguments)

    def mend(self) -> None:
        """Both sides as they were, with the first weights, as another version."""
        self.plant("restore")
        self.plant_in_trainer("restore")
        self.trainer.load(self.state)
        version = (self.rollout._version or 100) + 1
        self.rollout._version = version
        self.rollout.update_weights(self.trainer.weights(), version)
        assert digest_tensors(self.trainer.weights()) == dict(self.rollout.weight_digests())

    def train_and_update(self, requests: Sequence[SampleRequest]) -> None:
        """One optimizer step on fresh answers, and its weights online to the engine."""
        version = self.rollout._version
        take_step(self.sides, requests, self.rollout.generate(requests), version)
        self.rollout.update_weights(self.trainer.weights(), version + 1)

    def taps(self, request: SampleRequest) -> tuple[TapComparison, int]:
        """Taps of one response on both sides, and its tokens: prefill and every decode."""
        (completion,) = self.rollout.generate([request])
        return taps_of(self.sides, request, completion.tokens), len(request.prompt_tokens) + len(completion.tokens)


@contextmanager
def opened(kind: str, state: Path, *sets: str) -> Iterator[Gate]:
    scale = scale_of_this_machine()
    prompts = (f"data.system_prompt='{SENTENCE * scale.repeats}'", *(data_of_its_own(state) if scale.own_data else ()))
    config, plugins = load_config([CONFIG], [f"alignment.contract='{CONTRACTS[kind]}'", *prompts, *scale.sets, *sets])
    with exactly({}):
        policy = checked_policy(config, plugins)
        parts = ready_parts(with_learning_rate(config, UPDATE_LR), policy, plugins)
        with open_sides(parts) as sides:
            sides.trainer.save(state / "state")
            shape = read_shape(json.loads((parts.model / "config.json").read_text()))
            print(
                f"\nran: {scale.name}; KV cache {kind}; {shape.layers} layers, {len(shape.dense_layers)} dense;",
                end=" ",
            )
            print(f"keys chosen by layers {shape.indexed_layers}, {shape.index_top_k} each; {shape.experts} experts")
            for part in scale.not_run:
                print(f"not run: {part}")
            yield Gate(sides, shape, state / "state", kind)


def unequal_bits(a: Sequence[Float32Array], b: Sequence[Float32Array]) -> int:
    """Elements that differ in a bit, or are NaN."""
    first, second = np.concatenate(a), np.concatenate(b)
    assert first.dtype == second.dtype == np.float32
    assert first.size == second.size > 0
    return int(((first.view(np.int32) != second.view(np.int32)) | np.isnan(first) | np.isnan(second)).sum())
