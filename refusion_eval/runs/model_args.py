"""The arguments of `lm_eval --model refusion` and of `refusion-eval run`: names, types, defaults, help.

The systems of the paper, a decoder on a published checkpoint each, stand for some of these arguments by one name.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from datetime import datetime
from functools import cache
from typing import Any, Literal

from refusion_eval.config import (
    CheckpointOptions,
    NonNegativeInt,
    PositiveInt,
    build,
    check_keys,
    field_types,
    mapping,
    read_values,
    settings_class,
)
from refusion_eval.decoders import DECODERS, find_decoder
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_name, embedded_path, tasks_path

# Names in tables of the embedded checkpoints that are not their decoder's main checkpoint.
EMBEDDED_NAMES = {"autoregressive_sft": "AR-SFT"}
EMBEDDED_DECODERS = {"autoregressive_sft": "autoregressive"}

# Arguments about the machines of a run. They are no part of a record and may change when the run is continued.
LAUNCH_ARGUMENTS = ("engine", "workers", "worker_cpus", "ray_address")


def system_of_label(label: str) -> str:
    """The decoder or checkpoint whose runs have this name in tables by default; the name itself if none has."""
    labels = {name: decoder.label for name, decoder in DECODERS.items()} | EMBEDDED_NAMES
    return next((name for name, other in labels.items() if other == label), label)


@cache
def decoder_of_system(system: str) -> str:
    """The decoder of a published system, an embedded checkpoint or a decoder's own key; empty for others."""
    published = published_systems().get(system)
    decoder = EMBEDDED_DECODERS.get(system, system) if published is None else published.decoder
    return decoder if decoder in DECODERS else ""


@settings_class("model_args")
class ModelArgs(CheckpointOptions):
    """Which checkpoint to load and how to run it. Decoder settings are given beside these, by their own names.

    The entries below are also the help of the options of `refusion-eval run`.

    Attributes:
        decoder: Name of the decoder, or the place of your own: FILE.py:DECODER or MODULE:DECODER.
        preset: Settings table of the decoder, where its file has several. The default is the first.
        batch_size: Requests decoded together, as far as the KV budget allows, or auto. Speed is measured at 1 only.
        tps_samples: Items of every task that are decoded alone, to measure speed beside a batch.
        run_dir: Folder where every sample is recorded as it finishes, and found again by the next run.
        data_dir: Folder with benchmark rows.
        enable_thinking: Value that the chat template receives for thinking. The default is yes.
        chat_template: A Jinja file instead of the checkpoint's template, or none for plain prompts.
        add_bos_token: Begin every prompt with the tokenizer's BOS token, unless the prompt does already.
        prompt_time: Date that a chat template finds where it asks for today's, such as 2026-01-31, with a time where it
            matters. The default is the moment at which the run began.
        mc_samples: Noised copies of each continuation that estimate the log-likelihood of a masked model.
        warmup: Requests that are decoded and discarded before the first measured request of each settings.
        system: Name of the system in tables. The default is the decoder's.
        backbone: Model that the checkpoint was made from, if its config.json does not say. Speed-up compares systems of
            one backbone.
        loop: Loop of the autoregressive decoder: this project's engine, or transformers' generate, which separates the
            gain of an engine from the gain of an algorithm.
        engine: Where requests are decoded: local is this process and those of its launcher, ray the workers of a Ray
            cluster.
        workers: Largest number of Ray workers. The default is as many as fit.
        worker_cpus: Processor cores of a Ray worker without a GPU.
        ray_address: HOST:PORT of a Ray cluster, or auto for this machine's. By default a cluster is started here.
        settings: The decoder's settings that were given beside these.
    """

    decoder: str = "refusion"
    preset: str | None = None
    batch_size: PositiveInt | None = 1
    tps_samples: NonNegativeInt = 0
    run_dir: str | None = None
    data_dir: str | None = None
    enable_thinking: bool = True
    chat_template: str | None = None
    add_bos_token: bool = False
    prompt_time: str | None = None
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
        CheckpointOptions.__post_init__(self)  # super() does not work in a class with slots
        if self.prompt_time is not None:
            try:
                datetime.fromisoformat(self.prompt_time)
            except ValueError:
                raise ConfigError(
                    f"model_args: prompt_time={self.prompt_time!r} is not a date; write it as 2026-01-31 or "
                    "2026-01-31T12:00"
                ) from None
        needs_of_stock_loop = {"decoder": "autoregressive", "batch_size": 1, "cuda_graphs": False, "adapter": None}
        for name, needed in needs_of_stock_loop.items():
            value = getattr(self, name)
            if self.loop != "engine" and value not in (needed, None):
                raise ConfigError(
                    f"model_args: loop={self.loop} is transformers' own loop, which runs with {name}={needed} only, "
                    f"not {value}; leave one of them out"
                )
        for name, default in {"workers": None, "worker_cpus": 1, "ray_address": None}.items():
            value = getattr(self, name)
            if self.engine != "ray" and value != default:
                raise ConfigError(f"model_args: {name}={value} is for engine=ray only; add engine=ray, or leave it out")

    @property
    def settings_type(self) -> type:
        """The settings class of the decoder."""
        return find_decoder(self.decoder).Settings

    @property
    def checkpoint(self) -> str:
        """Folder or hub id of the checkpoint."""
        name = embedded_name(self.pretrained, self.decoder)
        return self.pretrained if name is None else str(embedded_path(name))

    @property
    def options(self) -> CheckpointOptions:
        """The options of the checkpoint, with the folder of an embedded checkpoint in place of its name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(CheckpointOptions)}
        return CheckpointOptions(**values | {"pretrained": self.checkpoint})

    @property
    def system_name(self) -> str:
        """Name of the system in tables."""
        embedded = EMBEDDED_NAMES.get(embedded_name(self.pretrained, self.decoder) or "")
        name = self.system or embedded or find_decoder(self.decoder).label
        name = name if self.preset is None else f"{name} ({self.preset})"
        return name if self.loop == "engine" else f"{name} ({self.loop})"


def parse_model_args(given: Mapping[str, Any], additional: Mapping[str, Any] | None = None) -> ModelArgs:
    """Separates the decoder's settings from the other model arguments, and converts and checks all of them.

    `additional` has what lm-eval's command line adds; `given` outranks it.
    """
    where = "model_args"
    flags = {key: value for key, value in (additional or {}).items() if value is not None}
    # lm-eval's command line passes cuda:0 on every machine, with a GPU or without, so that value is not the user's.
    if str(flags.get("device")) in ("cuda:0", "cuda"):
        del flags["device"]
    arguments = flags | dict(given)
    if arguments.pop("trust_remote_code", False):
        raise ConfigError(f"{where}: trust_remote_code: code from a checkpoint is never run here; leave it out")
    arguments.pop("max_batch_size", None)
    batch_size = arguments.get("batch_size")
    if str(batch_size).startswith("auto"):
        arguments["batch_size"] = None
    elif isinstance(batch_size, str) and not batch_size.lstrip("+-").isdigit():
        raise ConfigError(f"{where}: batch_size={batch_size!r} is not a whole number; give one, or auto")
    settings_type = find_decoder(str(arguments.get("decoder", "refusion"))).Settings
    setting_names = field_types(settings_type).keys()
    check_keys(arguments, field_types(ModelArgs).keys() | setting_names, where)
    if "pretrained" not in arguments:
        raise ConfigError(f"{where}: pretrained is missing; name a checkpoint folder or a hub id: pretrained=...")
    # Settings are checked one by one here, and as a whole once those of the task and the checkpoint are beside them.
    given_settings = {key: arguments.pop(key) for key in list(arguments) if key in setting_names}
    settings = read_values(settings_type, given_settings, where)
    return ModelArgs(**arguments, settings=settings)


@settings_class()
class PublishedSystem:
    """One row of the paper's comparison.

    Attributes:
        name: name that `--system` takes.
        label: name in tables.
        decoder: name of the decoder.
        pretrained: hub id of the checkpoint; None if none was published.
        adapter: hub id of the LoRA adapter on the checkpoint, if any.
        enable_thinking: argument of the chat template, as its authors set it.
        chat_template: "none" if its authors gave the model plain prompts.
        add_bos_token: whether its authors began prompts with the BOS token.
    """

    name: str
    label: str
    decoder: str
    pretrained: str | None = None
    adapter: str | None = None
    enable_thinking: bool = True
    chat_template: str | None = None
    add_bos_token: bool = False


def published_systems() -> dict[str, PublishedSystem]:
    """Reads tasks/settings/systems.toml; a decoder without a row there is a system without a published checkpoint."""
    path = tasks_path() / "settings" / "systems.toml"
    file = f"tasks/settings/{path.name}"
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML ({error}); correct it") from error
    systems = {}
    for name, row in rows.items():
        where = f"{file}: {name}"
        systems[name] = build(PublishedSystem, {"name": name, **mapping(row, where)}, where)
        check_keys([systems[name].decoder], DECODERS, where, what="decoder")
    with_row = {system.decoder for system in systems.values()}
    for name in sorted(DECODERS.keys() - with_row - systems.keys()):
        systems[name] = PublishedSystem(name=name, label=DECODERS[name].label, decoder=name)
    return systems


def system_arguments(name: str, model: str | None) -> dict[str, str | bool | None]:
    """The model arguments of a published system; on a checkpoint of the user's, without the published adapter."""
    systems = published_systems()
    check_keys([name], systems, "", what="system")
    system = systems[name]
    if model is None and system.pretrained is None:
        raise ConfigError(f"system {name}: no checkpoint of it was published; give one with --model")
    arguments = {**asdict(system), "system": system.label}
    del arguments["name"], arguments["label"]
    return arguments if model is None else arguments | {"pretrained": model, "adapter": None}
