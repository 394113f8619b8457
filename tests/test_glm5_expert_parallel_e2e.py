"""``vime run`` with the experts of GLM-5 over two trainer ranks: aligned with the engine, and one rank's bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import ROOT, Ran, no_traceback, vime

from vime_core.record.reader import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.engine]
pytest.importorskip("ray")

SMALL = (
    *("sampling.prompts_per_step=2", "sampling.samples_per_prompt=4", "sampling.max_tokens=8"),
    "trainer.token_budget=256",  # three sequences: an odd number of microbatches for two ranks
)
OVER_TWO = (
    *("run.launcher=ray", "run.ray.cpus_per_rank=0.25", "run.ray.cpus_per_engine=0.25"),
    *("trainer.megatron.data_parallel=2", "trainer.megatron.expert_parallel=2"),
)


def run(record: Path, *sets: str) -> Ran:
    overrides = [part for one in (*SMALL, *sets) for part in ("--set", one)]
    return vime("run", ROOT / "configs" / "glm5-tiny.toml", "--output", record, *overrides, timeout=600)


def test_experts_over_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    records = {}
    for name, sets in (("one", ()), ("two", OVER_TWO)):
        ran = run(tmp_path / name, *sets)
        no_traceback(ran)
        assert ran.code == 0, ran.text
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["train_rollout_logprob_abs_diff"] for line in lines] == [0.0, 0.0]
        records[name] = RunRecord.open(tmp_path / name)
    one, two = (record.steps[0] for record in records.values())
    for what in ("prompts", "tokens", "rollout_log_probs", "rewards", "advantages"):
        assert getattr(one, what) == getattr(two, what), what
    assert one.updates[0].train_log_probs == two.updates[0].train_log_probs
    assert records["one"].manifest.model_root == records["two"].manifest.model_root
    assert list(one.weights) == list(two.weights)
    trainers = [p.settings for p in records["two"].manifest.processes if p.role == "trainer"]
    assert [settings["experts"] for settings in trainers] == ["over 2 ranks by collective"] * 2


@pytest.mark.parametrize(
    ("dispatcher", "why"),
    [("alltoall", "adds the rows of a token"), ("deep_ep", "deep_ep"), ("pigeon", "no such provider")],
)
def test_another_dispatcher_is_refused_before_anything_starts(dispatcher: str, why: str, tmp_path: Path) -> None:
    ran = run(tmp_path / "record", *OVER_TWO, f"trainer.megatron.expert_dispatcher={dispatcher}")
    no_traceback(ran)
    assert ran.code == 2, ran.text
    assert "VIME-ALIGN-074" in ran.text
    assert why in ran.text
    assert not (tmp_path / "record").exists()
