"""``vime diff --replay``: run both records' configurations again, with taps of the first unequal step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vime_core.errors import BackendError

if TYPE_CHECKING:
    from vime_core.record.reader import RunRecord
    from vime_core.verify.difference import Difference
    from vime_core.verify.replay import Replayed, ReplayPlan


def replay(records: tuple[RunRecord, RunRecord], difference: Difference) -> Replayed | None:
    """Do the first unequal step of both records again; None when the difference lies in no step.

    Raises:
        BackendError: a run ended before that step.
    """
    from vime_core.verify.replay import compare_replays, plan_replay

    plan = plan_replay(records[0], difference)
    if plan is None:
        return None
    with tempfile.TemporaryDirectory(prefix="vime-replay-") as place:
        again = [_run(record, plan, Path(place) / name) for record, name in zip(records, ("a", "b"), strict=True)]
        return compare_replays(plan, records, (again[0], again[1]))


def _run(record: RunRecord, plan: ReplayPlan, place: Path) -> RunRecord:
    """A run that finds a mismatch within itself ends with exit code 1 after recording the step; that will do."""
    import tomlkit

    from vime_core.record.reader import RunRecord

    config = dict(record.manifest.config)
    config["run"] = {**config["run"], **plan.overrides(config)}
    place.mkdir()
    file, output = place / "config.toml", place / "record"
    file.write_text(tomlkit.dumps(config))
    print(f"Replaying {record.directory} up to step {plan.step}", file=sys.stderr)
    command = [sys.executable, "-m", "vime_cli", "run", str(file), "--output", str(output)]
    directories = [*record.manifest.module_directories, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, directories))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = RunRecord.open(output) if (output / "manifest.json").exists() else None
    if found is None or len(found.steps) <= plan.step:
        raise BackendError(
            f"the replay of {str(record.directory)!r} ended with exit code {done.returncode} before step {plan.step}"
            f" was recorded: {done.stderr.strip()}",
            remedy="Replay needs what the run needed: its model, data, plugins and hardware.",
            code="VIME-BACKEND-004",
        )
    return found
