from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import reasoning_gym
from pydantic import ValidationError

from vime_core.data import Message
from vime_core.data.reasoning import HASH_DEPENDENT, ReasoningGymOptions, open_reasoning_gym, regenerate
from vime_core.errors import DataError, PluginError

OPTIONS = ReasoningGymOptions(task="chain_sum", seed=5, size=20, task_options={"max_terms": 3})


def test_examples_are_the_library_s() -> None:
    dataset = open_reasoning_gym(OPTIONS)
    library = reasoning_gym.create_dataset("chain_sum", seed=5, size=20, max_terms=3)
    assert len(dataset) == len(library) == 20
    for index in (3, 0, 19, 3):
        assert dataset[index].messages == (Message("user", library[index]["question"]),)
        assert dataset[index].label == library[index]["answer"]


def test_another_seed_gives_other_examples() -> None:
    other = open_reasoning_gym(OPTIONS.model_copy(update={"seed": 6}))
    assert other[0] != open_reasoning_gym(OPTIONS)[0]


def test_metadata_is_json_and_makes_the_example_again() -> None:
    example = open_reasoning_gym(OPTIONS)[7]
    returned = replace(example, metadata=json.loads(json.dumps(example.metadata)))
    dataset, entry = regenerate(returned)
    assert (entry["question"], entry["answer"]) == (example.messages[0].content, example.label)
    assert dataset.options == OPTIONS


@pytest.mark.parametrize("field", ["question", "label"])
def test_an_example_that_comes_out_different_is_refused(field: str) -> None:
    example = open_reasoning_gym(OPTIONS)[7]
    other = replace(example, label="no") if field == "label" else replace(example, messages=(Message("user", "no"),))
    with pytest.raises(DataError, match="makes another example 7"):
        regenerate(other)


def test_an_example_of_another_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="only examples of the dataset source"):
        regenerate(replace(open_reasoning_gym(OPTIONS)[0], metadata={}))


def test_a_task_that_draws_from_the_global_generator_repeats_and_leaves_it_alone() -> None:
    dataset = open_reasoning_gym(ReasoningGymOptions(task="list_functions", seed=1, size=30))
    random.seed(1)
    state = random.getstate()
    first = [dataset[i] for i in range(30)]
    assert random.getstate() == state
    random.seed(2)
    assert [dataset[i] for i in range(30)] == first


def test_the_library_alone_would_not_repeat() -> None:
    library = reasoning_gym.create_dataset("list_functions", seed=1, size=30)
    random.seed(1)
    first = [library[i]["question"] for i in range(30)]
    random.seed(2)
    assert [library[i]["question"] for i in range(30)] != first


def test_a_task_without_an_answer_has_an_empty_label() -> None:
    assert open_reasoning_gym(ReasoningGymOptions(task="rush_hour", size=2))[0].label == ""


OPEN_ALL = """
from vime_core.data.reasoning import *
for task in sorted(HASH_DEPENDENT):
    try:
        print(open_reasoning_gym(ReasoningGymOptions(task=task, size=2, seed=7))[1])
    except DataError as error:
        print(error.code)
"""


def opened_in_a_process(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", OPEN_ALL], env=environment, capture_output=True, check=True)
    return done.stdout.decode()


def test_tasks_that_depend_on_the_hash_seed_need_it_to_be_zero() -> None:
    assert opened_in_a_process("1").split() == ["VIME-DATA-015"] * len(HASH_DEPENDENT)
    first = opened_in_a_process("0")
    assert first == opened_in_a_process("0")
    assert first.count("Example(") == len(HASH_DEPENDENT)


def test_an_unknown_task_gets_the_nearest_name() -> None:
    with pytest.raises(DataError, match="no task 'chain_sums'") as caught:
        open_reasoning_gym(ReasoningGymOptions(task="chain_sums"))
    assert "Did you mean 'chain_sum'?" in caught.value.remedy


@pytest.mark.parametrize("options", [{"max_term": 3}, {"min_terms": 5, "max_terms": 2}, {"max_terms": "many"}])
def test_task_options_that_the_task_refuses(options: dict[str, int | str]) -> None:
    with pytest.raises(DataError, match="refuses its task_options") as caught:
        open_reasoning_gym(OPTIONS.model_copy(update={"task_options": options}))
    assert "max_terms" in caught.value.remedy


def test_seed_and_size_stand_outside_the_task_options() -> None:
    with pytest.raises(ValidationError, match="beside task_options"):
        ReasoningGymOptions(task="chain_sum", task_options={"seed": 3})


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValidationError):
        ReasoningGymOptions(task="chain_sum", size=0)


@pytest.mark.parametrize("index", [-1, 20])
def test_an_index_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        open_reasoning_gym(OPTIONS)[index]


def test_without_reasoning_gym_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(PluginError) as caught:
        open_reasoning_gym(OPTIONS)
    assert "pip install 'vime-core[data]'" in caught.value.remedy


def test_every_task_of_the_library_opens_repeats_and_scores_its_own_answer() -> None:
    from reasoning_gym.factory import DATASETS

    tasks = sorted(set(DATASETS) - HASH_DEPENDENT - {"composite"})
    assert len(tasks) > 90
    for task in tasks:
        example = open_reasoning_gym(ReasoningGymOptions(task=task, size=2, seed=3))[1]
        dataset, entry = regenerate(example)
        assert example.messages[0].content
        assert not example.label or dataset.task.score_answer(example.label, entry) > 0.99, task


def test_a_task_made_of_tasks_is_refused_clearly() -> None:
    with pytest.raises(DataError, match="composite"):
        open_reasoning_gym(ReasoningGymOptions(task="composite", task_options={"datasets": [{"name": "chain_sum"}]}))
