"""An independent model of the same weights: transformers, in fp64 or as it is, with plain autograd."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from vime_core.errors import PluginError
from vime_core.types import Float32Array, TrainSequence
from vime_core.verify.gradient import ROUNDING, TensorError

if TYPE_CHECKING:
    from vime_core.rl.losses import TokenBatch, TokenLoss

OpenModel = Callable[[Path, Iterable[tuple[str, Tensor]], torch.dtype], Any]
"""(HF directory, weights by HF name, dtype) to a model: see `open_reference`."""
ExactLoss = Callable[[Tensor, TrainSequence], Tensor]
"""(log-probs [R] with gradients, their sequence) to the loss of each token [R], before its weight."""
Settle = Callable[[TrainSequence, Float32Array, int], TrainSequence]
"""(sequence, what the model itself scores its response tokens with, its number) to the sequence that it is given."""
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def errors_against_fp64(
    directory: Path,
    weights: Mapping[str, Tensor],
    dtype: str,
    sequences: Sequence[TrainSequence],
    temperature: float,
    ours: Mapping[str, Tensor],
    open_model: OpenModel | None = None,
    loss: ExactLoss | None = None,
    settle: Settle | None = None,
) -> tuple[tuple[TensorError, ...], float]:
    """How far gradients are from fp64, beside those of plain transformers in ``dtype``.

    Args:
        directory: HF model directory; its weights are not read.
        weights: that the gradients belong to, by HF name.
        dtype: the training dtype.
        sequences: that were trained on.
        temperature: of the log-probs.
        ours: the trainer's gradients by HF name.
        open_model: makes the reference; None: `open_reference`.
        loss: of a token, which the gradients are of; None: that of `policy_gradient`.
        settle: gives each computation old and reference log-probs around its own, so that all have the same ratios:
            a forward that rounds otherwise would move tokens across the loss's bounds. None: sequences as they are.

    Returns:
        The errors by tensor, in the reference's order, and the Euclidean norm of all gradients in fp64.

    Raises:
        PluginError: there is no reference for this model, or its tensors have other names.
    """
    exact, plain = (
        reference_gradients(
            (open_model or open_reference)(directory, weights.items(), kind), sequences, temperature, loss, settle
        )
        for kind in (torch.float64, DTYPES[dtype])
    )
    if unknown := sorted(ours.keys() ^ exact.keys()):
        raise _no_reference(f"the gradient {unknown[0]!r} is known on one side only")
    scales = {name: float(gradient.norm()) or 1.0 for name, gradient in exact.items()}
    own, other = (
        {name: float((side[name].cpu().double() - exact[name]).norm()) / scale for name, scale in scales.items()}
        for side in (ours, plain)
    )
    typical = median(other.values())
    errors = [
        TensorError(name, exact[name].numel(), own[name], other[name], typical, ROUNDING[dtype]) for name in exact
    ]
    return tuple(errors), float(torch.stack([gradient.norm() for gradient in exact.values()]).norm())


def policy_gradient(batch: TokenBatch) -> TokenLoss:
    """``-A log p``: linear in the log-prob, so that a gradient check sees the model's backward and no loss's."""
    from vime_core.rl.losses import TokenLoss

    return TokenLoss(-batch.advantages * batch.log_probs, {})


def open_reference(directory: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Any:
    """The transformers model of ``directory`` with the given weights, in ``dtype``.

    In fp64, three places where transformers computes in fp32 whatever the dtype are replaced by fp64: RMSNorm, the
    rotary angles, and the softmax of attention (by its sdpa implementation).

    Args:
        directory: HF model directory; its weights are not read.
        weights: by HF name; converted exactly, since every training dtype lies within fp64.
        dtype: of the whole computation.

    Raises:
        PluginError: transformers is absent, or does not know the structure or these weights.
    """
    model = _empty_model(directory).to(dtype).eval()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    given = dict(weights)
    if unknown := sorted(set(given) ^ set(parameters)):
        raise _no_reference(f"it has no weight {unknown[0]!r}, or one more than the trainer")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(given[name])
    if dtype == torch.float64:
        _compute_in_double(model)
    return model


def reference_gradients(
    model: Any,
    sequences: Sequence[TrainSequence],
    temperature: float,
    loss: ExactLoss | None = None,
    settle: Settle | None = None,
) -> dict[str, Tensor]:
    """Gradients of the sum of weight x loss over all response tokens, in fp64, by HF name.

    A sequence at a time; what each adds is in the model's dtype, their sum in fp64.

    Args:
        model: from `open_reference`.
        sequences: with advantages and weights.
        temperature: of the log-probs; at 0 they are defined at 1.
        loss: of a token; None: that of `policy_gradient`.
        settle: see `errors_against_fp64`.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in parameters]
    for number, given in enumerate(sequences):
        sequence = given if settle is None else settle(given, _scores(model, given, temperature), number)
        value = _loss(model, sequence, temperature, loss or _linear)
        for sum_, gradient in zip(total, torch.autograd.grad(value, parameters), strict=True):
            sum_ += gradient
    return dict(zip(names, total, strict=True))


def _linear(log_probs: Tensor, sequence: TrainSequence) -> Tensor:
    """`policy_gradient`."""
    return -torch.from_numpy(sequence.advantages).to(log_probs.dtype) * log_probs


def _scores(model: Any, sequence: TrainSequence, temperature: float) -> Float32Array:
    with torch.no_grad():
        return _token_log_probs(model, sequence, temperature).float().numpy()


def _loss(model: Any, sequence: TrainSequence, temperature: float, loss: ExactLoss) -> Tensor:
    log_probs = _token_log_probs(model, sequence, temperature)
    weights = torch.from_numpy(sequence.weights).to(log_probs.dtype)
    return (weights * loss(log_probs, sequence)).sum()


def _token_log_probs(model: Any, sequence: TrainSequence, temperature: float) -> Tensor:
    """Log-probs [R] of the response tokens, in fp32 at least."""
    logits = model(torch.tensor([sequence.tokens]), use_cache=False).logits[0, sequence.response_start - 1 : -1]
    precision = torch.promote_types(logits.dtype, torch.float32)
    log_probs = _left_to_choose(logits.to(precision) / (temperature or 1.0), sequence).log_softmax(-1)
    targets = torch.tensor(sequence.tokens[sequence.response_start :])[:, None]
    return log_probs.gather(-1, targets)[:, 0]


def _left_to_choose(logits: Tensor, sequence: TrainSequence) -> Tensor:
    """Logits [R, V] with -inf where the sequence's kept tokens leave a token out."""
    kept, start = sequence.kept, 0
    cut = torch.zeros(logits.shape, dtype=torch.bool)
    for row, count in enumerate(kept.counts):
        cut[row] = count > 0
        cut[row, list(kept.tokens[start : start + count])] = False
        start += count
    return logits.masked_fill(cut, -torch.inf)


def _empty_model(directory: Path) -> Any:
    try:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except (ImportError, ValueError, KeyError) as error:
        raise _no_reference(str(error)) from error


def _no_reference(why: str) -> PluginError:
    return PluginError(
        f"transformers gives no reference for this model: {why}",
        remedy="Install transformers >= 5, or check gradients of this structure by a check of its own plugin.",
        code="VIME-PLUGIN-030",
    )


def _compute_in_double(model: nn.Module) -> None:
    kinds: dict[str, Callable[..., Any]] = {"RMSNorm": _rms_norm, "RotaryEmbedding": _rotary}
    for module in model.modules():
        for suffix, forward in kinds.items():
            if type(module).__name__.endswith(suffix):
                module.forward = MethodType(forward, module)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def _rotary(module: Any, _x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[:, :, None].double() * module.inv_freq.double()
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
