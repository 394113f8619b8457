"""A checkpoint that cannot be written: one error, nothing of it left, and earlier ones as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from vime_core.errors import RecordError
from vime_core.loop import checkpoint
from vime_core.loop.checkpoint import LoopState, read_checkpoint, write_checkpoint


class Trainer:
    """Saves a file, or raises after half of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def save(self, directory: Path) -> None:
        (directory / "state").write_bytes(b"half")
        if self._error:
            raise self._error


def state(step: int) -> LoopState:
    words: Any = dict.fromkeys(("run_id", "weights_root", "optimizer_root", "steps_digest"), "")
    return LoopState(**words, next_step=step, weight_version=step, run_seed=1, settings={})


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "VIME-RECORD-002", "no space to write"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "VIME-RECORD-003", "Read-only file system"),
        (SafetensorError("No space left on device"), "VIME-RECORD-061", "SafetensorError: No space left on device"),
        (RecordError("own words", remedy="r", code="VIME-RECORD-041"), "VIME-RECORD-041", "own words"),
    ],
)
def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, error: Exception, code: str, says: str) -> None:
    first: Any = Trainer()
    kept = write_checkpoint(first, tmp_path, state(1))
    failing: Any = Trainer(error)
    with pytest.raises(RecordError, match=says) as caught:
        write_checkpoint(failing, tmp_path, state(2))
    assert caught.value.code == code
    if code != "VIME-RECORD-041":
        assert "step-000002" in caught.value.message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert read_checkpoint(kept) == state(1)


def test_a_checkpoint_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "trainer/state")

    trainer: Any = Trainer()
    kept = write_checkpoint(trainer, tmp_path, state(1))
    monkeypatch.setattr(checkpoint, "_digests", refuse)
    with pytest.raises(RecordError, match=r"step-000001' cannot be read: .*denied: 'trainer/state'") as caught:
        read_checkpoint(kept)
    assert caught.value.code == "VIME-RECORD-009"


def test_a_record_that_is_gone_is_not_made_anew_by_a_checkpoint(tmp_path: Path) -> None:
    trainer: Any = Trainer()
    with pytest.raises(RecordError, match="cannot write"):
        write_checkpoint(trainer, tmp_path / "gone", state(1))
    assert not (tmp_path / "gone").exists()
