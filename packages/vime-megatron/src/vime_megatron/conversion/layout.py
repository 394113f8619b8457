"""Which part of a checkpoint each of several ranks writes: layers by stage, matrices cut by tensor rank.

The cuts are Megatron's: the outputs of column-parallel linears, embedding and output layer, the inputs of row-parallel
ones. The checkpoint says of every part where it lies in its tensor, so that any other layout reads it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from vime_core.backends import Ranks
from vime_core.errors import ConfigError

TENSOR: Final = "--tensor-model-parallel-size"
PIPELINE: Final = "--pipeline-model-parallel-size"
LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
ROW_PARALLEL: Final = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Layout:
    """How many ranks share each tensor, and how many stages share the layers; ranks of one stage are neighbours."""

    tensor: int = 1
    pipeline: int = 1

    def share(self, state: Mapping[str, Any], rank: int, layers: int) -> dict[str, Any]:
        """What ``rank`` writes of Megatron's sharded state of a whole model, by name; every element has one writer."""
        stage, tensor_rank = divmod(rank, self.tensor)
        own: dict[str, Any] = {name: one for name, one in state.items() if self._stage(name, layers) == stage}
        apply_factories(own)
        parts = {f"{name}.{number}": part for name, one in own.items() for number, part in enumerate(_listed(one))}
        cut = {name: self._cut(name, part, tensor_rank) for name, part in parts.items()}
        return {name: part for name, part in cut.items() if part is not None}

    def _stage(self, name: str, layers: int) -> int:
        if found := LAYER.search(name):
            return int(found[1]) * self.pipeline // layers
        return 0 if name.startswith("embedding.") else self.pipeline - 1

    def _cut(self, name: str, part: Any, tensor_rank: int) -> Any:
        """The tensor rank's piece; what is not cut is the first rank's."""
        whole = replace(part, replica_id=0) if tensor_rank == 0 else None
        if isinstance(part, ShardedObject) or part.data.ndim < 2:
            return whole
        axis = 1 if any(suffix in name for suffix in ROW_PARALLEL) else 0
        if part.local_shape[axis] % self.tensor:
            return whole
        return _piece(part, axis, tensor_rank, self.tensor)


def chosen_layout(ranks: Ranks, flags: Mapping[str, str | None], layers: int) -> Layout:
    """The layout that Megatron's flags ask for; without them all ranks are stages.

    Raises:
        ConfigError: it does not fit the ranks that were started, or has more stages than the model has layers.
    """
    tensor = _size(TENSOR, flags, 1)
    layout = Layout(tensor, _size(PIPELINE, flags, max(1, ranks.world_size // tensor)))
    if layout.tensor * layout.pipeline != ranks.world_size:
        raise ConfigError(
            f"{TENSOR} {layout.tensor} and {PIPELINE} {layout.pipeline} are of {layout.tensor * layout.pipeline} ranks,"
            f" and {ranks.world_size} were started",
            remedy="Start as many: torchrun --nproc-per-node N tools/convert_hf_to_torch_dist.py ...",
            code="VIME-CONFIG-068",
        )
    if layout.pipeline > layers:
        raise ConfigError(
            f"{PIPELINE} {layout.pipeline} is more than the model's {layers} layers",
            remedy=f"Set {TENSOR}, or start fewer ranks.",
            code="VIME-CONFIG-068",
        )
    return layout


def _size(flag: str, flags: Mapping[str, str | None], default: int) -> int:
    text = flags.get(flag)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text} is no number of ranks", remedy="Give 1 or more.", code="VIME-CONFIG-068")
    return int(text)


def _listed(one: Any) -> Iterator[Any]:
    yield from one if isinstance(one, list) else (one,)


def _piece(part: ShardedTensor, axis: int, rank: int, size: int) -> ShardedTensor:
    length = part.local_shape[axis] // size
    data: Any = part.data
    in_file = axis + part.prepend_axis_num
    offset, fragments = list(part.global_offset), list(part.axis_fragmentations or ())
    offset[in_file] += rank * length
    fragments[in_file] *= size
    return replace(
        part,
        data=data.narrow(axis, rank * length, length).contiguous(),
        local_shape=tuple(length if i == axis else n for i, n in enumerate(part.local_shape)),
        global_offset=tuple(offset),
        axis_fragmentations=tuple(fragments),
        replica_id=0,
    )
