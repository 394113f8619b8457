"""The verdict *batch* on a live engine: the same requests alone, in company, in another order, cached, chunked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vime_core.backends import AlignedRollout, Rollout
from vime_core.errors import ContractViolation, NotFinite, PolicyError
from vime_core.loop.sides import Parts, Sides
from vime_core.rl.seeds import sample_seed
from vime_core.types import Completion, ProcessReport, SampleRequest
from vime_core.verify.batch import (
    NAME,
    Answer,
    Breaking,
    Circumstance,
    Collected,
    Trial,
    batch_verdict,
    compare_answers,
)
from vime_core.verify.company import smallest_company
from vime_core.verify.verdict import Verdict

LENGTHS: Final = (1, 2, 3, 15, 16, 17, 31, 33, 48, 63, 65, 100, 127, 129, 200, 255, 257, 511, 1023)
"""Prompt lengths around the sizes of pages and tiles."""
SUBJECT_LENGTHS: Final = (1, 17)
"""Prompt lengths of what is compared, besides one that is a little longer than a page and the longest possible."""
USUAL_PAGE: Final = 64
CHUNKS: Final = (5, 16)
"""Prefill tokens in one engine step: within a page and a whole one."""
MOST_CHUNKS: Final = 64
"""A prompt of more chunks than this is not prefilled in them; it takes another number of larger ones."""
NO_INSIDE: Final = "this engine offers no switch for it; one that keeps an alignment contract does"


@dataclass(frozen=True)
class BatchOptions:
    """How much is tried: ``company`` is the number of other requests beside those that are compared."""

    company: int = 16


def verify_batch(sides: Sides, options: BatchOptions) -> Verdict:
    """Give the engine the same requests under every circumstance.

    Raises:
        BackendError: the engine died, or gave an answer that no comparison can use.
    """
    try:
        return batch_verdict(_Experiment(sides, options).run())
    except (ContractViolation, NotFinite) as error:
        sentence = f"Batch does not hold: {error.message} ({error.code})."
        return Verdict(NAME, False, sentence, unequal=1, first=error.code)


class _Experiment:
    """The requests, what they get alone, and the trials against that."""

    def __init__(self, sides: Sides, options: BatchOptions) -> None:
        self._rollout: Rollout = sides.rollout
        self._reports = sides.reports
        page = int(_setting(sides.reports, "block_size") or USUAL_PAGE)
        self._subjects = subject_requests(sides.parts, page)
        self._others = company_requests(sides.parts, self._subjects, options.company)
        self._alone: dict[SampleRequest, Answer] = {}
        self._trials: list[Trial] = []
        self._not_tried: dict[Circumstance, str] = {}
        self._never: dict[Circumstance, str] = {}

    def run(self) -> Collected:
        self._keep_cache(keep=False)
        for subject in self._subjects:
            self._alone[subject] = self._answers([subject])[0]
            self._try("alone again", [subject])
        everything = [*self._subjects, *self._others]
        self._try("in company", everything)
        if _setting(self._reports, "max_num_seqs") == 1:
            self._never["in company"] = "max_num_seqs = 1, so no engine step has two requests"
        self._try("in another order", everything[::-1])
        breaking = self._breaking(everything)
        self._cached(everything)
        self._chunked()
        self._rescored()
        return Collected(tuple(self._trials), self._not_tried, self._never, breaking)

    def _answers(self, requests: Sequence[SampleRequest]) -> list[Answer]:
        return [_answer(completion) for completion in self._rollout.generate(requests)]

    def _try(self, circumstance: Circumstance, requests: Sequence[SampleRequest]) -> None:
        for request, answer in zip(requests, self._answers(requests), strict=True):
            if request in self._alone:
                self._add(circumstance, request, answer)

    def _add(self, circumstance: Circumstance, request: SampleRequest, answer: Answer) -> None:
        length, alone = len(request.prompt_tokens), self._alone[request]
        self._trials.append(Trial(circumstance, request.key, length, request.temperature, alone, answer))

    def _breaking(self, everything: Sequence[SampleRequest]) -> Breaking | None:
        """The smallest company for the first request that company broke; None when none did or it is broken alone."""
        unstable = {t.key for t in self._trials if t.circumstance == "alone again" and _differs(t.alone, t.answer)}
        broken = [t for t in self._trials if t.circumstance in ("in company", "in another order")]
        first = next((t for t in broken if t.key not in unstable and _differs(t.alone, t.answer)), None)
        if first is None:
            return None
        order = everything if first.circumstance == "in company" else everything[::-1]
        subject = next(request for request in self._subjects if request.key == first.key)

        def breaks(company: Sequence[SampleRequest]) -> bool:
            requests = [r for r in order if r is subject or r in company]
            return _differs(self._alone[subject], self._answers(requests)[requests.index(subject)])

        found = smallest_company([r for r in order if r is not subject], breaks)
        return Breaking(tuple(len(r.prompt_tokens) for r in found.items), found.trials, found.minimal)

    def _keep_cache(self, *, keep: bool) -> None:
        if isinstance(self._rollout, AlignedRollout):
            self._rollout.keep_prefix_cache(keep)

    def _cached(self, everything: Sequence[SampleRequest]) -> None:
        name: Circumstance = "after a prefix-cache hit"
        if _setting(self._reports, "prefix_caching") is False:
            self._never[name] = "prefix_caching = False"
        elif isinstance(self._rollout, AlignedRollout):
            self._keep_cache(keep=True)
            try:
                self._answers(everything)
                self._try_cached(self._rollout, [*self._subjects])
                self._try_cached(self._rollout, everything)
                if not any(trial.circumstance == name for trial in self._trials):
                    self._not_tried[name] = "no request of the verdict found its prefix in the cache"
            finally:
                self._keep_cache(keep=False)
        else:
            self._not_tried[name] = NO_INSIDE

    def _try_cached(self, rollout: AlignedRollout, requests: Sequence[SampleRequest]) -> None:
        """Only a request that really took tokens from the cache counts."""
        name: Circumstance = "after a prefix-cache hit"
        answers = self._answers(requests)
        for request, answer, cached in zip(requests, answers, rollout.cached_tokens(), strict=True):
            if request in self._alone and cached:
                self._add(name, request, answer)

    def _chunked(self) -> None:
        """Greedy requests, since not every platform takes seeded ones in chunks."""
        name: Circumstance = "in chunks"
        if not isinstance(self._rollout, AlignedRollout):
            off = _setting(self._reports, "chunked_prefill") is False
            (self._never if off else self._not_tried)[name] = "chunked_prefill = False" if off else NO_INSIDE
            return
        greedy = [subject for subject in self._subjects if subject.temperature == 0]
        try:
            for tokens, chunked in chunkings(greedy):
                self._rollout.prefill_in_chunks(tokens)
                self._try(name, chunked)
        except PolicyError as error:
            self._never[name] = error.message
        finally:
            self._rollout.prefill_in_chunks(0)

    def _rescored(self) -> None:
        """Decoded log-probs against one prefill of the whole sequence, which knows no temperature but 1."""
        name: Circumstance = "re-scored as prefill"
        if not isinstance(self._rollout, AlignedRollout):
            self._not_tried[name] = NO_INSIDE
            return
        for subject in self._subjects:
            if subject.temperature in (0.0, 1.0) and subject.top_p == 1.0 and subject.top_k == 0:
                tokens = self._alone[subject].tokens
                scored = self._rollout.prompt_log_probs(subject.prompt_tokens + tokens)
                self._add(name, subject, Answer(tokens, scored[len(subject.prompt_tokens) - 1 :]))


def _answer(completion: Completion) -> Answer:
    return Answer(completion.tokens, completion.log_probs)


def _differs(alone: Answer, answer: Answer) -> bool:
    return compare_answers(alone, answer).unequal > 0


def _setting(reports: Sequence[ProcessReport], name: str) -> Any:
    """A setting that an engine's process read back; None when it reports none."""
    return next((r.settings[name] for r in reports if r.role == "rollout" and name in r.settings), None)


def subject_requests(parts: Parts, page: int) -> list[SampleRequest]:
    """Short prompts, one longer than a page and one that fills the context but for its response.

    Each is sampled at the run's temperature, at 1, and greedily.
    """
    temperatures = dict.fromkeys((parts.config.sampling.temperature, 1.0, 0.0))
    lengths = dict.fromkeys(min(length, _longest(parts)) for length in (*SUBJECT_LENGTHS, page + 9, _longest(parts)))
    return [
        _request(parts, number, sample, prompt, temperature)
        for number, prompt in enumerate(_prompts(parts, [*lengths]))
        for sample, temperature in enumerate(temperatures)
    ]


def company_requests(parts: Parts, subjects: Sequence[SampleRequest], count: int) -> list[SampleRequest]:
    """Prompts of mixed lengths; among them the longest subject's own with another seed, and its first half."""
    longest = max((s.prompt_tokens for s in subjects), key=len)
    lengths = [length for length in LENGTHS if length <= _longest(parts)]
    mixed = _prompts(parts, [lengths[i % len(lengths)] for i in range(count)], skip=1)
    prompts = [longest, longest[: max(1, len(longest) // 2)], *mixed][:count]
    temperature = parts.config.sampling.temperature
    return [_request(parts, 1000 + number, 0, prompt, temperature) for number, prompt in enumerate(prompts)]


def chunkings(subjects: Sequence[SampleRequest]) -> Iterator[tuple[int, list[SampleRequest]]]:
    """Tokens of a chunk, and which of the subjects are longer than that and have at most `MOST_CHUNKS` of them."""
    longest = max((len(subject.prompt_tokens) for subject in subjects), default=0)
    for tokens in dict.fromkeys((*CHUNKS, max(CHUNKS[-1], longest // (MOST_CHUNKS // 2)))):
        yield tokens, [s for s in subjects if tokens < len(s.prompt_tokens) <= tokens * MOST_CHUNKS]


def _longest(parts: Parts) -> int:
    """The longest prompt that holds a response and can be scored as a prompt together with it."""
    return parts.config.rollout.context_length - parts.config.sampling.max_tokens - 1


def _prompts(parts: Parts, lengths: Sequence[int], skip: int = 0) -> list[tuple[int, ...]]:
    """Prompts of given lengths, cut from the run's own prompts laid end to end, each from another place."""
    pool = [token for prompt in parts.prompts.step(0) for token in prompt.tokens]
    pool *= 2 + max(lengths, default=0) // len(pool)
    room = len(pool) - max(lengths, default=0)
    return [tuple(pool[start : start + length]) for length, start in zip(lengths, _starts(room, skip), strict=False)]


def _starts(room: int, skip: int) -> Iterator[int]:
    place = skip
    while True:
        yield (place * 7) % room
        place += 1


def _request(parts: Parts, prompt: int, sample: int, tokens: tuple[int, ...], temperature: float) -> SampleRequest:
    sampling = parts.config.sampling
    return SampleRequest(
        prompt_index=prompt,
        sample_index=sample,
        prompt_tokens=tokens,
        seed=sample_seed(parts.config.run.seed, -2, prompt, sample),
        max_tokens=sampling.max_tokens,
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=sampling.stop_token_ids,
    )
