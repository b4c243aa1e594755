"""The entry of a decoder, what decoders share, and all decoders by name, found from the files of this folder.

A decoder is one file that ends with `DECODER = Decoder(...)`; its name is the file's. A file that holds several ends
with `DECODERS = {name: Decoder(...), ...}`. A decoder of a user's own stays where it is: `find_decoder` finds it.
"""

import hashlib
import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refusion_eval.config import unknown_key
from refusion_eval.errors import ConfigError
from refusion_eval.types import CheckpointKind, Decode, ProbArray, Readout, Response, StopReason, Trace
from refusion_eval.untrusted import names_code

# Entry points of installed packages that are decoders: name = "module:DECODER".
ENTRY_POINTS = "refusion_eval.decoders"


@dataclass(frozen=True, slots=True)
class Reads:
    """How a decoder uses a model.

    Attributes:
        attention: what a row sees: the rows before it, its own block and the blocks before it, or the whole text.
        masked: where the logits of a masked position are: in its "own" row, or in the row before it, which predicts the
            "next" position. None if the decoder feeds no masks and needs no mask token.
        clean: "next" if the row of a clean token predicts the token after it.
    """

    attention: Literal["causal", "block_causal", "bidirectional"]
    masked: Literal["own", "next"] | None = None
    clean: Literal["next"] | None = None

    @property
    def left_to_right(self) -> bool:
        """Whether each token is predicted from the tokens before it alone, so that log-likelihoods are exact."""
        return self.attention == "causal" and self.clean == "next"

    @property
    def mask_shift(self) -> int | None:
        """Rows between a masked position and the row that predicts it, where masks see the whole text; else None."""
        if self.attention != "bidirectional" or self.masked is None:
            return None
        return 1 if self.masked == "next" else 0


@dataclass(frozen=True, slots=True)
class Style:
    """How plots draw the decoder, and its place in lists.

    Attributes:
        colour: "#rrggbb".
        marker: matplotlib's name of the marker.
        line: matplotlib's line style: a name, or (offset, lengths of dashes and gaps in points).
        order: place among the decoders that fit a checkpoint; the lowest is the checkpoint's main decoder.
    """

    colour: str = "#6b6b6b"
    marker: str = "*"
    line: str | tuple[int, tuple[float, ...]] = "-"
    order: int = 100


@dataclass(frozen=True)
class Decoder:
    """The entry of a decoder.

    Attributes:
        decode: the generator function.
        Settings: its settings class.
        label: name of the system in tables and plots.
        reads: how it uses a model.
        fits: kinds of checkpoints that it decodes, unless their config.json names decoders.
        trained_by: objectives of `refusion_eval.training` whose checkpoints are for it and name it in config.json.
        adapts_masks_only: whether its LoRA adapters are for the rows of masks, so that none is merged into the weights.
        style: how plots draw it, and its place in lists.
        infills: what it fills between known tokens: one gap, or any "gaps"; None if it sees nothing behind a mask.
    """

    decode: Decode
    Settings: type[Any]
    label: str
    reads: Reads
    fits: tuple[CheckpointKind, ...] = ("masked",)
    trained_by: tuple[str, ...] = ()
    adapts_masks_only: bool = False
    style: Style = Style()
    infills: Literal["gap", "gaps"] | None = None

    def __post_init__(self) -> None:
        has_mask = "mask_id" in {field.name for field in fields(self.Settings)}
        assert has_mask == (self.reads.masked is not None), f"{self.label}: a decoder that reads masks has a mask_id"


def above_or_best(scores: ProbArray, threshold: float) -> list[int]:
    """Indices whose score exceeds the threshold (strictly), ascending, else of the best one (ReFusion, Eq. 5)."""
    return np.flatnonzero(scores > threshold).tolist() or [int(np.argmax(scores))]


def above_or_most(scores: ProbArray, threshold: float, count: int) -> list[int]:
    """Indices whose score exceeds the threshold (strictly) if these are at least `count`, else the `count` best."""
    above = np.flatnonzero(scores > threshold).tolist()
    return above if len(above) >= count else most_confident(scores, count)


def at_least_or_best(scores: ProbArray, threshold: float, readout: Readout) -> list[int]:
    """Indices whose score of this readout is at least the threshold, ascending, else of the best one (Fast-dLLM)."""
    # Without the best one a step could commit nothing, and decoding would not end.
    return np.flatnonzero(scores >= rounded_threshold(threshold, readout)).tolist() or [int(np.argmax(scores))]


def rounded_threshold(threshold: float, readout: Readout) -> float:
    """The threshold at the precision of the probabilities that are compared with it."""
    # torch compares numbers of a short dtype with a threshold rounded to that dtype, as the releases do: 0.9 is
    # 0.8984375 in bfloat16, and a probability of 0.8984375 is accepted there.
    if readout.rounded_to == "float16":
        return float(np.float16(threshold))
    if readout.rounded_to == "bfloat16":  # the upper half of a float32, rounded to the nearest even number
        bits = int(np.float32(threshold).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1)
        return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
    return threshold


def most_confident(scores: ProbArray, count: int) -> list[int]:
    """Indices of the `count` best scores, ascending; among equal ones the lowest indices win."""
    # Ties are common: where probabilities round to 1, or where a truncated distribution has one token left.
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


def num_within_factor(scores: ProbArray, factor: float) -> int:
    """Number of best scores to commit: the longest run whose n-th score reaches 1 - factor / (n + 1) (Fast-dLLM)."""
    # Where (n + 1)(1 - score) <= 1, n tokens at once are those of greedy decoding one by one (Fast-dLLM, Theorem 1);
    # the factor stands for that 1. The best score always counts, so that decoding goes on.
    ranks = np.arange(1, len(scores) + 1)
    passes = np.sort(scores)[::-1] >= 1 - factor / (ranks + 1)
    return 1 + accepted_prefix(passes[1:])


def accepted_prefix(accepted: npt.NDArray[np.bool_]) -> int:
    """Length of the run of accepted entries from the start, 0 to len(accepted)."""
    return int(np.logical_and.accumulate(accepted).sum())


# The settings, of those that a decoder has, with which no end token ends a text or is avoided.
NO_END: Mapping[str, Any] = {
    "eos_ids": (), "early_stop": False, "logits_eos_inf": False, "confidence_eos_eot_inf": False
}  # fmt: skip


def first_eos(tokens: Sequence[int] | npt.NDArray[np.int64], eos_ids: Container[int]) -> int | None:
    """Index of the first end-of-sequence token, or None."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return index
    return None


def response_of(tokens: Sequence[int], eos: int | None, reason: StopReason, trace: Trace) -> Response:
    """The response up to and including its end token at `eos`, or all of it; its end is recorded."""
    response = Response(tuple(tokens), reason) if eos is None else Response(tuple(tokens[: eos + 1]), "eos")
    trace.stop(response.stop, len(response.tokens))
    return response


def check_mask_id(decoder: str, mask_id: int, eos_ids: Sequence[int]) -> None:
    if mask_id in eos_ids:
        raise ConfigError(f"{decoder}: mask_id {mask_id} is also an end-of-sequence id; correct one of them")


def _find_decoders() -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        if hasattr(module, "DECODER"):
            decoders[file.name] = module.DECODER
        decoders |= getattr(module, "DECODERS", {})
    return decoders


DECODERS: dict[str, Decoder] = _find_decoders()


def find_decoder(decoder: str | Decoder) -> Decoder:
    """The entry of a decoder, by its name here or as an entry point, "module:DECODER", or "path/to/file.py:DECODER"."""
    if isinstance(decoder, Decoder):
        return decoder
    return DECODERS[decoder] if decoder in DECODERS else _own(decoder).decoder


def name_with_code(decoder: str) -> str:
    """The name of a decoder in records: behind that of a user's own stands the hash of its code, as NAME@HASH."""
    # The decoders of this package have its version in the records, and tests hold their tokens from one version to the
    # next, so that no comment in their files makes another protocol.
    code = "" if decoder in DECODERS else _own(decoder).code
    return f"{decoder}@{code[:12]}" if code else decoder


class _Own(NamedTuple):
    decoder: Decoder
    code: str  # SHA-256 of its source files, as they were when it was imported; empty for a module of this package


def _own(decoder: str) -> _Own:
    if names_code(decoder):
        return _decoder_at(decoder, beside=True)
    others = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    if decoder not in others:
        raise unknown_key(decoder, [*DECODERS, *others], what="decoder")
    return _decoder_at(others[decoder], beside=False)


@cache
def _decoder_at(place: str, *, beside: bool) -> _Own:
    """The decoder at a place; `beside`: also of a module in the current folder, which need not be installed."""
    source, _, name = place.rpartition(":")
    # A file of the current folder must not stand for the module of an installed decoder.
    folders = [os.getcwd()] if beside else []
    sys.path[:0] = folders
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else import_module(source)
        decoder, code = getattr(module, name), _hash_of_code(module)
    except Exception as problem:
        raise ConfigError(
            f"decoder {place}: cannot be imported ({type(problem).__name__}: {problem}); name a file or a module, and "
            "the Decoder in it: path/to/file.py:DECODER or module:DECODER"
        ) from problem
    finally:
        for folder in folders:
            sys.path.remove(folder)
    if not isinstance(decoder, Decoder):
        raise ConfigError(f"decoder {place}: it is a {type(decoder).__name__}, not a refusion_eval.decoders.Decoder")
    return _Own(decoder, code)


def _hash_of_code(module: ModuleType) -> str:
    """SHA-256 of the file of a module, or of all source files of the package that it belongs to."""
    package = sys.modules[module.__name__.partition(".")[0]]
    if package.__name__ == __name__.partition(".")[0]:
        return ""
    digest = hashlib.sha256()
    for folder in map(Path, getattr(package, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            digest.update(
                b"%s %d\n" % (str(file.relative_to(folder)).encode(), file.stat().st_size) + file.read_bytes()
            )
    if not hasattr(package, "__path__"):
        digest.update(Path(str(package.__file__)).read_bytes())
    return digest.hexdigest()


def _module_of_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    # Two folders may have files of one name.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fitting_decoders(kind: CheckpointKind, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the decoders that fit a checkpoint, its main one first; those that its config.json names, if any."""
    return tuple(named) or _in_order(name for name, decoder in DECODERS.items() if kind in decoder.fits)


def trained_decoders(objective: str) -> tuple[str, ...]:
    """Names of the decoders that a checkpoint is for after training with an objective; none if it serves several."""
    return _in_order(name for name, decoder in DECODERS.items() if objective in decoder.trained_by)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: DECODERS[name].style.order))
