"""Find the structure that some plugin registered for a model type."""

from __future__ import annotations

from vime_core.config.schema import PluginsSection
from vime_core.errors import PluginError
from vime_core.plugins.manager import PluginManager, PluginSelection
from vime_core.plugins.types import ModelStructure
from vime_megatron.structures.types import Structure

BACKEND = "megatron"


def find_structure(model_type: str, plugins: PluginsSection) -> Structure:
    """The `Structure` registered for a HF ``model_type`` and this backend.

    Raises:
        PluginError: nobody registered it.
    """
    selection = PluginSelection(allow=plugins.allow, disable=plugins.disable, modules=plugins.modules)
    registered = PluginManager.discover(selection).of_kind(ModelStructure)
    known = {entry.name: entry for entry in registered if entry.backend == BACKEND}
    if model_type not in known:
        raise PluginError(
            f"the model has model_type = {model_type!r}, a structure that no plugin registered for trainer.backend"
            f" = {BACKEND!r}. Known: {', '.join(sorted(known)) or 'none'}",
            remedy="Use a model of a known structure, or install a plugin that registers this one.",
            code="VIME-PLUGIN-021",
        )
    structure: Structure = known[model_type].load()
    return structure
