"""Rewards' inputs as JSON lines between the run and its reward workers. No pickle: a line carries data, never code."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from vime_core.data.types import Example, Message
from vime_core.rewards.types import RewardInput, RewardSpec


def encode_input(item: RewardInput) -> bytes:
    """One line. Raises TypeError or ValueError when the example's metadata is not JSON."""
    fields: dict[str, Any] = {
        "prompt_text": item.prompt_text,
        "response_text": item.response_text,
        "messages": [asdict(message) for message in item.example.messages],
        "label": item.example.label,
        "metadata": dict(item.example.metadata),
        "finish_reason": item.finish_reason,
        "key": item.key,
    }
    return encode_line(fields)


def decode_input(line: bytes) -> RewardInput:
    """The inverse of `encode_input`."""
    fields: dict[str, Any] = json.loads(line)
    messages = tuple(Message(**message) for message in fields.pop("messages"))
    example = Example(messages, fields.pop("label"), fields.pop("metadata"))
    key = fields.pop("key")
    return RewardInput(example=example, key=tuple(key) if key is not None else None, **fields)


def encode_spec(spec: RewardSpec) -> bytes:
    """One line that names the reward, its options' class and their values."""
    options_class = type(spec.options)
    fields = {
        "target": spec.target,
        "options_class": f"{options_class.__module__}:{options_class.__qualname__}",
        "options": spec.options.model_dump(mode="json"),
    }
    return encode_line(fields)


def encode_line(value: Any) -> bytes:
    """JSON without NaN and without line breaks, and the line's end."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"
