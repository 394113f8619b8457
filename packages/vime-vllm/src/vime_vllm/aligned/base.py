"""The base of every aligned model class: weights in and out by Hugging Face names, operations, the sampler's hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vime_core.alignment.taps import LOGITS, records, tap
from vime_vllm.aligned.installed import installed
from vime_vllm.aligned.modules import Linear, is_plain
from vime_vllm.copying import copy_all
from vime_vllm.engine_side.weights import parameters, submodules


@dataclass(frozen=True)
class Place:
    """Where a tensor of a Hugging Face directory lies in the model: a parameter, or a fused part of one."""

    parameter: str
    part: int | None = None
    first: int = 0
    rows: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """The view of the parameter."""
        return tensor if self.part is None else tensor[self.first : self.first + self.rows]


class AlignedModel(nn.Module):
    """A vLLM model class of an alignment contract.

    A subclass sets ``self.model`` in ``__init__(*, vllm_config, prefix="")``: modules of `vime_vllm.aligned.modules`
    with ``self.operations``, under the names of a Hugging Face directory. ``self.model.embed_tokens(ids)`` is the
    embedding, ``self.model(embedded, positions)`` gives hidden states [T, H], and the subclass's
    ``logits(hidden_states)`` gives [T, V]. It may define the static method ``check_config(config)``, which raises
    PolicyError for a configuration that its contract does not cover, before an engine is started. One that is built
    otherwise overrides what vLLM calls: ``embed_input_ids``, ``forward`` (which begins with `begin_step`) and
    ``compute_logits`` (which calls `tap_logits`).

    Attributes:
        ignored_weights: ends of names in a directory that hold no weight of this model.
        engine_environment: variables that the engine's processes need for this class.
        model_runner: the newest of vLLM's model runners that was seen to serve this class on a GPU.
        vime_loads_in_place: whether `load_weights` alone is a whole update; not where something else keeps what it
            made of weights.
    """

    model: Any
    engine_environment: ClassVar[Mapping[str, str]] = {}
    model_runner: ClassVar[str] = "V1"
    vime_loads_in_place: ClassVar[bool] = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.ignored_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)
        self.installed = installed(vllm_config)
        self.operations = self.installed.operations
        self.config: Any = vllm_config.model_config.hf_config
        self._step: list[Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors by Hugging Face names; returns the names of the parameters that got all of their parts.

        Raises:
            ValueError: a name that the model does not have, or a shape that does not fit.
        """
        own, loaded = dict(self.named_parameters()), set[str]()
        places = self._places_of(own)
        at_once: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for name, tensor in weights:
                if name.endswith(self.ignored_weights):
                    continue
                if name not in places:
                    raise ValueError(f"{type(self).__name__} has no weight {name!r}")
                place, parameter = places[name], own[places[name].parameter]
                loader: Any = parameter.weight_loader  # type: ignore[attr-defined]
                if is_plain(loader) and tensor.device == parameter.device:
                    at_once.append((place.of(parameter.data), tensor))
                else:
                    loader(parameter, tensor, *(() if place.part is None else (place.part,)))
                loaded.add(name)
        copy_all([target for target, _ in at_once], [source for _, source in at_once])
        missing = {place.parameter for name, place in places.items() if name not in loaded}
        return {places[name].parameter for name in loaded} - missing

    def vime_kernel_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, view) of every tensor that the operations read, in layer order."""
        own = dict(self.named_parameters())
        for name, place in self._places_of(own).items():
            yield name, place.of(own[place.parameter].data)

    def stale_tensors(self) -> list[str]:
        """Names of tensors that kernels read, derived from weights, and no longer what these weights give."""
        return []

    def places(self) -> dict[str, Place]:
        """Where each tensor of a Hugging Face directory lies."""
        found: dict[str, Place] = {}
        for path, module in submodules(self):
            for leaf, _ in parameters(module):
                found |= _module_places(path, module, leaf)
        return found

    def _places_of(self, own: Mapping[str, nn.Parameter]) -> Mapping[str, Place]:
        """`places`, remembered as long as the model has the same parameters by name."""
        known = self.__dict__.get("_known_places")
        if known is None or known[0] != list(own):
            known = self.__dict__["_known_places"] = list(own), self.places()
        return known[1]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits (T, V) of hidden states (T, H), rounded to the model's dtype."""
        raise NotImplementedError(f"{type(self).__name__} defines no logits")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(T, H) of ids (T)."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, H) after the final norm."""
        if input_ids is None or intermediate_tensors is not None or inputs_embeds is not None:
            raise ValueError("an aligned model takes token ids, on one pipeline stage")
        self.begin_step(positions)
        return self.model(self.embed_input_ids(input_ids), positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits (T, V) as they were rounded; whatever reads them here widens them itself."""
        logits = self.logits(hidden_states)
        self.tap_logits(logits)
        return logits

    def begin_step(self, positions: Tensor) -> None:
        """Remember the positions (T) of the tokens of this engine step."""
        self._step[:] = [positions]

    def tap_logits(self, logits: Tensor) -> None:
        """Hand over logits (n, V). A recording holds one sequence, whose logits are those of a step's last tokens."""
        if records():
            for positions in self._step:
                tap(LOGITS, positions[-len(logits) :], logits)

    @staticmethod
    def get_model_state_cls() -> Any:
        """Asked by model runner V2 only: where its sampler comes from."""
        from vime_vllm.aligned.sampler_v2 import AlignedModelState

        return AlignedModelState


def _module_places(path: str, module: nn.Module, leaf: str) -> dict[str, Place]:
    parameter = f"{path}.{leaf}" if path else leaf
    if not (isinstance(module, Linear) and module.parts):
        return {parameter: Place(parameter)}
    parent, found, first = path.rpartition(".")[0], dict[str, Place](), 0
    for number, (part, rows) in enumerate(zip(module.parts, module.part_rows, strict=True)):
        found[f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}"] = Place(parameter, number, first, rows)
        first += rows
    return found
