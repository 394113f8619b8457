"""Which verdicts run on a configuration, and checks that plugins bring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import config, make_sides

from vime_core.errors import BackendError, ConfigError, ContractViolation, PluginError, PluginFailed
from vime_core.plugins import AlignmentCheck, hookimpl
from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.plugins.types import OWN_VERDICTS
from vime_core.verify import align, batch, checks, gradient
from vime_core.verify.live import with_learning_rate
from vime_core.verify.verdict import Coverage, Verdict

HOLDS = Verdict("router", True, "Router holds.", Coverage(tokens=3))


def router(_config: Any, _plugins: Any) -> Verdict:
    return HOLDS


def nonsense(_config: Any, _plugins: Any) -> str:
    return "fine"


def fails(_config: Any, _plugins: Any) -> Verdict:
    raise BackendError("the engine died", remedy="None.", code="VIME-BACKEND-001")


def manager(**named: str) -> PluginManager:
    made = PluginManager()

    def entries() -> Iterator[AlignmentCheck]:
        for name, target in named.items():
            yield AlignmentCheck(name, "A check.", f"{__name__}:{target}")

    plugin = SimpleNamespace(vime_alignment_checks=hookimpl(entries))
    made.register(plugin, PluginInfo("fixture", "fixture", "1"))
    return made


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above under this module's own name, which pytest does not put into sys.modules by itself."""
    import sys

    monkeypatch.setitem(
        sys.modules,
        __name__,
        SimpleNamespace(**{check.__name__: check for check in (router, nonsense, fails, crashes)}),
    )


def test_a_check_of_a_plugin_runs() -> None:
    assert checks.run_check(config(), manager(router="router"), "router") is HOLDS


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        PluginError, match=r"verify roter: no such verdict\. Known: align, all, batch, .*resume, router"
    ) as info:
        checks.run_check(config(), manager(router="router"), "roter")
    assert "Did you mean 'router'?" in info.value.remedy


def crashes(_config: Any, _plugins: Any) -> Verdict:
    raise ZeroDivisionError("planted")


def test_a_check_that_raises_could_not_be_checked() -> None:
    with pytest.raises(PluginFailed, match=r"check 'odd' of .* failed: ZeroDivisionError: planted") as caught:
        checks.run_check(config(), manager(odd="crashes"), "odd")
    assert caught.value.exit_code == 3


def test_a_check_must_return_a_verdict() -> None:
    with pytest.raises(PluginError, match="the check 'odd' returned str, not a"):
        checks.run_check(config(), manager(odd="nonsense"), "odd")


@pytest.mark.parametrize("name", OWN_VERDICTS)
def test_no_plugin_replaces_a_verdict_of_our_own(name: str) -> None:
    with pytest.raises(PluginError, match=f"failed to load: .*a check is named '{name}', which is a verdict of vime's"):
        manager(**{name: "router"}).require()
    manager(other="router").require()


def test_the_names_of_our_own_are_those_of_the_verdicts() -> None:
    assert {batch.NAME, align.NAME, gradient.NAME, *("repeat", "resume", "all")} == set(OWN_VERDICTS)


class Started:
    """Stands in for what starts the sides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates: list[float] = []
        self.closed = 0
        self.error: Exception | None = None
        monkeypatch.setattr(checks, "checked_policy", lambda _config, _plugins: None)
        monkeypatch.setattr(checks, "ready_parts", self._ready)
        monkeypatch.setattr(checks, "open_sides", self._open)
        monkeypatch.setattr(checks, "open_trainer", self._open_trainer)
        monkeypatch.setattr(checks, "verify_gradient", lambda _parts, _trainer, _options: HOLDS)

    def _ready(self, run: Any, _policy: Any, _plugins: Any) -> Any:
        self.rates.append(run.trainer.lr)
        return make_sides().parts

    @contextmanager
    def _open(self, _parts: Any) -> Iterator[Any]:
        if self.error:
            raise self.error
        try:
            yield make_sides()
        finally:
            self.closed += 1

    @contextmanager
    def _open_trainer(self, _parts: Any) -> Iterator[Any]:
        yield make_sides().trainer


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def run_every(plugins: PluginManager) -> tuple[list[str], list[Verdict]]:
    names: list[str] = []
    return names, list(checks.run_every(config(), plugins, 0, 1, names.append))


def test_every_verdict_runs_once_on_one_start(started: Started) -> None:
    names, verdicts = run_every(manager(router="router"))
    assert names == ["gradient", "batch", "align", "router"]
    assert [v.exit_code for v in verdicts] == [0, 0, 0, 0], [v.sentence for v in verdicts]
    assert [v.name for v in verdicts[1:]] == ["batch", "align", "router"]
    assert started.closed == 1
    assert started.rates == [0.0, 1e-3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContractViolation("weight 'a' differs", remedy="None.", code="VIME-ALIGN-001"), 1),
        (BackendError("it did not start", remedy="None.", code="VIME-BACKEND-060"), 3),
    ],
)
def test_sides_that_do_not_start_are_told_and_the_rest_goes_on(started: Started, error: Any, code: int) -> None:
    started.error = error
    _, verdicts = run_every(manager(router="router"))
    assert [v.exit_code for v in verdicts] == [0, code, code, 0]
    assert all(error.message in v.sentence for v in verdicts[1:3])


def test_errors_of_configuration_end_it(started: Started) -> None:
    started.error = ConfigError("wrong", remedy="None.")
    with pytest.raises(ConfigError):
        run_every(manager())


def test_a_check_that_fails_is_not_checked(started: Started) -> None:
    _, verdicts = run_every(manager(bad="fails", router="router"))
    assert [(v.name, v.exit_code) for v in verdicts[3:]] == [("bad", 3), ("router", 0)]


def test_single_verdicts_start_what_they_need(started: Started) -> None:
    plugins = manager()
    assert checks.run_align(config(), plugins, checks.AlignOptions(updates=1), lr=0.01).exit_code == 0
    assert checks.run_batch(config(lr=1e-6), plugins, checks.BatchOptions(4)).exit_code == 0
    assert checks.run_gradient(config(), plugins).exit_code == 0
    assert started.rates == [0.01, 1e-6, 0.0]
    assert started.closed == 2


def test_layers_without_a_contract_start_nothing(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"alignment\.contract = ''"):
        checks.run_align(config(), manager(), checks.AlignOptions(layers=True))
    assert started.rates == []


def test_the_learning_rate_of_updates_has_no_warm_up() -> None:
    changed = with_learning_rate(config(lr=1e-6, warmup_steps=9), 1e-3)
    assert (changed.trainer.lr, changed.trainer.warmup_steps) == (1e-3, 0)
    assert changed.sampling == config().sampling
