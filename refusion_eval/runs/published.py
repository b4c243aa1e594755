"""The systems of the paper by name: which decoder on which published checkpoint."""

from refusion_eval.config import build, check_keys, mapping, read_yaml, settings_class
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError
from refusion_eval.paths import tasks_path


@settings_class()
class PublishedSystem:
    """One row of the paper's comparison.

    Attributes:
        name: what `--system` calls it.
        label: what tables call it.
        decoder: its decoder.
        pretrained: hub id of its checkpoint; None where none was published.
        adapter: hub id of the LoRA adapter on it, if any.
        enable_thinking, chat_template, add_bos_token: as `ModelArgs` has them; how its authors made prompts.
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
    """Reads tasks/settings/systems.yaml; a decoder without a row there is a system without a published checkpoint.

    Raises:
        ConfigError: a row is malformed.
    """
    path = tasks_path() / "settings" / "systems.yaml"
    rows = read_yaml(path, f"tasks/settings/{path.name}")
    systems = {}
    for name, row in rows.items():
        where = f"tasks/settings/{path.name}: {name}"
        systems[name] = build(PublishedSystem, {"name": name, **mapping(row, where)}, where)
        check_keys([systems[name].decoder], DECODERS, where, what="decoder")
    with_row = {system.decoder for system in systems.values()}
    for name in sorted(DECODERS.keys() - with_row - systems.keys()):
        systems[name] = PublishedSystem(name=name, label=DECODERS[name].label, decoder=name)
    return systems


def published_system(name: str) -> PublishedSystem:
    """One system by its name.

    Raises:
        ConfigError: it is unknown; the likeliest known one is named.
    """
    systems = published_systems()
    check_keys([name], systems, "", what="system")
    return systems[name]


def system_arguments(name: str, model: str | None) -> dict[str, str | bool | None]:
    """The model arguments of a system.

    Args:
        name: of the system.
        model: another checkpoint than the published one: a folder or a hub id. It brings its own adapter, if any, and
            keeps the system's label.

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
