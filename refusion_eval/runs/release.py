"""The release's own loop: where it is in a checkpoint's files, and its arguments. No code of a checkpoint runs here."""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, settings_class
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import is_diffusion_gemma, read_json
from refusion_eval.types import StopRule
from refusion_eval.untrusted import parse_python, read_text


@settings_class("loop=release")
class ReleaseSettings:
    """Settings of a run with `loop=release`, by the names of the releases; what is not given is the release's default.

    Attributes:
        gen_length: most tokens of the response; some loops call it max_new_tokens, and some round it up to a block.
        entry: FUNCTION, or FILE.py:FUNCTION, of the loop; by default the first known one in the files (`ENTRIES`).
        seed: seed of torch's random numbers before each request.
        mask_id, eos_ids: the checkpoint's mask token, and the tokens after which the response is cut.
        stop_rule: for loops of transformers, as in the autoregressive decoder; other loops do not ask it.
        temperature, top_p, top_k, steps, block_length, denoising_steps, threshold, confidence_threshold, eb_threshold,
        factor, remasking, remasking_strategy, alg, alg_temp, eps, cfg_scale, block_size, small_block_size,
        use_block_cache, minimal_topk, eos_early_stop, editing_threshold, max_post_steps, slot_size, serial_num_blocks,
        slot_threshold, token_threshold, max_denoising_steps, entropy_bound, t_min, t_max, stability_threshold:
        arguments of the loop.
    """

    gen_length: PositiveInt = 256
    entry: str | None = None
    seed: NonNegativeInt = 0
    mask_id: NonNegativeInt | None = None
    eos_ids: tuple[NonNegativeInt, ...] = ()
    temperature: NonNegativeFloat | None = None
    top_p: Fraction | None = None
    top_k: NonNegativeInt | None = None
    steps: PositiveInt | None = None
    block_length: PositiveInt | None = None
    denoising_steps: PositiveInt | None = None
    threshold: NonNegativeFloat | None = None
    confidence_threshold: NonNegativeFloat | None = None
    eb_threshold: NonNegativeFloat | None = None
    factor: NonNegativeFloat | None = None
    remasking: str | None = None
    remasking_strategy: str | None = None
    alg: str | None = None
    alg_temp: NonNegativeFloat | None = None
    eps: NonNegativeFloat | None = None
    cfg_scale: NonNegativeFloat | None = None
    block_size: PositiveInt | None = None
    small_block_size: PositiveInt | None = None
    use_block_cache: bool | None = None
    minimal_topk: PositiveInt | None = None
    eos_early_stop: bool | None = None
    editing_threshold: NonNegativeFloat | None = None
    max_post_steps: PositiveInt | None = None
    slot_size: PositiveInt | None = None
    serial_num_blocks: PositiveInt | None = None
    slot_threshold: NonNegativeFloat | None = None
    token_threshold: NonNegativeFloat | None = None
    max_denoising_steps: PositiveInt | None = None
    entropy_bound: PositiveFloat | None = None
    t_min: NonNegativeFloat | None = None
    t_max: NonNegativeFloat | None = None
    stability_threshold: NonNegativeInt | None = None
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    @property
    def num_positions(self) -> int:
        return self.gen_length

    @property
    def is_random(self) -> bool:
        return bool(self.temperature or self.t_max)

    @property
    def given(self) -> list[str]:
        """The names of arguments of the loop that have a value, but for the tokens, which a loop need not take."""
        others = ("mask_id", "eos_ids", *_OF_A_RUN)
        named = (entry for entry in fields(self) if entry.name not in others)  # type: ignore[arg-type]
        return [entry.name for entry in named if getattr(self, entry.name) != entry.default]


# What the loops call a setting of every run. Each loop takes at most one of the names.
_NAMES: Mapping[str, Sequence[str]] = {
    "gen_length": ("gen_length", "max_new_tokens", "max_gen_length"),
    "mask_id": ("mask_id", "mask_token_id"),
    "eos_ids": ("eos_ids", "stopping_criteria_idx", "eos_id", "eos_token_id", "stop_token"),
}
_SEVERAL = ("eos_ids", "stopping_criteria_idx")  # names of lists of tokens; the others are one token
_PROMPTS = ("prompt", "inputs", "input_ids", "prompt_ids")
_OF_A_RUN = ("entry", "seed", "stop_rule")
# A function that is known, and the arguments that it has where its signature says **kwargs. The first that the files
# of a checkpoint have is its loop: functions, which stand beside a model to be called, before methods of that name.
ENTRIES: Mapping[str, Sequence[str]] = {
    "generate_refusion": (),
    "diffusion_generate": (
        *("max_new_tokens", "mask_token_id", "attention_mask", "steps", "temperature", "top_p", "top_k"),
        *("alg", "alg_temp", "eps", "threshold", "block_length"),
    ),
    "block_diffusion_generate": (),
    "generate_spd": (),
    "generate": ("max_new_tokens", "attention_mask", "temperature", "top_p", "top_k"),
}
# Of `generate` of DiffusionGemma beside its length; those of its `generation_config` that decide tokens.
CANVAS_ARGUMENTS = (
    *("max_denoising_steps", "entropy_bound", "t_min", "t_max", "stability_threshold", "confidence_threshold"),
)


class Entry(NamedTuple):
    """A loop: a method of the model, or a function of a file that gets the model; of transformers without a file."""

    name: str
    file: str
    is_method: bool
    prompt: str  # name of the argument for the prompt; empty if it is the first
    is_mapping: bool  # whether the prompt is a mapping with `input_ids`
    takes: Sequence[str]  # its other arguments

    def __str__(self) -> str:
        return f"{self.name} of {self.file}" if self.file else f"{self.name} of transformers"

    def unknown(self, settings: Iterable[str]) -> list[str]:
        """The names among settings that the loop has no argument for."""
        return [name for name in settings if name not in ("eos_ids", *_OF_A_RUN) and not self._called(name)]

    def arguments(self, settings: ReleaseSettings) -> dict[str, Any]:
        """The arguments of a call beside model and prompt, by their names, as plain values."""
        given: dict[str, Any] = {}
        for name in (entry.name for entry in fields(settings) if entry.name not in _OF_A_RUN):  # type: ignore[arg-type]
            value, called = getattr(settings, name), self._called(name)
            if called and value not in (None, ()):
                is_one = name == "eos_ids" and called not in _SEVERAL
                given[called] = value[0] if is_one else list(value) if name == "eos_ids" else value
        if not self.file:  # transformers ignores a temperature without this, and warns of the temperature 0
            given["do_sample"] = settings.is_random
            given |= {} if settings.is_random else {"temperature": None}
        return given

    def _called(self, name: str) -> str:
        return next((one for one in _NAMES.get(name, (name,)) if one in self.takes), "")


def find_entry(directory: Path, wanted: str | None, *, allow_code: bool) -> Entry:
    """The loop of a checkpoint, read from its files.

    Args:
        wanted: FUNCTION or FILE.py:FUNCTION; None for the first known one.
        allow_code: whether code of the checkpoint may run; else the loop is transformers' own `generate`.
    """
    if not allow_code:
        if wanted not in (None, "generate"):
            raise ConfigError(f"entry={wanted} is code of the checkpoint; read it, then add --allow-code")
        is_canvas = is_diffusion_gemma(read_json(directory / "config.json"))
        takes = ("max_new_tokens", *CANVAS_ARGUMENTS) if is_canvas else ENTRIES["generate"]
        return Entry("generate", "", True, "inputs", False, takes)
    file, _, name = (wanted or "").rpartition(":")
    found = [entry for entry in _entries(directory) if file in ("", entry.file)]
    for known in (name,) if name else ENTRIES:
        of_name = sorted((entry for entry in found if entry.name == known), key=lambda entry: entry.is_method)
        if of_name:
            return of_name[0]
    if wanted is None:
        return find_entry(directory, None, allow_code=False)
    raise ConfigError(f"{directory}: no .py file has a function {wanted}; name another as entry=FILE.py:FUNCTION")


def _entries(directory: Path) -> Iterator[Entry]:
    for path in sorted(directory.glob("*.py")):
        try:
            body = parse_python(read_text(path)).body
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as Python ({error}); download it again") from error
        for node in body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = (inner for inner in inside if isinstance(inner, ast.FunctionDef))
            yield from (_entry(path.name, function, is_method=function is not node) for function in functions)


def _entry(file: str, node: ast.FunctionDef, *, is_method: bool) -> Entry:
    given = node.args
    # The first argument is the model.
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
    prompt = next((name for name in names if name in _PROMPTS), names[0] if names else "")
    takes = [name for name in names if name != prompt]
    takes += [] if given.kwarg is None else [name for name in ENTRIES.get(node.name, ()) if name not in takes]
    read = (one for one in ast.walk(node) if isinstance(one, ast.Subscript))
    is_mapping = any(ast.unparse(one) == f"{prompt}['input_ids']" for one in read)
    return Entry(node.name, file, is_method, prompt, is_mapping, tuple(takes))


def hash_of_code(directory: Path) -> str:
    """SHA-256 of all Python files in a checkpoint's folder."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()
