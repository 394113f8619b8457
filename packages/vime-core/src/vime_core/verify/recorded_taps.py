"""Taps that two records hold of the sample where they first differ: the first operation whose result is not equal."""

from __future__ import annotations

from dataclasses import replace

from vime_core.record.reader import RunRecord
from vime_core.record.taps import Side, TapRows, read_taps, taps_name
from vime_core.types import Sample, SampleKey
from vime_core.verify.difference import Found, TapsFound
from vime_core.verify.layers import compare_taps

ENGINE_STAGES = frozenset({"tokens", "rollout log-probs"})
SIDES = ("first run", "second run")


def recorded_taps(a: RunRecord, b: RunRecord, found: Found) -> TapsFound | None:
    """What the taps of the place say, or None when the two records hold none of it.

    The engine's taps where the engine's answer differs, else the trainer's forward. Only positions whose tokens are
    equal on both sides are compared.

    Raises:
        RecordError: a file of taps is damaged.
    """
    step = found.place.step
    side: Side = "engine" if found.place.stage in ENGINE_STAGES else "trainer"
    key = found.place.sample or (_first_tapped(a, step, side) if step is not None else None)
    if step is None or key is None:
        return None
    paths = [record.taps_folder(step) / taps_name(key, side) for record in (a, b)]
    if not all(path.exists() for path in paths):
        return None
    one, two = (_sample(record, step, key) for record in (a, b))
    shared = _shared(one.tokens, two.tokens)
    taps = [{name: _up_to(rows, shared) for name, rows in read_taps(path).items()} for path in paths]
    prompt = min(len(one.prompt_tokens), shared)
    compared = compare_taps(taps[0], taps[1], prompt, min(shared + 1, len(one.tokens), len(two.tokens)))
    first = compared.first and replace(compared.first, sides=SIDES)
    return TapsFound(side, key, len(compared.taps), first, compared.faults)


def _first_tapped(record: RunRecord, step: int, side: Side) -> SampleKey | None:
    for path in sorted(record.taps_folder(step).glob(f"*-{side}.parquet")):
        _, prompt, _, sample, _ = path.stem.split("-")
        return int(prompt), int(sample)
    return None


def _sample(record: RunRecord, step: int, key: SampleKey) -> Sample:
    return next(sample for sample in record.samples(step) if sample.key == key)


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many first tokens are equal."""
    length = min(len(a), len(b))
    return next((place for place in range(length) if a[place] != b[place]), length)


def _up_to(rows: TapRows, positions: int) -> TapRows:
    kept = rows.positions < positions
    return TapRows(rows.positions[kept], rows.rows[kept], rows.dtype)
