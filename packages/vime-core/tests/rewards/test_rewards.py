from __future__ import annotations

import sys

import pytest
import reasoning_gym

from vime_core.data import Dataset, Example, Message
from vime_core.data.reasoning import ReasoningGymOptions, open_reasoning_gym
from vime_core.errors import DataError, PluginError
from vime_core.rewards import RewardInput
from vime_core.rewards.exact import ExactOptions, make_exact
from vime_core.rewards.length import LengthOptions, make_length
from vime_core.rewards.reasoning import ReasoningGymRewardOptions, make_reasoning_gym
from vime_core.rewards.symbolic import MathVerifyOptions, make_math_verify


def response(text: str, label: str = "42") -> RewardInput:
    return RewardInput("question", text, Example((Message("user", "question"),), label))


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("It is 42.", "42", 1.0),
        ("It is 42.0", "42", 1.0),
        ("It is 1,042", "1042", 1.0),
        ("It is 1042", "1,042", 1.0),
        ("It is 42, or 43", "42", 0.0),
        ("It is -42", "42", 0.0),
        ("It is 0.1", "0.1", 1.0),
        ("0.1000000000000000055", "0.1", 0.0),
        ("forty-two", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_exact_number(text: str, label: str, reward: float) -> None:
    assert make_exact(ExactOptions())(response(text, label)) == reward


def test_exact_string_and_tag() -> None:
    score = make_exact(ExactOptions(match="string", answer="tag"))
    assert score(response("Thinking... <answer>New  York</answer>", "new york")) == 1.0
    assert score(response("new york", "new york")) == 0.0
    assert make_exact(ExactOptions(match="string"))(response(" Yes. ", "yes")) == 1.0
    assert make_exact(ExactOptions(answer="tag"))(response("<answer>41</answer> 42")) == 0.0


def test_a_label_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(DataError, match="'Paris' has no number"):
        make_exact(ExactOptions())(response("42", "Paris"))


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("So \\boxed{42}.", "42", 1.0),
        ("The answer is 42 apples.", "42", 1.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{1/3}", "\\frac{1}{3}", 1.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("It is 1000", "1,000", 1.0),
        ("\\boxed{42}", "\\boxed{42}", 1.0),
        ("\\boxed{41} is 42", "42", 0.0),
        ("\\boxed{x+2}", "1+x", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_math_verify(text: str, label: str, reward: float) -> None:
    assert make_math_verify(MathVerifyOptions())(response(text, label)) == reward


def test_a_label_without_mathematics_is_an_error_not_a_zero() -> None:
    with pytest.raises(DataError, match="no mathematical expression"):
        make_math_verify(MathVerifyOptions())(response("42", "\\boxed{}"))


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(PluginError) as caught:
        make_math_verify(MathVerifyOptions())
    assert "pip install 'vime-core[data]'" in caught.value.remedy


@pytest.fixture(scope="module")
def sums() -> Dataset:
    return open_reasoning_gym(ReasoningGymOptions(task="chain_sum", seed=5, size=20))


@pytest.mark.parametrize(
    "form", ["{0}", "the answer is {0}", "<answer>{0}</answer>", "<answer>It is {0}!</answer>", "999", ""]
)
def test_reasoning_gym_is_the_library_s_scorer(form: str, sums: Dataset) -> None:
    library = reasoning_gym.create_dataset("chain_sum", seed=5, size=20)
    extract = reasoning_gym.utils.extract_answer
    for index in (0, 3):
        text = form.format(sums[index].label)
        item = RewardInput("", text, sums[index])
        expected = library.score_answer(extract(text), library[index])
        assert make_reasoning_gym(ReasoningGymRewardOptions())(item) == expected
        expected = library.score_answer(text or None, library[index])
        assert make_reasoning_gym(ReasoningGymRewardOptions(answer="text"))(item) == expected


def test_reasoning_gym_scores_the_last_number(sums: Dataset) -> None:
    score = make_reasoning_gym(ReasoningGymRewardOptions(answer="number"))
    assert score(RewardInput("", f"First 1, then it is {sums[2].label}.", sums[2])) == 1.0
    assert score(RewardInput("", "It is 123456.", sums[2])) < 1.0
    assert score(RewardInput("", "nothing", sums[2])) == 0.0


def test_reasoning_gym_refuses_other_examples() -> None:
    with pytest.raises(DataError, match="only examples of the dataset source"):
        make_reasoning_gym(ReasoningGymRewardOptions())(response("42"))


@pytest.mark.parametrize(("length", "reward"), [(20, 1.0), (10, 0.5), (30, 0.5), (0, 0.0), (40, 0.0), (90, 0.0)])
def test_length(length: int, reward: float) -> None:
    assert make_length(LengthOptions(target=20))(response("x" * length)) == reward
