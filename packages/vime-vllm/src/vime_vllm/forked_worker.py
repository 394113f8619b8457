"""Imported by the server of `vime_vllm.forked` only: workers of its engines are forked from their cores."""

from __future__ import annotations

import multiprocessing
from importlib import import_module
from typing import Any


def _fork() -> Any:
    return multiprocessing.get_context("fork")


vars(import_module("vllm.v1.executor.multiproc_executor"))["get_mp_context"] = _fork
