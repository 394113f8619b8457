"""Remembered launches: a kind is as fine as what Triton compiles for, and the compiled kernel gets Triton's arguments.

Triton binds, specialises and looks kernels up as on a Hopper GPU; only its compiler and the device are stood in for.
"""

from __future__ import annotations

import runpy
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vime_core.numerics import AttentionSpec

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing of the provider 'cuda' can be tried")
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from vime_core.numerics.cuda import norm, pointwise  # noqa: E402
from vime_core.numerics.cuda.launch import Remembered, kind_of, remembered  # noqa: E402

CASES = Path(__file__).with_name("cuda_cases.py")
HOPPER = GPUTarget("cuda", 90, 32)
MODULES = ("attention", "attention_backward", "draw", "embedding", "matmul", "norm", "pointwise", "scoring")
KindOf = Callable[[Sequence[Any], Mapping[str, Any], int], tuple[Hashable, list[Any]]]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is launched here")


@cache
def kernels() -> dict[str, Remembered]:
    found = {
        f"{module}.{name}": kernel
        for module in MODULES
        for name, kernel in vars(import_module(f"vime_core.numerics.cuda.{module}")).items()
        if isinstance(kernel, Remembered) and kernel.function.__module__.endswith(module)
    }
    assert len(found) > 20
    return found


# What Triton compiles for: its own binder, for every kernel.


@cache
def binder(name: str) -> Any:
    function = kernels()[name].function
    return create_function_from_signature(function.signature, function.params, CUDABackend(HOPPER))


def place(dtype: torch.dtype, offset: int) -> Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


POINTERS = [
    place(dtype, offset) for dtype in (torch.bfloat16, torch.float32, torch.int64) for offset in (0, 1, 4, 8, 16)
]
BLOCKS = ([64, 64], [64, 128], [128, 64])
DESCRIBED = [TensorDescriptor.from_tensor(torch.zeros(256, 256, dtype=d), b, padding)
             for d in (torch.bfloat16, torch.float32) for b in BLOCKS for padding in ("zero", "nan")]  # fmt: skip
INTS = [0, 1, 2, 3, 15, 16, 17, 32, 48, 100, -1, -16, -17, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1,
        2**32 + 1, 2**63 - 1, 2**63, 2**63 + 16, 2**64 - 1, -(2**63)]  # fmt: skip
ABSENT = [None, 1, 3]
OTHERS = [None, True, False, 0.0, 1.0, 16.0, 0, 1, 3, 16, torch.nn.Parameter(place(torch.float32, 0)), POINTERS[1]]
CONSTANTS = [16, 64, False, True]
OPTIONS = [{"num_warps": 4}, {"num_warps": 8}, {"num_warps": 4, "enable_fp_fusion": False}, {"num_stages": 4}, {}]


def two_calls(name: str, chance: Random) -> list[tuple[list[Any], dict[str, Any]]]:
    """Two calls with another value of the same sort; now and then other constants or options, or another order."""
    parameters = kernels()[name].function.params
    sorts = [chance.choice([POINTERS, DESCRIBED, INTS, ABSENT, OTHERS]) for p in parameters if not p.is_constexpr]
    constants = {p.name: chance.choice(CONSTANTS) for p in parameters if p.is_constexpr}
    arguments, options = [chance.choice(sort) for sort in sorts], chance.choice(OPTIONS)
    first, index = (list(arguments), constants | options), chance.randrange(len(sorts))
    arguments[index] = chance.choice(sorts[index])
    match chance.randrange(12):
        case 0:
            options = chance.choice(OPTIONS)
        case 1:
            constants = {**constants, chance.choice(sorted(constants)): chance.choice(CONSTANTS)}
        case 2:
            constants = dict(reversed(constants.items()))
        case 3:
            arguments, other = list(first[0]), chance.randrange(len(sorts))
            arguments[index], arguments[other] = arguments[other], arguments[index]
    return [first, (arguments, constants | options)]


def compiled_for(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> object:
    """Triton's specialisation and options."""
    _, specialization, rest = binder(name)(*arguments, **options)
    return specialization, rest


def unlike(kind: KindOf, name: str) -> int:
    """How many of 500 pairs of calls with different arguments were of one kind; Triton compiles alike for each pair."""
    together = 0

    @settings(max_examples=500, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.randoms(use_true_random=True))
    def equal_kinds_are_compiled_alike(chance: Random) -> None:
        nonlocal together
        calls = two_calls(name, chance)
        (left, _), (right, _) = (kind(*call, 0) for call in calls)
        if left is not None and left == right:
            specialised = [compiled_for(name, *call) for call in calls]
            assert specialised[0] == specialised[1], "one kind, compiled for different arguments"
            together += any(a is not b for a, b in zip(calls[0][0], calls[1][0], strict=True))

    equal_kinds_are_compiled_alike()
    return together


@pytest.mark.parametrize("name", kernels())
def test_calls_of_one_kind_are_one_to_triton(name: str) -> None:
    assert unlike(kind_of, name) > 5


def blind(kind: str) -> KindOf:
    """`kind_of` that leaves something out."""

    def seen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"alignment": value.clone(), "dtype": value.view(torch.int8)}.get(kind, value)
        if type(value) is int:
            changed = {
                "is 1": 3 if value == 1 else value,
                "multiple of 16": value + 1 if value > 1 and value % 16 == 0 else value,
                "fits 32 bits": value % 2**20 + 2**20,
            }
            return changed.get(kind, value)
        if isinstance(value, TensorDescriptor) and kind == "block shape":
            return DESCRIBED[0] if value.base.dtype == torch.bfloat16 else DESCRIBED[-1]
        return 3 if kind == "none" and value is None else value

    def without(arguments: Sequence[Any], options: Mapping[str, Any], device: int) -> tuple[Hashable, list[Any]]:
        kept = {n: v for n, v in options.items() if kind != "options" or n.isupper()}
        return kind_of([seen(value) for value in arguments], {} if kind == "constants" else kept, device)

    return without


@pytest.mark.parametrize(
    "left_out",
    ["alignment", "dtype", "is 1", "multiple of 16", "fits 32 bits", "block shape", "none", "options", "constants"],
)
def test_a_kind_that_leaves_something_out_is_found(left_out: str) -> None:
    with pytest.raises(AssertionError, match="compiled for"):
        [
            unlike(blind(left_out), name)
            for name in ("matmul.walked", "norm.forward", "pointwise.turn", "draw.all_numbers")
        ]


def test_the_device_is_part_of_the_kind() -> None:
    assert kind_of([1], {}, 0)[0] != kind_of([1], {}, 1)[0]
    assert kind_of([(1, 2)], {}, 0)[0] is None


# The launch itself, on a device that only writes down what it is given.


class Compiled(CompiledKernel):
    """What Triton would have compiled, and a launcher that writes down."""

    def __init__(self, source: Any, options: Mapping[str, Any], launches: list[Any]) -> None:
        self.src, self.module, self.name = source, 1, source.fn.__name__
        self.packed_metadata, self.function = tuple(sorted(options.items())), len(launches)
        self._run = lambda *given: launches.append((self, given))


@dataclass
class Device:
    """One GPU whose current stream is each thread's own."""

    launches: list[tuple[Compiled, tuple[Any, ...]]] = field(default_factory=list)
    here: Any = field(default_factory=threading.local)

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return getattr(self.here, "device", -1)  # what torch says of the CPU's tensors: their addresses are passed

    def get_current_stream(self, device: int) -> int:
        return getattr(self.here, "stream", 7) + 100 * device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(
        "triton.compiler.compile", lambda source, options, **_: Compiled(source, options, made.launches)
    )
    for kernel in kernels().values():
        kernel.compiled.clear()
        monkeypatch.setattr(kernel.function, "device_caches", defaultdict(kernel.function.create_binder))
        monkeypatch.setattr(kernel.function, "compile", None, raising=False)  # the binder sets it to what stands in
    yield made
    for kernel in kernels().values():
        kernel.compiled.clear()


def plainly(launched: tuple[Compiled, tuple[Any, ...]]) -> tuple[Any, ...]:
    """A launch without hooks, tensors as their addresses."""
    kernel, (x, y, z, stream, function, metadata, _, _, _, *arguments) = launched
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    return kernel, x, y, z, stream, function, metadata, values


def test_every_launch_is_tritons_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of the cases, first and remembered, against Triton's for the very same arguments."""
    triton_runs, original = [0], JITFunction.run
    quick: set[str] = set()

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        triton_runs[0] += 1
        return original(self, *args, **options)

    def both(self: Remembered, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        before = triton_runs[0]
        remember(self, grid, *args, **options)
        quick.update([] if triton_runs[0] > before else [self.function.__name__])
        self.function[grid](*args, **options)
        ours, theirs = map(plainly, device.launches[-2:])
        assert ours == theirs
        device.launches.clear()

    remember = Remembered._launch
    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(Remembered, "_launch", both)
    cases = runpy.run_path(str(CASES))
    for _ in range(2):
        cases["run"]("cpu", torch.bfloat16)
    assert quick == {kernel.function.__name__ for kernel in kernels().values()}


def turned(count: int = 3) -> Tensor:
    x, positions = torch.zeros(count, 2, 48, dtype=torch.bfloat16), torch.arange(count)
    return pointwise.rope(x, positions, torch.zeros(9, 32), False, False)


def test_stream_and_device_are_asked_at_every_launch_of_every_thread(device: Device) -> None:
    turned()

    def work(stream: int) -> None:
        device.here.stream, device.here.device = stream, stream % 2 - 1
        for _ in range(20):
            turned()

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = [launched[3] for _, launched in device.launches]
    assert sorted(streams) == sorted([7 - 100, *(s + 100 * (s % 2 - 1) for s in range(8) for _ in range(20))])
    for kernel, _ in device.launches:
        on = {launched[3] // 100 for other, launched in device.launches if other is kernel}
        assert len(on) == 1, "one compiled kernel ran on two devices"
    for _, launched in device.launches[1:]:
        assert isinstance(launched[9], int) == (launched[3] < 0), (
            "of another device's tensor the launcher sees no address"
        )


def test_hooks_see_every_launch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    original = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *a, **o: (runs.append(self.__name__), original(self, *a, **o))[1]
    )
    turned()
    turned()
    assert len(runs) == 1

    def watched() -> bool:
        before = len(runs)
        turned()
        return len(runs) > before

    def hook(*_: Any, **__: Any) -> None:
        pass

    assert not watched()
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert watched()
        chain.remove(hook)
    function = pointwise.turn.function
    function.add_pre_run_hook(hook)
    assert watched()
    function.pre_run_hooks.clear()
    for holder, name, value in (
        (knobs.runtime, "launch_enter_hook", hook),
        (knobs.runtime, "launch_exit_hook", hook),
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash")),
        (knobs.compilation, "instrumentation_mode", "consan"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(holder, name, value)
            assert watched(), name
    assert not watched()


def test_what_triton_did_not_compile_is_not_remembered(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: True)
    turned()
    assert not pointwise.turn.compiled
    assert not device.launches
    compiled: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given["fn"].name))
    for count in (3, 3, 4, 16):
        turned(count)
    assert len(compiled) == 1, "a compilation was hidden from the hook, or made twice"
    assert len(device.launches) == 4


def test_an_argument_by_its_name_is_bound_by_triton(device: Device) -> None:
    x, y = torch.zeros(2, 8), torch.zeros(2, 4)
    for _ in range(2):
        pointwise.gated[(2, 1)](x, h_ptr=y, size=4, BLOCK=1024)
    pointwise.gated[(2, 1)](x, y, 4, 1024)
    assert not pointwise.gated.compiled
    pointwise.gated[(2, 1)](x, y, 4, BLOCK=1024)
    pointwise.gated[(2, 1)](x, y, 4, BLOCK=1024)
    assert len({repr(plainly(launched)[1:]) for launched in device.launches}) == 1
    assert len(pointwise.gated.compiled) == 1


def test_constants_come_last() -> None:
    def crossed(x_ptr, BLOCK: triton.language.constexpr, size):
        pass

    with pytest.raises(TypeError, match="constants of crossed are not its last parameters"):
        remembered(triton.jit(crossed))
    assert remembered("interpreted") == "interpreted"


@on_gpu
def test_remembered_launches_have_the_bits_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(70, 96, device="cuda").bfloat16(), torch.randn(96, device="cuda").bfloat16()
    q = torch.randn(70, 6, 64, device="cuda").bfloat16()
    starts = torch.tensor([0, 70], dtype=torch.int32, device="cuda")

    def results() -> list[Tensor]:
        from vime_core.numerics.cuda import attention, matmul

        return [
            *norm.add_rms_norm(x, x, w, 1e-5),
            matmul.linear(x.repeat(9, 1), x, None, 1, False),
            *attention.packed(q, q, q, starts, AttentionSpec(0.125)),
        ]

    want = [t.clone() for t in results()]
    monkeypatch.setattr(JITFunction, "run", None)  # nothing goes through Triton any more
    for found, first in zip(results(), want, strict=True):
        assert torch.equal(found, first)
    with pytest.raises(TypeError):
        norm.add_rms_norm(x.float(), x.float(), w, 1e-5)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        norm.add_rms_norm(x, x.cpu(), w, 1e-5)


@on_gpu
def test_remembered_launches_are_captured_on_the_stream_that_captures() -> None:
    x, w = torch.randn(9, 96, device="cuda").bfloat16(), torch.randn(96, device="cuda").bfloat16()
    norm.add_rms_norm(x, x, w, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, r = norm.add_rms_norm(x, x, w, 1e-5)
    x.copy_(torch.randn(9, 96, device="cuda").bfloat16())
    graph.replay()
    for found, want in zip((y, r), norm.add_rms_norm(x, x, w, 1e-5), strict=True):
        assert torch.equal(found, want)
