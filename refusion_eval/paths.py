"""Folders of the files that are not Python: tasks and embedded checkpoints. Imports the standard library only."""

import json
from functools import cache
from pathlib import Path

from refusion_eval import embedded
from refusion_eval.errors import ConfigError, DataError

EMBEDDED_FOLDER = Path(embedded.__file__).parent
# Names a decoder's tiny checkpoint in the package; the others are "embedded:NAME".
EMBEDDED = "embedded"


def embedded_name(pretrained: str, decoder: str) -> str | None:
    """The name of a checkpoint in the package; None for another checkpoint."""
    kind, _, name = pretrained.partition(":")
    return (name or decoder) if kind == EMBEDDED else None


def embedded_path(name: str) -> Path:
    """The folder of a checkpoint in the package. The main checkpoint of a decoder has the decoder's name."""
    if name not in embedded_names():
        raise ConfigError(
            f"there is no embedded checkpoint for {name}, only for {', '.join(embedded_names())}; name a checkpoint, "
            "or one of these as embedded:NAME"
        )
    return EMBEDDED_FOLDER / name


def embedded_names() -> list[str]:
    return sorted(path.parent.name for path in EMBEDDED_FOLDER.glob("*/config.json"))


def embedded_decoder(name: str) -> str:
    """The decoder that a checkpoint of the package was made for: its namesake, or the first that it lists."""
    config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    decoders = config.get("decoders", [name])
    return name if name in decoders else decoders[0]


def embedded_systems() -> dict[str, tuple[str, str]]:
    """Checkpoint and decoder of each system of the embedded family: its checkpoints, and LLaDA by Fast-dLLM."""
    checkpoints = {name: (name, embedded_decoder(name)) for name in embedded_names()}
    return checkpoints | {"fast_dllm_llada": ("llada", "fast_dllm_llada")}


def embedded_decoders() -> list[str]:
    """The decoders whose main checkpoint is in the package."""
    return [name for name in embedded_names() if embedded_decoder(name) == name]


def code_metric_path() -> Path:
    """The metric module that `evaluate.load` takes in place of the name code_eval."""
    return Path(__file__).resolve().parent / "sandbox" / "code_metric" / "code_metric.py"


@cache  # a plan of several runs asks for it thousands of times
def tasks_path() -> Path:
    """The folder with the lm-eval task files and the mini data: in the package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    candidates = (package / "tasks", package.parent / "tasks")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(f"no task folder at {candidates[0]} or {candidates[1]}; reinstall refusion_eval")
