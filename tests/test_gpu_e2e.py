"""The verdicts on a GPU of capability 9.0: vLLM's own batch-invariant mode is found out, the contract's kernels hold.

The model has Qwen2.5-0.5B's shape, since small ones choose other kernels. Nothing of it runs without such a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import ROOT, Ran, no_traceback, vime

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU of capability 9.0"
    ),
]

SHAPE = {"layers": 24, "hidden": 896, "heads": 14, "key_value_heads": 2, "intermediate": 4864, "vocabulary": 151936}
SIZES = (
    *(f"model.random-qwen2.{name}={size}" for name, size in SHAPE.items()),
    *("model.random-qwen2.context=4096", "rollout.context_length=1024", "rollout.vllm.kv_cache_gib=4.0"),
    *("sampling.prompts_per_step=16", "sampling.max_tokens=96", "trainer.token_budget=8192"),
)
CONTRACT = ("alignment.contract='dense/v1'", "alignment.provider='cuda'")
STOCK = ("alignment.contract=''",)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of its own, so that no package of tasks is needed."""
    sums = [{"question": f"What is {n} + {7 * n + 3}?", "answer": str(8 * n + 3)} for n in range(1, 65)]
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in sums))
    return path


def verify(name: str, questions: Path, *overrides: str, env: dict[str, str] | None = None) -> Ran:
    data = ("data.source='jsonl'", f"data.jsonl.path='{questions}'", "data.jsonl.label_marker=''")
    sets = [part for one in (*SIZES, *data, *overrides) for part in ("--set", one)]
    ran = vime("verify", name, ROOT / "configs" / "aligned-smoke.toml", "--json", *sets, env=env)
    no_traceback(ran)
    return ran


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_vllm_s_batch_invariant_mode_depends_on_company_and_is_found_out(backend: str, questions: Path) -> None:
    attention = f"rollout.vllm.attention_backend='{backend}'"
    ran = verify("batch", questions, *STOCK, attention, env={"VLLM_BATCH_INVARIANT": "1"})
    assert ran.code == 1, ran.text
    assert ran.json["holds"] is False
    assert ran.json["unequal"] > 0
    assert ran.json["details"]["smallest_company"]


@pytest.mark.parametrize("kernels", ["auto", "own"])
@pytest.mark.parametrize("verdict", ["batch", "align"])
def test_the_contract_holds(verdict: str, kernels: str, questions: Path) -> None:
    chosen = (f"alignment.linear='{kernels}'", f"alignment.attention='{kernels}'")
    ran = verify(verdict, questions, *CONTRACT, *chosen, "rollout.vllm.max_num_seqs=256")
    assert ran.code == 0, ran.text
    assert (ran.json["holds"], ran.json["unequal"]) == (True, 0)
    assert ran.json["coverage"]["tokens"] > 4000
