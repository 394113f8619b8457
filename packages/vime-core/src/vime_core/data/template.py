"""From an example to prompt tokens, by a tokenizer's chat template."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from vime_core.data.optional import require
from vime_core.data.types import Dataset, Example, Message
from vime_core.errors import DataError


class Tokenizer(Protocol):
    """What vime uses of a tokenizer; transformers' tokenizers fit."""

    @property
    def chat_template(self) -> Any:
        """The template, or None when messages are to be concatenated."""
        ...

    def apply_chat_template(self, conversation: Any, /, **arguments: Any) -> Any:
        """The conversation as text, with ``tokenize=False``."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text and as the tokens that the engine receives."""

    text: str
    token_ids: tuple[int, ...]


class PromptTooLong(DataError):
    """A prompt leaves no room for the response."""

    default_code = "VIME-DATA-008"


@dataclass(frozen=True)
class PromptRenderer:
    """Renders examples with one tokenizer.

    Args:
        tokenizer: the model's.
        max_tokens: longest prompt: context length minus longest response.
        system_prompt: put first; empty: none.
        reserved_by: the key that says how long a response may be, for errors.
        template_arguments: handed to the chat template (``{"enable_thinking": False}``).
    """

    tokenizer: Tokenizer
    max_tokens: int
    system_prompt: str = ""
    reserved_by: str = "sampling.max_tokens"
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    def render(self, example: Example, index: int) -> RenderedPrompt:
        """Text and tokens of the example at dataset index ``index``.

        With a chat template the generation prompt is added and special tokens are the template's; without one,
        contents are joined by newlines and special tokens are the tokenizer's.

        Raises:
            PromptTooLong: more than ``max_tokens`` tokens.
            DataError: the template refuses the messages, the prompt has no tokens, or there are two system prompts.
        """
        messages = self._with_system_prompt(example.messages, index)
        if self.tokenizer.chat_template is None:
            text = "\n".join(message.content for message in messages)
        else:
            text = self._apply_template(messages, index)
        ids = self.tokenizer.encode(text, add_special_tokens=self.tokenizer.chat_template is None)
        self._check_length(len(ids), index)
        return RenderedPrompt(text, tuple(ids))

    def _with_system_prompt(self, messages: tuple[Message, ...], index: int) -> tuple[Message, ...]:
        if not self.system_prompt:
            return messages
        if any(message.role == "system" for message in messages):
            raise DataError(
                f"data.system_prompt is set, but example {index} brings a system message of its own",
                remedy="Remove data.system_prompt, or the system messages from the dataset.",
                code="VIME-DATA-011",
            )
        return (Message("system", self.system_prompt), *messages)

    def _apply_template(self, messages: tuple[Message, ...], index: int) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **self.template_arguments
            )
        except Exception as error:  # a template raises what it likes
            raise DataError(
                f"the chat template refuses example {index}: {type(error).__name__}: {error}",
                remedy="Check roles and system prompt against what the model's template accepts.",
                code="VIME-DATA-012",
            ) from error
        return text

    def _check_length(self, length: int, index: int) -> None:
        if length == 0:
            raise DataError(
                f"the prompt of example {index} has no tokens",
                remedy="Remove empty examples, or set data.system_prompt.",
                code="VIME-DATA-013",
            )
        if length > self.max_tokens:
            raise PromptTooLong(
                f"the prompt of example {index} has {length} tokens, more than the {self.max_tokens} that"
                f" rollout.context_length leaves beside {self.reserved_by}",
                remedy=f"Raise rollout.context_length, lower {self.reserved_by}, or set data.overlong = 'drop'.",
            )


@dataclass(frozen=True)
class UsableExamples:
    """Dataset indices whose prompts fit, and those dropped because they do not; both ascend."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


def usable_examples(dataset: Dataset, renderer: PromptRenderer) -> UsableExamples:
    """Render everything once and drop prompts that are too long: ``data.overlong = "drop"``.

    Raises:
        DataError: nothing is left, or an example is unusable for another reason than its length.
    """
    kept: list[int] = []
    dropped: list[int] = []
    for index in range(len(dataset)):
        try:
            renderer.render(dataset[index], index)
        except PromptTooLong:
            dropped.append(index)
        else:
            kept.append(index)
    if not kept:
        raise DataError(
            f"all {len(dropped)} prompts are longer than {renderer.max_tokens} tokens, so dropping them leaves none",
            remedy="Raise rollout.context_length or lower sampling.max_tokens.",
            code="VIME-DATA-009",
        )
    return UsableExamples(tuple(kept), tuple(dropped))


def load_tokenizer(model_directory: Path) -> Tokenizer:
    """The tokenizer of a HF model directory; code from the directory is never run.

    Raises:
        DataError: the directory holds no tokenizer that transformers can load.
        PluginError: transformers is not installed.
    """
    transformers = require("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(model_directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises anything between OSError and KeyError here
        raise DataError(
            f"no tokenizer can be loaded from {str(model_directory)!r}: {error}",
            remedy="Give a HF model directory that holds tokenizer.json or its kin.",
            code="VIME-DATA-014",
        ) from error
    tokenizer.model_max_length = sys.maxsize  # PromptRenderer checks lengths; transformers would warn of them besides
    return tokenizer
