"""Find plugins through entry points and keep what they register, with the distribution that each came from."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import pluggy

from vime_core.errors import PluginError, PluginFailed, VimeError
from vime_core.plugins.foreign import describe_foreign, out_of_gpu_memory, text_of, with_notes
from vime_core.plugins.markers import PROJECT
from vime_core.plugins.source import package_sources, source_version
from vime_core.plugins.specs import LifecycleSpecs, RegistrationSpecs
from vime_core.plugins.types import Registration

_Entry = TypeVar("_Entry", bound=Registration)

HOOKS = frozenset(
    name for specs in (RegistrationSpecs, LifecycleSpecs) for name in vars(specs) if name.startswith(f"{PROJECT}_")
)
REGISTRATION_HOOKS = tuple(name for name in vars(RegistrationSpecs) if name.startswith(f"{PROJECT}_"))


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as it was found: ``error`` is why it could not be used, empty when it could.

    The ``version`` of a module of ``plugins.modules`` is a digest of its source; ``sources`` is that of the package
    of a distribution's entry point, whose version says little while it is edited (`vime_core.plugins.source`).
    """

    name: str
    distribution: str
    version: str
    error: str = ""
    sources: str = ""

    @property
    def origin(self) -> str:
        """The distribution with its version, or that a configuration names the module."""
        return f"{self.distribution} {self.version}".strip() if self.distribution else "plugins.modules"


@dataclass(frozen=True)
class Entry:
    """A registration with the plugin that made it."""

    registration: Registration
    plugin: PluginInfo


@dataclass(frozen=True)
class PluginSelection:
    """Which plugins a run may use.

    Args:
        allow: names of plugins that may load; None allows every installed one.
        disable: names of plugins that must not load.
        modules: extra modules to load as plugins, by import path; the other two hold for them too.
        directories: where such modules are looked for, besides Python's own path.
    """

    allow: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    directories: tuple[Path, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether the plugin of this name may load."""
        return name not in self.disable and (self.allow is None or name in self.allow)

    def hint(self) -> str:
        """Which keys leave plugins out, for who misses one; empty when none does."""
        allow = "" if self.allow is None else f" plugins.allow = {list(self.allow)} leaves out all others."
        return allow + (f" plugins.disable = {list(self.disable)} leaves these out." if self.disable else "")


@dataclass
class _Found:
    entries: dict[tuple[str, ...], Entry] = field(default_factory=dict[tuple[str, ...], Entry])
    claims: dict[tuple[str, ...], Entry] = field(default_factory=dict[tuple[str, ...], Entry])
    conflicts: list[PluginError] = field(default_factory=list[PluginError])


class PluginManager:
    """Typed facade over pluggy: discovery, look-up by kind and name, and lifecycle calls.

    Broken plugins and conflicts are kept, not raised, so that they can be listed; `require` raises them for a run.
    """

    def __init__(self, selection: PluginSelection | None = None) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(RegistrationSpecs)
        self._pluggy.add_hookspecs(LifecycleSpecs)
        self._selection = selection or PluginSelection()
        self._infos: dict[str, PluginInfo] = {}
        self._found = _Found()

    @classmethod
    def discover(cls, selection: PluginSelection | None = None) -> PluginManager:
        """Load every selected plugin and collect its registrations."""
        manager = cls(selection)
        for distribution, point in _entry_points():
            manager._load_entry_point(distribution, point)
        manager._add_directories()
        for module in filter(manager._selection.takes, manager._selection.modules):
            manager.load_module(module)
        return manager

    @property
    def hook(self) -> Any:
        """Lifecycle calls, by hook name. An exception of a plugin's becomes a PluginFailed that names its origin."""
        return _Hooks(self)

    def call_hook(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """Call a lifecycle hook of every plugin; the results that are not None.

        Raises:
            PluginFailed: one raised something that is no VimeError.
            BackendError: the GPU's memory was used up.
        """
        caller = getattr(self._pluggy.hook, name)
        try:
            return [list(r) if inspect.isgenerator(r) else r for r in cast("list[Any]", caller(**arguments))]
        except VimeError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(f"hook {name}", self._origin_of(name, error.__traceback__), error) from error

    @contextmanager
    def guarding(self, registration: Registration) -> Generator[None]:
        """While code of a registration runs: what it raises becomes a PluginFailed that names where it came from.

        Raises:
            PluginFailed: the code raised something that is no VimeError; SystemExit included.
            BackendError: the GPU's memory was used up.
        """
        try:
            yield
        except VimeError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{registration.kind} {registration.name!r}"
            raise self._failed(what, self.origin(registration), error) from error

    def origin(self, registration: Registration) -> str:
        """The distribution with its version that a registration came from, for messages."""
        found = self._found.entries.get(registration.claims[0])
        return found.plugin.origin if found else "an unknown plugin"

    def _failed(self, what: str, origin: str, error: BaseException) -> VimeError:
        finding = out_of_gpu_memory(text_of(error), f"{what} of {origin}") or PluginFailed(
            f"{what} of {origin} failed: {describe_foreign(error)}",
            remedy=f"Correct it, report it to the authors of {origin}, or do without (plugins.disable).",
            code="VIME-PLUGIN-007",
        )
        return with_notes(finding, error)

    def _origin_of(self, hook: str, trace: TracebackType | None) -> str:
        """Whose implementation of the hook a traceback runs through."""
        frames: set[object] = set()
        while trace is not None:
            frames.add(trace.tb_frame.f_code)
            trace = trace.tb_next
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            if getattr(inspect.unwrap(implementation.function), "__code__", None) in frames:
                return self._infos[implementation.plugin_name].origin
        names = [i.plugin_name for i in getattr(self._pluggy.hook, hook).get_hookimpls()]
        return " or ".join(self._infos[name].origin for name in names) or "an unknown plugin"

    def plugins(self) -> list[PluginInfo]:
        """Every plugin that was found, loaded or broken, by name."""
        return sorted(self._infos.values(), key=lambda info: info.name)

    def entries(self) -> list[Entry]:
        """Every registration, by kind and name."""
        return [self._found.entries[key] for key in sorted(self._found.entries)]

    def of_kind(self, kind: type[_Entry]) -> list[_Entry]:
        """The registrations of one kind, by name."""
        return [e.registration for e in self.entries() if isinstance(e.registration, kind)]

    def find(self, kind: type[_Entry], name: str, *, field_name: str) -> _Entry:
        """The registration that a configuration names. Raises PluginError with the nearest name."""
        found = {entry.name: entry for entry in self.of_kind(kind)}
        if name in found:
            return found[name]
        close = get_close_matches(name, found, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        broken = "".join(f" Plugin {i.name!r} failed to load: {i.error}." for i in self.broken())
        raise PluginError(
            f"{field_name} = {name!r}: no such {kind.kind}. Known: {', '.join(found) or 'none'}.{broken}",
            remedy=f"{hint}Use a known name, or install the package that registers {name!r}.{self._selection.hint()}",
            code="VIME-PLUGIN-001",
        )

    def broken(self) -> list[PluginInfo]:
        return [info for info in self.plugins() if info.error]

    def conflicts(self) -> list[PluginError]:
        """Registrations of one name by two plugins."""
        return list(self._found.conflicts)

    def require(self) -> None:
        """Raise the first conflict or broken plugin: a run uses all of what it selected, or does not start."""
        if self._found.conflicts:
            raise self._found.conflicts[0]
        for info in self.broken():
            raise PluginError(
                f"plugin {info.name!r} of {info.origin} failed to load: {info.error}",
                remedy=_repair(info),
                code="VIME-PLUGIN-002",
            )
        self._require_named(self._selection.disable, "plugins.disable")
        self._require_named(self._selection.allow or (), "plugins.allow")
        self._require_allowed_modules()

    def load_module(self, module: str) -> None:
        """Load one module as a plugin."""
        self._register(PluginInfo(module, "", ""), lambda: importlib.import_module(module))

    def register(self, plugin: object, info: PluginInfo) -> None:
        """Register an object as a plugin; for tests and embedding."""
        self._register(info, lambda: plugin)

    def _require_named(self, names: Sequence[str], field_name: str) -> None:
        installed = {point.name for _, point in _entry_points()} | set(self._infos) | set(self._selection.modules)
        for name in names:
            if name not in installed:
                raise PluginError(
                    f"{field_name} names {name!r}, which is not installed",
                    remedy=f"Installed plugins: {', '.join(sorted(installed))}.",
                    code="VIME-PLUGIN-005",
                )

    def _require_allowed_modules(self) -> None:
        allow = self._selection.allow
        for module in self._selection.modules:
            if allow is not None and module not in allow:
                raise PluginError(
                    f"plugins.modules names {module!r}, which plugins.allow leaves out",
                    remedy=f"Add {module!r} to plugins.allow, or leave it out of plugins.modules.",
                    code="VIME-PLUGIN-005",
                )

    @property
    def module_directories(self) -> tuple[str, ...]:
        """Where ``plugins.modules`` were looked for, besides Python's own path; empty without such modules."""
        return tuple(str(path.resolve()) for path in self._selection.directories) if self._selection.modules else ()

    def _add_directories(self) -> None:
        """At the end of Python's path, so that no file beside a configuration hides an installed module."""
        if self._selection.modules:
            new = [str(path.resolve()) for path in self._selection.directories]
            sys.path += [path for path in dict.fromkeys(new) if path not in sys.path]

    def _load_entry_point(self, distribution: Distribution, point: EntryPoint) -> None:
        if not self._selection.takes(point.name):
            return
        info = PluginInfo(point.name, _name(distribution), _version(distribution))
        if (other := self._infos.get(point.name)) is not None:
            self._found.conflicts.append(_conflict("plugin", point.name, other, info))
            return
        self._register(info, point.load, point.module)

    def _register(self, info: PluginInfo, load: Any, module: str = "") -> None:
        try:
            plugin = load()
            _require_marked(plugin)
            self._pluggy.register(plugin, name=info.name)
            self._pluggy.check_pending()
            if not info.distribution and not info.version:
                info = replace(info, version=source_version(plugin))
            if module:
                info = replace(info, sources=package_sources(module))
            self._collect(info, plugin)
        except (Exception, SystemExit) as error:  # a plugin must not end vime, least of all with exit code 0
            if self._pluggy.has_plugin(info.name):
                self._pluggy.unregister(name=info.name)
            info = replace(info, error=f"{type(error).__name__}: {error}")
        self._infos[info.name] = info

    def _collect(self, info: PluginInfo, plugin: object) -> None:
        for entry in [Entry(registration, info) for registration in _registrations(plugin)]:
            taken = [claim for claim in entry.registration.claims if claim in self._found.claims]
            if taken:
                kind, *what = taken[0]
                other = self._found.claims[taken[0]].plugin
                self._found.conflicts.append(_conflict(kind, " ".join(what), other, info))
            else:
                self._found.entries[entry.registration.claims[0]] = entry
                self._found.claims |= dict.fromkeys(entry.registration.claims, entry)


class _Hooks:
    """``hooks.vime_after_step(step=..., metrics=...)``."""

    def __init__(self, manager: PluginManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        def call(**arguments: Any) -> list[Any]:
            return self._manager.call_hook(name, arguments)

        return call


def _require_marked(plugin: object) -> None:
    """Raise TypeError for a function that looks like a hook and would be ignored."""
    own = getattr(plugin, "__name__", None)
    for name, member in vars(plugin).items():
        looks_like_one = name.startswith(f"{PROJECT}_") and inspect.isroutine(member)
        if looks_like_one and not hasattr(member, f"{PROJECT}_impl") and _is_own(name, member, own):
            raise TypeError(f"{name} looks like a hook but is not marked with @hookimpl")


def _is_own(name: str, member: object, module: object) -> bool:
    """A hook by its name, or any function that the plugin's own module defines."""
    return name in HOOKS or getattr(member, "__module__", None) == module


def _repair(info: PluginInfo) -> str:
    if info.distribution:
        return f"Repair or uninstall {info.distribution}, or set plugins.disable = [{info.name!r}]."
    return (
        "Correct the module, its name, or where it is: beside the configuration file, in an installed package or on"
        " PYTHONPATH."
    )


def _registrations(plugin: object) -> Iterator[Registration]:
    for hook in REGISTRATION_HOOKS:
        implementation = getattr(plugin, hook, None)
        if implementation is None:
            continue
        results: Iterable[object] = implementation() or ()
        for registration in results:
            if not isinstance(registration, Registration):
                raise TypeError(f"{hook} yielded {registration!r}, which is no registration")
            yield registration


def _conflict(kind: str, name: str, first: PluginInfo, second: PluginInfo) -> PluginError:
    return PluginError(
        f"{kind} {name!r} is registered twice: by {first.origin} (plugin {first.name!r})"
        f" and by {second.origin} (plugin {second.name!r})",
        remedy=f"Uninstall one of them, or set plugins.disable = [{second.name!r}].",
        code="VIME-PLUGIN-006",
    )


def _entry_points() -> list[tuple[Distribution, EntryPoint]]:
    found: dict[tuple[str, str, str], tuple[Distribution, EntryPoint]] = {}
    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group == PROJECT:
                found.setdefault((_name(distribution), point.name, point.value), (distribution, point))
    return [found[key] for key in sorted(found)]


def _name(distribution: Distribution) -> str:
    """An installation that was damaged may have no name: its directory then stands for it."""
    return _metadata(distribution, "Name") or Path(str(getattr(distribution, "_path", "a distribution"))).name


def _version(distribution: Distribution) -> str:
    return _metadata(distribution, "Version") or "of unknown version"


def _metadata(distribution: Distribution, key: str) -> str:
    metadata = cast("Any", distribution.metadata)  # None where the file is missing, whatever its type says
    return str(metadata[key] or "") if metadata is not None and key in metadata else ""
