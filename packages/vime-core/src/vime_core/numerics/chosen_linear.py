"""A linear that takes offered kernels where they have its own bits, and its own where they do not.

What is chosen hangs on the call alone (pass, N, K, dtype of the result), and only where every number of tokens that was
tried gives the own kernel's bits: so neither the choice nor the number of tokens can be seen in a result. A call that
fails stays with the own kernel, and is named with the reason (:meth:`ChosenLinear.choices`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vime_core.errors import BackendError, ContractViolation
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.linear import rows_of
from vime_core.numerics.offers import LinearCall, LinearOffer, Pass

Linear = Callable[[Tensor, Tensor, Tensor | None, int, bool], Tensor]
Product = tuple[Pass, int, int]
"""Which product of a weight, and N and K of the weight."""
_Key = tuple[Product, bool, bool]
"""A `LinearCall` as it is looked up: its product, whether it is wide, whether it has a bias."""
TOKENS = (1, 2, 3, 16, 17, 63, 64, 65, 128, 255, 256, 257, 1024, 4096)
"""Numbers of tokens that every choice is tried with, beside those that the offer names."""
_BYTES = 16  # what the tensor copy engine wants addresses and strides to be multiples of
_ELEMENTS = _BYTES // torch.bfloat16.itemsize
_SLAB = 1 << 24  # elements that are drawn or compared at a time
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenLinear:
    """See the module; called as `Kernels.linear`.

    Args:
        own: the provider's kernel, the definition.
        offer: what may stand in for it.
        required: whether the offer must serve every call that it covers.
        settled: what was found, by call: empty where the offer serves, else why it does not.
    """

    own: Linear
    offer: LinearOffer
    required: bool = False
    settled: dict[LinearCall, str] = field(default_factory=dict[LinearCall, str])
    _served: dict[_Key, LinearCall | None] = field(default_factory=dict[_Key, LinearCall | None], init=False)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, wide: bool) -> Tensor:
        """y (..., N) of x (..., K), weight (N, K) and bias (N); see `Kernels.linear`."""
        product = product_of(x, weight)
        if product is None:
            return self.own(x, weight, bias, chunks, wide)
        left, right = _as_stored(product[0], x, weight)
        if not (_copied_whole(left) and _copied_whole(right)):
            return self.own(x, weight, bias, chunks, wide)
        key = (product, wide, bias is not None)
        try:
            call = self._served[key]
        except KeyError:
            call = self._serve(key, x.device)
        if call is None or not (self.offer.pays(call, left.shape[0]) or _captures(x.device)):
            return self.own(x, weight, bias, chunks, wide)
        y = self.offer.run(call, left, right)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], -1)

    def choices(self) -> dict[str, str]:
        """Call -> the kernels that serve it, with the reason where they are the provider's own."""
        found = {str(call): f"own ({why})" if why else self.offer.name for call, why in self.settled.items()}
        return dict(sorted(found.items()))

    def settle(self, calls: Iterable[LinearCall], device: torch.device) -> None:
        """Build and compare what is offered for ``calls``; what it took of a GPU's memory is given back.

        Raises:
            ContractViolation: the offer is required, and a call that it covers has other bits.
            BackendError: the GPU has less memory left than a comparison takes.
        """
        new = [call for call in dict.fromkeys(calls) if call not in self.settled]
        self.settled.update((call, why) for call in new if (why := self._excluded(call)))
        covered = [call for call in new if call not in self.settled]
        self.offer.prepare(covered)
        for call in covered:
            why = self._compared(call, device)
            if why and self.required:
                raise _other_bits(self.offer.name, call, why)
            self.settled[call] = why
            log.log(logging.WARNING if why else logging.DEBUG, "linear, %s: %s", call, why or self.offer.name)

    def settle_gradients(self, device: torch.device) -> None:
        """The same for both gradients, in bf16, of every weight whose forward was seen."""
        weights = [(call.n, call.k) for call in self.settled if call.of == "forward"]
        passes: tuple[Pass, ...] = ("input gradient", "weight gradient")
        self.settle([LinearCall(of, n, k, wide=False) for of in passes for n, k in weights], device)

    def _compared(self, call: LinearCall, device: torch.device) -> str:
        try:
            return differences(self.own, self.offer, call, device)
        except torch.OutOfMemoryError as error:
            raise _no_memory(self.offer, call) from error
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # of every size that was compared; engine and trainer share the GPU

    def _excluded(self, call: LinearCall) -> str:
        """Why a call is not even compared; empty: it is."""
        if call.bias:
            return "it adds the bias before it rounds"
        return "" if self.offer.covers(call) else f"{self.offer.name} has no kernel"

    def _serve(self, key: _Key, device: torch.device) -> LinearCall | None:
        """The call, where the offer serves it; asked once for each that is settled."""
        product, wide, bias = key
        call = LinearCall(*product, wide, bias)
        if call not in self.settled:
            if _captures(device):
                return None  # nothing can be built or compared here; the own kernel has the same bits
            self.settle([call], device)
        self._served[key] = None if self.settled[call] else call
        return self._served[key]


def with_linear(own: Kernels, offer: LinearOffer, *, required: bool) -> Kernels:
    """``own`` with the offered linear where its bits are the same; ``required``: other bits are refused."""
    chosen = ChosenLinear(own.linear, offer, required)
    return replace(
        own,
        linear=chosen,
        choices=lambda: {**own.choices(), **chosen.choices()},
        settle=chosen.settle,
        settle_gradients=chosen.settle_gradients,
    )


def product_of(x: Tensor, weight: Tensor) -> Product | None:
    """Which product of a weight ``linear(x, weight)`` is, by how its operands are stored; None: nobody offers it."""
    rows, columns = weight.shape
    if x.dtype is not torch.bfloat16 or weight.dtype is not x.dtype or not (rows and columns and x.numel()):
        return None
    turned = weight.stride(1) != 1
    if x.stride(-1) != 1 and x.dim() == 2:
        return ("weight gradient", x.shape[0], rows) if turned else None
    return ("input gradient", columns, rows) if turned else ("forward", rows, columns)


def differences(own: Linear, offer: LinearOffer, call: LinearCall, device: torch.device) -> str:
    """Where the two differ in a bit or give NaN; empty: nowhere. Some columns of the values are large, as in models.

    Many tokens come first: PyTorch cuts memory for few out of what many left, but not the other way round.
    """
    sizes = compared_tokens(offer, call)
    if not sizes:
        return "nothing compared"
    made = torch.Generator(device).manual_seed(call.n + call.k)
    left, right = (_values(rows, columns, made) for rows, columns in _stored(call, sizes[0]))
    summed = call.of == "weight gradient"  # over tokens: no row of the result is one token's
    whole = None if summed else own(*_as_linear(call, left, right), None, 1, call.wide)
    wrong: dict[int, int] = {}
    for m in sizes:
        some = left[:m], right[:m] if summed else right
        # Of the own kernel every row is the same for any number of rows.
        sliced = whole is not None and m not in TOKENS
        want = whole[:m] if whole is not None and sliced else own(*_as_linear(call, *some), None, 1, call.wide)
        if count := _unequal(offer.run(call, *some), want):
            wrong[m] = count
    if wrong:
        return f"{offer.name} differs at M = {', '.join(map(str, sorted(wrong)))}: {sum(wrong.values())} elements"
    return ""


def compared_tokens(offer: LinearOffer, call: LinearCall) -> list[int]:
    """The numbers of tokens that a choice is tried with: the offer's, and the usual ones up to its most; descending."""
    named = sorted(set(offer.tokens(call)))
    return sorted({*named, *(m for m in TOKENS if named and m <= named[-1])}, reverse=True)


def comparison_bytes(call: LinearCall, tokens: int) -> int:
    """The most memory that `differences` holds at once with up to so many ``tokens``.

    Both operands and the copies that the own kernel makes of them, the own result (twice, where rows of that of all
    tokens are compared too), the offered one, and what is drawn or compared at a time.
    """
    operands = sum(rows * columns for rows, columns in _stored(call, tokens))
    result = call.n * call.k if call.of == "weight gradient" else tokens * (call.n if call.of == "forward" else call.k)
    results = 2 if call.of == "weight gradient" else 3
    return 4 * operands + results * result * (4 if call.wide else 2) + _SLAB * 12


def _unequal(got: Tensor, want: Tensor) -> int:
    if got.shape != want.shape or got.dtype != want.dtype:
        return want.numel()
    bits, rows = _BITS[want.dtype], _slab_rows(want)
    parts = zip(torch.split(got, rows), torch.split(want, rows), strict=True)
    return sum(int(((a.view(bits) != b.view(bits)) | a.isnan()).sum()) for a, b in parts)


def _slab_rows(matrix: Tensor) -> int:
    return max(1, _SLAB // max(1, matrix.shape[-1]))


def _stored(call: LinearCall, tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    weight, x, dy = (call.n, call.k), (tokens, call.k), (tokens, call.n)
    return {"forward": (x, weight), "input gradient": (dy, weight), "weight gradient": (dy, x)}[call.of]


def _as_stored(of: Pass, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if of == "weight gradient":
        return x.t(), weight.t()
    return rows_of(x), weight if of == "forward" else weight.t()


def _as_linear(call: LinearCall, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if call.of == "forward":
        return left, right
    return (left, right.t()) if call.of == "input gradient" else (left.t(), right.t())


def _values(rows: int, columns: int, made: torch.Generator) -> Tensor:
    # vLLM builds models under another default dtype: both sides must draw the same
    large = torch.rand(columns, generator=made, device=made.device, dtype=torch.float32) < 0.01
    scale, values = 1.0 + 30.0 * large.float(), torch.empty(rows, columns, dtype=torch.bfloat16, device=made.device)
    for part in torch.split(values, _slab_rows(values)):
        x = torch.randn(part.shape, generator=made, device=made.device, dtype=torch.float32)
        part.copy_(x.mul_(scale))
    return values


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _copied_whole(matrix: Tensor) -> bool:
    """Whether the tensor copy engine can read a matrix in bf16 as it is stored."""
    row, column = matrix.stride()
    return column == 1 and not row % _ELEMENTS and not matrix.data_ptr() % _BYTES


def _other_bits(name: str, call: LinearCall, why: str) -> ContractViolation:
    return ContractViolation(
        f"alignment.linear = {name!r} cannot serve the {call}: {why}",
        remedy='Set alignment.linear = "auto" to keep the provider\'s own kernel there, or "own".',
        code="VIME-ALIGN-010",
    )


def _no_memory(offer: LinearOffer, call: LinearCall) -> BackendError:
    needed = comparison_bytes(call, max(offer.tokens(call))) / (1 << 30)
    return BackendError(
        f"comparing {offer.name} with the provider's own {call} ran out of GPU memory; it needs {needed:.1f} GiB",
        remedy="Lower rollout.vllm.gpu_memory_utilization or set rollout.vllm.kv_cache_gib, free the GPU of other"
        ' processes, or set alignment.linear = "own".',
        code="VIME-ALIGN-015",
    )
