"""What a dataset is made of. Plain and immutable; metadata holds JSON values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args

from pydantic import JsonValue

ChatRole = Literal["system", "user", "assistant", "tool"]
CHAT_ROLES: tuple[str, ...] = get_args(ChatRole)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: ChatRole
    content: str


@dataclass(frozen=True)
class Example:
    """A conversation to continue, the answer that a reward compares with, and what else the reward needs.

    ``label`` is empty where a task has no single right answer.
    """

    messages: tuple[Message, ...]
    label: str
    metadata: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])


class Dataset(Protocol):
    """Examples by index: the same index gives the same example, whatever was asked before."""

    def __len__(self) -> int:
        """Number of examples, at least 1."""
        ...

    def __getitem__(self, index: int, /) -> Example:
        """The example at ``index`` in [0, len). Raises DataError when it cannot be made."""
        ...


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Messages from their JSON form; a string is one user message.

    Raises:
        ValueError: what is wrong, in words for a user.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("the prompt is empty")
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a string or a list of messages, found {_short(value)}")
    messages = tuple(_parse_message(number, item) for number, item in enumerate(cast(list[Any], value)))
    if messages[-1].role == "assistant":
        raise ValueError("the last message is the assistant's, so there is nothing left to generate")
    return messages


def _parse_message(number: int, item: Any) -> Message:
    message = cast(dict[str, Any], item) if isinstance(item, dict) else {}
    role, content = message.get("role"), message.get("content")
    if role not in CHAT_ROLES:
        raise ValueError(f"a message needs a role out of {', '.join(CHAT_ROLES)}; found {_short(item)}")
    if not isinstance(content, str):
        raise ValueError(f"a message needs a string as content, for rollouts are of text only; found {_short(item)}")
    if not content.strip():
        raise ValueError(f"the content of message {number} is empty; found {_short(item)}")
    return Message(cast(ChatRole, role), content)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
