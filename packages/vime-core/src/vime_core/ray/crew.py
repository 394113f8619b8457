"""Actors as the driver calls them: results in the order of the actors, and the cause when one fails or is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vime_core.errors import BackendError, ContractViolation, VimeError
from vime_core.plugins.foreign import out_of_gpu_memory, text_of
from vime_core.ray.hosts import Place
from vime_core.ray.library import ray

_POLL_S: Final = 0.2
"""Signals are taken between two waits: inside of one Ray would swallow what their handlers raise."""
_GRACE_S: Final = 15.0
"""How long after one rank's failure another one's death may be noticed, which then is the cause."""
_KNOWN_S: Final = 30.0
"""How long Ray may take to learn how an actor ended that it cannot reach any more."""
_CLOSE_S: Final = 45.0
_LOG_LINES: Final = 15
_FATAL: Final = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_DETAIL: Final = re.compile(r"exit type: (\w+) .*?exit detail: (.+?\.)(?:\s|$)", re.DOTALL)
_NOISE: Final = (":job_id:", ":actor_name:", ":task_name:", "Extension modules:")


@dataclass(frozen=True)
class Member:
    """One actor: Ray's handle, its name for messages, and where it is."""

    handle: Any
    name: str
    place: Place

    def __str__(self) -> str:
        return f"{self.name} (process {self.place.pid} on node {self.place.host})"


class Crew:
    """The actors of one side of a run.

    Args:
        members: in the order of their ranks.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self._failed = False

    def call(self, method: str, *args: Any) -> list[Any]:
        """The results of one method of every member, called at once.

        Raises:
            VimeError: as a member raised it.
            BackendError: a member died (the message says how) or raised something else.
        """
        return self.calls(method, [args] * len(self.members))

    def calls(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of each member's own."""
        started = [(m, getattr(m.handle, method).remote(*a)) for m, a in zip(self.members, arguments, strict=True)]
        return self.gather(method, started)

    def one(self, number: int, method: str, *args: Any) -> Any:
        """The result of one member's method."""
        member = self.members[number]
        return self.gather(method, [(member, getattr(member.handle, method).remote(*args))])[0]

    def gather(self, what: str, started: Sequence[tuple[Member, Any]]) -> list[Any]:
        """The results of calls that were started, in their order."""
        try:
            return gather(what, started)
        except BaseException:
            self._failed = True  # the others may wait for the one that failed for as long as they like
            raise

    def close(self) -> None:
        """Ask every member to close what it holds, unless one failed; then end their processes. Idempotent."""
        members, self.members = self.members, ()
        if not self._failed:
            asked = [member.handle.close.remote() for member in members]
            deadline = time.monotonic() + _CLOSE_S
            while asked and time.monotonic() < deadline:
                asked = ray().wait(asked, num_returns=len(asked), timeout=_POLL_S)[1]
        for member in members:
            ray().kill(member.handle)


def gather(what: str, started: Sequence[tuple[Member, Any]]) -> list[Any]:
    """The results of calls, in their order. See `Crew.call`."""
    waiting = {reference: member for member, reference in started}
    found: dict[Any, Any] = {}
    while waiting:
        for reference in ray().wait(list(waiting), timeout=_POLL_S)[0]:
            member = waiting.pop(reference)
            try:
                found[reference] = ray().get(reference)
            except Exception as error:
                raise _cause(what, member, error, waiting) from error
    return [found[reference] for _, reference in started]


def _cause(what: str, member: Member, error: Exception, waiting: Mapping[Any, Member]) -> VimeError:
    """A rank whose neighbour died fails in a collective, perhaps before anybody knows of the death."""
    if _is_death(error):
        return _death(what, member, error)
    if isinstance(reason := getattr(error, "cause", None), VimeError):
        return reason
    for other, death in _deaths(waiting):
        return _death(what, other, death)
    if short := out_of_gpu_memory(text_of(reason or error), f"{member}, in {what},"):
        return short
    return BackendError(
        f"{member} failed in {what}: {type(reason or error).__name__}: {_first_line(reason or error)}{_tail(member)}",
        remedy="Read the lines above; go on with `vime run --resume RUN` when the cause is gone.",
        code="VIME-BACKEND-083",
    )


def _deaths(waiting: Mapping[Any, Member]) -> Iterator[tuple[Member, Exception]]:
    deadline, rest = time.monotonic() + _GRACE_S, dict(waiting)
    while rest and time.monotonic() < deadline:
        for reference in ray().wait(list(rest), timeout=_POLL_S)[0]:
            member = rest.pop(reference)
            try:
                ray().get(reference)
            except Exception as error:
                if _is_death(error):
                    yield member, error


def _is_death(error: Exception) -> bool:
    exceptions = ray().exceptions
    return isinstance(error, exceptions.ActorDiedError | exceptions.ActorUnavailableError)


def _death(what: str, member: Member, error: Exception) -> BackendError:
    return BackendError(
        f"{member} died during {what}: {how_it_ended(member, str(_once_known(member, error)))}{_tail(member)}",
        remedy="Go on with `vime run --resume RUN` when the cause is gone; `dmesg` says whether memory ran out.",
        code="VIME-BACKEND-080",
    )


def _once_known(member: Member, error: Exception) -> Exception:
    """What Ray says of a death when it knows of it: before, it says only that the actor cannot be reached."""
    deadline = time.monotonic() + _KNOWN_S
    while isinstance(error, ray().exceptions.ActorUnavailableError) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        try:
            if asked := ray().wait([member.handle.place.remote()], timeout=_POLL_S)[0]:
                ray().get(asked)
                break  # it lives, and what could not reach it is the cause
        except Exception as again:
            error = again
    return error


def how_it_ended(member: Member, said: str) -> str:
    """Ray sees a closed connection, not a signal; Python writes a trace for every signal but those it cannot see."""
    if fatal := _FATAL.search("\n".join(_lines(member))):
        return f"it was ended by a fatal error, {fatal[1]}"
    if "receives a SIGTERM" in said:
        return "it was ended by SIGTERM"
    if "connection error code 2" in said:
        return "it was ended without a word, as SIGKILL does (kill -9, or the kernel where memory ran out)"
    detail = _DETAIL.search(said)
    return f"{detail[1]}: {detail[2]}" if detail else " ".join(said.split())


def _tail(member: Member) -> str:
    lines = [line for line in _lines(member) if not line.startswith(_NOISE)][-_LOG_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


def _lines(member: Member) -> list[str]:
    """What the actor wrote, where its node's files can be read from here."""
    files: list[Path] = sorted(member.place.logs.glob(f"worker-*-{member.place.pid}.*"), reverse=True)  # out, err
    return [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def agreed(what: str, members: Sequence[Member], found: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The one mapping of digests that all members gave.

    Raises:
        ContractViolation: a member gave another one; names the first tensor.
    """
    for member, other in zip(members[1:], found[1:], strict=True):
        if other != found[0] or list(other) != list(found[0]):
            names = [name for name in {**found[0], **other} if found[0].get(name) != other.get(name)]
            raise ContractViolation(
                f"{members[0].name} and {member.name} hold different {what}: {names[:1]} and {len(names)} of"
                f" {len(found[0])} tensors in all",
                remedy="What must be one thing in several processes is not; the run stops before using it.",
                code="VIME-ALIGN-009",
            )
    return found[0]
