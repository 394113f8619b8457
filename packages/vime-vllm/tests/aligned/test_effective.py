"""What a started engine read back keeps the contract, or is refused by the name of what does not; without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from vime_core.alignment import Alignment
from vime_core.errors import PolicyError
from vime_core.numerics import DENSE_V1
from vime_core.types import ProcessReport

SIDE = "vime_vllm.aligned.model:AlignedDecoder"
CENSUS = {"ran": {"vime_vllm.aligned.modules.Linear": 8}, "foreign": []}
KEPT: dict[str, Any] = {
    "contract": "dense/v1",
    "model_class": "vime_vllm.aligned.model.AlignedDecoder",
    "quantization": "",
    "logits_processors": [],
    "tensor_parallel_size": 1,
    "attention_backends": ["CUSTOM", "CUSTOM"],
    "sampler": "vime_vllm.aligned.sampler.AlignedSampler",
    "census": CENSUS,
}


def require(*settings: dict[str, Any]) -> None:
    from vime_vllm.aligned.effective import require_aligned

    reports = [ProcessReport("rollout", n, n, {}, one, {}, {}) for n, one in enumerate(settings)]
    require_aligned(reports, Alignment(DENSE_V1, "cpu", "nobody:nothing", SIDE))


def test_what_keeps_the_contract_passes() -> None:
    require(KEPT)
    require({"process": "core"}, KEPT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_class": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM"}, "model_class 'vllm.model_executor"),
        ({"quantization": "fp8"}, "quantization 'fp8' is effective"),
        ({"logits_processors": ["a.B"]}, r"logits_processors \['a.B'\] is effective"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 is effective"),
        ({"attention_backends": ["CUSTOM", "FLASH_ATTN"]}, "attention backend .*FLASH_ATTN"),
        ({"attention_backends": []}, "attention backend"),
        ({"sampler": "vllm.v1.sample.sampler.Sampler"}, "sampler 'vllm.v1.sample"),
        ({"census": {"ran": {}, "foreign": []}}, "module 'none' was seen to run"),
        ({"census": {**CENSUS, "foreign": ["vllm.RMSNorm"]}}, "module 'vllm.RMSNorm' runs in the engine"),
    ],
)
def test_what_does_not_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        require({**KEPT, **change})
    with pytest.raises(PolicyError, match=words):
        require(KEPT, {**KEPT, **change})


def test_an_engine_that_reports_no_contract_keeps_none() -> None:
    with pytest.raises(PolicyError, match="process 'none' reports a contract"):
        require({name: value for name, value in KEPT.items() if name != "contract"})
    with pytest.raises(PolicyError, match="process 'none' reports a contract"):
        require()
