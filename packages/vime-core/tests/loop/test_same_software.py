"""What may be otherwise in the plugins of a resumed run, and what may not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vime_core.errors import ConfigError
from vime_core.loop.resume import require_same_software
from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.record.schema import Manifest, ResumeEntry

REPEATS: Any = SimpleNamespace(repeats=True)
OFF: Any = SimpleNamespace(repeats=False)


def present(sources: str, version: str = "0.1") -> PluginManager:
    made = PluginManager()
    made.register(SimpleNamespace(), PluginInfo("mine", "vime-mine", version, sources=sources))
    return made


def entry(**sources: str) -> dict[str, str]:
    return {"name": "mine", "distribution": "vime-mine", "version": "0.1", **sources}


def recorded(*resumed: str, **sources: str) -> Manifest:
    """A manifest as it is read: ``resumed`` are the sources of each time that the run went on."""
    went_on = {"step": 0, "recorded": 0, "vime_version": "0.1.0", "platform": {}, "processes": ()}
    times = tuple(ResumeEntry.model_validate({**went_on, "plugins": (entry(sources=s),)}) for s in resumed)
    began = {"vime_version": "0.1.0", "config": {}, "policy": "", "platform": {}}
    return Manifest.model_validate({**began, "plugins": (entry(**sources),), "resumed": times})


@pytest.mark.parametrize("now", ["b" * 64, "a" * 63 + "b", ""])
def test_other_sources_of_one_version_are_refused_by_name(now: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_same_software(recorded(sources="a" * 64), REPEATS, present(now))
    assert (caught.value.code, caught.value.exit_code) == ("VIME-CONFIG-017", 2)
    said = now[:16] or "without files"
    for part in (f"sources {'a' * 16} of vime-mine 0.1 (plugin 'mine'), and this is {said}", "start a new run"):
        assert part in str(caught.value)


def test_the_same_sources_go_on_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vime"):
        require_same_software(recorded(sources="a" * 64), REPEATS, present("a" * 64))
    assert not caplog.records


def test_another_version_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match=r"mine vime-mine 0\.1, and this is vime-mine 0\.2"):
        require_same_software(recorded(sources="a" * 64), REPEATS, present("b" * 64, "0.2"))


def test_a_policy_without_a_promise_asks_for_nothing() -> None:
    require_same_software(recorded(sources="a" * 64), OFF, present("b" * 64))


def test_a_record_from_before_there_were_sources_goes_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vime"):
        require_same_software(recorded(), REPEATS, present("a" * 64))
    assert "sources of vime-mine 0.1 (plugin 'mine'): whether they are the same is unknown" in caplog.text


def test_such_a_record_holds_the_sources_with_which_it_went_on_first() -> None:
    require_same_software(recorded("a" * 64, "b" * 64), REPEATS, present("a" * 64))
    with pytest.raises(ConfigError, match="VIME-CONFIG-017"):
        require_same_software(recorded("a" * 64, "b" * 64), REPEATS, present("b" * 64))
