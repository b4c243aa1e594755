"""How a run's memory is shared out: what the three kinds of parallelism ask of the trainer and of the machine."""

import importlib.util
import os
from typing import Any

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import Parallelism
from refusion_eval.training.data.step_batches import Place

# As in the release: optimizer states and gradients are shared out, weights are not. transformers fills in "auto".
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

# FSDP2, one unit for each layer of the model.
FSDP: dict[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def place_of_process(parallelism: Parallelism) -> Place:
    """This process among those that torchrun started; alone without it.

    Raises:
        ConfigError: the environment says what cannot be, or torchrun is missing where it is needed.
    """
    if parallelism != "ddp" and "RANK" not in os.environ:
        raise ConfigError(f"parallelism={parallelism} needs torchrun, for one process too; start the run with train.sh")
    try:
        place = Place(rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as problem:
        raise ConfigError(f"RANK and WORLD_SIZE are no numbers ({problem}); start the run with torchrun") from problem
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(f"RANK is {place.rank} and WORLD_SIZE {place.world_size}; start the run with torchrun")
    return place


def check_parallelism(parallelism: Parallelism) -> None:
    """Refuses what is not installed here.

    Raises:
        ConfigError: likewise.
    """
    if parallelism == "zero2" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "parallelism=zero2 needs the package deepspeed, which is not installed: pip install "
            "'refusion-eval[deepspeed]', or set parallelism=fsdp, which needs no other package"
        )


def trainer_settings(parallelism: Parallelism) -> dict[str, Any]:
    """What transformers' TrainingArguments get."""
    if parallelism == "zero2":
        return {"deepspeed": ZERO2}
    if parallelism == "fsdp":
        return {"fsdp": True, "fsdp_config": dict(FSDP)}
    return {"ddp_find_unused_parameters": False}
