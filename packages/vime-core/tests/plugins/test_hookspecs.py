"""Every hook is documented, has an example that runs, says since when it exists, and is named by a test here."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from vime_core import __version__
from vime_core.findings import Finding
from vime_core.plugins import types
from vime_core.plugins.markers import PROJECT, hookimpl
from vime_core.plugins.specs import LifecycleSpecs, RegistrationSpecs


def _hooks(holder: type) -> dict[str, Callable[..., Any]]:
    return {name: spec for name, spec in vars(holder).items() if name.startswith("vime_")}


HOOKS = {**_hooks(RegistrationSpecs), **_hooks(LifecycleSpecs)}
ARGUMENTS = {
    "config": SimpleNamespace(run=SimpleNamespace(name="r"), sampling=SimpleNamespace(max_tokens=10_000)),
    "policy": None,
    "model_directory": None,
    "alignment": None,
    "step": 0,
    "trainer": SimpleNamespace(weights=lambda: iter(())),
    "rollout": SimpleNamespace(weight_digests=dict),
    "samples": (),
    "metrics": {"reward/mean": 0.5},
    "point": "renamed",
    "path": Path("manifest.json"),
}


def _example_implementation(name: str, spec: Callable[..., Any]) -> Callable[..., Any]:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(spec) or "")
    assert len(examples) == 1, f"{name} needs exactly one example"
    namespace: dict[str, Any] = {"hookimpl": hookimpl, "Finding": Finding, **vars(types)}
    exec(examples[0].source, namespace)
    return namespace[name]


def _problems(name: str, spec: Callable[..., Any]) -> list[str]:
    text = inspect.getdoc(spec) or ""
    found = []
    if not re.match(r"[A-Z].{20,}\.", text.replace("\n", " ")):
        found.append("no opening sentence")
    if not re.search(r"\.\. versionadded:: \d+\.\d+", text):
        found.append("no versionadded")
    if ">>> @hookimpl" not in text:
        found.append("no example")
    annotations = dict(inspect.signature(spec).parameters)
    annotations.pop("self", None)
    if any(p.annotation is inspect.Parameter.empty for p in annotations.values()):
        found.append("an argument without type")
    return found


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented(name: str) -> None:
    assert _problems(name, HOOKS[name]) == []


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_of_a_hook_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(RegistrationSpecs)
    manager.add_hookspecs(LifecycleSpecs)
    manager.register(SimpleNamespace(**{name: _example_implementation(name, HOOKS[name])}))
    manager.check_pending()
    wanted = [p for p in inspect.signature(HOOKS[name]).parameters if p != "self"]
    results = getattr(manager.hook, name)(**{p: ARGUMENTS[p] for p in wanted})
    if name in _hooks(RegistrationSpecs):
        (registrations,) = results
        assert all(isinstance(r, types.Registration) and r.name and r.summary for r in registrations)
    elif name == "vime_check_run":
        assert [finding.code for found in results for finding in found] == ["SITE-001"]
    else:
        assert capsys.readouterr().out.strip()


def test_every_hook_is_in_the_guide_for_contributors() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "plugins.md").read_text()
    assert [name for name in HOOKS if f"`{name}`" not in guide] == []


def test_the_meta_test_notices_a_bare_hook() -> None:
    def vime_bare(thing) -> None:  # type: ignore[no-untyped-def]
        pass

    assert _problems("vime_bare", vime_bare) == [
        "no opening sentence",
        "no versionadded",
        "no example",
        "an argument without type",
    ]


def test_versions_named_are_not_of_the_future() -> None:
    for name, spec in HOOKS.items():
        (added,) = re.findall(r"versionadded:: (\d+\.\d+)", inspect.getdoc(spec) or "")
        assert tuple(map(int, added.split("."))) <= tuple(map(int, __version__.split(".")[:2])), name
