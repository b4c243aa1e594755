"""What was run: content of run.json, and the part of it that has to be equal for a run to be resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from refusion_eval.store.environment import Hardware

# Manifest.decoder of runs by transformers' own greedy `generate`, one token a forward.
STOCK_GENERATE = "stock_generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One invocation of a run.

    Attributes:
        system: label of the system in tables.
        backbone: model that the system was made from; speed-up is a ratio within one backbone.
        decoder: name of the decoder.
        settings: all settings in force: defaults, tables by task, command line.
        checkpoint: path or hub id of the weights.
        checkpoint_revision: hub revision, empty for a local directory.
        checkpoint_hash: hash of configuration and weights, empty if not computed.
        tasks: version of each task.
        seed: seed of everything random.
        dtype: type of weights and cache.
        device: `cpu` or `cuda`.
        attention: attention backend.
        package_version: version of refusion_eval.
        batch_size: requests decoded at the same time.
        warmup: requests decoded before the first measured one.
        hardware: machine of this invocation.
        versions: versions of the packages in use.
        git_commit: commit of the checkout, None for an installed package.
        command: command line.
        arguments: model arguments, from which the run can be made again; empty for runs of earlier versions.
        roofline: `weight_bytes`, `cache_bytes_per_row`, `copy_bytes_per_second`; empty if not measured.
    """

    system: str
    backbone: str
    decoder: str
    settings: Mapping[str, Any]
    checkpoint: str
    tasks: Mapping[str, str]
    seed: int
    dtype: str
    device: str
    attention: str
    package_version: str
    checkpoint_revision: str = ""
    checkpoint_hash: str = ""
    batch_size: int = 1
    warmup: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    command: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    roofline: Mapping[str, float] = field(default_factory=dict)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides a text and so has to be equal for a run to be resumed.

        Batch size, rank, hardware and command are left out because they must not change a text. Tasks are left out
        because every sample has its task and version, so that a run can be resumed with more tasks. Weights may move:
        their hash counts, and their name only if there is no hash.
        """
        names = ("system", "backbone", "decoder", "settings", "seed", "dtype", "device", "attention", "package_version")
        weights = self.checkpoint_hash or f"{self.checkpoint}@{self.checkpoint_revision or 'local'}"
        return as_json({**{name: getattr(self, name) for name in names}, "checkpoint": weights})

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types."""
        return as_json(asdict(self))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Manifest:
        """Inverse of `to_json`; fields of later versions are ignored."""
        present = {name: fields[name] for name in cls.__slots__ if name in fields}
        return cls(**{**present, "hardware": Hardware.from_json(fields.get("hardware", {}))})


def differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, str] = ("recorded", "now")
) -> list[str]:
    """One line for every key in which two fingerprints differ, with the name and value of both."""
    before, after = dict(_flat(stored)), dict(_flat(now))
    return [
        f"{name}: {names[0]} {_shown(before, name)}, {names[1]} {_shown(after, name)}"
        for name in sorted({*before, *after})
        if before.get(name, _ABSENT) != after.get(name, _ABSENT)
    ]


_ABSENT = object()


def as_json(value: Any) -> Any:
    """The value as JSON gives it back: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value, default=str))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "nothing"
