"""Parallel training: settings of the Trainer for DDP, DeepSpeed ZeRO-2 and FSDP2, and the rank of this process."""

import importlib.util
import os
from typing import Any

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import Parallelism
from refusion_eval.training.data.step_batches import ProcessRank

# As in the release: optimiser states and gradients are sharded, weights are not. transformers replaces "auto".
ZERO2: dict[str, Any] = {
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}

# FSDP2 with one unit for each layer of the model.
FSDP: dict[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def process_from_environment(parallelism: Parallelism) -> ProcessRank:
    """Rank and world size that torchrun set; rank 0 of 1 without torchrun.

    Raises:
        ConfigError: RANK and WORLD_SIZE are invalid, or the parallelism needs torchrun.
    """
    if parallelism != "ddp" and "RANK" not in os.environ:
        raise ConfigError(f"parallelism={parallelism} needs torchrun, for one process too; start the run with train.sh")
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        process = ProcessRank(rank=int(rank), world_size=int(world_size))
    except ValueError as problem:
        raise ConfigError(f"RANK and WORLD_SIZE are not numbers ({problem}); start the run with torchrun") from problem
    if not 0 <= process.rank < process.world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world_size}; start the run with torchrun")
    return process


def check_parallelism(parallelism: Parallelism) -> None:
    """Checks that the package of a parallelism is installed.

    Raises:
        ConfigError: it is not.
    """
    if parallelism == "zero2" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "parallelism=zero2 needs the package deepspeed, which is not installed: pip install "
            "'refusion-eval[deepspeed]', or set parallelism=fsdp, which needs no other package"
        )


def trainer_settings(parallelism: Parallelism) -> dict[str, Any]:
    """Arguments of transformers' TrainingArguments."""
    if parallelism == "zero2":
        return {"deepspeed": ZERO2}
    if parallelism == "fsdp":
        return {"fsdp": True, "fsdp_config": dict(FSDP)}
    return {"ddp_find_unused_parameters": False}
