"""A run goes on with the data that it had, and a changed example is found whatever of it was changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vime_core.data import Example, Message
from vime_core.errors import RecordError
from vime_core.loop.data_digest import RunData, described, require_same_data
from vime_core.loop.prompts import PromptStream
from vime_core.loop.streams import EvaluationStream


class Renderer:
    """Tokens are the characters of the last message."""

    def render(self, example: Example, index: int) -> Any:
        text = example.messages[-1].content
        return SimpleNamespace(token_ids=tuple(map(ord, text)), text=text, index=index)


def run_data(examples: list[Example], evaluation: int = 2) -> RunData:
    renderer: Any = Renderer()
    stream = PromptStream(examples, renderer, range(len(examples)), seed=5, prompts_per_step=2)
    return RunData(stream, (EvaluationStream("", tuple(stream.first(evaluation)), 4, 0.0),))


EXAMPLES = [Example((Message("user", f"{n}?"),), str(n), {"level": n}) for n in range(10)]
CHANGES = {
    "message": {"messages": (Message("user", "another"),)},
    "role": {"messages": (Message("system", "a"), Message("user", "0?"))},
    "label": {"label": "another"},
    "metadata": {"metadata": {"level": 99}},
}


def test_the_same_data_is_taken() -> None:
    recorded = described(run_data(EXAMPLES), 3)
    require_same_data("c", recorded, run_data(list(EXAMPLES)))
    require_same_data("c", None, run_data(EXAMPLES))


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_example_is_found(what: str) -> None:
    """Of the first, which the evaluation takes, and of every one that training takes."""
    recorded = described(run_data(EXAMPLES), 3)
    taken = {prompt.dataset_index for prompt in run_data(EXAMPLES).prompts.taken(3)}
    assert len(taken) == 6
    for place in {0, *taken}:
        changed = [replace(e, **CHANGES[what]) if n == place else e for n, e in enumerate(EXAMPLES)]
        with pytest.raises(RecordError, match="'c': of the prompts of training or of evaluation") as caught:
            require_same_data("c", recorded, run_data(changed))
        assert caught.value.code == "VIME-RECORD-062"


def test_another_number_of_examples_is_found() -> None:
    recorded = described(run_data(EXAMPLES), 3)
    with pytest.raises(RecordError, match="data is not what"):
        require_same_data("c", recorded, run_data([*EXAMPLES, EXAMPLES[0]]))


@pytest.mark.parametrize("recorded", [{}, {"steps": "3", "digest": "x"}, "x", {"digest": "x"}])
def test_what_says_nothing_is_no_agreement(recorded: object) -> None:
    with pytest.raises(RecordError, match="data is not what"):
        require_same_data("c", recorded, run_data(EXAMPLES))
