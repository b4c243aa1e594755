"""The systems that were published, by name: checkpoint, decoder and settings, and the arguments that they stand for."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache

from refusion_eval.config import build, check_keys, mapping, settings_class
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import EMBEDDED, embedded_systems, tasks_path
from refusion_eval.store.records import SERVER

# Names in tables of the embedded checkpoints that are not their decoder's main checkpoint.
EMBEDDED_NAMES = {"autoregressive_sft": "AR-SFT"}
EMBEDDED_DECODERS = {"autoregressive_sft": "autoregressive"}

_BY_A_SERVER = {"decoder": "autoregressive", "loop": SERVER}
NO_FILES = "none"  # `pretrained` of a server's model of which no files are at hand


def system_of_label(label: str) -> str:
    """The decoder or checkpoint whose runs have this name in tables by default; the name itself if none has."""
    labels = {name: decoder.label for name, decoder in DECODERS.items()} | EMBEDDED_NAMES
    return next((name for name, other in labels.items() if other == label), label)


@cache
def decoder_of_system(system: str) -> str:
    """The decoder of a published system, an embedded checkpoint or a decoder's own key; empty for others."""
    published = published_systems().get(system)
    own = EMBEDDED_DECODERS.get(system, system)  # of runs here, also where the name is that of a server's model
    decoder = own if published is None or published.decoder == SERVER else published.decoder
    return decoder if decoder in DECODERS else ""


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
    file = "tasks/settings/systems.toml"
    try:
        content = (tasks_path() / "settings" / "systems.toml").read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); correct it") from error
    return dict(_systems_in(content, file))


@cache  # the plan of a suite asks for them a hundred times
def _systems_in(content: bytes, file: str) -> Mapping[str, PublishedSystem]:
    try:
        rows = tomllib.loads(content.decode())
    except ValueError as error:
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


def system_arguments(
    name: str, model: str | None, beside: Mapping[str, object] | None = None
) -> dict[str, str | bool | None]:
    """The model arguments of a published system; on a checkpoint of the user's, without the published adapter.

    `server` and `server:URL` stand for the model of a server, of which `model` has the tokenizer.

    Args:
        beside: other arguments that the user gives, without a `base_url` if the name has an address.

    Raises:
        ConfigError: there are two addresses, or no such system or checkpoint.
    """
    kind, _, address = name.partition(":")
    if kind == SERVER:
        if address and (other := (beside or {}).get("base_url")):
            given = f"system {name} names its server, and base_url={other} names one too"
            raise ConfigError(f"{given}; leave out one of the two addresses")
        named: dict[str, str | bool | None] = {"base_url": address} if address else {}
        return {**_BY_A_SERVER, "pretrained": model or NO_FILES, **named}
    systems = published_systems()
    check_keys([name], systems, "", what="system")
    system = systems[name]
    if model is None and system.pretrained is None:
        raise ConfigError(f"system {name}: no checkpoint of it was published; give one with --model")
    arguments = {**asdict(system), "system": system.label}
    for name_here in ("name", "label", "serve", "source"):
        del arguments[name_here]
    arguments |= _BY_A_SERVER if system.decoder == SERVER else {}
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
