"""`python -m miniature.run`: a training run of the package with Muon, and with compiled layers on a CPU.

The command line is that of `refusion_eval.training.run`.
"""

import sys
from typing import Literal

import torch

from miniature.compiled import compile_layers
from miniature.muon import muon
from refusion_eval.config import added_setting, settings_class
from refusion_eval.errors import ConfigError
from refusion_eval.training.config import OptimisationConfig, RunConfig
from refusion_eval.training.run import main
from refusion_eval.training.trainer import LossModel


@settings_class("optimisation")
class MiniatureOptimisation(OptimisationConfig):
    """Optimiser and schedule.

    Attributes:
        optimizer: "adamw", or "muon" for the matrices of the layers with AdamW for the rest.
    """

    optimizer: Literal["adamw", "muon"] = added_setting("adamw")


@settings_class()
class MiniatureConfig(RunConfig):
    """All settings of a training run of a tiny model."""

    optimisation: MiniatureOptimisation

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.optimisation.optimizer == "muon" and (self.parallelism != "ddp" or self.backbone.lora is not None):
            raise ConfigError(
                "optimisation.optimizer=muon needs whole matrices in every process; set parallelism=ddp and no "
                "backbone.lora, or optimizer=adamw"
            )


def prepare(model: LossModel, config: RunConfig, num_steps: int) -> torch.optim.Optimizer | None:
    """Compiles the layers for a long run, and makes Muon if the settings name it."""
    assert isinstance(config, MiniatureConfig)
    if compile_layers(model.language_model, num_steps):
        print("the first step takes a minute longer, as it compiles the layers", file=sys.stderr)
    return muon(model, config.optimisation) if config.optimisation.optimizer == "muon" else None


if __name__ == "__main__":
    sys.exit(main(settings=MiniatureConfig, prepare=prepare))
