"""A step's samples as columns, and the digests of what each stage of a step computed.

The columns are what the step's Parquet file holds. A column is flat: a scalar a sample, or the samples' lists one
after the other with the length of each. Samples stand in (prompt index, sample index) order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vime_core.errors import RecordError
from vime_core.record.digest import array_digest, merkle_root
from vime_core.types import Float32Array, KeptTokens, Sample, SampleKey

Form = Literal["scalar", "list", "text"]


@dataclass(frozen=True)
class Field:
    """A column's name and type; ``text`` is UTF-8 bytes a sample."""

    name: str
    dtype: str
    form: Form = "scalar"


@dataclass(frozen=True)
class Column:
    """Values of all samples one after the other; ``lengths`` int64 [N] says how many are each sample's."""

    values: NDArray[Any]
    lengths: NDArray[np.int64] | None = None

    def rows(self) -> list[NDArray[Any]]:
        """Each sample's own values, for a column of lists."""
        assert self.lengths is not None
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


Columns = Mapping[str, Column]

KEY_FIELDS: Final = (Field("prompt_index", "int64"), Field("sample_index", "int64"))
SAMPLE_FIELDS: Final = (
    *KEY_FIELDS,
    Field("dataset_index", "int64"),
    Field("prompt_tokens", "int32", "list"),
    Field("seed", "uint64"),
    Field("response_tokens", "int32", "list"),
    Field("loss_mask", "bool", "list"),
    Field("weight_version", "int64"),
    Field("finish_reason", "uint8", "text"),
    Field("response_text", "uint8", "text"),
    Field("kept_tokens", "int32", "list"),
    Field("kept_counts", "int32", "list"),
    Field("rollout_log_probs", "float32", "list"),
    Field("reward", "float64"),
)
TRAIN_FIELDS: Final = (
    Field("advantage", "float32"),
    Field("update", "int64"),
    Field("train_log_probs", "float32", "list"),
)
FIELDS: Final = (*SAMPLE_FIELDS, *TRAIN_FIELDS)
REFERENCE: Final = Field("reference_log_probs", "float32", "list")
"""Only where a run has a reference model."""

PROMPT_COLUMNS: Final = ("dataset_index", "prompt_tokens", "seed")
TOKEN_COLUMNS: Final = (
    *("response_tokens", "loss_mask", "weight_version", "finish_reason", "response_text"),
    *("kept_tokens", "kept_counts"),
)
_ATTRIBUTES: Final = {"kept_tokens": "kept.tokens", "kept_counts": "kept.counts"}
"""Where a sample holds a column that is none of its own attributes."""


@dataclass(frozen=True)
class StepDigests:
    """Digests of a step's stages up to the advantages: fields of `vime_core.record.schema.StepEntry`."""

    prompts: str
    tokens: str
    rollout_log_probs: str
    rewards: str
    advantages: str


def step_digests(samples: Sequence[Sample], advantages: Float32Array) -> StepDigests:
    """Digest a step's samples and their advantages, fp32 [N], one a sample.

    Raises:
        RecordError: the samples are out of order, a key comes twice, or lengths or dtypes don't fit.
    """
    return stage_digests(sample_columns(samples) | {"advantage": _advantages(advantages, len(samples))})


def stage_digests(columns: Columns) -> StepDigests:
    """The digests of a step's columns, whether they come from live samples or from a record."""
    return StepDigests(**sampled_digests(columns), advantages=_columns_digest(columns, {"advantage": "advantage"}))


def sampled_digests(columns: Columns) -> dict[str, str]:
    """The digests of the stages that need no training: those of an evaluation, and the first four of a step."""
    return {
        "prompts": _columns_digest(columns, {name: name for name in PROMPT_COLUMNS}),
        "tokens": _columns_digest(columns, {name: name for name in TOKEN_COLUMNS}),
        "rollout_log_probs": _columns_digest(columns, {"log_probs": "rollout_log_probs"}),
        "rewards": _columns_digest(columns, {"reward": "reward"}),
    }


def log_prob_digest(keys: Sequence[SampleKey], log_probs: Sequence[Float32Array]) -> str:
    """The digest of log-probs, fp32 [R] a sample: of rollout and trainer alike, so equal bits give equal digests."""
    columns = _key_columns(keys) | {"log_probs": _float_lists("train_log_probs", keys, log_probs)}
    return _columns_digest(columns, {"log_probs": "log_probs"})


def update_log_prob_digest(columns: Columns, update: int) -> str:
    """`log_prob_digest` of the samples that one optimizer step trained on."""
    keys = sample_keys(columns)
    rows = columns["train_log_probs"].rows()
    chosen = [i for i, number in enumerate(columns["update"].values.tolist()) if number == update]
    return log_prob_digest([keys[i] for i in chosen], [rows[i] for i in chosen])


def reference_digest(columns: Columns) -> str:
    """`log_prob_digest` of the reference model; empty where there is none."""
    if REFERENCE.name not in columns:
        return ""
    return log_prob_digest(sample_keys(columns), columns[REFERENCE.name].rows())


def sample_keys(columns: Columns) -> list[SampleKey]:
    """(prompt index, sample index) of each sample."""
    return list(zip(columns["prompt_index"].values.tolist(), columns["sample_index"].values.tolist(), strict=True))


def sample_columns(samples: Sequence[Sample]) -> dict[str, Column]:
    """What the samples themselves hold. Raises RecordError as `step_digests` does."""
    keys = [sample.key for sample in samples]
    require_order(keys)
    for sample in samples:
        _require_lengths(sample)
    columns = {
        field.name: _column(field, list(map(attrgetter(_ATTRIBUTES.get(field.name, field.name)), samples)))
        for field in SAMPLE_FIELDS
    }
    columns["rollout_log_probs"] = _float_lists("rollout_log_probs", keys, [s.rollout_log_probs for s in samples])
    return columns


def train_columns(
    keys: Sequence[SampleKey],
    advantages: Float32Array,
    updates: Sequence[int],
    train_log_probs: Sequence[Float32Array],
    reference: Sequence[Float32Array] | None = None,
) -> dict[str, Column]:
    """What training added: advantage, number of the optimizer step, and log-probs of each sample."""
    extra = {} if reference is None else {REFERENCE.name: _float_lists(REFERENCE.name, keys, reference)}
    return extra | {
        "advantage": _advantages(advantages, len(keys)),
        "update": Column(np.asarray(updates, dtype=np.int64)),
        "train_log_probs": _float_lists("train_log_probs", keys, train_log_probs),
    }


def require_order(keys: Sequence[SampleKey]) -> None:
    """Raise RecordError when a key comes twice or out of order: samples are matched by it."""
    for before, key in pairwise(keys):
        if key <= before:
            what = "comes twice" if key == before else f"stands after {before}"
            raise _unfit(f"sample {key} {what}", "Sort samples by (prompt index, sample index), each key once.")


def samples_from(columns: Columns) -> list[Sample]:
    """The samples that the columns describe."""
    lists: dict[str, list[Any]] = {field.name: _values(field, columns[field.name]) for field in SAMPLE_FIELDS}
    kept = [KeptTokens(*pair) for pair in zip(lists.pop("kept_tokens"), lists.pop("kept_counts"), strict=True)]
    rows = zip(*lists.values(), strict=True)
    return [Sample(**dict(zip(lists, row, strict=True)), kept=own) for row, own in zip(rows, kept, strict=True)]


def _columns_digest(columns: Columns, chosen: Mapping[str, str]) -> str:
    """Root over the key columns and ``chosen`` (leaf name to column name); a list column has its lengths as a leaf."""
    leaves: dict[str, str] = {}
    for leaf, name in {**{field.name: field.name for field in KEY_FIELDS}, **chosen}.items():
        column = columns[name]
        if column.lengths is not None:
            leaves[f"{leaf}.lengths"] = array_digest(f"{leaf}.lengths", column.lengths)
        leaves[leaf] = array_digest(leaf, column.values)
    return merkle_root(leaves)


def _key_columns(keys: Sequence[SampleKey]) -> dict[str, Column]:
    return {
        field.name: Column(np.array([key[i] for key in keys], dtype=np.int64)) for i, field in enumerate(KEY_FIELDS)
    }


def _column(field: Field, values: Sequence[Any]) -> Column:
    if field.form == "scalar":
        return Column(_array(field, values))
    if field.form == "text":
        values = [value.encode() for value in values]
        return Column(np.frombuffer(b"".join(values), dtype=np.uint8), _lengths(values))
    return Column(_array(field, [item for value in values for item in value]), _lengths(values))


def _array(field: Field, values: Sequence[Any]) -> NDArray[Any]:
    try:
        return np.array(values, dtype=field.dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise _unfit(
            f"{field.name} of a sample is no {field.dtype}: {error}", "Correct what filled the sample."
        ) from error


def _float_lists(name: str, keys: Sequence[SampleKey], values: Sequence[Float32Array]) -> Column:
    if len(values) != len(keys):
        raise _unfit(f"{name} has {len(values)} arrays for {len(keys)} samples", "Give one array for each sample.")
    for key, value in zip(keys, values, strict=True):
        if value.dtype != np.float32 or value.ndim != 1:
            raise _unfit(
                f"{name} of sample {key} is {value.dtype} {value.shape}, not float32 [R]",
                "Hand over the fp32 values as they were computed, without conversion.",
            )
    flat = np.concatenate(values) if values else np.zeros(0, dtype=np.float32)
    return Column(flat, _lengths(values))


def _advantages(advantages: Float32Array, count: int) -> Column:
    if advantages.dtype != np.float32 or advantages.shape != (count,):
        raise _unfit(
            f"advantages are {advantages.dtype} {advantages.shape} for {count} samples, not float32 [{count}]",
            "Give one fp32 advantage for each sample.",
        )
    return Column(advantages)


def _lengths(values: Iterable[Any]) -> NDArray[np.int64]:
    return np.array([len(value) for value in values], dtype=np.int64)


def _require_lengths(sample: Sample) -> None:
    tokens = len(sample.response_tokens)
    for name in ("rollout_log_probs", "loss_mask"):
        if len(getattr(sample, name)) != tokens:
            raise _unfit(
                f"{name} of sample {sample.key} has {len(getattr(sample, name))} values for {tokens} response tokens",
                "Give one value for each response token.",
            )
    counts = sample.kept.counts
    if len(counts) not in (0, tokens) or sum(counts) != len(sample.kept.tokens):
        raise _unfit(
            f"kept of sample {sample.key} has {len(counts)} counts and {len(sample.kept.tokens)} tokens for"
            f" {tokens} response tokens",
            "Give one count for each response token, and as many tokens as they sum to; or none at all.",
        )


def _values(field: Field, column: Column) -> list[Any]:
    if field.form == "scalar":
        return column.values.tolist()
    rows = column.rows()
    if field.form == "text":
        return [row.tobytes().decode() for row in rows]
    return rows if field.dtype == "float32" else [tuple(row.tolist()) for row in rows]


def _unfit(message: str, remedy: str) -> RecordError:
    return RecordError(message, remedy=remedy, code="VIME-RECORD-004")
