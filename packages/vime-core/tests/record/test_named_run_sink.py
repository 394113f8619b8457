from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from synthetic import make_step, write_run

from vime_core.record.reader import RunRecord
from vime_core.sinks.run import NamedRunSink, RunFacts


class Told:
    """What a tool's run was told, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def start(self, facts: RunFacts, name: str) -> Told:
        self.calls.append(("start", facts.name, name))
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((step, dict(metrics)))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_a_resumed_run_is_another_run_of_the_same_group(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [make_step(0)])
    manifest, told = RunRecord.open(tmp_path / "run").manifest, Told()
    sink = NamedRunSink(tmp_path / "run", told.start)
    sink.close()
    sink.log(0, {"a": 1.0})
    sink.rewind(3)
    sink.log(3, {"a": 2.0})
    sink.close()
    group = manifest.config["run"]["name"]
    own = f"{group}-{manifest.run_id[:8]}"
    assert told.calls == [
        *[("start", group, own), (0, {"a": 1.0}), ("finish",)],
        *[("start", group, f"{own}-from-step-3"), (3, {"a": 2.0}), ("finish",)],
    ]
