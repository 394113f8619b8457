"""Find plugins through entry points and keep what they register, with the distribution that each came from."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TypeVar

import pluggy

from vime_core.errors import PluginError
from vime_core.plugins.markers import PROJECT
from vime_core.plugins.specs import LifecycleSpecs, RegistrationSpecs
from vime_core.plugins.types import Registration

_Entry = TypeVar("_Entry", bound=Registration)

REGISTRATION_HOOKS = tuple(name for name in vars(RegistrationSpecs) if name.startswith(f"{PROJECT}_"))


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as it was found: ``error`` is why it could not be used, empty when it could."""

    name: str
    distribution: str
    version: str
    error: str = ""


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
        modules: extra modules to load as plugins, by import path.
    """

    allow: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass
class _Found:
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict[tuple[str, str], Entry])
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
        for module in manager._selection.modules:
            manager.load_module(module)
        return manager

    @property
    def hook(self) -> Any:
        """The pluggy relay, for lifecycle calls."""
        return self._pluggy.hook

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
            remedy=f"{hint}Use a known name, or install the package that registers {name!r}.",
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
                f"plugin {info.name!r} of {info.distribution} {info.version} failed to load: {info.error}",
                remedy=f"Repair or uninstall {info.distribution}, or set plugins.disable = [{info.name!r}].",
                code="VIME-PLUGIN-002",
            )
        self._require_named(self._selection.disable, "plugins.disable")
        self._require_named(self._selection.allow or (), "plugins.allow")

    def load_module(self, module: str) -> None:
        """Load one module as a plugin."""
        self._register(PluginInfo(module, "(module)", ""), lambda: importlib.import_module(module))

    def register(self, plugin: object, info: PluginInfo) -> None:
        """Register an object as a plugin; for tests and embedding."""
        self._register(info, lambda: plugin)

    def _require_named(self, names: Sequence[str], field_name: str) -> None:
        installed = {point.name for _, point in _entry_points()} | set(self._infos)
        for name in names:
            if name not in installed:
                raise PluginError(
                    f"{field_name} names {name!r}, which is not installed",
                    remedy=f"Installed plugins: {', '.join(sorted(installed))}.",
                    code="VIME-PLUGIN-005",
                )

    def _load_entry_point(self, distribution: Distribution, point: EntryPoint) -> None:
        if self._selection.allow is not None and point.name not in self._selection.allow:
            return
        if point.name in self._selection.disable:
            return
        info = PluginInfo(point.name, distribution.metadata["Name"], distribution.version)
        if (other := self._infos.get(point.name)) is not None:
            self._found.conflicts.append(_conflict("plugin", point.name, other, info))
            return
        self._register(info, point.load)

    def _register(self, info: PluginInfo, load: Any) -> None:
        try:
            plugin = load()
            self._pluggy.register(plugin, name=info.name)
            self._pluggy.check_pending()
            self._collect(info, plugin)
        except (Exception, SystemExit) as error:  # a plugin must not end vime, least of all with exit code 0
            if self._pluggy.has_plugin(info.name):
                self._pluggy.unregister(name=info.name)
            info = PluginInfo(info.name, info.distribution, info.version, f"{type(error).__name__}: {error}")
        self._infos[info.name] = info

    def _collect(self, info: PluginInfo, plugin: object) -> None:
        entries = [Entry(registration, info) for registration in _registrations(plugin)]
        for entry in entries:
            key = (entry.registration.kind, entry.registration.name)
            if key in self._found.entries:
                other = self._found.entries[key].plugin
                self._found.conflicts.append(_conflict(*key, other, info))
            else:
                self._found.entries[key] = entry


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
        f"{kind} {name!r} is registered twice: by {first.distribution} {first.version} (plugin {first.name!r})"
        f" and by {second.distribution} {second.version} (plugin {second.name!r})",
        remedy=f"Uninstall one of them, or set plugins.disable = [{second.name!r}].",
        code="VIME-PLUGIN-006",
    )


def _entry_points() -> list[tuple[Distribution, EntryPoint]]:
    found: dict[tuple[str, str, str], tuple[Distribution, EntryPoint]] = {}
    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group == PROJECT:
                found.setdefault((distribution.metadata["Name"], point.name, point.value), (distribution, point))
    return [found[key] for key in sorted(found)]
