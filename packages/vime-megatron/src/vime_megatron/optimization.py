"""Megatron's gradient buffers, distributed optimizer and scheduler around a model, as one small typed object."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from vime_core.config.schema import TrainerSection
from vime_core.errors import BackendError
from vime_megatron.cpu_bridge import cuda_bridge
from vime_megatron.data_parallel import add_over_ranks, data_parallel_size, join_ranges
from vime_megatron.model import DTYPES, PolicyModel
from vime_megatron.sharding import whole

MOMENTS = ("exp_avg", "exp_avg_sq")
QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
NEVER = 1 << 62
"""A number of steps that no run reaches: Megatron's scheduler wants an end for its decay, and there is none."""


class Optimization:
    """AdamW over fp32 masters, with gradients accumulated in fp32 and clipped by their global norm.

    As in Megatron, biases and norm weights do not decay.
    """

    def __init__(self, model: PolicyModel, config: TrainerSection) -> None:
        with cuda_bridge():
            self.model = DistributedDataParallel(model.config, _ddp_config(), model)
            self.optimizer: Any = get_megatron_optimizer(
                _optimizer_config(config), [self.model], use_gloo_process_groups=False
            )
        self.scheduler = _scheduler(self.optimizer, config)
        # All but those that the structure froze, once: a step asks several times, and each walk is of all modules.
        self._trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._initialise_moments()

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        with cuda_bridge():
            self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Finish the sum over ranks; `gradients` is final afterwards, and whole on every rank."""
        self._add_qk_norms()
        if data_parallel_size() > 1:  # Megatron's reduce-scatter adds in an order of the library's
            holder: Any = self.model
            for buffer in holder.buffers:
                add_over_ranks(buffer.grad_data, parallel_state.get_data_parallel_group())
            for buffer in holder.expert_parallel_buffers:  # what is of other ranks' tokens is in it already
                add_over_ranks(buffer.grad_data, parallel_state.get_expert_data_parallel_group())
            return
        with cuda_bridge():
            self.model.finish_grad_sync()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """fp32 gradient of each trained parameter, by its Megatron name, in the model's order; a collective."""
        for name, parameter in self._trained:
            yield name, whole(parameter, cast("Any", parameter).main_grad)

    def step(self) -> tuple[float, float]:
        """Clip, and update masters and weights once.

        Returns:
            The gradient norm before clipping, and the learning rate.
        """
        self.scheduler.step(1)
        with cuda_bridge():
            _, norm, _ = self.optimizer.step()
        return float(norm), float(self.optimizer.param_groups[0]["lr"])

    def require_finite(self) -> None:
        """Refuse weights that an update ruined, before anybody samples with them, saves or records them; a collective.

        Raises:
            BackendError: a trained weight is not finite on some rank; names the first.
        """
        held = [(name, parameter.detach()) for name, parameter in self._trained if parameter.numel()]
        largest: tuple[Tensor, ...] = cast("Any", torch)._foreach_norm([tensor for _, tensor in held], math.inf)
        ruined = (~torch.stack([one.float() for one in largest]).isfinite()).float()
        if dist.get_world_size() > 1:
            dist.all_reduce(ruined, dist.ReduceOp.MAX)
        if count := int(ruined.sum()):
            first = held[int(ruined.argmax())][0]
            raise BackendError(
                f"the update made the weight {first} not finite ({count} of {len(held)} tensors)",
                remedy="Lower trainer.lr or trainer.weight_decay, or raise trainer.eps; the weights are lost, so start"
                " again from the last checkpoint.",
                code="VIME-BACKEND-025",
            )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """fp32 master and moments of each trained parameter, in its shape: ``NAME.master``, ``NAME.exp_avg``, ...

        A collective: each data parallel rank holds a range of each parameter's.
        """
        for name, parameter in self._trained:
            held, own = self._held(parameter)
            for key, label in (("param", "master"), *((moment, moment) for moment in MOMENTS)):
                yield f"{name}.{label}", whole(parameter, _joined(parameter, held.get(key), own))

    def load_state_dict(self, state: Mapping[str, Any], scheduler: Mapping[str, Any]) -> None:
        """Load what Megatron's ``sharded_state_dict`` described, and the scheduler's state.

        Megatron keeps the count of updates in the parameter groups of a checkpoint and leaves torch's AdamW, which
        counts in one tensor a parameter, at the count that it had before loading.
        """
        with cuda_bridge(), torch.no_grad():  # fp32 masters are views of weights that require gradients
            self.optimizer.load_state_dict(state)
        for adam in (inner.optimizer for inner in self._inners):
            for group in adam.param_groups if isinstance(adam, torch.optim.AdamW) else ():
                updates = float(group.pop("step"))
                for master in group["params"]:
                    adam.state[master]["step"] = torch.tensor(updates, device=master.device)
        self.scheduler.num_steps = 0  # Megatron adds the loaded count to its own
        self.scheduler.load_state_dict(dict(scheduler))

    def _held(self, parameter: torch.nn.Parameter) -> tuple[Mapping[str, Tensor], slice]:
        """This rank's part of a parameter's state, nothing where it has none, and which elements that is."""
        for inner in self._inners:
            if parameter in inner.model_param_gbuf_map:
                own = inner._get_model_param_range_map(parameter)["param"]
                return inner._get_main_param_and_optimizer_states(parameter), slice(own.start, own.end)
        return {}, slice(0, 0)

    def _add_qk_norms(self) -> None:
        """Each tensor parallel rank has seen its own heads only, and these weights are of all heads."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            for name, parameter in self._trained:
                if name.endswith(QK_NORMS):
                    gradient = cast("Any", parameter).main_grad
                    add_over_ranks(gradient, parallel_state.get_tensor_model_parallel_group())

    @property
    def _inners(self) -> list[Any]:
        """The DistributedOptimizers within Megatron's chain; a second one holds experts that are spread over ranks."""
        return self.optimizer.chained_optimizers

    def _initialise_moments(self) -> None:
        """Zeros and step 0 from the start, so that a trainer that never stepped can be recorded and saved."""
        for inner in self._inners:
            _initialise(inner.optimizer)


def _initialise(adam: Any) -> None:
    for group in adam.param_groups:
        for master in group["params"]:
            adam.state[master] |= {moment: torch.zeros_like(master, dtype=torch.float32) for moment in MOMENTS}
        if isinstance(adam, torch.optim.AdamW):  # Transformer Engine's counts in the group, and is fused already
            group["fused"] = True  # one pass over memory: four times as fast on the CPU
            for master in group["params"]:
                adam.state[master]["step"] = torch.zeros((), device=master.device)


def _joined(parameter: torch.nn.Parameter, held: Tensor | None, own: slice) -> Tensor:
    group = ranks_that_hold(parameter)
    if dist.get_world_size(group) == 1:
        assert held is not None
        return held.detach().view(parameter.shape)
    return join_ranges(parameter.numel(), own, held, parameter.device, group).view(parameter.shape)


def ranks_that_hold(parameter: torch.nn.Parameter) -> Any:
    """The group over which Megatron spreads a parameter's optimizer state: those with the same weights."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group()
    return parallel_state.get_expert_data_parallel_group()


def _ddp_config() -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )


def _optimizer_config(config: TrainerSection) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad or math.inf,  # an infinite bound clips nothing, and the norm is still computed
        use_distributed_optimizer=True,
        params_dtype=DTYPES[config.dtype],
        bf16=config.dtype == "bf16",
    )


def _scheduler(optimizer: Any, config: TrainerSection) -> OptimizerParamScheduler:
    """Linear from lr / warmup_steps at the first update to lr at update ``warmup_steps``, then constant."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=NEVER,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=NEVER,
        wd_incr_style="constant",
    )
