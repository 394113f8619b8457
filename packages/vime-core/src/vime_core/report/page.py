"""The page: what the run was, what its record says of itself, curves, time, environment."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from vime_core.errors import RecordError
from vime_core.record.check import RecordCheck
from vime_core.record.contract_name import contract_name
from vime_core.record.files import write_whole
from vime_core.record.reader import RunRecord
from vime_core.report.chart import Points, chart
from vime_core.report.verdicts import ShownVerdict

MISMATCH: Final = "train_rollout_logprob_abs_diff"
CURVES: Final[Mapping[str, tuple[str, ...]]] = {
    "Reward": ("reward/mean", "reward/min", "reward/max"),
    "|train - rollout log-prob|": (f"{MISMATCH}/max", MISMATCH),
    "Share of tokens whose log-prob differs": (f"{MISMATCH}/unequal",),
    "Entropy (nats a token)": ("rollout/entropy", "train/entropy"),
    "Loss": ("train/loss",),
    "Gradient norm": ("train/grad_norm",),
    "KL to the reference": ("train/reference_kl",),
    "Response length (tokens)": ("rollout/response_length",),
    "Share of responses cut off": ("rollout/truncated",),
    "Learning rate": ("train/learning_rate",),
}
"""Figures and their metrics; one that a run has none of is left out."""

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --soft: #5b6675; --line: #d5dae1; --good: #176f3d;
  --bad: #b3261e; --c0: #1f5fbf; --c1: #b45309; --c2: #6d28d9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --paper: #14181f; --soft: #a3adba; --line: #333c48;
  --good: #6fcf97; --bad: #ff8a80; --c0: #7db2ff; --c1: #f2b263; --c2: #c4a5ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
h1, p, figcaption, summary { overflow-wrap: anywhere; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; min-width: 0; padding: 12px; border: 1px solid var(--line); border-radius: 8px; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; } .frame { fill: none; stroke: var(--line); }
polyline { fill: none; stroke-width: 1.8; } polyline.s0 { stroke: var(--c0); } polyline.s1 { stroke: var(--c1); }
polyline.s2 { stroke: var(--c2); } circle.s0 { fill: var(--c0); } circle.s1 { fill: var(--c1); }
circle.s2 { fill: var(--c2); }
.legend { display: flex; flex-wrap: wrap; gap: 0 1em; font-size: 0.85rem; margin: 4px 0 0; }
.legend span { min-width: 0; overflow-wrap: anywhere; }
span.s0 { color: var(--c0); } span.s1 { color: var(--c1); } span.s2 { color: var(--c2); }
.good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } td { overflow-wrap: anywhere; }
.facts { table-layout: fixed; } .facts th { width: 32%; overflow-wrap: break-word; }
td.number { text-align: right; white-space: nowrap; } td.share { width: 60%; min-width: 60px; vertical-align: middle; }
.bar { height: 14px; background: var(--c0); border-radius: 3px; min-width: 1px; }
details { margin: 8px 0; } pre { overflow-x: auto; font-size: 0.85rem; }
"""


def write_report(record: RunRecord, output: Path, verdicts: Sequence[ShownVerdict] = ()) -> Path:
    """Write the page, with verdicts on the run that the record itself does not hold.

    Raises:
        RecordError: ``output`` exists or cannot be written, the record holds no step, or it is damaged beyond reading.
    """
    if output.exists():
        raise RecordError(
            f"{str(output)!r} exists already",
            remedy="Name another file with --output, or remove it.",
            code="VIME-RECORD-056",
        )
    text = page(record, verdicts).encode()
    try:
        write_whole(output, text)
    except RecordError as error:
        raise RecordError(
            error.message,
            remedy="Name another file with --output, in a directory that exists, may be written and has space.",
            code=error.code,
        ) from error
    return output


def page(record: RunRecord, verdicts: Sequence[ShownVerdict] = ()) -> str:
    """The record as one HTML document without a reference to anything outside it."""
    if not record.steps:
        raise RecordError(
            f"{str(record.directory)!r} holds no finished step: there is nothing to show",
            remedy="Report a run that finished at least one step.",
            code="VIME-RECORD-057",
        )
    manifest = record.manifest
    name = str(manifest.config.get("run", {}).get("name", record.directory.name))
    parts = [
        f"<h1>{escape(name)}</h1>",
        _summary(record, record.check()),
        f"<h2>Verdicts</h2>{_verdicts(verdicts)}",
        f'<h2>Curves</h2><div class="grid">{"".join(_curves(record))}</div>',
        f"<h2>Time by phase</h2>{_times(record)}",
        f"<h2>Environment</h2>{_environment(record)}",
        f"<h2>Configuration</h2><details><summary>resolved</summary><pre>{_json(manifest.config)}</pre></details>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _summary(record: RunRecord, check: RecordCheck) -> str:
    manifest = record.manifest
    sound = "agrees with itself" if check.holds else f"contradicts itself: {'; '.join(check.findings[:3])}"
    largest = _largest([value for _, value in _series(record, f"{MISMATCH}/max")])
    rows = {
        "status": (manifest.status + (f": {manifest.error}" if manifest.error else ""), manifest.status == "complete"),
        "record": (sound, bool(check.holds)),
        "steps": (f"{len(record.steps)}, {check.samples} samples", None),
        "policy": (manifest.policy, None),
        "contract": (contract_name(manifest.contract), None),
        "largest |train - rollout log-prob|": (
            "not recorded" if largest is None else f"{largest:.3g}".replace("nan", "NaN"),
            _no_distance(largest, promised=bool(manifest.contract)),
        ),
        "resumed": (", ".join(f"at step {entry.step}" for entry in manifest.resumed) or "never", None),
        "final weights": (record.steps[-1].weights_root, None),
        "seal of the record": (_seal(record), None),
    }
    return _facts((name, text, good) for name, (text, good) in rows.items())


def _seal(record: RunRecord) -> str:
    try:
        return record.seal or "none"
    except RecordError:  # the record's check says why
        return "not readable"


def _largest(values: Sequence[float]) -> float | None:
    """The largest value, or NaN where one is NaN, which no comparison finds; None: there is none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


def _no_distance(largest: float | None, *, promised: bool) -> bool | None:
    """Whether a distance is as it should be: 0 where that is promised, and finite everywhere."""
    if largest is None or (math.isfinite(largest) and not promised):
        return None
    return largest == 0.0


_MARKS: Final = {True: ' class="good"', False: ' class="bad"', None: ""}


def _facts(rows: Iterable[tuple[str, str, bool | None]]) -> str:
    """A table of names and values; a value that is good or bad has that colour."""
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td{_MARKS[good]}>{escape(text)}</td></tr>" for name, text, good in rows
    )
    return f'<table class="facts">{cells}</table>'


def _verdicts(verdicts: Sequence[ShownVerdict]) -> str:
    if not verdicts:
        return "<p>None was given: see vime report --against and --verdicts.</p>"
    return _facts((f"{one.name} ({one.source})", one.sentence, bool(one.holds)) for one in verdicts)


def _series(record: RunRecord, metric: str) -> Points:
    return [(e.step, float.fromhex(e.metrics[metric])) for e in record.steps if metric in e.metrics]


def _curves(record: RunRecord) -> Iterator[str]:
    reward, *others = CURVES.items()
    for title, metrics in (reward, *_evaluations(record).items(), *others):
        series = {metric: points for metric in metrics if (points := _series(record, metric))}
        if series:
            yield chart(title, series)


def _evaluations(record: RunRecord) -> dict[str, tuple[str, ...]]:
    """The mean reward of each evaluation set that the run has."""
    names = dict.fromkeys(name for entry in record.steps for name in entry.metrics)
    found = [re.fullmatch(r"evaluation/(?:(.+)/)?reward", name) for name in names]
    return {f"Evaluation reward{f': {one[1]}' if one[1] else ''}": (one[0],) for one in found if one}


def _times(record: RunRecord) -> str:
    totals: dict[str, float] = {}
    for entry in record.steps:
        for phase, seconds in entry.timings.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    whole = sum(totals.values()) or 1.0
    rows = "".join(
        f'<tr><th>{escape(phase)}</th><td class="number">{_seconds(seconds)}</td>'
        f'<td class="number">{seconds / whole:.0%}</td>'
        f'<td class="share"><div class="bar" style="width:{100 * seconds / whole:.1f}%"></div></td></tr>'
        for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])
    )
    return f"<table>{rows}</table>"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _environment(record: RunRecord) -> str:
    manifest = record.manifest
    rows = {"vime": manifest.vime_version, **manifest.platform}
    for one in manifest.processes:
        held = [f"{name} {version}" for name, version in one.versions.items() if version]
        device = [str(one.hardware[key]) for key in ("device", "cpu") if one.hardware.get(key)]
        rows[f"{one.role} {one.rank}"] = ", ".join([*held, *device]) or "nothing reported"
    processes = "".join(
        f"<details><summary>{escape(one.role)} {one.rank}: environment and settings</summary>"
        f"<pre>{_json(one.model_dump())}</pre></details>"
        for one in manifest.processes
    )
    return _facts((name, str(value), None) for name, value in rows.items()) + processes


def _json(value: Any) -> str:
    return escape(json.dumps(value, indent=2, default=str))
