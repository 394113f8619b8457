"""Which prompts a step takes, as tokens, and the requests made of them. A function of (seed, step) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vime_core.config.schema import RunConfig
from vime_core.data import Dataset, Example
from vime_core.data.order import indices_from, prompt_indices
from vime_core.data.template import PromptRenderer
from vime_core.errors import ContractViolation
from vime_core.rl.seeds import sample_seed
from vime_core.types import SampleRequest


@dataclass(frozen=True)
class Prompt:
    """One prompt of a step. ``index`` counts prompts over the whole run, ``dataset_index`` within the dataset."""

    index: int
    dataset_index: int
    tokens: tuple[int, ...]
    text: str
    example: Example


@dataclass(frozen=True)
class PromptStream:
    """The prompts of every step. ``usable`` indices may be taken, ``dropped`` many are too long."""

    dataset: Dataset
    renderer: PromptRenderer
    usable: Sequence[int]
    seed: int
    prompts_per_step: int
    dropped: int = 0

    def check(self, steps: int) -> None:
        """Render every prompt that the first ``steps`` steps take, so that a bad one is found before any compute.

        Raises:
            DataError: a prompt is too long or its example unusable.
        """
        for _ in self.taken(steps):
            pass

    def taken(self, steps: int) -> Iterator[Prompt]:
        """The prompts that the first ``steps`` steps take, each once. Raises DataError as `check` does."""
        wanted = steps * self.prompts_per_step
        if wanted >= len(self.usable):
            places = list(range(len(self.usable)))
        else:
            places = [place for _, place in prompt_indices(len(self.usable), self.seed, 0, wanted)]
        for place in places:
            yield self._prompt(0, self.usable[place])

    def step(self, step: int) -> list[Prompt]:
        """The prompts of a step, by prompt index."""
        chosen = prompt_indices(len(self.usable), self.seed, step, self.prompts_per_step)
        return [self._prompt(index, self.usable[place]) for index, place in chosen]

    def take(self, first: int, count: int) -> list[Prompt]:
        """``count`` prompts from prompt index ``first`` on."""
        chosen = indices_from(len(self.usable), self.seed, first, count)
        return [self._prompt(index, self.usable[place]) for index, place in chosen]

    def first(self, count: int) -> list[Prompt]:
        """The dataset's first usable prompts in its own order: an evaluation set."""
        return [self._prompt(number, index) for number, index in enumerate(self.usable[:count])]

    def _prompt(self, index: int, dataset_index: int) -> Prompt:
        example = self.dataset[dataset_index]
        rendered = self.renderer.render(example, dataset_index)
        return Prompt(index, dataset_index, rendered.token_ids, rendered.text, example)


def training_requests(config: RunConfig, step: int, prompts: Sequence[Prompt]) -> list[SampleRequest]:
    """Every sample of a step, by (prompt index, sample index), each with its own seed."""
    sampling = config.sampling
    return [
        SampleRequest(
            prompt_index=prompt.index,
            sample_index=sample,
            prompt_tokens=prompt.tokens,
            seed=sample_seed(config.run.seed, step, prompt.index, sample),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
        )
        for prompt in prompts
        for sample in range(sampling.samples_per_prompt)
    ]


def require_distinct_seeds(requests: Sequence[SampleRequest]) -> None:
    """Two samples of a step must not share a random stream: equal seeds give equal noise, unseen in any metric.

    Raises:
        ContractViolation: naming the two samples.
    """
    first: dict[int, SampleRequest] = {}
    for request in requests:
        other = first.setdefault(request.seed, request)
        if other is not request:
            raise ContractViolation(
                f"samples {other.key} and {request.key} (prompt, sample) have the same seed {request.seed}",
                remedy="Seeds must be a hash of run seed, step, prompt and sample index; check their maker.",
                code="VIME-ALIGN-002",
            )
