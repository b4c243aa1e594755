"""Settings classes: frozen dataclasses whose values pydantic converts and checks, and the YAML files that hold them.

A value from a command line, a YAML file or lm-eval's own parser arrives as text or as a number of the wrong kind:
lm-eval turns a folder called 2025 into an int and "-1" into the float -1.0. `_READERS` holds what each declared type
accepts. A value that has no single meaning as the declared type is refused, never guessed.
"""

import copy
import difflib
import inspect
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import Field, field, fields, is_dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import PydanticCustomError

from refusion_eval.errors import ConfigError
from refusion_eval.untrusted import check_depth, read_text

LARGEST_YAML = 1 << 20  # bytes
_MOST_NODES = 20_000  # keys and values of a YAML file
_LONGEST_NUMBER = 40  # characters of a number in one: some forms of YAML make 10,000 digits of as many characters
_LONGEST_NAME = 100  # characters of what becomes part of a folder's name
_LARGEST_INT = 2**63

T = TypeVar("T")

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

# Names that users know from lm-eval, Transformers or the public ReFusion script, and this project's names for them.
OTHER_NAMES = {
    "model_path": "pretrained",
    "model": "pretrained",
    "path": "pretrained",
    "torch_dtype": "dtype",
    "attn_implementation": "attention",
    "attn": "attention",
    "max_gen_toks": "gen_length",
    "max_new_tokens": "gen_length",
    "max_tokens": "gen_length",
    "slot_threshold": "tau_slot",
    "token_threshold": "tau_token",
    "serial_num_blocks": "block_size",
    "editing_threshold": "edit_threshold",
    "max_post_steps": "max_post_edit_steps",
    "k": "slot_size",
    "b": "block_size",
}

# Of values in messages, which a stranger's file may hold.
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_shown.maxlist = _shown.maxtuple = _shown.maxdict = 20

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field, Field))
def settings_class(where: str = "") -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen, keyword-only dataclass that converts and checks its values; ranges are annotations."""

    # A `__post_init__` may check how values fit each other and raise ConfigError. Error messages of a direct call begin
    # with `where`, or with the name of the class.
    def decorate(cls: type[T]) -> type[T]:
        hints = typing.get_type_hints(cls, include_extras=True)
        cls.__annotations__ = {name: _with_reader(hints[name]) for name in inspect.get_annotations(cls)}
        made: Any = pydantic_dataclass(frozen=True, kw_only=True, slots=True, config=_CONFIG)(cls)
        checked = made.__init__

        @wraps(checked)
        def __init__(self: Any, **values: Any) -> None:
            try:
                checked(self, **values)
            except ValidationError as error:
                of_post_init = error.errors()[0].get("ctx", {}).get("error")
                raise of_post_init or _config_error(error, made, where or made.__name__) from error

        made.__init__ = __init__
        return made

    return decorate


def added_setting(default: Any) -> Any:
    """A field that is recorded only where it differs from its default."""
    # A setting that a class gains is declared so, because keys of recorded samples hold a digest of all settings.
    return field(default=default, metadata={"added": True})


def recorded_values(settings: Any) -> dict[str, Any]:
    """The values of a settings class without callbacks, and without added settings that are at their default."""
    added = {entry.name: entry.default for entry in fields(settings) if entry.metadata.get("added")}
    values = {name: getattr(settings, name) for name in field_types(type(settings))}
    return {name: value for name, value in values.items() if name not in added or value != added[name]}


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Makes an instance of a settings class from values of any origin; raises ConfigError where one is refused."""
    check_keys(values, field_types(cls), where)
    validator = getattr(cls, "__pydantic_validator__", None)
    if validator is None:  # a plain dataclass, as the settings of a user's own decoder may be
        try:
            return cls(**read_values(cls, values, where))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {error}") from error
    try:
        return validator.validate_python(dict(values))
    except ValidationError as error:
        raise _config_error(error, cls, where) from error


def read_values(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts and checks some values of a settings class, each by itself, without making an instance."""
    annotations, converted = field_types(cls), {}
    check_keys(values, annotations, where)
    for key, value in values.items():
        try:
            converted[key] = _adapter(annotations[key]).validate_python(value)
        except ValidationError as error:
            raise _config_error(error, annotations[key], where, key) from error
    return converted


def field_types(cls: Any) -> Mapping[str, Any]:
    """Maps the fields of a dataclass to their annotations, without callbacks (fields that are not compared)."""
    return _field_types(cls)


@cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(cls) if entry.init and entry.compare}  # type: ignore[arg-type]


def check_keys(
    keys: Collection[str], valid: Collection[str], where: str, *, what: str = "key", offered: Collection[str] = ()
) -> None:
    """Refuses a key that is not valid, and suggests the likeliest of `offered`, which by default are the valid keys."""
    for key in keys:
        if key not in valid:
            raise unknown_key(key, offered or valid, where, what=what)


def unknown_key(key: str, valid: Collection[str], where: str = "", *, what: str = "key") -> ConfigError:
    name_here = OTHER_NAMES.get(key)
    near = [name_here] if name_here in valid else difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known {what}s: {', '.join(sorted(valid))}"
    return ConfigError(f"{where}{': ' if where else ''}unknown {what} {_shown.repr(key)}; {hint}")


@cache
def _adapter(wanted: Any) -> TypeAdapter:
    # A settings class has a configuration, which pydantic does not let an adapter replace.
    is_settings_class = hasattr(wanted, "__pydantic_validator__")
    return TypeAdapter(_with_reader(wanted), config=None if is_settings_class else _CONFIG)


def _with_reader(wanted: Any) -> Any:
    """The annotation with the reader of its type in front of pydantic's own checks."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        return Annotated[_with_reader(arguments[0]), *arguments[1:]]
    if origin in (typing.Union, types.UnionType) and types.NoneType in arguments and len(arguments) == 2:
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        # Text may be "none", as a chat template is.
        is_text = inner is str or typing.get_args(inner)[:1] == (str,)  # the fields of a settings class are annotated
        texts = ("None",) if is_text else ("None", "none", "null")
        none = BeforeValidator(lambda value: None if isinstance(value, str) and value in texts else value)
        return Annotated[_with_reader(inner) | None, none]
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        reader = _names if arguments[0] is str else _items
        return Annotated[tuple[_with_reader(arguments[0]), ...], BeforeValidator(reader)]  # type: ignore[misc]
    if wanted in _READERS:
        read = _READERS[wanted]
        return Annotated[wanted, BeforeValidator(lambda value: read(_plain(value)))]
    return wanted


def _settings_class_in(wanted: Any) -> Any:
    """The dataclass that an annotation is or holds, as an optional does; None if there is none."""
    if isinstance(wanted, type) and is_dataclass(wanted):
        return wanted
    return next(filter(None, map(_settings_class_in, typing.get_args(wanted))), None)


def _plain(value: Any) -> Any:
    """Python's own number or list for a value of numpy or torch."""
    return value.tolist() if hasattr(value, "tolist") else value


def _items(value: Any) -> Any:
    """Splits a list that arrived as text at commas, spaces or plus signs: lm-eval keeps commas for itself."""
    value = _plain(value)
    if isinstance(value, str):
        if value.lower() in ("", "none", "null"):
            return []
        return re.split(r"[\s,+]+", value.strip("[]() "))
    return list(value) if isinstance(value, list | tuple) else [value]


def _names(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        return _items(value)
    raise _refused("a list of names")


def _refused(wanted: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "is not {wanted}{hint}", {"wanted": wanted, "hint": hint})  # type: ignore[arg-type]


def _bool(value: Any) -> bool:
    # lm-eval turns true and false into bools, but leaves 1 and 0 as ints; --set and JSON carry text.
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "1", "false", "0"):
        return value.lower() in ("true", "1")
    raise _refused("true or false (1 or 0)")


def _int(value: Any) -> int:
    number = None
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and (not isinstance(value, float) or value.is_integer()):
            number = int(value)
    if number is None:
        raise _refused("a whole number")
    if abs(number) >= _LARGEST_INT:
        raise _refused("a whole number below 2**63")
    return number


def _float(value: Any) -> float:
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and not math.isnan(number := float(value)):
            return number
    raise _refused("a number")


def _str(value: Any) -> str:
    # An int keeps its digits ("2025"); the spelling of a float is lost ("1e5" arrives as 100000.0).
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise _refused("text", "; pass the arguments as JSON, with the value in quotes")


_READERS: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}

# The rule that a refused value breaks, by pydantic's name of the refusal.
_RULES = {
    "wrong_type": " is not {wanted}{hint}",
    "greater_than_equal": "; it must be at least {ge:g}",
    "greater_than": "; it must be above {gt:g}",
    "less_than_equal": "; it must be at most {le:g}",
    "less_than": "; it must be below {lt:g}",
    "finite_number": "; it must be finite",
    "dataclass_type": "; write its settings below it, one a line",
}


def _config_error(error: ValidationError, cls: Any, where: str, key: str = "") -> ConfigError:
    """The first refusal of pydantic as one sentence: place, key, value, rule."""
    # A wrong name of a required key is both unknown and missing; the unknown one tells more.
    first = min(error.errors(include_url=False), key=lambda entry: entry["type"] != "unexpected_keyword_argument")
    # Besides names of fields a location holds indices of lists and pydantic's own words for unions and functions.
    location = [part for part in first["loc"] if isinstance(part, str) and part.isidentifier()]
    name = ".".join(filter(None, (key, *location)))
    place = f"{where}: " if where else ""
    if first["type"] in ("unexpected_keyword_argument", "missing"):
        if first["type"] == "missing":
            return ConfigError(f"{place}{name} is missing; add it")
        *sections, unknown = location
        for section in sections:
            cls = _settings_class_in(field_types(cls)[section])
        return unknown_key(unknown, field_types(cls), ": ".join(filter(None, (where, key, *sections))))
    if first["type"] == "value_error":  # of a `__post_init__`, which names the values itself
        return ConfigError(f"{place}{name + ': ' if name else ''}{first['ctx']['error']}")
    if first["type"] in _RULES:
        rule = _RULES[first["type"]].format_map(first.get("ctx", {}))
    elif first["type"] == "literal_error":
        rule = f"; choose one of {first['ctx']['expected'].replace(chr(39), '').replace(' or ', ', ')}"
    else:
        rule = f"; {first['msg'][0].lower()}{first['msg'][1:]}"
    return ConfigError(f"{place}{name}={_shown.repr(first['input'])}{rule}")


@settings_class("load_model")
class CheckpointOptions:
    """Which checkpoint is opened, and how; `load_model` and the model arguments of a run have the same options.

    Attributes:
        pretrained: Checkpoint: a folder, a GGUF file, a hub id, "embedded" (the decoder's tiny model) or
            "embedded:NAME".
        adapter: LoRA adapter, a folder or hub id. It is merged into the weights when they are loaded.
        revision: Branch, tag or commit of a hub id.
        dtype: Type of weights and cache. auto is the checkpoint's own type on a GPU and float32 on a CPU. There all is
            computed in float32: weights with 16 bits keep them in memory, and bfloat16 and float16 only round weights.
        device: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.
        attention: Attention backend: sdpa, flash (causal forwards by flash-attn, without CUDA graphs), or native (on a
            CPU). auto is native where it can run, else sdpa.
        kv_budget_gib: GiB that the keys and values of a batch may take. The default is the free memory.
        cuda_graphs: Record forwards as CUDA graphs, of one request and of batches. The default is yes on a GPU.
        tune: Measure what a wider forward costs here, by which ReFusion's are fused; then TPF depends on the machine.
        backend: own, or transformers: its own forward, for any causal or masked language model that it loads. It
            computes the whole text each time, without a cache, so its times measure no decoder.
    """

    pretrained: str
    adapter: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attention: str = "auto"
    kv_budget_gib: NonNegativeFloat | None = None
    cuda_graphs: bool | None = None
    tune: bool = False
    backend: Literal["own", "transformers"] = "own"

    def __post_init__(self) -> None:
        if self.backend == "own":
            return
        for name in ("attention", "cuda_graphs", "adapter", "tune"):
            if (value := getattr(self, name)) not in (None, False, "auto", "sdpa"):
                raise ConfigError(f"{name}={value} is for backend=own only; leave it out")


# --- YAML files that users write ---


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice in one mapping, of which YAML itself would take the last, and aliases.

    What takes long to read is refused, too: very many values, and very long numbers.
    """

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Thirty lines of aliases of aliases make a value that no check comes to the end of.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            problem = f"the alias *{event.anchor} is not read; write the value itself"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.num_nodes += 1
        if self.num_nodes > _MOST_NODES:
            problem = f"the file has more than {_MOST_NODES} keys and values"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            problem = f"a number of {len(node.value)} characters is not read"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and (key_node.tag, key) in seen:
                problem = f"the key {key!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add((key_node.tag, key))
        return super().construct_mapping(node, deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


# What the parser of YAML raises: for a text that is none, and for a value that does not fit its tag, as `!!bool maybe`.
NOT_YAML = (yaml.YAMLError, ArithmeticError, ValueError, RecursionError)
NOT_OF_ITS_TAG = (LookupError, AttributeError, TypeError)


@lru_cache(maxsize=32)
def _parsed(text: str) -> Any:
    # Each run of a protocol reads the same tables of settings.
    content = yaml.load(text, Loader=_Loader)
    check_depth(content)
    return content


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Reads a file that holds one mapping; raises ConfigError for any other."""
    try:
        content = copy.deepcopy(_parsed(read_text(path, LARGEST_YAML)))
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: there is no such file; correct the path") from error
    except (OSError, *NOT_YAML) as error:
        raise ConfigError(f"{where}: cannot be read as YAML in UTF-8 ({error}); correct it") from error
    except NOT_OF_ITS_TAG as error:
        raise ConfigError(f"{where}: cannot be read as YAML: a value does not fit its tag; correct it") from error
    if content is None:
        raise ConfigError(f"{where}: the file is empty; write its settings, or remove it")
    return mapping(content, where)


def check_name(name: str, where: str) -> None:
    """Refuses (ConfigError) a name that cannot be a part of the names of folders."""
    if not re.fullmatch(rf"(?!\.+$)[A-Za-z0-9_.-]{{1,{_LONGEST_NAME}}}", name):
        raise ConfigError(
            f"{where}: {_shown.repr(name)} is part of folder names; use letters, digits, _, - and . only, and not dots "
            f"alone, {_LONGEST_NAME} at most"
        )


def check_number(number: int, most: int, where: str, what: str) -> None:
    """Refuses (ConfigError) more than so many things, which would take long to read."""
    if number > most:
        raise ConfigError(f"{where}: {number:,} {what} are too many; {most:,} at most")


def mapping(value: object, where: str) -> dict[str, Any]:
    """Returns a value that has to be a mapping with text as keys, or raises ConfigError; None is an empty mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is a {type(value).__name__} ({_shown.repr(value)}); write `key: value` lines")
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{where}: the key {wrong[0]!r} is not text; write it in quotes")
    return value
