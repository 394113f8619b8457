"""The configured reward, ready to score a step's responses in sample order."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vime_core.config.schema import RunConfig
from vime_core.errors import DataError, PluginFailed
from vime_core.loop.prompts import Prompt
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import Reward
from vime_core.rewards.pool import RewardFailed, RewardPool, Scores
from vime_core.rewards.types import RewardInput, RewardSpec
from vime_core.types import Completion


@dataclass(frozen=True)
class Scorer:
    """Scores responses in reward workers. ``source`` says for messages which reward it is and whose."""

    pool: RewardPool
    source: str

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], completions: Sequence[Completion]) -> Scores:
        """One finite reward a response, in the given order, whichever finished first.

        Raises:
            PluginFailed: the reward failed for a response.
        """
        inputs = [
            RewardInput(prompt.text, text, prompt.example, completion.finish_reason, completion.key)
            for prompt, text, completion in zip(prompts, texts, completions, strict=True)
        ]
        try:
            return self.pool.score(inputs)
        except RewardFailed as error:
            raise PluginFailed(f"{self.source}: {error.message}", remedy=error.remedy, code=error.code) from error


def try_reward(config: RunConfig, plugins: PluginManager, prompt: Prompt) -> None:
    """Score the label of a prompt as if it were a response, so that a reward that cannot work fails before a run.

    Raises:
        DataError: it cannot be built, raises, takes too long or gives no number.
    """
    item = RewardInput(prompt.text, prompt.example.label, prompt.example, key=(0, 0))
    with open_scorer(config, plugins, workers=1) as scorer:
        try:
            scorer.pool.score([item])
        except DataError as error:
            raise DataError(
                f"reward.name = {config.reward.name!r} was tried on the first prompt, with its label as the response:"
                f" {error.message}",
                remedy=f"{error.remedy} A reward takes one RewardInput and returns a number (docs/plugins.md).",
                code=error.code,
            ) from error


@contextmanager
def open_scorer(config: RunConfig, plugins: PluginManager, workers: int | None = None) -> Generator[Scorer]:
    """Load the reward and keep its workers until the end of the run."""
    section = config.reward
    entry = plugins.find(Reward, section.name, field_name="reward.name")
    options = config.options("reward", section.name)
    pool = RewardPool(
        RewardSpec(entry.target, options),
        timeout_s=section.timeout_s,
        workers=workers or section.workers,
        timeout_reward=section.timeout_reward,
    )
    with pool:
        yield Scorer(pool, f"reward.name = {section.name!r} of {plugins.origin(entry)}")
