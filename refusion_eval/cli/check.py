from typing import Any

from refusion_eval.cli import System, options_from
from refusion_eval.cli.run import HELPS, SYSTEM_FIELDS, with_system
from refusion_eval.runs.model_args import ModelArgs, parse_model_args


@options_from(
    ModelArgs, "pretrained:model decoder adapter revision backend", without_default=SYSTEM_FIELDS, helps=HELPS
)
def check(given: dict[str, Any], system: System = None) -> None:
    """Say whether a decoder can run a checkpoint. Only the checkpoint's configuration is read, no weights."""
    from refusion_eval.runs.system import System as OpenedSystem

    opened = OpenedSystem(parse_model_args(with_system(system, given)))
    config = opened.model.config
    brought = "".join(f", {key}={value}" for key, value in opened.checkpoint_settings.items())
    name, decoder = opened.args.pretrained, opened.args.decoder
    print(f"{name}: {config.family}, {config.num_layers} layers{brought}; {decoder} can run it")
    print(f"{name}: {opened.model.place}")
