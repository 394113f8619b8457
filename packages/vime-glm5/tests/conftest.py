"""What the tests of GLM-5 share: operations of every provider, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))
settings.register_profile("vime", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")


@pytest.fixture(params=["cpu", "reference"])
def every(request: pytest.FixtureRequest):
    from vime_glm5.numerics import GLM5_V1, load_operations

    return load_operations(GLM5_V1, request.param)


@pytest.fixture(scope="session")
def ops():
    from vime_glm5.numerics import GLM5_V1, load_operations

    return load_operations(GLM5_V1, "cpu")
