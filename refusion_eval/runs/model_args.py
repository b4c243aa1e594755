"""The arguments of a run, the published systems that stand for some of them, and the settings of each task."""

import hashlib
import json
import logging
import re
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from annotated_types import Le

from refusion_eval.benchmarks import BENCHMARKS, Task, find_task
from refusion_eval.config import (
    CheckpointOptions,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    build,
    check_keys,
    field_types,
    mapping,
    read_values,
    read_yaml,
    recorded_values,
    settings_class,
)
from refusion_eval.decoders import DECODERS, find_decoder
from refusion_eval.errors import ConfigError
from refusion_eval.paths import EMBEDDED, embedded_name, embedded_path, embedded_systems, tasks_path
from refusion_eval.store.records import SERVER
from refusion_eval.untrusted import names_code

log = logging.getLogger(__name__)

# Names in tables of the embedded checkpoints that are not their decoder's main checkpoint.
EMBEDDED_NAMES = {"autoregressive_sft": "AR-SFT"}
EMBEDDED_DECODERS = {"autoregressive_sft": "autoregressive"}

# Arguments about the machines and watchers of a run, no part of a record, which may change when the run is continued.
LAUNCH_ARGUMENTS = ("engine", "workers", "worker_cpus", "ray_address", "tracker")

_NEEDS_OF_LOOPS: dict[str, dict[str, Any]] = {
    "engine": {},
    "generate": {"decoder": "autoregressive", "batch_size": 1, "cuda_graphs": False, "adapter": None},
    "server": {"decoder": "autoregressive", "cuda_graphs": False, "adapter": None, "engine": "local", "backend": "own"},
}
# Arguments of servers: those that reach one, and those that say what runs there.
TO_SERVERS = ("base_url", "server_name", "served_model", "api_key_env", "timeout", "patience")
OF_SERVERS = (*TO_SERVERS, "diffusion", "server_threads")
_LONGEST_NAME = 255  # bytes of a file's name
MOST_SAMPLES = 10_000  # of an item; all requests are listed before the first is made
NO_FILES = "none"  # `pretrained` of a server's model of which no files are at hand

DEFAULT = "default"  # source of a setting that nothing gives

# Names of lm-eval for the length of the response. The first that is given counts, as in lm-eval.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

# Generation arguments with values that change nothing, so a decoder that does not know them accepts these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "num_beams": (1,),
    "repetition_penalty": (1,),
    "use_cache": (True,),
}


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
        preset: Settings table of the decoder: the name of one, where the package has several (the default is the
            first), or FILE.yaml with a table of your own, which has a row for each benchmark.
        batch_size: Requests decoded together, as far as the KV budget allows, or auto (of a server 1). Speed is
            measured at 1 only.
        tps_samples: Items of every task that are decoded alone, to measure speed beside a batch.
        samples: Texts of every item, each drawn with a seed of its own. More than one need a temperature.
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
        loop: Loop of the autoregressive decoder: this project's engine; transformers' generate, which separates the
            gain of an engine from the gain of an algorithm; or a server, which decoder=server means too.
        base_url: Address of a server with OpenAI-compatible completions, such as http://127.0.0.1:8000.
        server_name: Name that stands for the server's address, so that a run goes on, and speeds compare, at another
            address of the same server. It has letters, digits, dots, hyphens and underscores.
        served_model: Name of the model at the server. The default is the only one that the server lists.
        api_key_env: Environment variable that holds the server's key. The key itself is never given as an argument.
        diffusion: The server's model is a diffusion model, whose forwards no server tells, so that TPF stays empty.
        server_threads: Threads of a server on this machine. With these, --device and --dtype its speed stands beside
            that of this engine; otherwise it has columns of its own.
        timeout: Seconds of silence after which a request to a server has failed. The default is 600.
        patience: Seconds during which a request that failed for a passing reason is repeated. The default is 300.
        engine: Where requests are decoded: local is this process and those of its launcher, ray the workers of a Ray
            cluster.
        workers: Largest number of Ray workers. The default is as many as fit.
        worker_cpus: Processor cores of a Ray worker without a GPU.
        ray_address: HOST:PORT of a Ray cluster, or auto for this machine's. By default a cluster is started here.
        tracker: Experiment tracker that the figures of the run go to while it runs: wandb, trackio or mlflow, each with
            the extra of its name. By default none.
        settings: The decoder's settings that were given beside these.
        protocol: What records say of the protocol that the run belongs to; see `Manifest.protocol`.
    """

    decoder: str = "refusion"
    preset: str | None = None
    batch_size: PositiveInt | None = 1
    tps_samples: NonNegativeInt = 0
    samples: Annotated[PositiveInt, Le(MOST_SAMPLES)] = 1
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
    loop: Literal["engine", "generate", "server"] = "engine"
    base_url: str | None = None
    server_name: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    diffusion: bool = False
    server_threads: PositiveInt | None = None
    timeout: PositiveFloat | None = None
    patience: NonNegativeFloat | None = None
    engine: Literal["local", "ray"] = "local"
    workers: PositiveInt | None = None
    worker_cpus: PositiveInt = 1
    ray_address: str | None = None
    tracker: Literal["wandb", "trackio", "mlflow"] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    protocol: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        CheckpointOptions.__post_init__(self)  # super() does not work in a class with slots
        texts = {entry.name: value for entry in fields(self) if isinstance(value := getattr(self, entry.name), str)}
        for name, text in texts.items():  # most may be the name of a file
            if "\0" in text or any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in text.split("/")):
                shown = reprlib.repr(text)
                raise ConfigError(f"model_args: {name}={shown} is too long for a name, or has a NUL; correct it")
        try:
            datetime.fromisoformat("2026-01-31" if self.prompt_time is None else self.prompt_time)
        except ValueError:
            example = "write it as 2026-01-31 or 2026-01-31T12:00"
            raise ConfigError(f"model_args: prompt_time={self.prompt_time!r} is not a date; {example}") from None
        for name, needed in _NEEDS_OF_LOOPS[self.loop].items():
            if (value := getattr(self, name)) not in (needed, None):
                reason = f"loop={self.loop} runs with {name}={needed} only, not {value}"
                raise ConfigError(f"model_args: {reason}; leave one of them out")
        if self.tracker is not None and self.run_dir is None:
            raise ConfigError(f"model_args: tracker={self.tracker} is for a recorded run; add run_dir, or leave it out")
        self._check_server()
        for name, default in {"workers": None, "worker_cpus": 1, "ray_address": None}.items():
            if (value := getattr(self, name)) != default and self.engine != "ray":
                raise ConfigError(f"model_args: {name}={value} is for engine=ray only; add engine=ray, or leave it out")

    def _check_server(self) -> None:
        if self.loop != "server":
            given = [name for name in OF_SERVERS if getattr(self, name) not in (None, False)]
            if given:
                raise ConfigError(f"model_args: {given[0]} is for a server only; add decoder=server, or leave it out")
            return
        address = urlsplit(self.base_url or "")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(
                f"model_args: base_url={self.base_url} is no address; give that of the server: http://HOST:PORT"
            )
        if address.username is not None or address.query or address.fragment:
            raise ConfigError(
                "model_args: base_url holds more than an address; a key goes into a variable: api_key_env"
            )
        if self.server_name is not None and not re.fullmatch(r"[\w.-]+", self.server_name):
            raise ConfigError(
                f"model_args: server_name={self.server_name!r} becomes part of the name of a folder; write it with "
                "letters, digits, dots, hyphens and underscores"
            )
        if self.batch_size is None:
            raise ConfigError("model_args: batch_size=auto is for this machine's memory; give a server a number")
        if self.pretrained == NO_FILES and self.chat_template not in (None, "none"):
            raise ConfigError(
                "model_args: chat_template needs the model's tokenizer files too; give them as pretrained"
            )
        if self.server_threads is not None and "auto" in (self.device, self.dtype):
            raise ConfigError("model_args: server_threads needs device and dtype too, which decide speed as well")

    @property
    def is_apart(self) -> bool:
        """Whether a server decodes on a machine that is not known, so that its speed compares with no other."""
        return self.loop == SERVER and self.server_threads is None

    @property
    def checkpoint(self) -> str:
        name = embedded_name(self.pretrained, self.decoder)
        return self.pretrained if name is None else str(embedded_path(name))

    @property
    def options(self) -> CheckpointOptions:
        """The options of the checkpoint, with the folder of an embedded checkpoint in place of its name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(CheckpointOptions)}
        return CheckpointOptions(**values | {"pretrained": self.checkpoint})

    @property
    def system_name(self) -> str:
        embedded = EMBEDDED_NAMES.get(embedded_name(self.pretrained, self.decoder) or "")
        served = f"server {server_place(self.base_url, self.server_name)}" if self.loop == SERVER else None
        name = self.system or served or embedded or find_decoder(self.decoder).label
        name = name if self.preset is None else f"{name} ({Path(self.preset).name})"
        return name if self.loop != "generate" else f"{name} ({self.loop})"


def server_place(base_url: str | None, server_name: str | None = None) -> str:
    """What tells a server from others: the name that the user gives it, else HOST:PORT of its address."""
    return server_name or urlsplit(base_url or "").netloc


def parse_model_args(given: Mapping[str, Any], additional: Mapping[str, Any] | None = None) -> ModelArgs:
    """Separates the decoder's settings from the other arguments, and checks all; `given` outranks `additional`."""
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
    if arguments.get("decoder") == SERVER:
        arguments |= {"decoder": "autoregressive", "loop": SERVER, "pretrained": arguments.get("pretrained", NO_FILES)}
    settings_type = find_decoder(str(arguments.get("decoder", "refusion"))).Settings
    setting_names = field_types(settings_type).keys()
    check_keys(arguments, field_types(ModelArgs).keys() | setting_names, where)
    if "pretrained" not in arguments:
        raise ConfigError(f"{where}: pretrained is missing; name a checkpoint folder or a hub id: pretrained=...")
    # Settings are checked one by one here, and as a whole once those of the task and the checkpoint are beside them.
    given_settings = {key: arguments.pop(key) for key in list(arguments) if key in setting_names}
    settings = read_values(settings_type, given_settings, where)
    return ModelArgs(**arguments, settings=settings)


def entry_arguments(
    arguments: Mapping[str, Any], where: str, of_servers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The model arguments of a system in a file, with those of a published system in the place of its name.

    `of_servers` are arguments that a system which a server decodes has besides.
    """
    given = dict(arguments)
    if "system" in given and "pretrained" not in given and "decoder" not in given:
        given = system_arguments(given.pop("system"), given.pop("model", None)) | given
    if SERVER in (given.get("decoder"), given.get("loop")):
        given |= of_servers or {}
    try:
        parsed = parse_model_args(given)  # types every argument and refuses unknown ones
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if parsed.settings or parsed.run_dir:
        raise ConfigError(f"{where}: arguments hold run_dir or decoder settings; settings go under `settings:`")
    return given | {"decoder": parsed.decoder, "loop": parsed.loop, "pretrained": parsed.pretrained}


def file_arguments(
    arguments: Mapping[str, Any], where: str, *, allow_code: bool, of_servers: Mapping[str, Any]
) -> dict[str, Any]:
    """`entry_arguments` of a file, which may be a stranger's; it imports and sends nothing that the user did not allow.

    Args:
        allow_code: whether the file may name code.
        of_servers: what the command line says of servers, which counts before what the file says.
    """
    code = [arguments["decoder"]] if names_code(str(arguments.get("decoder", ""))) else []
    code += [arguments["ray_address"]] if arguments.get("ray_address") else []  # a cluster sends objects with code
    check_code(code, where, allow_code=allow_code)
    names_host = "base_url" in arguments or str(arguments.get("system", "")).startswith(f"{SERVER}:")
    variable = arguments.get("api_key_env")
    if names_host and variable is not None and not ({"base_url", "api_key_env"} & of_servers.keys()):
        raise ConfigError(
            f"{where}: names a host and the variable {variable}, whose key would be sent there; if you want that, "
            f"say it on the command line: --api-key-env {variable}"
        )
    return entry_arguments(arguments, where, of_servers)


def check_code(code: Sequence[Any], where: str, *, allow_code: bool) -> None:
    """Refuses code that a file names, unless the command line allows it."""
    if code and not allow_code:
        raise ConfigError(f"{where}: names code, {code[0]}, which runs only with --allow-code; read it before")


@settings_class()
class PublishedSystem:
    name: str  # which `--system` takes
    label: str  # in tables
    decoder: str
    pretrained: str | None = None  # hub id of the checkpoint; None if none was published
    adapter: str | None = None  # hub id of the LoRA adapter on the checkpoint
    preset: str | None = None  # its settings table, if that is not the first one of its decoder
    # How its authors prompted: thinking in the chat template, "none" for plain prompts, a BOS token in front.
    enable_thinking: bool = True
    chat_template: str | None = None
    add_bos_token: bool = False
    # Of a model that only servers run: whether it is a diffusion model, the command of its server, and who says so.
    diffusion: bool = False
    serve: str | None = None
    source: str | None = None


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
        check_keys([systems[name].decoder], (*DECODERS, SERVER), where, what="decoder")
    with_row = {system.decoder for system in systems.values()}
    for name in sorted(DECODERS.keys() - with_row - systems.keys()):
        systems[name] = PublishedSystem(name=name, label=DECODERS[name].label, decoder=name)
    return systems


def system_arguments(name: str, model: str | None) -> dict[str, str | bool | None]:
    """The model arguments of a published system; on a checkpoint of the user's, without the published adapter.

    `server` and `server:URL` stand for the model of a server, of which `model` has the tokenizer.
    """
    kind, _, address = name.partition(":")
    if kind == SERVER:
        named: dict[str, str | bool | None] = {"base_url": address} if address else {}
        return {"decoder": SERVER, "pretrained": model or NO_FILES, **named}
    systems = published_systems()
    check_keys([name], systems, "", what="system")
    system = systems[name]
    if model is None and system.pretrained is None:
        raise ConfigError(f"system {name}: no checkpoint of it was published; give one with --model")
    arguments = {**asdict(system), "system": system.label}
    for name_here in ("name", "label", "serve", "source"):
        del arguments[name_here]
    return arguments if model is None else arguments | {"pretrained": model, "adapter": None}


def choose_systems(names: Sequence[str], model: str = "") -> dict[str, dict[str, str]]:
    """Name -> model arguments of systems: published ones, one of them on the checkpoint `model`, or embedded ones.

    They are of the embedded family for the model `embedded`, and, all of it, without names and a model.
    """
    if model == EMBEDDED or not (names or model):
        family = embedded_systems()
        check_keys(names, family, f"--model {EMBEDDED}", what="system")
        chosen = {name: family[name] for name in names or family}
        return {
            name: {"pretrained": EMBEDDED if decoder == one else f"{EMBEDDED}:{one}", "decoder": decoder}
            for name, (one, decoder) in chosen.items()
        }
    if model and len(names) != 1:
        raise ConfigError(f"--model {model} is one checkpoint, and --system names {len(names)} systems")
    for name in names:
        system_arguments(name, model or None)  # refuses a name, or a system without a checkpoint
    return {name: {"system": name, **({"model": model} if model else {})} for name in names}


_TABLE_KEYS = ("decoder", "source", "common", "benchmarks")


class Table(NamedTuple):
    """A settings table: the decoder's settings for each benchmark, and where each row comes from."""

    label: str  # in messages and records, with the name of the table if its file has several
    benchmarks: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str]
    is_own: bool = False  # of the user, who means every benchmark to have a row


class Generation(NamedTuple):
    """Generation arguments of a request: decoder settings, and strings at whose first occurrence the text is cut."""

    values: Mapping[str, Any]
    until: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    settings: Any  # an instance of the decoder's settings class
    sources: Mapping[str, str]  # setting -> model_args, generation_kwargs, a table and benchmark, checkpoint, ...
    until: tuple[str, ...] = ()  # strings at whose first occurrence the text is cut
    task: Task | None = None  # the task of this project that it is, or that a task of lm-eval corresponds to
    values: Mapping[str, Any] = field(init=False)  # the settings as they are recorded
    digest: str = field(init=False)  # hash of settings and stop strings; it is part of the key of a sample

    def __post_init__(self) -> None:
        values = recorded_values(self.settings)
        text = json.dumps([values, self.until], sort_keys=True, default=str)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    def describe(self, before: "Resolved | None" = None, *, with_defaults: bool = False) -> str:
        """The settings on one line for the log, grouped by source: those that are not defaults, or not as before.

        Args:
            with_defaults: also name the defaults, which no page lists for a decoder of a user's own.
        """
        by_source: dict[str, list[str]] = {}
        for key, value in self.values.items():
            is_named = with_defaults or self.sources[key] != DEFAULT
            if is_named if before is None else before.values.get(key) != value:
                by_source.setdefault(self.sources[key], []).append(f"{key}={value}")
        described = [f"{' '.join(pairs)} [{source}]" for source, pairs in by_source.items()]
        if before is None or before.until != self.until:
            described.append(f"stop at {list(self.until)}")
        return "; ".join(described) or "as before"


def own_table(preset: str | None) -> Path | None:
    """The file with a settings table of the user's own, if that is what `preset` is, and not the name of a table."""
    path = Path(preset or "").expanduser()
    return path if path.suffix in (".yaml", ".yml") else None


def choose_preset(decoder: str, preset: str | None) -> tuple[str | None, dict[str, Any]]:
    """Reads one settings table of a decoder, by default its first, unchecked; the name of an only one is None."""
    return _choose(own_table(preset) or tasks_path() / "settings" / f"{decoder}.yaml", decoder, preset)


def _choose(path: Path, decoder: str, preset: str | None) -> tuple[str | None, dict[str, Any]]:
    where = _where(path, preset)
    is_own = own_table(preset) is not None
    content = read_yaml(path, where) if is_own or path.exists() else {}
    check_keys(content, (*_TABLE_KEYS, "presets"), where)
    if content and content.get("decoder") != decoder:
        raise ConfigError(f"{where}: the file has to say `decoder: {decoder}`")
    if is_own or "presets" not in content:
        if preset is not None and not is_own:
            raise ConfigError(f"{where} has no presets, so leave out preset={preset}")
        return None, content
    check_keys(content, ("decoder", "presets"), where)
    presets = mapping(content["presets"], f"{where}: presets")
    name = next(iter(presets)) if preset is None else preset
    check_keys([name], presets, where, what="preset")
    return name, mapping(presets[name], f"{where}: {name}")


def _where(path: Path, preset: str | None) -> str:
    return f"tasks/settings/{path.name}" if own_table(preset) is None else str(path)


def load_table(
    folder: Path,
    decoder: str,
    mini: bool,
    settings_type: type,
    checkpoint: Mapping[str, Any],
    preset: str | None = None,
) -> Table | None:
    """Reads and checks a settings table, for the benchmarks or the mini tasks; None if the decoder has no such file."""
    # A file holds one table, or several under `presets`: the authors' own settings and those of a comparison differ.
    # The row of a benchmark outranks `common`, and may have a source of its own.
    own = own_table(preset)
    path = own or folder / f"{'mini_' if mini else ''}{decoder}.yaml"
    if own is None and not path.exists():
        return None
    where = _where(path, preset)
    name, content = _choose(path, decoder, preset)
    where += f":{name}" if name else ""
    check_keys(content, _TABLE_KEYS, where)
    rows, common = mapping(content.get("benchmarks"), f"{where}: benchmarks"), mapping(content.get("common"), where)
    if not rows:
        raise ConfigError(f"{where}: has no benchmarks; write benchmarks: with one or more of {', '.join(BENCHMARKS)}")
    check_keys(rows, BENCHMARKS, where)
    benchmarks: dict[str, Mapping[str, Any]] = {}
    sources: dict[str, Any] = {}
    for benchmark, row in rows.items():
        row = mapping(row, f"{where}: {benchmark}")
        values = {key: value for key, value in {**common, **row}.items() if key != "source"}
        sources[benchmark] = row.get("source", content.get("source", own and own.name))
        if not sources[benchmark]:
            raise ConfigError(f"{where}: {benchmark} needs a source, its own or the table's")
        # Built only to check the whole row; which settings a task has is known once all sources are merged.
        checked: Any = build(settings_type, {**checkpoint, **values}, f"{where}: {benchmark}")
        benchmarks[benchmark] = {key: getattr(checked, key) for key in values}
    if own is None:
        return Table(where, benchmarks, sources)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()[:12]
    return Table(f"{own.name}@{digest}", benchmarks, sources, is_own=True)


def load_tables(args: ModelArgs, checkpoint: Mapping[str, Any]) -> dict[bool, Table | None]:
    """The settings tables of a run's decoder: for the benchmarks (False) and for the mini tasks (True)."""
    # The user may have to name the tokens of a checkpoint without a card. A row of the table that needs an EOS must not
    # stop the tasks of other rows, so every row is read with one. What a task has is checked later, as it is.
    tokens = {**checkpoint, **{key: value for key, value in args.settings.items() if key in ("mask_id", "eos_ids")}}
    tokens["eos_ids"] = tokens.get("eos_ids") or (0 if tokens.get("mask_id") else 1,)
    # The package's settings of the mini tasks have no presets.
    presets = {False: args.preset, True: args.preset if own_table(args.preset) else None}
    folder, settings_type = tasks_path() / "settings", find_decoder(args.decoder).Settings
    return {
        mini: load_table(folder, args.decoder, mini, settings_type, tokens, preset) for mini, preset in presets.items()
    }


def resolve_task(
    task: str,
    args: ModelArgs,
    generation_kwargs: Mapping[str, Any],
    tables: Mapping[bool, Table | None],
    checkpoint: Mapping[str, Any],
) -> Resolved:
    """The settings of a task in a run; see `resolve`."""
    task_here, settings_type = find_task(task), find_decoder(args.decoder).Settings
    return resolve(
        task,
        settings_type,
        model_args=args.settings,
        generation=read_generation_kwargs(generation_kwargs, settings_type, task),
        table=tables[task_here.mini] if task_here else None,
        checkpoint=checkpoint,
        # Fusing gives the same tokens in fewer forwards, so the paper's TPF is counted without them.
        paper={"fuse": False} if "fuse" in settings_type.__dataclass_fields__ else {},
    )


def read_generation_kwargs(kwargs: Mapping[str, Any], settings_type: type, where: str) -> Generation:
    """Translates generation arguments into settings of a decoder; ConfigError for what the decoder cannot do."""
    types = field_types(settings_type)
    rest = dict(kwargs)
    until = rest.pop("until", None) or ()
    lengths = [value for name in LENGTH_NAMES if (value := rest.pop(name, None)) is not None]
    if lengths:
        rest.setdefault("gen_length", lengths[0])
    # Sampling follows lm-eval: no argument about it is greedy, do_sample=True without a temperature samples at 1.
    do_sample = rest.pop("do_sample", None)
    for key, neutral in NEUTRAL.items():
        if key not in types and key in rest:
            value = rest.pop(key)
            if value not in neutral:
                raise ConfigError(f"{where}: {key}={value!r} cannot be obeyed by this decoder; leave it out")
    where = f"{where}: generation_kwargs"
    values = read_values(settings_type, rest, where)
    if "temperature" in types:
        temperature = values.get("temperature")
        if do_sample is False:
            if temperature:
                log.warning("%s: temperature=%s has no effect with do_sample=False: greedy", where, temperature)
            values["temperature"] = 0.0
        elif do_sample is True and temperature is None:
            values["temperature"] = 1.0
        elif do_sample is True and temperature == 0:
            log.warning("%s: do_sample=True with temperature=0 is greedy", where)
    elif do_sample:
        raise ConfigError(f"{where}: do_sample=True, but this decoder has no temperature; leave it out")
    until = (until,) if isinstance(until, str) else until
    return Generation(values, tuple(map(str, filter(None, until))))


def resolve(
    task: str,
    settings_type: type,
    *,
    model_args: Mapping[str, Any],
    generation: Generation,
    table: Table | None,
    checkpoint: Mapping[str, Any],
    paper: Mapping[str, Any] | None = None,  # where the paper's algorithm differs from the decoder's defaults
) -> Resolved:
    """Merges the sources of one task's settings by their precedence; ConfigError if they contradict each other."""
    task_here = find_task(task)
    # Lowest first: the decoder's defaults, the paper's algorithm, the mask and end tokens of the checkpoint, the table,
    # the task's generation arguments (its YAML's, updated by --gen_kwargs), the model arguments.
    layers: list[tuple[str, Mapping[str, Any]]] = [("paper", paper or {}), ("checkpoint", checkpoint)]
    if table is not None and task_here is not None:
        name = task_here.benchmark.name
        if name not in table.benchmarks and task_here.benchmark.settings_of in table.benchmarks:
            name = task_here.benchmark.settings_of
        if name in table.benchmarks:
            layers.append((f"{table.label}:{name}", table.benchmarks[name]))
        elif table.is_own:
            raise ConfigError(
                f"{table.label}: has no row for {name}; add it under benchmarks, or leave out task {task}"
            )
    layers += [("generation_kwargs", generation.values), ("model_args", model_args)]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(field_types(settings_type), DEFAULT)
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    given = ", ".join(f"{key}={value} from {sources[key]}" for key, value in values.items())
    settings: Any = build(settings_type, values, f"task {task} ({given or 'defaults'})")
    recorded = {key: sources[key] for key in recorded_values(settings)}
    return Resolved(settings=settings, sources=recorded, until=generation.until, task=task_here)
