"""The tokenizer of a checkpoint: text to token ids and back, chat template. Runs no code from the checkpoint."""

import ast
import atexit
import functools
import itertools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment
from transformers import AutoTokenizer, Qwen2TokenizerFast
from transformers.utils import logging

from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models.checkpoint import read_json
from refusion_eval.types import PROMPT_END, THINK_END, THINK_START
from refusion_eval.untrusted import Child, python_parser, read_text

# Classes that a checkpoint brings as Python code, and the class of transformers that does the same with its files.
# AutoTokenizer refuses such a checkpoint, as it does not run the code.
SAME_AS: Mapping[str, Any] = {"DreamTokenizer": Qwen2TokenizerFast}

JSON_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
# The function that transformers gives to chat templates for the date and the time.
CLOCK = "strftime_now"
# A question for the time in a template, with its format as a literal.
_ASKS = re.compile(rf"""{CLOCK}\(\s*("[^"]*"|'[^']*')\s*\)""")
# What jinja gives to templates that draws at random.
RANDOM = {"random", "lipsum"}
TEMPLATE_FILE = "chat_template.jinja"
# The tokens before prefix, suffix and middle of a text with a gap (FIM), as the families of models spell them.
FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)

# The rendering process ends itself much earlier, by processor time; this only bounds a machine that stands still.
_LONGEST_SECONDS = 60.0
_ADVICE = "correct it, or name another Jinja file, or none, as chat_template"


class Tokenizer:
    def __init__(self, directory: Path) -> None:
        options = {"trust_remote_code": False, "local_files_only": True}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # transformers warns about model types, which do not matter for the tokenizer
        try:
            self.inner: Any = _tokenizer_class(directory).from_pretrained(directory, **options)
        # The Rust code of the library raises plain exceptions; damaged files must not end in a traceback.
        except Exception as error:
            _refuse_damaged(directory)
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error}); it needs tokenizer_config.json "
                "and tokenizer.json, or vocab.json and merges.txt: download them"
            ) from error
        finally:
            logging.set_verbosity(verbosity)

    def check_vocabulary(self, num_rows: int) -> None:
        """Refuses the tokenizer of another model, for whose tokens the embedding has no rows."""
        # Special tokens may lie beyond the embedding: some checkpoints name a padding token that they never use.
        added = self.inner.added_tokens_decoder
        beyond = [number for number in self.inner.get_vocab().values() if number >= num_rows and number not in added]
        if beyond:
            ids = f"{len(beyond)} tokens (up to id {max(beyond)}) outside the vocabulary of {num_rows} in config.json"
            raise CheckpointError(
                f"{self.inner.name_or_path}: the tokenizer has {ids}; take all files of one checkpoint"
            )

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        # A rendered chat holds its special tokens, so nothing is added to it, neither in front nor at the end: the ids
        # are those of `apply_chat_template(tokenize=True)` of transformers. To a plain prompt the tokenizer adds what
        # it is made to add, unless the text begins with the BOS token already.
        bos = self.inner.bos_token
        adds = plain and not (bos and text.startswith(bos))
        return list(self.inner.encode(text, add_special_tokens=adds, verbose=False))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # Cleaning would remove spaces before punctuation, which are part of a program.
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.inner.decode(list(tokens), **options))

    @functools.cached_property
    def thought_end(self) -> list[int]:
        """Tokens that end a thought as chat templates do; ConfigError if that of the checkpoint knows no thoughts."""
        if THINK_END not in str(self.inner.chat_template):
            raise ConfigError(
                f"{self.inner.name_or_path}: the chat template has no {THINK_END}, so thoughts have no end to set; "
                "leave thought_budget out, or name another template as chat_template"
            )
        return self.encode(f"\n{THINK_END}\n\n")

    def end_of_thought(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """The tokens that end the thought in which a response stands; none if it stands in none.

        A response that has not begun gets an empty thought, unless the prompt has a thought.
        """
        text = self.decode(response, skip_special_tokens=False)
        before = self.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
        starts_open = before.rstrip().endswith(THINK_START)
        if not response and not starts_open:
            return [] if THINK_END in before else [*self.encode(f"{THINK_START}\n"), *self.thought_end]
        start, end = text.rfind(THINK_START), text.rfind(THINK_END)
        return self.thought_end if start > end or (end < 0 and starts_open) else []

    @functools.cached_property
    def fim_ids(self) -> list[int]:
        """Ids of the tokens before prefix, suffix and middle of a text with a gap; none if the tokenizer has none."""
        vocabulary = self.inner.get_vocab()
        known = (names for names in FIM_TOKENS if vocabulary.keys() >= set(names))
        return [vocabulary[name] for name in next(known, ())]

    @property
    def asks_for_the_time(self) -> bool:
        """Whether the chat template writes the date or the time, so that prompts differ from one day to the next."""
        return CLOCK in str(self.inner.chat_template)

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, now: datetime | None = None, **template_arguments: Any
    ) -> str:
        """The text of a conversation under the chat template, which finds `now` where it asks for the time."""
        name = self.inner.name_or_path
        if not self.inner.chat_template:
            files = "chat_template.jinja or tokenizer_config.json"
            raise ConfigError(f"{name} has no chat template ({files}); evaluate it without a template")
        template = self.inner.get_chat_template()
        arguments = {"add_generation_prompt": True, **template_arguments}
        text = render_chat(self.inner, messages, template if now is None else _at(template, now), **arguments)
        if obstacle := _obstacle(template, is_fixed=now is not None):
            raise ConfigError(f"{name}: the chat template {obstacle}, so no prompt could be written twice; {_ADVICE}")
        return text

    def beginning(self, **template_arguments: Any) -> str:
        """What the chat template writes before the first turn, such as a system turn; "" for a BOS token alone."""
        roles = ("user", "assistant", "user")
        said = ("first question", "an answer", "second question")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        before, found, rest = self.render_chat(messages, **template_arguments).partition(said[0])
        # What opens a turn stands before the second question, too.
        pairs = zip(reversed(before), reversed(rest.partition(said[2])[0]), strict=False)
        opening = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        own = before[: len(before) - opening]
        return own if found and own.removeprefix(self.inner.bos_token or "").strip() else ""


def render_chat(
    inner: Any, messages: Sequence[Mapping[str, str]], template: str | None = None, **arguments: Any
) -> str:
    """The text of a conversation, as `apply_chat_template` of transformers gives it; time and memory are bounded."""
    template = template or inner.get_chat_template()
    question = {"conversations": [messages], "chat_template": template, **inner.special_tokens_map, **arguments}
    child, lock = _renderer()
    with lock:
        try:
            found = child.ask(question, _LONGEST_SECONDS)
        except (ChildProcessError, TimeoutError) as error:
            raise ConfigError(f"{inner.name_or_path}: the chat template cannot be rendered: {error}") from error
        answer = found or {"error": "it takes more than half a second of processor time, or ends its process"}
    if "text" in answer:
        return str(answer["text"])
    raise ConfigError(f"{inner.name_or_path}: the chat template cannot be rendered ({answer['error']}); {_ADVICE}")


@functools.cache
def _renderer() -> tuple[Child, threading.Lock]:
    # One process for all threads of this one: it takes most of a second to start.
    child = Child(Path(__file__).with_name("template_worker.py"), {"conversations": [], "chat_template": ""})
    atexit.register(child.close)
    return child, threading.Lock()


def _at(template: str, now: datetime) -> str:
    # Written into the template, because transformers hands no function of a caller to it.
    with python_parser():
        return _ASKS.sub(lambda asked: json.dumps(now.strftime(ast.literal_eval(asked[1]))), template)


@functools.cache
def _obstacle(template: str, *, is_fixed: bool) -> str:
    """Why two renderings of a template may differ, even at a moment that is fixed by `_at`; empty if they do not."""
    left = _ASKS.sub('""', template)
    tokens = [(kind, value) for _, kind, value in Environment().lex(left) if kind != "whitespace"]
    names = {value for kind, value in tokens if kind == "name"}
    if drawing := sorted(names & RANDOM):
        return f"draws at random ({', '.join(drawing)})"
    asks = any(value == CLOCK and after != "is" for (_, value), (_, after) in itertools.pairwise(tokens))
    return f"asks for the time by more than {CLOCK}('FORMAT')" if is_fixed and asks else ""


def _tokenizer_class(directory: Path) -> Any:
    path = directory / "tokenizer_config.json"
    declared = str(read_json(path).get("tokenizer_class")) if path.is_file() else ""
    if declared not in SAME_AS:
        return AutoTokenizer
    # Without its files transformers would make an empty vocabulary, not an error.
    missing = " and ".join(name for name in ("vocab.json", "merges.txt") if not (directory / name).is_file())
    if missing and not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{directory} lacks {missing}, which {declared} is made from; download the files")
    return SAME_AS[declared]


def _refuse_damaged(directory: Path) -> None:
    # Names the file that cannot be read, which the libraries do not do.
    for name in JSON_FILES:
        if (directory / name).is_file():
            read_json(directory / name)
    template = directory / TEMPLATE_FILE
    try:
        read_text(template)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{template} cannot be read ({error}); save it as UTF-8, or download it again") from error
