"""The arguments of a run, the published systems that stand for some of them, and the settings of each task."""

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from annotated_types import Le

from refusion_eval.config import (
    CheckpointOptions,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_keys,
    field_types,
    read_values,
    settings_class,
)
from refusion_eval.decoders import find_decoder
from refusion_eval.errors import ConfigError
from refusion_eval.models.packaged import MODELS
from refusion_eval.paths import embedded_name, embedded_path
from refusion_eval.runs.release import ReleaseSettings
from refusion_eval.runs.systems import EMBEDDED_NAMES, NO_FILES, system_arguments
from refusion_eval.store.records import SERVER
from refusion_eval.untrusted import names_code

# Arguments about the machines and watchers of a run, no part of a record, which may change when the run is continued.
LAUNCH_ARGUMENTS = ("engine", "workers", "worker_cpus", "ray_address", "tracker", "allow_code")


class Loop(NamedTuple):
    """What the model argument `loop` names."""

    backend: str  # MODULE:CLASS of the `Backend`, imported at its first use, because some load slowly
    needs: Mapping[str, Any] = MappingProxyType({})  # model argument -> the only value with which it runs, beside None
    mark: str = ""  # what names of systems and folders say of it


RELEASE = "release"  # the loop that a checkpoint was published with
_LEFT_TO_RIGHT = {"decoder": "autoregressive", "cuda_graphs": False, "adapter": None}
LOOPS: Mapping[str, Loop] = {
    "engine": Loop("refusion_eval.runs.own_engine:OwnEngine"),
    "generate": Loop("refusion_eval.runs.stock_loop:StockBackend", {**_LEFT_TO_RIGHT, "batch_size": 1}, "generate"),
    RELEASE: Loop(
        "refusion_eval.runs.stock_loop:ReleaseBackend",
        {"cuda_graphs": False, "adapter": None, "batch_size": 1, "preset": None, "engine": "local", "backend": "own"},
        "release-loop",
    ),
    SERVER: Loop("refusion_eval.runs.server:Server", {**_LEFT_TO_RIGHT, "engine": "local", "backend": "own"}),
}
# Arguments of servers: those that reach one, and those that say what runs there.
TO_SERVERS = (
    *("base_url", "server_api", "server_name", "served_model", "api_key_env", "timeout", "patience"),
    *("system_prompt", "reasoning_effort"),
)
OF_CHATS = ("system_prompt", "reasoning_effort", "diffusing")
OF_SERVERS = (*TO_SERVERS, "diffusing", "diffusion", "server_threads")
_LONGEST_NAME = 255  # bytes of a file's name
MOST_SAMPLES = 10_000  # of an item; all requests are listed before the first is made


@settings_class("model_args")
class ModelArgs(CheckpointOptions):
    """Which checkpoint to load and how to run it. Decoder settings are given beside these, by their own names.

    The entries below are also the help of the options of `refusion-eval run`.

    Attributes:
        decoder: Name of the decoder, or the place of your own: FILE.py:DECODER or MODULE:DECODER.
        preset: Settings table of the decoder: the name of one, where the package has several (the default is the
            first), or FILE.yaml with a table of your own, which has a row for each benchmark.
        batch_size: Requests decoded together, as far as the KV budget allows, or auto (not of a server). Speed is
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
        loop: What decodes: this project's engine; transformers' greedy generate, for decoder=autoregressive, which
            separates the gain of an engine from the gain of an algorithm; the generate of the checkpoint's own release,
            whose arguments are then the settings; or a server, which decoder=server means too.
        allow_code: Run the code that comes with the checkpoint, for loop=release, in a process of its own.
        base_url: Address of a server, such as http://127.0.0.1:8000. Of Azure it is that of a deployment:
            https://NAME/openai/deployments/DEPLOYMENT?api-version=VERSION.
        server_api: What the server is asked by: OpenAI-compatible completions, chat or responses, Ollama's chat, or
            SGLang's generate. The default is what it is known or found to have, completions first.
        server_name: Name that stands for the server's address, so that a run goes on, and is compared as the same
            system, at another address of the same server. It has letters, digits, dots, hyphens and underscores.
        served_model: Name of the model at the server. The default is the only one that the server lists.
        api_key_env: Environment variable that holds the server's key. The key itself is never given as an argument.
        diffusion: The server's model is a diffusion model, so that drafts that a server counts are no saved forwards.
        server_threads: Threads of a server on this machine. With these, --device and --dtype its speed stands beside
            that of this engine; otherwise it has columns of its own.
        system_prompt: System turn of the conversations that a chat gets, for items without one.
        reasoning_effort: Effort of thinking that a chat is asked for, in the server's words, such as low or none.
        diffusing: Ask a chat for every state of its text (Mercury), which records then have with their times, and
            `replay` shows. Servers may count no tokens then.
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
    loop: Literal["engine", "generate", "release", "server"] = "engine"
    allow_code: bool = False
    base_url: str | None = None
    server_api: Literal["completions", "chat", "responses", "generate", "ollama"] | None = None
    server_name: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    system_prompt: str | None = None
    reasoning_effort: str | None = None
    diffusing: bool = False
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
        texts.pop("system_prompt", None)
        for name, text in texts.items():  # most may be the name of a file
            if "\0" in text or any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in text.split("/")):
                shown = reprlib.repr(text)
                raise ConfigError(f"model_args: {name}={shown} is too long for a name, or has a NUL; correct it")
        try:
            datetime.fromisoformat("2026-01-31" if self.prompt_time is None else self.prompt_time)
        except ValueError:
            example = "write it as 2026-01-31 or 2026-01-31T12:00"
            raise ConfigError(f"model_args: prompt_time={self.prompt_time!r} is not a date; {example}") from None
        for name, needed in LOOPS[self.loop].needs.items():
            if (value := getattr(self, name)) not in (needed, None):
                reason = f"loop={self.loop} runs with {name}={needed} only, not {value}"
                raise ConfigError(f"model_args: {reason}; leave one of them out")
        if self.allow_code and self.loop != RELEASE:
            raise ConfigError("model_args: allow_code is for loop=release only; add loop=release, or leave it out")
        if self.tracker is not None and self.run_dir is None:
            raise ConfigError(f"model_args: tracker={self.tracker} is for a recorded run; add run_dir, or leave it out")
        self._check_server()
        for name, default in {"workers": None, "worker_cpus": 1, "ray_address": None}.items():
            if (value := getattr(self, name)) != default and self.engine != "ray":
                raise ConfigError(f"model_args: {name}={value} is for engine=ray only; add engine=ray, or leave it out")

    def _check_server(self) -> None:
        if self.loop != SERVER:
            given = [name for name in OF_SERVERS if (value := getattr(self, name)) is not None and value is not False]
            if given:
                raise ConfigError(f"model_args: {given[0]} is for a server only; add decoder=server, or leave it out")
            return
        try:
            address = urlsplit(self.base_url or "")
            is_whole = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # of brackets, or of a port that is no number
            is_whole = False
        if not is_whole:
            raise ConfigError(
                f"model_args: base_url={self.base_url} is no address; give that of the server: http://HOST:PORT"
            )
        is_azure = "/openai/deployments/" in address.path and re.fullmatch(r"api-version=[\w.-]+", address.query)
        if address.username is not None or (address.query and not is_azure) or address.fragment:
            raise ConfigError(
                "model_args: base_url holds more than an address; a key goes into a variable: api_key_env"
            )
        if self.server_name is not None and not re.fullmatch(r"[\w.-]+", self.server_name):
            raise ConfigError(
                f"model_args: server_name={self.server_name!r} becomes part of the name of a folder; write it with "
                "letters, digits, dots, hyphens and underscores"
            )
        of_chats = [name for name in OF_CHATS if getattr(self, name) not in (None, False)]
        if of_chats and self.server_api not in (("chat",) if self.diffusing else ("chat", "responses", "ollama")):
            raise ConfigError(f"model_args: {of_chats[-1]} is for chats only; add server_api=chat, or leave it out")
        if self.batch_size is None:
            raise ConfigError("model_args: batch_size=auto is for this machine's memory; give a server a number")
        if not self.has_files and self.chat_template not in (None, "none"):
            raise ConfigError(
                "model_args: chat_template needs the model's tokenizer files too; give them as pretrained"
            )
        if self.server_threads is not None and "auto" in (self.device, self.dtype):
            raise ConfigError("model_args: server_threads needs device and dtype too, which decide speed as well")

    @property
    def has_files(self) -> bool:
        """Whether files of the model are read here. A server may have them all; then nothing here needs PyTorch."""
        return self.loop != SERVER or self.pretrained != NO_FILES

    @property
    def is_apart(self) -> bool:
        """Whether a server decodes on a machine that is not known, so that its speed compares with no other."""
        return self.loop == SERVER and self.server_threads is None

    @property
    def settings_type(self) -> type:
        return settings_type(self.decoder, self.loop)

    @property
    def pinned(self) -> str | None:
        """The hash or commit that decides the weights; None for a name that may mean others on another day."""
        return MODELS[self.pretrained].sha256 if self.pretrained in MODELS else self.revision

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
        mark = LOOPS[self.loop].mark
        return f"{name} ({mark})" if mark else name


def settings_type(decoder: str, loop: str) -> type:
    """The class of the settings: the decoder's, or that of the loops of releases."""
    return ReleaseSettings if loop == RELEASE else find_decoder(decoder).Settings


def server_place(base_url: str | None, server_name: str | None = None) -> str:
    """What tells a server from others: the name that the user gives it, else HOST:PORT of its address."""
    return server_name or re.split("[/?#]", (base_url or "").partition("//")[2])[0]


def server_folder(base_url: str | None, server_name: str | None = None) -> str:
    """What the folder of a server's run says of it: its name, else HOST-PORT and what the address has behind them."""
    if server_name:
        return f"{SERVER}-{server_name}"
    _, _, address = re.split("[?#]", base_url or "")[0].partition("://")
    return re.sub(r"[^\w.\[\]-]", "-", f"{SERVER}-{address.rstrip('/').removesuffix('/v1')}")


def parse_model_args(given: Mapping[str, Any], additional: Mapping[str, Any] | None = None) -> ModelArgs:
    """Separates the decoder's settings from the other arguments, and checks all; `given` outranks `additional`."""
    where = "model_args"
    flags = {key: value for key, value in (additional or {}).items() if value is not None}
    # lm-eval's command line passes cuda:0 on every machine, with a GPU or without, so that value is not the user's.
    if str(flags.get("device")) in ("cuda:0", "cuda"):
        del flags["device"]
    arguments = flags | dict(given)
    if arguments.pop("trust_remote_code", False):
        told = "trust_remote_code: code from a checkpoint is never run here; leave it out"
        raise ConfigError(f"{where}: {told}, or give loop=release and allow_code=true for the release's own loop")
    arguments.pop("max_batch_size", None)
    batch_size = arguments.get("batch_size")
    if str(batch_size).startswith("auto"):
        arguments["batch_size"] = None
    elif isinstance(batch_size, str) and not batch_size.lstrip("+-").isdigit():
        raise ConfigError(f"{where}: batch_size={batch_size!r} is not a whole number; give one, or auto")
    if arguments.get("decoder") == SERVER:
        arguments |= {"decoder": "autoregressive", "loop": SERVER, "pretrained": arguments.get("pretrained", NO_FILES)}
    kind = settings_type(str(arguments.get("decoder", "refusion")), str(arguments.get("loop")))
    setting_names = field_types(kind).keys()
    check_keys(arguments, field_types(ModelArgs).keys() | setting_names, where)
    if "pretrained" not in arguments:
        raise ConfigError(f"{where}: pretrained is missing; name a checkpoint folder or a hub id: pretrained=...")
    if arguments.get("loop") == RELEASE and not {"decoder", "system"} & arguments.keys():
        arguments["system"] = Path(str(arguments["pretrained"])).name  # no decoder of this project says what it is
    # Settings are checked one by one here, and as a whole once those of the task and the checkpoint are beside them.
    given_settings = {key: arguments.pop(key) for key in list(arguments) if key in setting_names}
    settings = read_values(kind, given_settings, where)
    return ModelArgs(**arguments, settings=settings)


def entry_arguments(
    arguments: Mapping[str, Any], where: str, of_servers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The model arguments of a system in a file, with those of a published system in the place of its name.

    `of_servers` are arguments that a system which a server decodes has besides.
    """
    given = dict(arguments)
    if "system" in given and "pretrained" not in given and "decoder" not in given:
        given = system_arguments(given.pop("system"), given.pop("model", None), given) | given
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
    code += [f"that of the checkpoint {arguments.get('pretrained')}"] if arguments.get("allow_code") else []
    check_code(code, where, allow_code=allow_code)
    names_host = "base_url" in arguments or str(arguments.get("system", "")).startswith(f"{SERVER}:")
    variable = arguments.get("api_key_env")
    if names_host and variable is not None and not ({"base_url", "api_key_env"} & of_servers.keys()):
        raise ConfigError(
            f"{where}: names a host and the variable {variable}, whose key would be sent there; if you want that, "
            f"say it on the command line: --api-key-env {variable}"
        )
    return entry_arguments(arguments, where, of_servers)


def check_used(of_servers: Mapping[str, Any], systems: Iterable[Mapping[str, Any]], where: str) -> None:
    """Refuses what is said of servers where no system is decoded by one; `systems` are `file_arguments`."""
    if of_servers and all(arguments["loop"] != SERVER for arguments in systems):
        option = next(iter(of_servers)).replace("_", "-")
        raise ConfigError(f"{where} has no system of a server, so --{option} changes nothing")


def check_code(code: Sequence[Any], where: str, *, allow_code: bool) -> None:
    """Refuses code that a file names, unless the command line allows it."""
    if code and not allow_code:
        raise ConfigError(f"{where}: names code, {code[0]}, which runs only with --allow-code; read it before")
