"""A structure from outside of vime, installed from its own wheel, passes the contract kit; a broken one is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def install(source: Path, place: Path) -> Path:
    """Build the wheel of a distribution and install it into a directory of its own."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    copied = place / "source"
    subprocess.run(["cp", "-r", str(source), str(copied)], check=True)
    wheels = place / "wheels"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, copied], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", place / "site", *wheels.glob("*.whl")], check=True)
    return place / "site"


def check(site: Path, name: str, *options: str) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit code and what ``vime plugins check`` found, by what was checked."""
    command = [sys.executable, "-m", "vime_cli", "plugins", "check", name, "--json", *options]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=900
    )
    assert ran.stdout, ran.stderr
    return ran.returncode, {one["what"]: one for one in json.loads(ran.stdout)}


def test_the_example_passes_from_its_wheel(tmp_path: Path) -> None:
    code, found = check(install(ROOT / "examples" / "vime-lantern", tmp_path), "vime-lantern")
    assert code == 0, found
    verdicts = {f"lantern/v1 lantern {dtype} {v}" for dtype in ("bf16", "fp32") for v in ("gradient", "batch", "align")}
    assert verdicts < set(found)
    assert all(one["holds"] for one in found.values())
    assert "0 unequal), up to position 191 of 191" in str(found["lantern/v1 lantern bf16 align"]["sentence"])
    assert "the reference of lantern/v1" in str(found["lantern/v1 lantern fp32 gradient"]["sentence"])


@pytest.mark.parametrize(
    ("file", "right", "wrong", "dtype", "verdict", "words"),
    [
        ("vllm.py", "else config.window", "else config.window + 1", "fp32", "align", "layer 0, attention, position 21"),
        ("reference.py", "x = x + self.after", "x = 1.5 * x + self.after", "fp32", "gradient", "farther from fp64"),
    ],
    ids=["a window one too wide", "another reference"],
)
def test_a_side_that_differs_is_named(
    file: str, right: str, wrong: str, dtype: str, verdict: str, words: str, tmp_path: Path
) -> None:
    site = install(ROOT / "examples" / "vime-lantern", tmp_path)
    source = site / "vime_lantern" / file
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, wrong))
    code, found = check(site, "vime-lantern", "--dtype", dtype)
    assert code == 1
    wrong_one = found[f"lantern/v1 lantern {dtype} {verdict}"]
    assert wrong_one["holds"] is False
    assert words in str(wrong_one["sentence"])


def test_what_cannot_be_loaded_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    site = install(ROOT / "examples" / "vime-lantern", tmp_path)
    plugin = site / "vime_lantern" / "plugin.py"
    plugin.write_text(plugin.read_text().replace("vllm:AlignedLantern", "vllm:AlignedLamp"))
    code, found = check(site, "vime-lantern")
    assert code == 1
    assert "has no 'AlignedLamp'" in str(found["aligned side lantern/v1 vllm"]["sentence"])
    assert not any(what.startswith("lantern/v1 lantern") for what in found)


def test_the_skeleton_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in (0, 2):  # it is not written over
        command = [sys.executable, "-m", "vime_cli", "plugins", "new", "vime-mine"]
        assert subprocess.run(command, capture_output=True).returncode == expected
    code, found = check(install(tmp_path / "vime-mine", tmp_path), "vime-mine", "--dtype", "bf16")
    assert code == 0, found
    assert {f"mine/v1 mine bf16 {verdict}" for verdict in ("gradient", "batch", "align")} < set(found)
