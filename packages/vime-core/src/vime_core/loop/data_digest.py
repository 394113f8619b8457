"""Is the data that of before? A digest of the prompts that a run takes, and of what their rewards are given.

Order and seeds are functions of the configuration, so a checkpoint holds no data, and a dataset that was changed since
would go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from vime_core.errors import RecordError
from vime_core.loop.prompts import Prompt, PromptStream
from vime_core.loop.streams import EvaluationStream


@dataclass(frozen=True)
class RunData:
    """What a run trains on and is evaluated with."""

    prompts: PromptStream
    evaluation: Sequence[EvaluationStream]

    def digest(self, steps: int) -> str:
        """blake3 of the number of usable prompts, of those that the first ``steps`` steps take when none is left out,
        and of the evaluation's. Raises DataError when one cannot be made."""
        hasher = blake3(str(len(self.prompts.usable)).encode())
        for prompt in self._of_steps(steps):
            hasher.update(_text(prompt).encode())
        return hasher.hexdigest()

    def _of_steps(self, steps: int) -> Iterator[Prompt]:
        yield from self.prompts.taken(steps)
        for stream in self.evaluation:
            yield from stream.prompts


def require_same_data(checkpoint: str, recorded: object, data: RunData) -> None:
    """The prompts must be those that the run had when it wrote its checkpoint.

    Args:
        checkpoint: for the message.
        recorded: what `described` said then; None: nothing, as before there was one.
        data: what the run has now.

    Raises:
        RecordError: a prompt, or what its reward is given, is another.
    """
    match recorded:
        case {"steps": int(steps), "digest": str(digest)}:
            if data.digest(steps) == digest:
                return
        case None:
            return
        case _:
            pass
    raise RecordError(
        f"the data is not what the run had when it wrote checkpoint {checkpoint!r}: of the prompts of training or of"
        " evaluation, or of what their rewards are given, something is another",
        remedy="Resume with the data as it was, or start a new run.",
        code="VIME-RECORD-062",
    )


def described(data: RunData, steps: int) -> dict[str, int | str]:
    """For a checkpoint: the digest, and of how many steps' prompts."""
    return {"steps": steps, "digest": data.digest(steps)}


def _text(prompt: Prompt) -> str:
    example = prompt.example
    messages = [[message.role, message.content] for message in example.messages]
    content = [prompt.dataset_index, prompt.tokens, messages, example.label, dict(example.metadata)]
    return json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__)
