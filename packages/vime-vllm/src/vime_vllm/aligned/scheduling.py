"""How much an engine step computes, changed in a running engine core, so that verdicts see prompts come in chunks."""

from __future__ import annotations

from typing import Any


def limit_step_tokens(core: Any, tokens: int) -> int:
    """Schedule at most ``tokens`` a step from now on, prompts in chunks; 0: as the engine was started.

    A method of vLLM's EngineCore in the engines of vime. Returns the limit that the scheduler now has.
    """
    scheduler, config = core.scheduler, core.scheduler.scheduler_config
    if not hasattr(core, "vime_step_tokens"):
        core.vime_step_tokens = (scheduler.max_num_scheduled_tokens, bool(config.enable_chunked_prefill))
    started, chunks = core.vime_step_tokens
    scheduler.max_num_scheduled_tokens = tokens or started
    config.enable_chunked_prefill = chunks or tokens > 0
    return int(scheduler.max_num_scheduled_tokens)
