"""YAML files that users write. An error names file and place, and a key that is written twice is refused."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from refusion_eval.errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is written twice in one mapping: YAML itself would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and (key_node.tag, key) in seen:
                problem = f"the key {key!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add((key_node.tag, key))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Reads a file that holds one mapping.

    Args:
        path: the file.
        where: name of the file in messages.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or not YAML, has a key twice, is empty, or holds no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from error
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read as YAML ({error}); correct it") from error
    if content is None:
        raise ConfigError(f"{where}: the file is empty; write its settings, or remove it")
    return mapping(content, where)


def mapping(value: object, where: str) -> dict[str, Any]:
    """Returns a value that has to be a mapping with text as keys; None is an empty mapping.

    Raises:
        ConfigError: the value is no mapping, or a key is no text.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a {type(value).__name__} ({value!r}); write `key: value` lines")
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{where}: the key {wrong[0]!r} is not text; write it in quotes")
    return value
