"""The cluster that a run's actors live in: its own on this machine, or one that was there before and stays."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from vime_core.errors import BackendError, ConfigError, Interrupted
from vime_core.ray.library import ray
from vime_core.ray.options import RayOptions
from vime_core.scratch import run_scratch

Resources = Mapping[str, float]
_OWN: Final = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray's settings for a cluster of our own: nothing is reported, and nobody but the kernel ends a process for memory."""
_LONGEST: Final = 40
"""Characters of Ray's directory: the sockets in it must have names of at most 107."""
_NAMED: Final = 8
"""Most actors that a message names."""
_POLL_S: Final = 0.2
_ANSWER_S: Final = 5.0
_HOST_PORT: Final = re.compile(r"(\[[^\]]+\]|[^:/\[\]]+):(\d+)")


@dataclass(frozen=True)
class Demand:
    """What one actor reserves, and its name for messages."""

    who: str
    resources: Resources


class Cluster:
    """A connection to Ray. `close` ends a cluster of our own; one with an address is only left.

    Args:
        options: of the launcher.

    Raises:
        ConfigError: nothing listens at the address.
        BackendError: Ray does not start, or what listens at the address is no cluster to join.
        Interrupted: SIGTERM came meanwhile.
    """

    def __init__(self, options: RayOptions) -> None:
        require_answer(options.address)
        self._options = options
        self._group: Any = None
        self._stack = ExitStack()
        self._stack.enter_context(run_scratch())
        handler = signal.getsignal(signal.SIGTERM)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with patch.object(import_module("ray._private.worker"), "listen_error_messages", _nothing):
                ray().init(**(self._joined() if options.address else self._own()))
        except Exception as error:
            self._stack.close()
            raise _no_cluster(options.address, error) from error
        except SystemExit as error:  # what Ray's own handler makes of SIGTERM
            self._stack.close()
            raise Interrupted(signal.SIGTERM.name, 128 + signal.SIGTERM) from error
        finally:
            with suppress(ValueError):  # no main thread: Ray took no handler either
                signal.signal(signal.SIGTERM, handler)
        self._stack.callback(ray().shutdown)

    @property
    def resources(self) -> Resources:
        """CPUs, GPUs and whatever else all nodes together have."""
        return ray().cluster_resources()

    def reserve(self, demands: Sequence[Demand]) -> Any:
        """A placement group with one bundle for each demand, in order.

        Raises:
            ConfigError: the cluster has less, or no node has room for one of them; names what is asked and what exists.
            BackendError: other jobs hold too much of it for too long.
        """
        require_room(demands, self.resources, self._where)
        _require_node(demands, [node["Resources"] for node in ray().nodes() if node["Alive"]])
        group = import_module("ray.util.placement_group")
        self._group = group.placement_group([dict(d.resources) for d in demands], strategy=self._options.placement)
        self._stack.callback(self._release)
        waited, ready = 0.0, self._group.ready()
        while not ray().wait([ready], timeout=_POLL_S)[0]:
            waited += _POLL_S
            if waited > self._options.wait_s:
                raise self._occupied(demands)
        return self._group

    def close(self) -> None:
        """Give back what was reserved and leave. Idempotent."""
        self._stack.close()

    @property
    def _where(self) -> str:
        return f"the Ray cluster at {self._options.address!r}" if self._options.address else "this machine"

    def _own(self) -> dict[str, Any]:
        for name, value in _OWN.items():
            os.environ.setdefault(name, value)
        return {
            **_QUIET,
            "num_cpus": len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "_temp_dir": str(self._directory()),
        }

    def _directory(self) -> Path:
        scratch = self._stack.enter_context(run_scratch()) / "ray"
        if len(str(scratch)) <= _LONGEST:
            scratch.mkdir(exist_ok=True)
            return scratch
        short = tempfile.TemporaryDirectory(prefix="vime-ray-", dir="/tmp", ignore_cleanup_errors=True)
        return Path(self._stack.enter_context(short))

    def _joined(self) -> dict[str, Any]:
        return {**_QUIET, "address": self._options.address}

    def _release(self) -> None:
        with suppress(Exception):
            import_module("ray.util.placement_group").remove_placement_group(self._group)

    def _occupied(self, demands: Sequence[Demand]) -> BackendError:
        return BackendError(
            f"{self._where} did not give {_told(_sum(demands))} within run.ray.wait_s = {self._options.wait_s:g} s;"
            f" of {_told(self.resources)}, {_told(ray().available_resources())} are free, and run.ray.placement ="
            f" {self._options.placement!r}",
            remedy="Wait for other jobs to end, ask for fewer ranks or engines, or set run.ray.placement = 'PACK'.",
            code="VIME-BACKEND-082",
        )


_QUIET: Final[dict[str, Any]] = {"log_to_driver": False, "logging_level": logging.ERROR}


def require_answer(address: str) -> None:
    """Raise ConfigError unless something listens at HOST:PORT, for which Ray itself would wait a quarter of an hour."""
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), _ANSWER_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"nothing answers at run.ray.address = {address!r}: {error}",
            remedy="Start a cluster there with `ray start --head`, correct the address, or leave it out for a cluster"
            " of the run's own.",
            code="VIME-CONFIG-076",
        ) from error


def require_room(demands: Sequence[Demand], present: Resources, where: str) -> None:
    """Raise ConfigError unless all demands together fit into what is present."""
    for name, asked in _sum(demands).items():
        if asked > present.get(name, 0.0):
            raise ConfigError(
                f"{len(demands)} actors ({_names(demands)}) reserve {asked:g} {name}, and"
                f" {where} has {present.get(name, 0.0):g}",
                remedy="Add nodes, ask for fewer ranks or engines, or lower run.ray.cpus_per_rank, cpus_per_engine,"
                " gpus_per_rank or gpus_per_engine (0.5: two share one).",
                code="VIME-CONFIG-071",
            )


def _require_node(demands: Sequence[Demand], nodes: Sequence[Resources]) -> None:
    for demand in demands:
        if not any(all(node.get(n, 0.0) >= asked for n, asked in demand.resources.items()) for node in nodes):
            raise ConfigError(
                f"{demand.who} reserves {_told(demand.resources)}, and none of the cluster's {len(nodes)} nodes has"
                f" that: {'; '.join(map(_told, nodes))}",
                remedy="Add a larger node, or lower what an actor reserves in [run.ray].",
                code="VIME-CONFIG-072",
            )


def _names(demands: Sequence[Demand]) -> str:
    names = [demand.who for demand in demands]
    return ", ".join(names if len(names) <= _NAMED else [*names[: _NAMED - 2], "...", names[-1]])


def _sum(demands: Sequence[Demand]) -> dict[str, float]:
    names = sorted({name for demand in demands for name in demand.resources})
    return {name: sum(demand.resources.get(name, 0.0) for demand in demands) for name in names}


def _told(resources: Resources) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "nothing"


def _nothing(*_: object) -> None:
    """In the place of a thread that prints to standard output what our own errors say."""


def _no_cluster(address: str, error: Exception) -> BackendError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if address:
        return BackendError(
            f"no Ray cluster could be joined at run.ray.address = {address!r}: {said}",
            remedy="Start one there with `ray start --head`, or leave the address out for one of the run's own. One"
            " that asks for a token needs RAY_AUTH_MODE=token here too.",
            code="VIME-BACKEND-081",
        )
    return BackendError(
        f"Ray did not start on this machine: {said}",
        remedy="Look at the machine's memory and /dev/shm; `ray start --head` says more.",
        code="VIME-BACKEND-081",
    )
