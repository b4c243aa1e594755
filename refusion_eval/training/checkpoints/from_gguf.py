"""Writes the model of a GGUF file as a checkpoint folder in Hugging Face layout."""

from pathlib import Path

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models import gguf
from refusion_eval.models.checkpoint import read_json, write_json
from refusion_eval.training.checkpoints.save import replacing, with_both_spellings


def convert(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Writes the folder completely or not at all, with a piece of one tensor in memory at a time.

    Args:
        source: the GGUF file.
        target: the folder, which must not exist yet.
        dtype: float32, bfloat16 or float16. The default is that of the file, and float32 for quantised weights.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: the file cannot be read, or the folder cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; name a new directory")
    try:
        with replacing(target) as part:
            gguf.unpack(source.expanduser(), part, dtype)
            write_json(part / "config.json", with_both_spellings(read_json(part / "config.json")))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error}); make room, or name another folder") from error
