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
        seed: from which the seed of torch's random numbers is made for each item and sample; a loop may draw whatever
            the settings say.
        mask_id, eos_ids: the checkpoint's mask token, and the tokens after which the response is cut.
        stop_rule: for loops of transformers, as in the autoregressive decoder; other loops do not ask it.
        temperature, top_p, top_k, steps, block_length, denoising_steps, threshold, confidence_threshold, eb_threshold,
        factor, remasking, remasking_strategy, alg, alg_temp, eps, cfg_scale, block_size, small_block_size,
        use_block_cache, minimal_topk, eos_early_stop, editing_threshold, max_post_steps, num_to_transfer, slot_size,
        serial_num_blocks, slot_threshold, token_threshold, max_denoising_steps, entropy_bound, t_min, t_max,
        stability_threshold: arguments of the loop.
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
    max_post_steps: NonNegativeInt | None = None
    num_to_transfer: PositiveInt | None = None
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
        return True  # for all that is known: a loop may have a temperature of its own, or a random order

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
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # the first that the checkpoint has
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
    """A loop: a method of the model, or a function of a file that gets the model; of transformers without a file.

    A method is of the class that config.json names for the model, or of one from which that class inherits.
    """

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
            given["do_sample"] = bool(settings.temperature)
            given |= {} if settings.temperature else {"temperature": None}
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
        if of_name := next((entry for entry in found if entry.name == known), None):
            return of_name
    if wanted is None:
        return find_entry(directory, None, allow_code=False)
    raise ConfigError(
        f"{directory}: no .py file has a function {wanted}, or a method of the model's class with this name; name "
        "another as entry=FILE.py:FUNCTION"
    )


def model_class(config: Mapping[str, Any]) -> tuple[str, str]:
    """The class of transformers that loads the model of a checkpoint's code, and the name of its class there."""
    brought = config.get("auto_map")
    brought = brought if isinstance(brought, Mapping) else {}
    auto = next((name for name in _AUTO_CLASSES if name in brought), _AUTO_CLASSES[0])
    return auto, str(brought.get(auto, "")).rpartition(".")[2]


def _entries(directory: Path) -> Iterator[Entry]:
    """The functions of a checkpoint's files, then the methods of its model, those of a class before its bases'."""
    classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for path in sorted(directory.glob("*.py")):
        try:
            body = parse_python(read_text(path)).body
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as Python ({error}); download it again") from error
        for node in body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((path.name, node))
            elif isinstance(node, ast.FunctionDef):
                yield _entry(path.name, node, is_method=False)
    names = [model_class(read_json(directory / "config.json"))[1]]
    for name in names:  # which grows by the names of the bases
        for file, node in classes.pop(name, ()):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef))
            yield from (_entry(file, method, is_method=True) for method in methods)
            names += [ast.unparse(base).rpartition(".")[2] for base in node.bases]


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
