"""One rank of several, as a process: ``ranks.py TASK RANK WORLD TENSOR_PARALLEL MODEL PLACE`` prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime_core.backends import Ranks, TrainerContext
from vime_core.determinism.policy import REPRODUCIBLE
from vime_core.record.digest import digest_tensors
from vime_megatron.options import MegatronOptions
from vime_megatron.testing import PPO, Observed, random_sequences, run_config
from vime_megatron.trainer import open_trainer


def add(ranks: Ranks) -> dict[str, Any]:
    """Sums, ranges and shares over data parallel ranks."""
    from vime_megatron.data_parallel import add_over_ranks, by_microbatch, join_ranges, own_share
    from vime_megatron.parallel import process_groups

    with process_groups(ranks, 1):
        flat = torch.tensor([[1e8, 1.0, -0.0], [1.0, 1e8, -0.0], [-1e8, -1e8, -0.0]][ranks.rank])
        add_over_ranks(flat, dist.group.WORLD)
        own = [slice(0, 2), slice(2, 5), slice(0, 0)][ranks.rank]
        values = torch.arange(5.0)[own] if ranks.rank < 2 else None
        joined = join_ranges(5, own, values, torch.device("cpu"), dist.group.WORLD)
        shared = by_microbatch([index * 10 for index in own_share(5)])
    return {"sum": flat.tolist(), "joined": joined.tolist(), "by_microbatch": shared}


def train(ranks: Ranks, tensor_parallel: int, model: Path, place: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a step; then the checkpoint again and the same step."""
    options = MegatronOptions(tensor_parallel=tensor_parallel, data_parallel=ranks.world_size // tensor_parallel)
    trainer = open_trainer(TrainerContext(run_config(), options, REPRODUCIBLE, model, None, ranks))
    microbatches = [[one] for one in random_sequences([(5, 7), (9, 4), (3, 8), (6, 6), (12, 3)])]
    seen, initial = Observed(), digest_tensors(trainer.weights())
    result = trainer.train_step(microbatches, PPO, seen)
    gradients = {name: tensor.tolist() for name, tensor in seen.seen.items()}
    trainer.train_step(microbatches, PPO, seen)
    trainer.save(place / "checkpoint")

    def step() -> list[dict[str, str]]:
        trainer.train_step(microbatches, PPO, seen)
        return [digest_tensors(trainer.weights()), digest_tensors(trainer.optimizer_state())]

    straight = step()
    trainer.load(place / "checkpoint")
    resumed = step()
    shapes = {name: list(tensor.shape) for name, tensor in trainer.optimizer_state()}
    trainer.close()
    return {
        "initial": initial,
        "gradients": gradients,
        "straight": straight,
        "resumed": resumed,
        "shapes": shapes,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
    }


def main() -> None:
    task, rank, world, tensor_parallel, model, place = sys.argv[1:]
    meeting = f"file://{place}/meeting" if int(world) > 1 else ""
    ranks = Ranks(int(rank), int(world), 0, meeting)
    said = add(ranks) if task == "sum" else train(ranks, int(tensor_parallel), Path(model), Path(place))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
