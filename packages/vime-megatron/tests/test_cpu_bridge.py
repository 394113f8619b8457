from __future__ import annotations

import pytest
import torch

from vime_megatron.cpu_bridge import cuda_bridge

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bridge does nothing where CUDA is")


def test_calls_that_assume_cuda_get_the_cpu() -> None:
    with cuda_bridge():
        made = [
            torch.zeros(1, device="cuda"),
            torch.tensor([1.0], device="cuda"),
            torch.empty(2, device=torch.cuda.current_device()),
            torch.ones(1).cuda(),
        ]
        torch.cuda.synchronize()
        assert torch.cuda.current_stream() is None
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_tensor_types_are_named_as_on_cuda() -> None:
    with cuda_bridge():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_torch_is_untouched_outside() -> None:
    with cuda_bridge():
        pass
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()


def test_an_exception_undoes_it_too() -> None:
    with pytest.raises(KeyError), cuda_bridge():
        raise KeyError
    assert torch.zeros(1).type() == "torch.FloatTensor"
