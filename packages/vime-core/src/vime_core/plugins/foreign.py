"""What other people's code raised, in one line: exceptions of plugins are findings, not tracebacks."""

from __future__ import annotations

import traceback


def describe_foreign(error: BaseException) -> str:
    """Type, message and the innermost line of code: ``KeyError: 'x' (in reward.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    message = str(error).strip()
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} (in {frames[-1].filename}, line {frames[-1].lineno})" if frames else text
