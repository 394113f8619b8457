"""``vime diff``: two records, walked to the first result that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, cast

from vime_core.determinism.environment import PER_RUN
from vime_core.errors import RecordError
from vime_core.record.contract_name import contract_name
from vime_core.record.reader import RunRecord
from vime_core.verify.difference import Difference, Found, Place, Size
from vime_core.verify.recorded_taps import recorded_taps
from vime_core.verify.stages import StepPair, first_unequal, unequal_tensors

PLACEMENT: Final = tuple(
    f"run.ray.{key}"
    for key in (
        *("address", "placement", "wait_s"),
        *("cpus_per_rank", "cpus_per_engine", "gpus_per_rank", "gpus_per_engine"),
    )
)
NO_INPUTS: Final = frozenset({"run.name", "run.output", "run.sinks", "run.cache", "run.taps", *PLACEMENT})
"""Configuration keys that name a run and decide nothing about it."""


class NothingCompared(RecordError):
    """Two records share no step."""

    default_code = "VIME-RECORD-010"
    exit_code: ClassVar[int] = 3


def diff_records(a: RunRecord, b: RunRecord) -> Difference | None:
    """The first unequal result in the order in which a run computes them; None when all are equal.

    Raises:
        NothingCompared: no difference was found because the records hold no step.
        RecordError: a record is damaged.
    """
    config = config_differences(a, b)
    found = _first_unequal(a, b)
    if found is None and not config:
        if not a.steps:
            raise NothingCompared(
                f"{str(a.directory)!r} and {str(b.directory)!r} hold no finished step: nothing could be compared",
                remedy="Compare records of runs that finished at least one step.",
            )
        return None
    inputs, context = _inputs_equal(a, b, config, found), context_differences(a, b)
    return Difference(found, inputs, config, context, unfinished(a, b), recorded_taps(a, b, found) if found else None)


def one_run(a: RunRecord, b: RunRecord) -> str:
    """That both records are of one run, whose equality says nothing; empty when they are of two."""
    if not a.manifest.run_id or a.manifest.run_id != b.manifest.run_id:
        return ""
    return f"both records are of one run ({a.manifest.run_id}), and a run equals itself"


def unfinished(a: RunRecord, b: RunRecord) -> str:
    """Which of two records is not complete, and how far it goes; empty when both are complete."""
    return " and ".join(
        f"the {which} record is {record.manifest.status}{_error(record)} with {len(record.steps)} of"
        f" {record.manifest.config.get('run', {}).get('steps', 'unknown')} steps"
        for which, record in (("first", a), ("second", b))
        if record.manifest.status != "complete"
    )


def _error(record: RunRecord) -> str:
    return f" ({record.manifest.error})" if record.manifest.error else ""


def config_differences(a: RunRecord, b: RunRecord) -> tuple[str, ...]:
    """Inputs of the runs with two values: configuration keys (but names and paths of the run), policy, contract."""
    sides = [
        {**_flat(m.config), "policy version": m.policy, "contract": contract_name(m.contract)}
        for m in (a.manifest, b.manifest)
    ]
    return tuple(line for key, line in _differences(*sides) if key not in NO_INPUTS)


def context_differences(a: RunRecord, b: RunRecord) -> tuple[str, ...]:
    """Versions, platform, plugins and processes with two values: no inputs, but often the cause."""
    return tuple(line for _, line in _differences(_context(a), _context(b)))


def _first_unequal(a: RunRecord, b: RunRecord) -> Found | None:
    if found := _initial_weights(a, b):
        return found
    for entry_a, entry_b in zip(a.steps, b.steps, strict=False):
        if entry_a.step != entry_b.step:
            what = f"the records go on with steps {entry_a.step} and {entry_b.step}, equal before"
            return Found(Place("steps", min(entry_a.step, entry_b.step)), what, Size(1, 1, "steps"), "ended early")
        if found := first_unequal(StepPair(a, b, entry_a, entry_b)):
            return found
    return _ends(a, b)


def _initial_weights(a: RunRecord, b: RunRecord) -> Found | None:
    x, y = a.manifest, b.manifest
    if not (x.initial_weights and y.initial_weights):
        return None
    place = Place("initial weights")
    return unequal_tensors(place, "initial weights", x.initial_weights, y.initial_weights, x.model_root, y.model_root)


def _ends(a: RunRecord, b: RunRecord) -> Found | None:
    counts = [len(a.steps), len(b.steps)]
    if counts[0] == counts[1]:
        return None
    longer = a if counts[0] > counts[1] else b
    states = " and ".join(f"{r.manifest.status!r}" for r in (a, b))
    what = f"the records hold {counts[0]} and {counts[1]} steps, with status {states}, equal as far as both go"
    size = Size(abs(counts[0] - counts[1]), max(counts), "steps")
    return Found(Place("steps", longer.steps[min(counts)].step), what, size, "ended early")


def _inputs_equal(a: RunRecord, b: RunRecord, config: tuple[str, ...], found: Found | None) -> bool | None:
    if config:
        return False
    known = a.manifest.initial_weights and b.manifest.initial_weights
    return True if known or (found is not None and found.place.stage == "initial weights") else None


def _context(record: RunRecord) -> dict[str, Any]:
    manifest = record.manifest
    flat: dict[str, Any] = {"vime": manifest.vime_version, **_flat(manifest.platform, "platform.")}
    flat |= {f"plugin {entry.name}": f"{entry.distribution} {entry.version}".strip() for entry in manifest.plugins}
    flat |= {f"plugin {entry.name}, sources": entry.sources[:16] for entry in manifest.plugins if entry.sources}
    for process in manifest.processes:
        values = process.model_dump(exclude={"role", "rank", "pid"})
        values["environment"] = {k: v for k, v in process.environment.items() if k not in PER_RUN}
        flat |= _flat(values, f"{process.role} {process.rank}: ")
    return flat


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in sorted({*a, *b}):
        one, two = (repr(side[key]) if key in side else "unset" for side in (a, b))
        if one != two:
            yield key, f"{key}: {one} against {two}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
