"""The report in a real browser: it renders, says nothing on the console, and is readable narrow and wide."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bigram
import pytest
from command import vime

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
REMEDY = "install it (apt-get install chromium-headless-shell), or deselect with -m 'not browser'"

MEASURE = """() => {
  const texts = [...document.querySelectorAll("body *")].filter(one => one.checkVisibility()
    && [...one.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));
  const scale = one => one.ownerSVGElement ? one.getScreenCTM().a : 1;
  const outside = one => { const box = one.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth; };
  const shown = one => getComputedStyle(one);
  return {
    width: document.documentElement.scrollWidth,
    smallest: Math.min(...texts.map(one => parseFloat(shown(one).fontSize) * scale(one))),
    outside: texts.filter(one => !one.closest("pre") && outside(one)).map(one => one.textContent),
    headings: [...document.querySelectorAll("h1, h2")].map(one => one.textContent),
    figures: [...document.querySelectorAll("figure")].filter(one => one.getBoundingClientRect().height > 100).length,
    lines: [...document.querySelectorAll("polyline")].map(one => shown(one).stroke),
    paper: shown(document.body).backgroundColor,
    ink: shown(document.body).color,
    text: document.body.innerText,
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail(f"none of {', '.join(NAMES)} is on the PATH: {REMEDY}", pytrace=False)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright, which drives the browser, is not installed: pip install playwright", pytrace=False)
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with evaluations, compared with the same run again, and with a verdict from a file."""
    place = tmp_path_factory.mktemp("report")
    sets = [*bigram.OVERRIDES, "run.steps=5", "evaluation.every=2", "evaluation.prompts=4", f"run.cache='{place}'"]
    for name in ("run", "other"):
        settings = [*sets, f"run.output='{place / name}'"]
        ran = vime("run", "configs/smoke.toml", *(part for one in settings for part in ("--set", one)))
        assert ran.code == 0, ran.text
    said = {"name": "batch", "holds": True, "sentence": "Batch holds: it was said so."}
    (place / "batch.json").write_text(json.dumps(said))
    ran = vime("report", place / "run", "--against", place / "other", "--verdicts", place / "batch.json")
    assert ran.code == 0, ran.text
    return place / "run.html"


def seen(browser: Any, page: Path, width: int, scheme: str) -> tuple[dict[str, Any], list[str]]:
    """What the page measures of itself, and everything that it or its loading complained of."""
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: said.append(request.url) if request.url != page.as_uri() else None)
    view.goto(page.as_uri())
    found = view.evaluate(MEASURE)
    view.close()
    return found, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_report_is_readable(width: int, scheme: str, browser: Any, report: Path) -> None:
    found, said = seen(browser, report, width, scheme)
    assert said == []
    assert found["width"] == width, found["outside"]
    assert found["outside"] == []
    assert found["smallest"] >= 12
    assert found["headings"][1:] == ["Verdicts", "Curves", "Time by phase", "Environment", "Configuration"]
    assert found["figures"] >= 8
    assert all(stroke.startswith("rgb(") for stroke in found["lines"])
    ink, paper = (sum(map(int, found[name][4:-1].split(","))) for name in ("ink", "paper"))
    assert (ink < paper) is (scheme == "light")
    for text in ("Repeat holds", "Batch holds: it was said so.", "agrees with itself", "generate", "torch"):
        assert text in found["text"]


def test_long_names_break(browser: Any, report: Path) -> None:
    long = report.with_name("long.html")
    text = report.read_text()
    for word in ("smoke", "reproducible/v1", "batch (", "release<", "Evaluation reward<"):
        assert word in text
        text = text.replace(word, word[0] * 150 + word)
    long.write_text(text)
    found, _ = seen(browser, long, 400, "light")
    assert found["outside"] == []
    assert found["width"] == 400


FAULTS = {
    "console": ("<h1>", "<script>console.error('planted')</script><h1>"),
    "exception": ("<h1>", "<script>planted()</script><h1>"),
    "network": ("<h1>", "<img src='http://127.0.0.1:9/x.png'><h1>"),
    "wide": ("<h1>", "<p style='width: 700px'>planted</p><h1>"),
    "small": ("<h1>", "<p style='font-size: 9px'>planted</p><h1>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, browser: Any, report: Path) -> None:
    planted = report.with_name(f"{fault}.html")
    planted.write_text(report.read_text().replace(*FAULTS[fault]))
    found, said = seen(browser, planted, 400, "light")
    assert bool(said) is (fault in ("console", "exception", "network"))
    assert (found["width"] > 400) is (fault == "wide")
    assert (found["smallest"] < 12) is (fault == "small")
