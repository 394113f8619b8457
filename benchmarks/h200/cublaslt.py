"""cuBLASLt through ctypes: bf16 y = x @ w.T with algorithms that never split K, or with one pinned algorithm."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

BF16, FP32, COMPUTE_FP32 = 14, 0, 68
_TRANS_A, _TRANS_B = 3, 4  # descriptor attributes
_MAX_WORKSPACE, _REDUCTION_MASK = 1, 3  # preference attributes
_CONFIG = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "stages": 6, "inner": 7, "cluster": 8}
_WORKSPACE_BYTES = 32 * 2**20
_ASKED = 64


class Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: cuBLAS status {status}")


@dataclass
class CublasLt:
    """Keeps one handle and workspace; descriptors are cached by shape. No algorithm that reduces over K is allowed.

    `only` keeps one family of algorithms (66 on Hopper is the tensor-core family; 13 and 41 sum in other ways).
    """

    only: int | None = None
    _plans: dict[tuple[int, int, int], tuple[object, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lib = ctypes.CDLL("libcublasLt.so.13")
        self.handle = ctypes.c_void_p()
        _check(self.lib.cublasLtCreate(ctypes.byref(self.handle)), "create")
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def algorithm(self, m: int, n: int, k: int) -> Algo:
        """The library's first choice for this shape under the preference."""
        return self._plan(m, n, k)[-1]  # type: ignore[return-value]

    def linear(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, algo: Algo | None = None) -> torch.Tensor:
        """y (M, N) = x (M, K) @ w (N, K).T, all bf16 and contiguous; `algo` None takes the library's choice."""
        desc, a, b, d, own = self._plan(x.shape[0], w.shape[0], x.shape[1])
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        pointer = lambda t: ctypes.c_void_p(t.data_ptr())  # noqa: E731
        status = self.lib.cublasLtMatmul(
            self.handle, desc, ctypes.byref(one), pointer(w), a, pointer(x), b, ctypes.byref(zero), pointer(y), d,
            pointer(y), d, ctypes.byref(algo or own), pointer(self.workspace), ctypes.c_size_t(_WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        _check(status, "matmul")
        return y

    def _plan(self, m: int, n: int, k: int) -> tuple[object, ...]:
        if (m, n, k) not in self._plans:
            self._plans[m, n, k] = self._make_plan(m, n, k)
        return self._plans[m, n, k]

    def _make_plan(self, m: int, n: int, k: int) -> tuple[object, ...]:
        # cuBLAS is column-major: row-major y (M, N) is D (N, M), w is A (K, N) transposed, x is B (K, M).
        desc, a, b, d, preference = (ctypes.c_void_p() for _ in range(5))
        _check(self.lib.cublasLtMatmulDescCreate(ctypes.byref(desc), COMPUTE_FP32, FP32), "descriptor")
        self._set(self.lib.cublasLtMatmulDescSetAttribute, desc, _TRANS_A, ctypes.c_int32(1))
        self._set(self.lib.cublasLtMatmulDescSetAttribute, desc, _TRANS_B, ctypes.c_int32(0))
        for layout, rows, cols in ((a, k, n), (b, k, m), (d, n, m)):
            size = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(rows))
            _check(self.lib.cublasLtMatrixLayoutCreate(ctypes.byref(layout), BF16, *size), "layout")
        _check(self.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "preference")
        set_preference = self.lib.cublasLtMatmulPreferenceSetAttribute
        self._set(set_preference, preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
        self._set(set_preference, preference, _REDUCTION_MASK, ctypes.c_uint32(0))
        found, count = (Heuristic * _ASKED)(), ctypes.c_int()
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, a, b, d, d, preference, _ASKED, found, ctypes.byref(count)
        )
        _check(status, "heuristic")
        algos = [found[i].algo for i in range(count.value)]
        algos = [algo for algo in algos if self.only is None or self._read(algo, _CONFIG["id"]) == self.only]
        if not algos:
            raise RuntimeError(f"cuBLASLt offers no algorithm {self.only} for M, N, K = {m}, {n}, {k}")
        return desc, a, b, d, algos[0]

    @staticmethod
    def _set(setter, target, attribute, value) -> None:  # type: ignore[no-untyped-def]
        _check(setter(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))), "attribute")

    def describe(self, algo: Algo) -> dict[str, int]:
        """The algorithm's own settings, read back: id, tile, split_k, reduction, stages, inner, cluster."""
        return {name: self._read(algo, attribute) for name, attribute in _CONFIG.items()}

    def _read(self, algo: Algo, attribute: int) -> int:
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        size = ctypes.c_size_t(2 if attribute in (7, 8) else 4)
        status = self.lib.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algo), attribute, ctypes.byref(value), size, ctypes.byref(written)
        )
        return -1 if status else int(value.value)
