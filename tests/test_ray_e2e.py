"""The launcher ``ray`` with real Ray, Megatron and vLLM: ranks, engines, deaths, and clusters that are not ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import bigram
import psutil
import pytest
import ray_faults
from command import PLUGINS, ROOT, Ran, no_traceback, vime

from vime_core.config.load import load_config
from vime_core.determinism.environment import exactly
from vime_core.errors import ContractViolation
from vime_core.loop.sides import checked_policy, ready_parts
from vime_core.record.digest import digest_tensors
from vime_core.record.reader import RunRecord
from vime_core.verify.gradient_live import GradientOptions, gradient_sequences, open_trainer
from vime_core.verify.live import GradientDigests

pytestmark = [pytest.mark.slow, pytest.mark.engine]
pytest.importorskip("ray")

ALIGNED = ROOT / "configs" / "aligned-smoke.toml"
RAY = (
    *("run.launcher=ray", "run.ray.cpus_per_rank=0.25", "run.ray.cpus_per_engine=0.25"),
    "plugins.modules=['ray_faults']",
)
EVALUATION = ("evaluation.every=1", "evaluation.prompts=3", "evaluation.max_tokens=8")
TWO_RANKS = (
    *(*RAY, *EVALUATION),
    *("trainer.megatron.data_parallel=2", "trainer.token_budget=256", "run.checkpoint_every=1"),
)
JOINING = {"RAY_AUTH_MODE": "token"}
"""What Ray asks of those who join a cluster that was started with its defaults."""


def sets(*overrides: str) -> list[str]:
    return [part for one in overrides for part in ("--set", one)]


def manifest(record: Path) -> dict[str, Any]:
    return json.loads((record / "manifest.json").read_text())


def trainers(record: Path) -> list[dict[str, Any]]:
    return [process for process in manifest(record)["processes"] if process["role"] == "trainer"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short directory for temporary files, so that sockets fit."""
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as name:
        yield Path(name)


def left_over(*places: Path) -> list[str]:
    """Living processes that name or hold a file in one of these places, as all of a run's do."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            held = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            words = " ".join([process.name(), *process.cmdline()])
            if any(str(place) in text for place in places for text in [words, *held]):
                found.append(words)
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data parallel ranks and an engine under dense/v1, on a cluster of the run's own."""
    record = tmp_path_factory.mktemp("straight") / "record"
    ran = vime("run", ALIGNED, "--output", record, *sets(*TWO_RANKS))
    assert ran.code == 0, ran.text
    return record


def test_two_ranks_and_an_engine_are_aligned(straight: Path) -> None:
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_rollout_logprob_abs_diff"] for line in lines] == [0.0, 0.0]
    assert [line["evaluation/train_rollout_logprob_abs_diff"] for line in lines] == [0.0, 0.0]
    steps = RunRecord.open(straight).steps
    assert all(float.fromhex(update.grad_norm) > 0 for update in steps[-1].updates)
    assert steps[0].weights_root != steps[1].weights_root


def test_an_engine_that_draws_otherwise_is_found_in_the_evaluation(tmp_path: Path) -> None:
    ran = vime("run", ALIGNED, "--output", tmp_path / "record", *sets(*RAY, *EVALUATION), env={"VIME_TEST_RAY": "draw"})
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert "contract dense/v1 does not hold in the evaluation before step 1" in ran.text
    assert "the trainer draws" in ran.text


def test_the_record_says_where_the_ranks_were(straight: Path) -> None:
    ranks = trainers(straight)
    assert [process["rank"] for process in ranks] == [0, 1]
    assert len({process["pid"] for process in ranks}) == 2
    for number, process in enumerate(ranks):
        settings = process["settings"]
        assert (settings["launcher"], settings["actors"], settings["data_parallel_rank"]) == ("ray", 2, number)
        assert settings["node"]
        assert process["environment"]["NCCL_ALGO"] == "Ring"
    (core, *_) = [process for process in manifest(straight)["processes"] if process["role"] == "rollout"]
    assert (core["settings"]["engine"], core["environment"]["PYTHONHASHSEED"]) == (0, "0")
    assert "NCCL_ALGO" not in core["environment"]


def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    straight: Path, tmp_path: Path, temporary: Path
) -> None:
    """As on a machine so slow that the driver misses the rank before Ray knows that it ended."""
    record, place = tmp_path / "record", {"TMPDIR": str(temporary)}
    slow = {"RAY_timeout_ms_task_wait_for_death_info": "0"}
    ran = vime("run", ALIGNED, "--output", record, *sets(*TWO_RANKS), env={"VIME_TEST_RAY": "kill", **slow, **place})
    no_traceback(ran)
    assert ran.code == 3, ran.text
    dead = trainers(record)[1]["pid"]
    assert f"VIME-BACKEND-080: trainer rank 1 (process {dead} on node " in ran.err
    assert "died during train_step: it was ended without a word, as SIGKILL does" in ran.err
    assert manifest(record)["status"] == "failed"
    wait_for(lambda: left_over(temporary, record) == [])
    ran = vime("run", "--resume", record, env=place)
    assert ran.code == 0, ran.text
    assert "Resumed at step 1" in ran.out
    same = vime("diff", straight, record, "--json")
    assert (same.code, same.json["equal"]) == (0, True), same.text
    wait_for(lambda: left_over(temporary, record) == [])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster that somebody else started and will end."""
    place = Path("/tmp") / f"vr{os.getpid()}"
    program = (
        "import ray, sys\n"
        f"ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir={str(place)!r})\n"
        "print('at', ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    ) as owner:
        assert owner.stdout is not None
        yield next(line.split()[1] for line in owner.stdout if line.startswith("at "))
        assert owner.poll() is None, "the cluster did not outlive the runs that used it"
        owner.communicate("")
    shutil.rmtree(place, ignore_errors=True)


def test_two_engines_answer_by_prompt_index_with_the_bits_of_one(cluster: str, straight: Path, tmp_path: Path) -> None:
    """On the way one engine's weights go astray by a bit and back again, which is found."""
    record, said = tmp_path / "record", tmp_path / "said"
    more = (f"run.ray.address='{cluster}'", "rollout.engines=2", "run.steps=1")
    env = {**JOINING, "VIME_TEST_RAY": "engine", "VIME_TEST_SAID": str(said)}
    ran = vime("run", ALIGNED, "--output", record, *sets(*RAY, *more), env=env)
    assert ran.code == 0, ran.text
    engines = [p for p in manifest(record)["processes"] if p["role"] == "rollout"]
    assert {process["settings"]["engine"] for process in engines} == {0, 1}
    assert len({process["pid"] for process in engines}) == len(engines)
    one, two = RunRecord.open(straight).steps[0], RunRecord.open(record).steps[0]
    for what in ("prompts", "tokens", "rollout_log_probs", "rewards"):
        assert getattr(one, what) == getattr(two, what), what
    assert (
        "VIME-ALIGN-009: engine 0 and engine 1 hold different weights: ['model.norm.weight'] and 1" in said.read_text()
    )


def gradient(cluster: str, *overrides: str) -> Ran:
    """The verdict *gradient*, which starts no engine."""
    return vime(
        "verify", "gradient", ALIGNED, "--json", *sets(*RAY, f"run.ray.address='{cluster}'", *overrides), env=JOINING
    )


def test_two_tensor_parallel_ranks_give_the_gradients_of_fp64_twice(cluster: str) -> None:
    ran = gradient(cluster, "trainer.megatron.tensor_parallel=2", "alignment.contract=''")
    assert ran.code == 0, ran.text
    assert ran.json["holds"] is True


def test_a_rank_with_other_gradients_is_named(tmp_path: Path) -> None:
    with exactly({"PYTHONPATH": str(PLUGINS)}):
        config, plugins = load_config([ALIGNED], [*TWO_RANKS, f"run.cache='{tmp_path}'"])
        parts = ready_parts(config, checked_policy(config, plugins), plugins)
        microbatches = parts.algorithm.microbatches(gradient_sequences(parts, GradientOptions(longest=64)))
        with open_trainer(parts) as trainer:
            before = digest_tensors(trainer.weights())
            trainer.train_step(microbatches, parts.algorithm.loss, GradientDigests())
            assert digest_tensors(trainer.weights()) != before
            ray_faults.stray(trainer)
            with pytest.raises(ContractViolation, match="trainer rank 0 and trainer rank 1 hold different gradients"):
                trainer.train_step(microbatches, parts.algorithm.loss, GradientDigests())


def test_two_tensor_parallel_ranks_train_with_an_engine(cluster: str, smoke: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    more = (f"run.ray.address='{cluster}'", "trainer.megatron.tensor_parallel=2")
    ran = vime("run", smoke, "--output", record, *sets(*RAY, *more), env=JOINING)
    assert ran.code == 0, ran.text
    assert [process["settings"]["tensor_parallel_rank"] for process in trainers(record)] == [0, 1]
    lines = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["train_rollout_logprob_abs_diff"] < 0.05 for line in lines)


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own; when everything else was killed they take a minute or two to notice."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["TERM", "KILL"])
def test_nothing_of_a_run_that_is_ended_stays(
    number: signal.Signals, code: int, smoke: Path, tmp_path: Path, temporary: Path
) -> None:
    """A table of bigrams stands for trainer and engine: what is tried is the cluster of the run's own."""
    record = tmp_path / "record"
    options = sets(*RAY[:3], "run.steps=100000", f"run.cache='{tmp_path}'", *bigram.OVERRIDES)
    command = [sys.executable, "-m", "vime_cli", "run", smoke, "--output", record, *options]
    variables = {**os.environ, "PYTHONPATH": str(PLUGINS), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.DEVNULL) as run:
        wait_for(lambda: (record / "steps.jsonl").exists() or run.poll() is not None)
        assert any("ray::" in name for name in left_over(temporary, record))
        run.send_signal(number)
        assert run.wait(300) == code
    agents = AGENTS if number == signal.SIGKILL else ()
    wait_for(lambda: [name for name in left_over(temporary, record) if not name.startswith(agents)] == [])
    assert manifest(record)["status"] == ("interrupted" if number == signal.SIGTERM else "running")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
