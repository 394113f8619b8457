"""Processes that end with the one that needs them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from vime_core.processes import kept


@pytest.mark.parametrize("status", [0, 7])
def test_a_keeper_told_to_end_keeps_the_status_of_a_command_that_has_ended(status: int) -> None:
    def statuses(delay_s: float) -> int:
        command = [sys.executable, "-S", "-c", f"import os; os._exit({status})"]
        with subprocess.Popen(kept(command), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read() == b""  # the command has ended, its keeper perhaps not
            time.sleep(delay_s)
            process.terminate()
            return process.wait()

    assert [statuses(step * 5e-4) for step in range(40)] == [status] * 40
