"""The arguments of `lm_eval --model refusion` and of `refusion-eval run`: names, types, defaults, help."""

import logging
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from refusion_eval.config import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    check_keys,
    field_types,
    read_values,
    settings_class,
)
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_path

log = logging.getLogger(__name__)

# Value of `pretrained` for the tiny checkpoint of the decoder in the package; "embedded:NAME" is another one of these.
EMBEDDED = "embedded"

# Names in tables of those checkpoints in the package that are not their decoder's main one.
EMBEDDED_NAMES = {"autoregressive_sft": "AR-SFT"}


def embedded_name(pretrained: str, decoder: str) -> str | None:
    """Returns the name of the checkpoint in the package; None if the checkpoint is not of the package."""
    kind, _, name = pretrained.partition(":")
    return (name or decoder) if kind == EMBEDDED else None


def system_of_label(label: str) -> str:
    """Returns the decoder or checkpoint whose runs have this name in tables by default; the name itself if none has."""
    names = {decoder.label: name for name, decoder in DECODERS.items()}
    return (names | {name: checkpoint for checkpoint, name in EMBEDDED_NAMES.items()}).get(label, label)


# Arguments about the machines of a run. They are no part of a record and may change when the run is continued.
LAUNCH_ARGUMENTS = ("engine", "workers", "worker_cpus", "ray_address")


@settings_class("model_args")
class ModelArgs:
    """Which checkpoint to load and how to run it. Decoder settings are given beside these, by their own names.

    The entries below are also the help of the options of `refusion-eval run`.

    Attributes:
        pretrained: Checkpoint: a folder, a hub id, "embedded" (the decoder's tiny model) or "embedded:NAME".
        decoder: Name of the decoder.
        adapter: LoRA adapter, a folder or hub id. It is merged into the weights when they are loaded.
        preset: Settings table of the decoder, where its file has several. The default is the first.
        revision: Branch, tag or commit of a hub id.
        dtype: Type of weights and cache. auto is bfloat16 on a GPU and float32 on a CPU.
        device: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.
        attention: Attention backend: sdpa or flash. auto takes the fastest one that works here.
        batch_size: Requests decoded together, as far as the KV budget allows, or auto. Speed is measured at 1 only.
        tps_samples: Items of every task that are decoded alone, to measure speed beside a batch.
        kv_budget_gib: GiB that the keys and values of a batch may take. The default is the free memory.
        cuda_graphs: Record the forwards of a request that is decoded alone as CUDA graphs.
        run_dir: Folder where every sample is recorded as it finishes, and found again by the next run.
        data_dir: Folder with benchmark rows.
        enable_thinking: Value that the chat template receives for thinking. The default is yes.
        chat_template: A Jinja file instead of the checkpoint's template, or none for plain prompts.
        add_bos_token: Begin every prompt with the tokenizer's BOS token, unless the prompt does already.
        mc_samples: Noised copies of each continuation that estimate the log-likelihood of a masked model.
        warmup: Requests that are decoded and discarded before the first measured one of each settings.
        system: Name of the system in tables. The default is the decoder's.
        backbone: Model that the checkpoint was made from, if its config.json does not say. Speed-up compares systems of
            one backbone.
        loop: Loop of the autoregressive decoder: this project's engine, or transformers' generate, which separates the
            gain of an engine from the gain of an algorithm.
        engine: Where requests are decoded: local is this process and those of its launcher, ray the workers of a Ray
            cluster.
        workers: Largest number of Ray workers. The default is as many as fit.
        worker_cpus: Processor cores of a Ray worker without a GPU.
        ray_address: HOST:PORT of a Ray cluster, or auto for the one of this machine. By default one is started here.
        settings: The decoder's settings that were given beside these.
    """

    pretrained: str
    decoder: str = "refusion"
    adapter: str | None = None
    preset: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention: str = "auto"
    batch_size: PositiveInt | None = 1
    tps_samples: NonNegativeInt = 0
    kv_budget_gib: NonNegativeFloat | None = None
    cuda_graphs: bool = False
    run_dir: str | None = None
    data_dir: str | None = None
    enable_thinking: bool = True
    chat_template: str | None = None
    add_bos_token: bool = False
    mc_samples: PositiveInt = 128
    warmup: NonNegativeInt = 1
    system: str | None = None
    backbone: str | None = None
    loop: Literal["engine", "generate"] = "engine"
    engine: Literal["local", "ray"] = "local"
    workers: PositiveInt | None = None
    worker_cpus: PositiveInt = 1
    ray_address: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.loop != "engine":
            self._check_stock_loop()
        if self.engine != "ray":
            self._check_without_ray()

    def _check_without_ray(self) -> None:
        for name, default in (("workers", None), ("worker_cpus", 1), ("ray_address", None)):
            value = getattr(self, name)
            if value != default:
                raise ConfigError(f"model_args: {name}={value} is for engine=ray only; add engine=ray, or leave it out")

    def _check_stock_loop(self) -> None:
        needed = {"decoder": "autoregressive", "batch_size": 1, "cuda_graphs": False, "adapter": None}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"model_args: loop={self.loop} is transformers' own loop, which runs with {name}={value} only, "
                    f"not {getattr(self, name)}; leave one of them out"
                )

    @property
    def settings_type(self) -> type:
        """Settings class of the decoder."""
        return DECODERS[self.decoder].Settings

    @property
    def checkpoint(self) -> str:
        """Folder or hub id of the checkpoint."""
        name = embedded_name(self.pretrained, self.decoder)
        return self.pretrained if name is None else str(embedded_path(name))

    @property
    def system_name(self) -> str:
        """Name of the system in tables."""
        embedded = EMBEDDED_NAMES.get(embedded_name(self.pretrained, self.decoder) or "")
        name = self.system or embedded or DECODERS[self.decoder].label
        name = name if self.preset is None else f"{name} ({self.preset})"
        return name if self.loop == "engine" else f"{name} ({self.loop})"


def parse_model_args(given: Mapping[str, Any], additional: Mapping[str, Any] | None = None) -> ModelArgs:
    """Separates the decoder's settings from the other model arguments, and converts and checks all of them.

    Args:
        given: the arguments as lm-eval's parser, a command line or a file left them.
        additional: arguments from lm-eval's own flags: batch_size, max_batch_size, device. `given` outranks them.

    Raises:
        ConfigError: a key is unknown, a value is refused, or arguments do not fit each other.
    """
    where = "model_args"
    arguments = _from_flags(additional or {}) | dict(given)
    if arguments.pop("trust_remote_code", False):
        raise ConfigError(f"{where}: trust_remote_code: code from a checkpoint is never run here; leave it out")
    arguments.pop("max_batch_size", None)
    arguments["batch_size"] = _batch_size(arguments.get("batch_size", 1))
    decoder = arguments.get("decoder", "refusion")
    check_keys([str(decoder)], DECODERS, "", what="decoder")
    settings_type = DECODERS[decoder].Settings
    of_decoder = field_types(settings_type)
    check_keys(arguments, field_types(ModelArgs).keys() | of_decoder.keys(), where)
    if "pretrained" not in arguments:
        raise ConfigError(f"{where}: pretrained is missing; name a checkpoint folder or a hub id: pretrained=...")
    settings = read_values(settings_type, {key: value for key, value in arguments.items() if key in of_decoder}, where)
    rest = read_values(ModelArgs, {key: value for key, value in arguments.items() if key not in of_decoder}, where)
    return ModelArgs(**rest, settings=settings)


def _from_flags(additional: Mapping[str, Any]) -> dict[str, Any]:
    flags = {key: value for key, value in additional.items() if value is not None}
    # lm-eval's command line passes cuda:0 on every machine, with a GPU or without, so that value is not the user's.
    if str(flags.get("device", "")) in ("cuda:0", "cuda"):
        del flags["device"]
    return flags


def _batch_size(value: Any) -> Any:
    return None if isinstance(value, str) and value.startswith("auto") else value
