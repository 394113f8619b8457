"""A command run inside of a test sets variables and a logger, as in its own process: the next test finds neither."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    log = logging.getLogger("vime")
    level, handlers, propagate = log.level, log.handlers, log.propagate
    with patch.dict(os.environ):
        yield
    log.setLevel(level)
    log.handlers, log.propagate = handlers, propagate
