"""Keys and values of other frameworks: those that have another name here, and those of what vime does not do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from vime_core.config.layers import Table
from vime_core.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "algorithm.advantage_estimator": "algorithm.advantage",
    "algorithm.entropy_coef": "algorithm.ppo-clip.entropy_coefficient",
    "algorithm.eps_clip": "algorithm.ppo-clip.clip_low",
    "algorithm.eps_clip_high": "algorithm.ppo-clip.clip_high",
    "algorithm.kl_loss_coef": "algorithm.ppo-clip.kl_coefficient",
    "rollout.max_model_len": "rollout.context_length",
    "rollout.n_samples_per_prompt": "sampling.samples_per_prompt",
    "rollout.rollout_batch_size": "sampling.prompts_per_step",
    "rollout.temperature": "sampling.temperature",
    "run.num_rollout": "run.steps",
    "run.save_interval": "run.checkpoint_every",
    "sampling.max_new_tokens": "sampling.max_tokens",
    "sampling.n": "sampling.samples_per_prompt",
    "trainer.learning_rate": "trainer.lr",
    "trainer.max_tokens_per_gpu": "trainer.token_budget",
}
"""Names that other frameworks use for our keys: an error that says ours."""

UNSUPPORTED: Mapping[str, str] = {
    "algorithm.critic": "PPO with a critic",
    "algorithm.gae": "PPO with a critic",
    "trainer.critic": "PPO with a critic",
    "rollout.multi_turn": "a rollout of several turns",
    "rollout.max_turns": "a rollout of several turns",
    "sampling.max_turns": "a rollout of several turns",
    "data.image_key": "a multimodal rollout",
    "data.multimodal_keys": "a multimodal rollout",
}
"""What people ask for that is not there: an error that says so."""

UNSUPPORTED_CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "algorithm.advantage": (("gae", "ppo"), "PPO with a critic"),
}
"""The same of values that a key may have elsewhere."""


def refuse_renamed(raw: Table) -> None:
    """Raise ConfigError for a key that other frameworks have, with our name for it."""
    for path in _paths(raw):
        if path in RENAMED:
            raise ConfigError(
                f"{path} is called {RENAMED[path]} here",
                remedy=f"Rename the key to {RENAMED[path]}.",
                code="VIME-CONFIG-005",
            )


def refuse_unsupported(raw: Table) -> None:
    """Raise ConfigError for a key or value that asks for what vime does not do."""
    for path in _paths(raw):
        if path in UNSUPPORTED:
            raise _unsupported(path, UNSUPPORTED[path])
    for path, (values, what) in UNSUPPORTED_CHOICES.items():
        section, _, key = path.partition(".")
        value = cast(Table, raw.get(section, {})).get(key)
        if value in values:
            raise _unsupported(f"{path} = {value!r}", what)


def _unsupported(asked: str, what: str) -> ConfigError:
    return ConfigError(
        f"{asked} asks for {what}, which vime does not do",
        remedy="Leave it out; docs/algorithms.md lists what there is.",
        code="VIME-CONFIG-019",
    )


def _paths(table: Table, prefix: str = "") -> Iterable[str]:
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(cast(Table, value), f"{prefix}{key}.")
