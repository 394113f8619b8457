"""Faults planted in a live model: each is caught, by the census or by the bits, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vime_core.errors import ContractViolation
from vime_core.numerics import Operations, load_provider
from vime_megatron.aligned.census import _Watch, census, takeable
from vime_megatron.aligned.layer import AlignedMlp
from vime_megatron.aligned.modules import AlignedColumnLinear, AlignedEmbedding, AlignedRmsNorm
from vime_megatron.aligned.sequences import LayerTaps
from vime_megatron.aligned.testing import WholeSequence, unequal_bits
from vime_megatron.model import DTYPES
from vime_megatron.testing import random_sequences, run_config

SEQUENCES = random_sequences([(9, 60), (1, 40), (20, 30)])


@pytest.fixture(params=["fp32", "bf16"])
def trainer(request: Any, llama: Path, open_aligned: Callable[..., Any]) -> Any:
    return open_aligned(llama, run_config(0.7, dtype=request.param))


@pytest.fixture
def wrong(trainer: Any, llama: Path, operations: Operations) -> Callable[[], int]:
    """Counts log-probs that differ from those of the untouched weights."""
    reference = WholeSequence.open(operations, llama, DTYPES[trainer._context.config.trainer.dtype])
    expected = torch.cat([reference.log_probs(s, 0.7) for s in SEQUENCES])

    def count() -> int:
        found = trainer.log_probs([SEQUENCES])
        return unequal_bits(torch.cat([torch.from_numpy(part) for part in found]), expected)

    assert count() == 0
    return count


def first_unequal_tap(trainer: Any, llama: Path, operations: Operations) -> str:
    reference = WholeSequence.open(operations, llama, DTYPES[trainer._context.config.trainer.dtype])
    expected: dict[str, Tensor] = {}
    reference.log_probs(SEQUENCES[0], 0.7, lambda name, rows: expected.__setitem__(name, rows))
    taps = trainer.record_taps(SEQUENCES[0])
    return next(name for name, (_, rows) in taps.items() if unequal_bits(rows, expected[name]))


def layer(trainer: Any, number: int) -> Any:
    return trainer._model.decoder.layers[number]


def refused(trainer: Any, named: str) -> None:
    with pytest.raises(ContractViolation, match=named) as caught:
        trainer.processes()
    assert caught.value.code == "VIME-ALIGN-036"


def test_the_census_counts_what_ran(trainer: Any) -> None:
    assert trainer.processes()[0].settings["modules"] == {
        "AlignedAddRmsNorm": 2,
        "AlignedAttention": 2,
        "AlignedColumnLinear": 5,  # the output layer among them
        "AlignedEmbedding": 1,
        "AlignedLayer": 2,
        "AlignedMlp": 2,
        "AlignedModel": 1,
        "AlignedRmsNorm": 3,
        "AlignedRowLinear": 4,
        "AlignedSelfAttention": 2,
        "TransformerBlock": 1,
    }


def test_classes_that_megatron_fixes_are_replaced(trainer: Any) -> None:
    assert type(trainer._model.output_layer) is AlignedColumnLinear
    assert type(trainer._model.embedding.word_embeddings) is AlignedEmbedding
    names = {name for name, _ in trainer._model.named_parameters()}
    assert "embedding.word_embeddings.weight" in names


def test_one_ulp_in_one_weight(trainer: Any, wrong: Callable[[], int], llama: Path, operations: Operations) -> None:
    weight = layer(trainer, 1).mlp.linear_fc1.weight
    with torch.no_grad():
        flat = weight.view(-1)
        largest = flat.abs().argmax()  # a small one may vanish in the sums
        flat[largest] = torch.nextafter(flat[largest], torch.tensor(torch.inf, dtype=weight.dtype))
    assert wrong() > 0
    if weight.dtype == torch.float32:  # in bf16 one sequence may not show it
        assert first_unequal_tap(trainer, llama, operations) == "layers.1.gate_up"


def test_another_eps(trainer: Any, wrong: Callable[[], int], llama: Path, operations: Operations) -> None:
    layer(trainer, 1).pre_mlp_layernorm.eps = 1e-3
    assert wrong() > len(SEQUENCES)
    assert first_unequal_tap(trainer, llama, operations) == "layers.1.post_attention_norm"


def test_another_rotary_table(trainer: Any, wrong: Callable[[], int], llama: Path, operations: Operations) -> None:
    trainer._model.rope_table.copy_(trainer._model.rope_table.roll(1, 0))
    assert wrong() > 0
    assert first_unequal_tap(trainer, llama, operations) == "layers.0.q_rope"


def test_another_temperature(trainer: Any, wrong: Callable[[], int]) -> None:
    trainer._temperature = 0.707
    assert wrong() > 100


def test_an_operation_swapped_in_one_module(
    trainer: Any, wrong: Callable[[], int], llama: Path, operations: Operations
) -> None:
    def torch_swiglu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    mlp = layer(trainer, 0).mlp
    mlp.operations = replace(mlp.operations, kernels=replace(mlp.operations.kernels, swiglu=torch_swiglu))
    refused(trainer, "2 sets of operations")
    if trainer._context.config.trainer.dtype == "fp32":  # one rounding to bf16 hides a last bit of fp32
        assert wrong() > 0
        assert first_unequal_tap(trainer, llama, operations) == "layers.0.swiglu"


def test_another_provider_in_one_module(trainer: Any) -> None:
    layer(trainer, 0).input_layernorm.operations = load_provider("reference")
    refused(trainer, r"2 sets of operations \(cpu [0-9a-f]{12}, reference [0-9a-f]{12}\)")


def test_a_foreign_module(trainer: Any, wrong: Callable[[], int]) -> None:
    norm = layer(trainer, 1).input_layernorm
    foreign = torch.nn.RMSNorm(len(norm.weight), eps=norm.eps, dtype=norm.weight.dtype)
    foreign.weight = norm.weight
    layer(trainer, 1).input_layernorm = foreign
    refused(trainer, "in RMSNorm")
    if norm.weight.dtype == torch.float32:
        assert wrong() > 0  # in bf16 the rounded norms agree; the census sees it all the same


def test_arithmetic_in_a_module_of_ours(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AlignedMlp.forward

    def scaled(self: AlignedMlp, hidden_states: Tensor, taps: LayerTaps) -> Tensor:
        return original(self, hidden_states, taps) * 1.0

    monkeypatch.setattr(AlignedMlp, "forward", scaled)
    refused(trainer, r"aten::mul in AlignedMlp")


def test_a_hook_that_computes(trainer: Any) -> None:
    handle = layer(trainer, 0).register_forward_hook(lambda _, __, output: (output[0] + 0.0, output[1]))
    refused(trainer, "aten::add")
    handle.remove()
    trainer.processes()


def test_a_rounding_to_another_dtype(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def through_half(self: AlignedRmsNorm, x: Tensor) -> Tensor:
        return self.operations.rms_norm(x.half().to(x.dtype), self.weight, self.eps)

    monkeypatch.setattr(AlignedRmsNorm, "forward", through_half)
    refused(trainer, "aten::_to_copy in AlignedRmsNorm")


def test_a_copy_into_another_dtype(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def through_half(self: AlignedRmsNorm, x: Tensor) -> Tensor:
        return self.operations.rms_norm(
            torch.empty_like(x).copy_(torch.empty_like(x, dtype=torch.half)), self.weight, 1
        )

    monkeypatch.setattr(AlignedRmsNorm, "forward", through_half)
    refused(trainer, "aten::copy_ in AlignedRmsNorm")


def test_a_model_that_computes_outside_is_refused_at_its_start(
    llama: Path, open_aligned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AlignedEmbedding, "forward", lambda self, ids: self.weight[ids] * 1.0)
    with pytest.raises(ContractViolation, match="aten::mul in AlignedEmbedding"):
        open_aligned(llama)
    monkeypatch.undo()
    open_aligned(llama)  # nothing is left open


class Calling(torch.nn.Module):
    """Calls a function; ``held`` is the file of the class of its operations."""

    def __init__(self, function: Callable[[Tensor], object], held: str = "") -> None:
        super().__init__()
        self.function = function
        if held:
            self.operations = object.__new__(type("Held", (Operations,), {"__module__": held}))

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def written_in(module: str) -> Callable[[Tensor], Tensor]:
    """Doubles, in a file of that name."""
    names: dict[str, Any] = {"__name__": module}
    exec("def double(x):\n    return x + x", names)
    return names["double"]


@pytest.mark.parametrize("held", ["", "one_file", "stranger.operations", "stranger.numerics.operations"])
@pytest.mark.parametrize("module", ["vime_core.loop.planted", "vime_core.numerics_planted", "stranger.models", "other"])
def test_arithmetic_outside_the_operations_of_any_package_is_named(module: str, held: str) -> None:
    model = Calling(written_in(module), held)
    with pytest.raises(ContractViolation, match="aten::add in Calling"):
        census(model, lambda: model(torch.ones(2)))


@pytest.mark.parametrize(
    ("module", "held"),
    [
        ("vime_core.numerics.norm", ""),
        ("one_file", "one_file"),
        ("stranger.operations", "stranger.operations"),
        ("stranger.numerics.kernels", "stranger.numerics.operations"),
    ],
)
def test_arithmetic_of_the_held_operations_is_theirs(module: str, held: str) -> None:
    model = Calling(written_in(module), held)
    assert census(model, lambda: model(torch.ones(2))) == {"Calling": 1}


def test_floats_beside_whole_numbers_are_computed() -> None:
    model = Calling(lambda x: x.sort())
    with pytest.raises(ContractViolation, match="aten::sort in Calling"):
        census(model, lambda: model(torch.ones(2)))


def test_a_census_that_saw_nothing_is_none() -> None:
    with pytest.raises(ContractViolation, match="called no module"):
        census(torch.nn.Linear(2, 2), lambda: None)


class Listing:
    """An operator that gives a list with an undefined tensor, as only compiled ones can."""

    _schema = torch.ops.aten.split.Tensor._schema

    def __call__(self, given: Tensor) -> list[Tensor | None]:
        return [given, None]


def test_an_undefined_tensor_in_a_list_is_given_back_to_torch_as_an_empty_one() -> None:
    given = torch.ones(2)
    first, second = _Watch(()).__torch_dispatch__(Listing(), (), (given,))
    assert first is given
    assert second.numel() == 0
    assert takeable((given, None)) == (given, None), "of several results torch takes undefined ones"
