"""One rank of a trainer in a process of its own: everything that a run asks of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SEQUENCES = [(30, 10), (1, 25), (12, 30)]


def main(rank: int, size: int, place: str, model: str, spoiled: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.save(work(rank, size, Path(place), Path(model), spoiled), f"{place}/rank{rank}.pt")


def work(rank: int, size: int, place: Path, model: Path, spoiled: bool) -> dict[str, Any]:
    """With experts over all ranks; ``spoiled``: a row of the last rank's experts has the other sign."""
    import torch

    from vime_core.alignment import Alignment
    from vime_core.backends import Ranks, TrainerContext
    from vime_core.determinism.policy import REPRODUCIBLE
    from vime_glm5.numerics import GLM5_V1
    from vime_megatron.options import MegatronOptions
    from vime_megatron.testing import PPO, Observed, random_sequences, run_config, snapshot
    from vime_megatron.trainer import open_trainer

    alignment = Alignment(
        GLM5_V1, "cpu", "vime_glm5.megatron.side:FP8", "", operations="vime_glm5.numerics.provider:load_operations"
    )
    options = MegatronOptions.model_validate({"data_parallel": size, "expert_parallel": size})
    ranks = Ranks(rank, size, 0, f"file://{place}/meet" if size > 1 else "")
    trainer = open_trainer(TrainerContext(run_config(dtype="bf16"), options, REPRODUCIBLE, model, alignment, ranks))
    try:
        microbatches = [[s] for s in random_sequences(SEQUENCES, vocabulary=500)]
        experts = {n: p for n, p in trainer._model.named_parameters() if ".experts.linear_fc" in n}
        found: dict[str, Any] = {
            "settings": trainer.processes()[0].settings,
            "held": {name: tuple(parameter.shape) for name, parameter in experts.items()},
            "weights": snapshot(trainer.weights()),
        }
        if spoiled and rank == size - 1:
            with torch.no_grad():
                experts["decoder.layers.2.mlp.experts.linear_fc2.weight"][-1, 0].neg_()
        found["log_probs"] = torch.cat([torch.from_numpy(x) for x in trainer.log_probs(microbatches)])
        if spoiled:
            return found
        found["gradients"] = {name: g.clone() for name, g in trainer.gradients(microbatches, PPO).items()}
        result = trainer.train_step(microbatches, PPO, Observed())
        found["training_log_probs"] = torch.cat([torch.from_numpy(x) for x in result.log_probs])
        found["loss"], found["norm"] = result.loss, result.grad_norm
        found["after"] = snapshot(trainer.weights()) | snapshot(trainer.optimizer_state())
        trainer.save(place / "state")
        trainer.train_step(microbatches, PPO, Observed())
        found["later"] = snapshot(trainer.weights())
        trainer.load(place / "state")
        found["loaded"] = snapshot(trainer.weights()) | snapshot(trainer.optimizer_state())
        return found
    finally:
        trainer.close()
