"""A sum whose order is written down.

``tl.sum`` adds in the order in which a compiled kernel spreads elements over threads, and that follows from the dtype
that was loaded: equal values in bf16 and fp32 then have sums of other bits. Of two elements there is one sum only.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_MOST_HALVINGS = tl.constexpr(20)


@triton.jit
def tree_sum(x):
    """The sum of x, a power of two of elements: neighbours are added, then neighbours of these sums, to the last."""
    for _ in tl.static_range(_MOST_HALVINGS):
        if x.shape[0] > 2:
            x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), 1)
    return tl.sum(x, 0)
