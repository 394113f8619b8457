from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from vime_core.data import Example, Message
from vime_core.data.reasoning import ReasoningGymOptions, open_reasoning_gym
from vime_core.errors import DataError
from vime_core.rewards import RewardInput, RewardPool, RewardSpec, score_all
from vime_core.rewards.exact import ExactOptions
from vime_core.rewards.process import WorkerProcess
from vime_core.rewards.reasoning import ReasoningGymRewardOptions
from vime_core.rewards.symbolic import MathVerifyOptions

ACTING_REWARD = """
    import os, re, subprocess, sys, threading, time
    from pydantic import BaseModel

    class ActOptions(BaseModel):
        scale: float = 1.0

    def make_act(options):
        def score(item):
            action, _, argument = item.response_text.partition(" ")
            return options.scale * ACTIONS[action](argument) if action in ACTIONS else RAW[action]()
        return score

    def sleep(seconds):
        time.sleep(float(seconds))
        return float(seconds)

    def meet(paths):
        mine, other = paths.split()
        open(mine, "w").close()
        while not os.path.exists(other):
            time.sleep(0.01)
        return float(os.getpid())

    def note(path):
        open(path, "w").close()
        time.sleep(10)

    def hang_with_child(path):
        child = subprocess.Popen(["sleep", "600"])
        other = subprocess.Popen(["sleep", "600"], start_new_session=True)
        daemon = subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"], stdout=subprocess.PIPE)
        with open(path + ".unfinished", "w") as file:
            file.write(f"{os.getpid()} {child.pid} {other.pid} {int(daemon.stdout)}")
        os.rename(path + ".unfinished", path)
        time.sleep(600)

    def chatter(text):
        print('{"value": 99}', flush=True)
        os.write(1, b"noise\\n")
        return float(len(sys.stdin.read()))

    ACTIONS = {
        "value": float,
        "sleep": sleep,
        "meet": meet,
        "note": note,
        "hang": hang_with_child,
        "spin": lambda _: re.match("(a+)+$", "a" * 60 + "b"),
        "raise": lambda text: (_ for _ in ()).throw(KeyError(text)),
        "exit": lambda code: sys.exit(int(code)),
        "die": lambda code: os._exit(int(code)),
        "kill": lambda number: os.kill(os.getpid(), int(number)),
        "chatter": chatter,
        "pid": lambda _: float(os.getpid()),
        "main": lambda _: float(threading.current_thread() is threading.main_thread()),
        "hash": lambda _: float(hash("vime") % 2**20),
        "long": lambda _: (_ for _ in ()).throw(ValueError("\\U0001f600" * 5000)),
    }
    RAW = {"none": lambda: None, "text": lambda: "1.0", "nan": lambda: float("nan"), "inf": lambda: float("-inf"),
           "huge": lambda: 1e39, "true": lambda: True, "list": lambda: [1.0]}

    def make_nothing(options):
        return None

    def make_error(options):
        raise RuntimeError("no licence")
"""

LONG_S = 120.0
"""A time limit that no test comes to on the slowest machine."""
HANG_S = 10.0
"""Time for a reward to start three processes, after which it counts as hanging."""


@pytest.fixture(autouse=True, scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("reward")
    (directory / "acting_reward.py").write_text(textwrap.dedent(ACTING_REWARD))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield


def acting_spec(**options: float) -> RewardSpec:
    import acting_reward  # pyright: ignore

    return RewardSpec("acting_reward:make_act", acting_reward.ActOptions(**options))


@pytest.fixture(scope="module")
def pool(acting: None) -> Iterator[RewardPool]:
    with RewardPool(acting_spec(), timeout_s=LONG_S, workers=2) as shared:
        yield shared


def responses(*texts: str) -> list[RewardInput]:
    example = Example((Message("user", "q"),), "42", {"n": [1, {"x": None}]})
    return [RewardInput("q", text, example, key=(10 + i, i)) for i, text in enumerate(texts)]


def is_gone(pid: int) -> bool:
    """Dead, or a zombie that its parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def assert_gone(*pids: int) -> None:
    deadline = time.monotonic() + LONG_S
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.02)


def test_results_come_by_index_not_by_completion(pool: RewardPool) -> None:
    texts = ["sleep 0.4", *(f"value {i}" for i in range(20)), "sleep 0.1"]
    assert pool.score(responses(*texts)).values == (0.4, *map(float, range(20)), 0.1)


def test_workers_run_side_by_side_and_are_reused(pool: RewardPool, tmp_path: Path) -> None:
    """Each of two rewards waits until the other one has begun."""
    first, second = tmp_path / "first", tmp_path / "second"
    pids = pool.score(responses(f"meet {first} {second}", f"meet {second} {first}")).values
    assert len(set(pids)) == 2
    assert set(pool.score(responses("pid", "pid")).values) <= set(pids)


def test_nothing_to_score(pool: RewardPool) -> None:
    assert pool.score([]).values == ()


def test_no_worker_before_the_first_input() -> None:
    with RewardPool(RewardSpec("nowhere:make"), timeout_s=1) as lazy:
        assert lazy.score([]).values == ()


def test_floats_cross_the_process_border_unchanged(pool: RewardPool) -> None:
    values = (0.1, -0.0, 1e-45, 3.4028234663852886e38, 1 / 3)
    scores = pool.score(responses(*(f"value {v!r}" for v in values))).values
    assert [v.hex() for v in scores] == [v.hex() for v in values]


def test_options_reach_the_reward() -> None:
    assert score_all(acting_spec(scale=3.0), responses("value 2"), timeout_s=LONG_S) == (6.0,)


def test_the_function_runs_on_the_main_thread(pool: RewardPool) -> None:
    assert pool.score(responses("main")).values == (1.0,)


def test_printing_and_reading_do_not_disturb(pool: RewardPool) -> None:
    assert pool.score(responses("chatter", "value 1")).values == (0.0, 1.0)


def test_hashes_are_the_same_in_every_worker() -> None:
    hashes = {score_all(acting_spec(), responses("hash"), timeout_s=LONG_S) for _ in range(2)}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise boom", "KeyError: 'boom'"),
        ("exit 3", "SystemExit: 3"),
        ("die 7", "its process ended (exit status 7)"),
        (f"kill {signal.SIGSEGV}", "its process ended (killed by SIGSEGV)"),
        ("nan", "the reward is nan, which is not a finite fp32 number"),
        ("inf", "the reward is -inf"),
        ("huge", "the reward is 1e+39"),
        ("none", "the reward is NoneType None, not a number"),
        ("text", "the reward is str '1.0', not a number"),
        ("list", "not a number"),
        ("long", "ValueError: \U0001f600"),
    ],
)
def test_a_failing_reward_is_named_and_the_pool_goes_on(action: str, message: str, pool: RewardPool) -> None:
    with pytest.raises(DataError) as caught:
        pool.score(responses("value 1", action, "value 2"))
    assert "prompt 11, sample 1" in caught.value.message
    assert message in caught.value.message
    assert caught.value.code == "VIME-DATA-020"
    assert len(caught.value.message) < 600
    assert pool.score(responses("value 1", "value 2", "value 3")).values == (1.0, 2.0, 3.0)


def test_true_is_one(pool: RewardPool) -> None:
    assert pool.score(responses("true")).values == (1.0,)


@pytest.mark.parametrize("order", [("sleep 0.4", "raise late", "raise early"), ("sleep 0.3", "die 1", "raise early")])
def test_the_first_failure_by_index_is_reported(order: tuple[str, ...], pool: RewardPool) -> None:
    for _ in range(3):
        with pytest.raises(DataError, match="prompt 11, sample 1"):
            pool.score(responses(*order))


def test_nothing_is_started_after_a_failure(pool: RewardPool, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="prompt 10, sample 0"):
        pool.score(responses("raise at once", *(f"note {tmp_path / str(index)}" for index in range(20))))
    assert len(list(tmp_path.iterdir())) <= 1, "the one beside the failure"


def test_a_slow_failure_before_a_fast_one_is_the_one_reported(acting: None) -> None:
    with (
        RewardPool(acting_spec(), timeout_s=1, workers=2) as small,
        pytest.raises(DataError, match="prompt 10, sample 0"),
    ):
        small.score(responses("sleep 600", "raise fast"))


def test_a_hanging_reward_is_killed_with_its_children(tmp_path: Path) -> None:
    with RewardPool(acting_spec(), timeout_s=HANG_S, workers=2) as short:
        with pytest.raises(DataError) as caught:
            short.score(responses("value 1", f"hang {tmp_path / 'pids'}", "sleep 600"))
        assert "took longer than reward.timeout_s = 10 for prompt 11, sample 1" in caught.value.message
        assert caught.value.code == "VIME-DATA-021"
        assert_gone(*map(int, (tmp_path / "pids").read_text().split()))
        assert short.score(responses("value 1", "value 2")).values == (1.0, 2.0)


def test_a_reward_that_holds_the_interpreter_is_killed() -> None:
    with pytest.raises(DataError, match="took longer"):
        score_all(acting_spec(), responses("spin"), timeout_s=0.5)


def test_a_time_limit_can_be_a_reward_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rewards that never come get a short limit: no machine is too slow for the others."""
    send = WorkerProcess.send

    def limited(worker: WorkerProcess, line: bytes, job: int, timeout_s: float) -> None:
        send(worker, line, job, 1.0 if b"sleep" in line else timeout_s)

    monkeypatch.setattr(WorkerProcess, "send", limited)
    with RewardPool(acting_spec(), timeout_s=LONG_S, workers=2, timeout_reward=-1.0) as lenient:
        scores = lenient.score(responses("value 1", "sleep 600", "value 2", "sleep 600"))
    assert scores.values == (1.0, -1.0, 2.0, -1.0)
    assert scores.timed_out == (1, 3)


def test_a_reply_that_the_run_was_too_slow_to_take_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reply keeps the run busy until the second one is there and its time is up."""
    receive = RewardPool._receive

    def slowly(pool: RewardPool, worker: WorkerProcess, batch: Any) -> None:
        receive(pool, worker, batch)
        for other in [other for other in pool._workers if other.job is not None]:
            select.select([other.replies], [], [])
            time.sleep(other.remaining_s)

    first, second = tmp_path / "first", tmp_path / "second"
    with RewardPool(acting_spec(), timeout_s=HANG_S, workers=2) as pool:
        pool.score(responses(f"meet {first} {second}", f"meet {second} {first}"))
        monkeypatch.setattr(RewardPool, "_receive", slowly)
        assert pool.score(responses("value 1", "sleep 0.2")).values == (1.0, 0.2)


def test_close_ends_the_workers_and_a_closed_pool_starts_anew() -> None:
    with RewardPool(acting_spec(), timeout_s=LONG_S) as pool:
        (pid,) = pool.score(responses("pid")).values
        pool.close()
        assert_gone(int(pid))
        assert pool.score(responses("pid")).values != (pid,)


def test_a_worker_ends_with_the_run_even_when_its_reward_hangs(tmp_path: Path) -> None:
    script = f"""
        from vime_core.data import Example
        from vime_core.rewards import *
        import acting_reward
        spec = RewardSpec("acting_reward:make_act", acting_reward.ActOptions())
        score_all(spec, [RewardInput("", "hang {tmp_path / "pids"}", Example((), ""))], timeout_s=600)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    try:
        while not (tmp_path / "pids").exists():
            assert run.poll() is None
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    assert_gone(*map(int, (tmp_path / "pids").read_text().split()))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("acting_reward:make_error", "RuntimeError: no licence"),
        ("acting_reward:make_nothing", "returned None instead of a reward function"),
        ("acting_reward:absent", "has no attribute 'absent'"),
        ("absent_module:make", "No module named 'absent_module'"),
    ],
)
def test_a_reward_that_cannot_be_built(target: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        score_all(RewardSpec(target), responses("value 1"), timeout_s=LONG_S, workers=2)
    assert caught.value.code == "VIME-DATA-023"
    assert message in caught.value.message


def test_options_of_a_local_class_cannot_cross() -> None:
    class Local(BaseModel):
        pass

    with pytest.raises(DataError, match="cannot be built"):
        score_all(RewardSpec("acting_reward:make_act", Local()), responses("value 1"), timeout_s=LONG_S)


def test_metadata_that_is_not_json_is_refused(pool: RewardPool) -> None:
    bad = RewardInput("q", "value 1", Example((), "", {"x": {1, 2}}))  # pyright: ignore
    with pytest.raises(DataError, match="input 1 cannot be sent"):
        pool.score([*responses("value 1"), bad])


def test_what_the_reward_sees_is_what_was_given() -> None:
    item = RewardInput("Frage: ü\n", "\ud800 \x00\n{", responses("x")[0].example, "length", (3, 4))
    from vime_core.rewards.wire import decode_input, encode_input

    line = encode_input(item)
    assert line.count(b"\n") == 1
    assert decode_input(line) == item


def test_built_in_rewards_run_in_workers() -> None:
    exact = RewardSpec("vime_core.rewards.exact:make_exact", ExactOptions())
    assert score_all(exact, responses("It is 42", "It is 41"), timeout_s=LONG_S) == (1.0, 0.0)
    math = RewardSpec("vime_core.rewards.symbolic:make_math_verify", MathVerifyOptions())
    assert score_all(math, responses("\\boxed{84/2}", "41"), timeout_s=LONG_S) == (1.0, 0.0)
    dataset = open_reasoning_gym(ReasoningGymOptions(task="chain_sum", seed=5, size=3))
    gym = RewardSpec("vime_core.rewards.reasoning:make_reasoning_gym", ReasoningGymRewardOptions(answer="number"))
    inputs = [RewardInput("", f"It is {dataset[i].label}", dataset[i]) for i in range(3)]
    assert score_all(gym, inputs, timeout_s=LONG_S) == (1.0, 1.0, 1.0)


def test_a_response_that_hangs_math_verify_is_an_error_not_a_zero() -> None:
    math = RewardSpec("vime_core.rewards.symbolic:make_math_verify", MathVerifyOptions())
    with pytest.raises(DataError, match="took longer"):
        score_all(math, responses("\\boxed{9^{9^{9}}}"), timeout_s=3)


def test_an_example_that_differs_between_processes_is_refused() -> None:
    dataset = open_reasoning_gym(ReasoningGymOptions(task="chain_sum", seed=5, size=3))
    example = Example((Message("user", "another question"),), dataset[0].label, dataset[0].metadata)
    gym = RewardSpec("vime_core.rewards.reasoning:make_reasoning_gym", ReasoningGymRewardOptions())
    with pytest.raises(DataError, match="makes another example"):
        score_all(gym, [RewardInput("", "1", example)], timeout_s=LONG_S)
