"""The systems of the paper by name: a decoder on a published checkpoint."""

import tomllib

from refusion_eval.config import build, check_keys, mapping, settings_class
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import tasks_path


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
    """Reads tasks/settings/systems.toml; a decoder without a row there is a system without a published checkpoint.

    Raises:
        ConfigError: the file cannot be read, or a row is malformed.
    """
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


def published_system(name: str) -> PublishedSystem:
    """Returns a system.

    Raises:
        ConfigError: there is no system of this name; the message suggests the likeliest one.
    """
    systems = published_systems()
    check_keys([name], systems, "", what="system")
    return systems[name]


def system_arguments(name: str, model: str | None) -> dict[str, str | bool | None]:
    """Returns the model arguments of a system.

    Args:
        name: name of the system.
        model: folder or hub id of a checkpoint to use instead of the published one, without the published adapter. The
            system keeps its label.

    Raises:
        ConfigError: the system is unknown, or has no published checkpoint and none is given.
    """
    system = published_system(name)
    if model is None and system.pretrained is None:
        raise ConfigError(f"system {name}: no checkpoint of it was published; give one with --model")
    return {
        "pretrained": model or system.pretrained,
        "adapter": system.adapter if model is None else None,
        "decoder": system.decoder,
        "system": system.label,
        "enable_thinking": system.enable_thinking,
        "chat_template": system.chat_template,
        "add_bos_token": system.add_bos_token,
    }
