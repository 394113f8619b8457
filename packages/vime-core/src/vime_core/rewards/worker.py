"""The process that runs a reward function: JSON lines in, JSON lines out, the function on the main thread.

The main thread, because math libraries interrupt themselves by signals, which only it receives. Another thread waits
for input, so that the worker ends when the run does, even in the middle of a reward.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from numbers import Real
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar, cast

from vime_core.rewards.types import RewardFunction
from vime_core.rewards.wire import decode_input, encode_line

_Result = TypeVar("_Result")

LONGEST_ERROR = 300
"""Characters of an error message that are passed on: a reply must fit one atomic write to a pipe (4096 bytes)."""

LARGEST_REWARD = 3.4028234663852886e38


def main() -> None:
    """Serve until standard input ends."""
    requests, replies = _take_standard_streams()
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    reward = _answer(replies, lambda: _build(lines.get()), lambda _: {"ready": True})
    while reward is not None:
        _answer(replies, partial(_score, reward, lines.get()), lambda value: {"value": value})


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep the protocol's pipes private: what a reward prints goes to stderr, what it reads is empty."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb", buffering=0)


def _read(requests: BinaryIO, lines: SimpleQueue[bytes]) -> None:
    for line in requests:
        lines.put(line)
    os._exit(0)


def _score(reward: RewardFunction, line: bytes) -> float:
    return _checked(reward(decode_input(line)))


def _answer(
    replies: BinaryIO, act: Callable[[], _Result], describe: Callable[[_Result], dict[str, Any]]
) -> _Result | None:
    """Do something and say how it went; None when it failed. A reward may raise anything, SystemExit included."""
    try:
        result = act()
        reply = describe(result)
    except BaseException as error:
        result = None
        reply = {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
    replies.write(encode_line(reply))
    return result


def _build(line: bytes) -> RewardFunction:
    spec: dict[str, Any] = json.loads(line)
    options = _attribute(spec["options_class"]).model_validate(spec["options"])
    reward: Any = _attribute(spec["target"])(options)
    if not callable(reward):
        raise TypeError(f"it returned {reward!r} instead of a reward function")
    return cast(RewardFunction, reward)


def _attribute(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _checked(value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the reward is {type(value).__name__} {value!r}, not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
        raise ValueError(f"the reward is {number}, which is not a finite fp32 number")
    return number
