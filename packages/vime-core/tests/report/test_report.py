"""The page as a parser sees it: every curve and value, nothing from outside, and what is wrong in plain sight."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vime_core.errors import RecordError
from vime_core.record.reader import RunRecord
from vime_core.record.schema import Manifest, StepEntry
from vime_core.record.seal import write_seal
from vime_core.report.chart import chart
from vime_core.report.page import STYLE, page, write_report
from vime_core.report.verdicts import read_verdicts

VOID = {"meta"}
METRICS = {"reward/mean": 0.5, "rollout/entropy": 2.0, "train_rollout_logprob_abs_diff/max": 0.0, "train/loss": -0.25}


@dataclass
class Seen(HTMLParser):
    """Tags in balance, their attributes, and the text."""

    open: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Seen:
    seen = Seen()
    seen.feed(html)
    assert seen.open == []
    return seen


def record(directory: Path, steps: int = 3, **manifest: object) -> RunRecord:
    """A record as the reader gives it; its files are not there, so its check finds that."""
    entries = tuple(
        StepEntry(
            step=step,
            weight_version=step,
            prompts="",
            tokens="",
            rollout_log_probs="",
            rewards="",
            advantages="",
            updates=(),
            weights={},
            weights_root="ab" * 32,
            optimizer={},
            optimizer_root="",
            metrics={name: (value + step).hex() for name, value in METRICS.items()},
            timings={"generate": 2.0, "train": 1.0},
        )
        for step in range(steps)
    )
    values = {
        "vime_version": "0",
        "config": {"run": {"name": "a <b> & c"}},
        "policy": "off/v1",
        "platform": {},
        **manifest,
    }
    found = RunRecord(directory, Manifest.model_validate(values))
    found.__dict__["steps"] = entries  # what the reader would have read
    found.__dict__["_step_bytes"] = b""
    return found


def test_every_curve_and_number_is_there(tmp_path: Path) -> None:
    seen = parsed(page(record(tmp_path)))
    for text in ("Reward", "Entropy (nats a token)", "Loss", "6.0 s", "67%", "off/v1", "a <b> & c", "ab" * 32):
        assert text in seen.text
    lines = [value for tag, name, value in seen.attributes if (tag, name) == ("polyline", "points")]
    assert len(lines) == len(METRICS)
    assert all(len(points.split()) == 3 for points in lines)


def test_nothing_comes_from_outside(tmp_path: Path) -> None:
    html = page(record(tmp_path))
    seen = parsed(html)
    assert {tag for tag, _, _ in seen.attributes} & {"script", "link", "img", "iframe", "object"} == set()
    assert [name for _, name, _ in seen.attributes if name in ("src", "href", "srcset") or name.startswith("on")] == []
    assert not re.search(r"https?:|url\(|@import|<script", html)


def test_it_fits_narrow_and_wide_light_and_dark() -> None:
    assert "min(100%, 340px)" in STYLE  # a column is never wider than the screen
    assert "prefers-color-scheme: dark" in STYLE
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, flags=re.S)
    colours = [set(re.findall(r"--(\w+): #", part)) for part in (light, dark)]
    assert colours[0] == colours[1]
    for part in (light, dark):
        named = dict(re.findall(r"--(\w+): (#\w+)", part))
        for ink in ("ink", "soft", "good", "bad", "c0", "c1", "c2"):
            assert contrast(named[ink], named["paper"]) >= 4.5, ink


def contrast(first: str, second: str) -> float:
    """Of two colours. Source: WCAG 2.1, relative luminance."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_contract_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "not readable" in page(record(tmp_path, contract="x"))


def test_the_seal_is_told_none_or_not_readable(tmp_path: Path) -> None:
    shown = record(tmp_path)
    assert "seal of the recordnone" in parsed(page(shown)).text
    digest = write_seal(tmp_path, b"{}")
    assert f"seal of the record{digest}" in parsed(page(shown)).text
    (tmp_path / "seal.json").write_text("{")
    assert "seal of the recordnot readable" in parsed(page(shown)).text


def test_what_is_wrong_stands_in_plain_sight(tmp_path: Path) -> None:
    seen = parsed(page(record(tmp_path, status="failed", error="BackendError: gone")))
    assert "failed: BackendError: gone" in seen.text
    assert "contradicts itself" in seen.text


@pytest.mark.parametrize(
    ("values", "contract", "text", "mark"),
    [
        ([0.0, math.nan, 0.0], '{"id": "dense/v1"}', "NaN", "bad"),
        ([0.0, math.nan, 0.0], "", "NaN", "bad"),
        ([0.0, math.inf, 0.0], "", "inf", "bad"),
        ([0.0, 0.5, 0.0], '{"id": "dense/v1"}', "0.5", "bad"),
        ([0.0, 0.5, 0.0], "", "0.5", ""),
        ([0.0, 0.0, 0.0], '{"id": "dense/v1"}', "0", "good"),
    ],
)
def test_the_largest_distance_is_what_the_steps_say(
    values: list[float], contract: str, text: str, mark: str, tmp_path: Path
) -> None:
    found = record(tmp_path, contract=contract)
    for entry, value in zip(found.steps, values, strict=True):
        cast("dict[str, str]", entry.metrics)["train_rollout_logprob_abs_diff/max"] = value.hex()
    told = re.search(r"largest \|train - rollout log-prob\|</th><td([^>]*)>([^<]*)<", page(found))
    assert told
    assert (told[1], told[2]) == (f' class="{mark}"' if mark else "", text)


@example([float("nan"), float("inf")])
@example([1.7e308, -1.7e308])
@example([0.0, 5e-324])
@given(st.lists(st.floats(), min_size=1, max_size=20))
def test_any_values_make_a_chart_within_its_frame(values: list[float]) -> None:
    seen = parsed(chart("t", {"v": list(enumerate(values))}))
    assert not [value for _, name, value in seen.attributes if name in ("points", "cx", "cy") and "nan" in value]
    for _, name, value in seen.attributes:
        for number in re.findall(r"-?\d+\.\d+", value) if name in ("points", "cx", "cy") else []:
            assert 0 <= float(number) <= 360
    broken = sum(value != value or abs(value) == float("inf") for value in values)
    assert (f"{broken} values are not finite" in seen.text) is (broken > 0)


def test_a_place_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot write .*nowhere/run.html.*No such file") as caught:
        write_report(record(tmp_path), tmp_path / "nowhere" / "run.html")
    assert "--output" in caught.value.remedy
    assert "run.output" not in caught.value.remedy


def test_a_file_that_exists_and_a_record_without_steps_are_refused(tmp_path: Path) -> None:
    written = write_report(record(tmp_path), tmp_path / "run.html")
    assert written.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(RecordError, match="exists already"):
        write_report(record(tmp_path), written)
    with pytest.raises(RecordError, match="holds no finished step"):
        page(record(tmp_path, steps=0))


def test_verdicts_are_read_from_what_verify_prints(tmp_path: Path) -> None:
    one = {"name": "batch", "holds": None, "sentence": "Batch could not be <checked>.", "unequal": 0}
    (tmp_path / "one.json").write_text(json.dumps(one))
    (tmp_path / "all.json").write_text(json.dumps({"exit_code": 1, "verdicts": [one, {**one, "holds": True}]}))
    single, several = read_verdicts(tmp_path / "one.json"), read_verdicts(tmp_path / "all.json")
    assert [verdict.holds for verdict in single + several] == [None, None, True]
    seen = parsed(page(record(tmp_path), several))
    assert seen.text.count("Batch could not be <checked>.") == 2
    marks = [value for tag, name, value in seen.attributes if (tag, name) == ("td", "class")]
    assert marks.count("good") == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"verdicts": 3}', "[" * 9999, '{"verdicts": [{}]}', '{"name": "a", "holds": 1, "sentence": "s"}'],
)
def test_what_is_no_verdict_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RecordError, match="no output of vime verify"):
        read_verdicts(tmp_path / "x.json")
