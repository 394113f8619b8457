"""Fixtures of the tests that cross packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import ROOT


@pytest.fixture(scope="session")
def smoke() -> Path:
    return ROOT / "configs" / "smoke.toml"


@pytest.fixture(scope="session")
def tiny_model(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HF directory of the smoke configuration's model."""
    from vime_core.config.load import load_config
    from vime_core.loop.model import model_directory

    cache = tmp_path_factory.mktemp("cache")
    config, plugins = load_config([smoke], [f"run.cache='{cache}'"])
    return model_directory(config, plugins)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as their ``summary``, whether they passed or not."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for text in [value for name, value in getattr(report, "user_properties", ()) if name == "summary"]:
            terminalreporter.write_line(f"{report.nodeid}: {text}")
