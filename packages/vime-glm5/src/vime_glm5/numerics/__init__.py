"""The operations of the alignment contracts of GLM-5: one definition, called by trainer and engine.

    operations = load_operations(GLM5_V1, "cpu")
    y = operations.block_linear(x, weight)            # differentiable; same bits for any batch, place, threads

They extend those of ``dense/v1`` (vime_core.numerics), which they share for norms, rotary embedding, SwiGLU, bf16
linears, the walk of attention and log-probs. Every module defines one operation in its docstring.
"""

from vime_glm5.numerics.absorbed import AbsorbedWeights
from vime_glm5.numerics.contract import GLM5_V1, GLM5_V1_BF16KV
from vime_glm5.numerics.e4m3 import BlockWeight
from vime_glm5.numerics.operations import Glm5Operations
from vime_glm5.numerics.provider import load_operations

__all__ = ["GLM5_V1", "GLM5_V1_BF16KV", "AbsorbedWeights", "BlockWeight", "Glm5Operations", "load_operations"]
