"""A system under test: a checkpoint, a decoder, the settings and prompts of each task, and the decoding here."""

import functools
import hashlib
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from refusion_eval import api
from refusion_eval.benchmarks import Item, find_task
from refusion_eval.benchmarks.rows import Gap, Sealing, Turns
from refusion_eval.config import CheckpointOptions, field_types
from refusion_eval.decoders import DECODERS, find_decoder
from refusion_eval.decoders.gap_length import holes
from refusion_eval.decoders.infilling import check_infilling
from refusion_eval.decoders.thoughts import has_budget
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError
from refusion_eval.runs.backend import TEMPLATE_BEGINS, Backend, F, Files, GetOrCompute
from refusion_eval.runs.job import Job, WarmUp, record_error
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, LOOPS, RELEASE, ModelArgs
from refusion_eval.runs.own_engine import OwnEngine, hashed
from refusion_eval.runs.settings_tables import Resolved, Table, load_tables, resolve_task
from refusion_eval.runs.systems import published_systems
from refusion_eval.store.manifest import Manifest, git_commit, package_versions
from refusion_eval.store.records import REFUSED, Sample
from refusion_eval.untrusted import read_text
from refusion_eval.version import __version__

log = logging.getLogger(__name__)

# Requests decoded together with batch_size=auto, by type of device; the KV budget may allow fewer.
AUTO_BATCH_SIZES = {"cpu": 16, "cuda": 64}
# A request for log-likelihoods: contexts with their continuations.
Pair = tuple[Sequence[int], Sequence[int]]
Part = Sequence[Pair]

NO_TEMPLATE = "none"
GAP = "<gap>"  # stands for a gap in the texts of prompts

# A weight file up to this size is hashed whole; of a larger file, evenly spread pieces are hashed.
WHOLE_BYTES, PIECE_BYTES, NUM_PIECES = 256 * 2**20, 2**16, 256


class ModelCache:
    """Keeps the checkpoint that was opened last, so that successive systems on one checkpoint load its weights once."""

    def __init__(self, given: api.LoadedModel | None = None) -> None:
        self._given = given  # stands for every checkpoint
        self._key: tuple[Any, ...] | None = None
        self._model: api.LoadedModel | None = None

    def get(self, key: tuple[Any, ...], open_model: Callable[[], api.LoadedModel]) -> api.LoadedModel:
        if self._given is not None:
            return self._given
        if self._model is None or key != self._key:
            self._model = None  # two models may not fit into the memory at once
            self._key, self._model = key, open_model()
        return self._model


class System:
    """Everything that is fixed for a run; nothing is loaded before it is needed, the weights last."""

    def __init__(
        self,
        args: ModelArgs,
        model_cache: ModelCache | None = None,
        *,
        get_or_compute: GetOrCompute = lambda name, compute: compute(),  # the measured facts of a continued run
        num_processes: int = 1,
    ) -> None:
        self.get_or_compute = get_or_compute
        self.num_processes = num_processes
        self.args = args
        self.model_cache = model_cache or ModelCache()
        self._resolved: dict[tuple[str, str], Resolved] = {}
        self._warm_up = WarmUp(args.warmup)

    @functools.cached_property
    def backend(self) -> Backend:
        """What decodes, chosen here and nowhere else."""
        module, _, name = LOOPS[self.args.loop].backend.partition(":")
        kind: type[Backend] = getattr(importlib.import_module(module), name)
        return kind.of(self)

    def shared(self, options: CheckpointOptions) -> api.LoadedModel:
        """The checkpoint with these options, which systems share as long as they follow each other."""

        def opened() -> api.LoadedModel:
            model = api.LoadedModel(options)
            log.info("%s: %s", self.args.pretrained, model.place)
            return self.prepared(model)

        return self.model_cache.get((options, self.args.chat_template), opened)

    def prepared(self, opened: F) -> F:
        """The files of a model, with the chat template of the arguments; warns where a published adapter is missing."""
        args = self.args
        published = [system.adapter for system in published_systems().values() if system.decoder == args.decoder]
        if args.adapter is None and any(published):
            what = f"decoder={args.decoder} without the adapter that it was published with"
            log.warning("%s: right only if %s has it merged", what, args.pretrained)
        if args.chat_template is not None:
            opened.tokenizer.inner.chat_template = self.own_chat_template
        return opened

    @property
    def files(self) -> Files:
        return self.backend.files

    @property
    def engine(self) -> OwnEngine:
        """The backend, if it computes log-likelihoods; ConfigError if it is a server or the loop of a release."""
        if isinstance(self.backend, OwnEngine) and self.backend.scores:
            return self.backend
        other = self.backend.ends_no_thoughts
        raise ConfigError(f"log-likelihoods are not asked of {other}; choose tasks that generate texts")

    @property
    def model(self) -> api.LoadedModel:
        """The checkpoint with its weights; ConfigError if a server has them."""
        return self.engine.model

    @functools.cached_property
    def own_chat_template(self) -> str | None:
        """The chat template that the user gives instead of the checkpoint's; None for plain prompts."""
        name = self.args.chat_template
        if name in (None, NO_TEMPLATE):
            return None
        try:
            return read_text(Path(name).expanduser())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template={name}: {error}; give a Jinja file, or {NO_TEMPLATE}") from error

    @functools.cached_property
    def batch_size(self) -> int:
        return self.args.batch_size or AUTO_BATCH_SIZES.get(self.backend.device, 1)

    @property
    def has_template(self) -> bool:
        return bool(self.files.tokenizer.inner.chat_template)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Renders a conversation with the chat template, up to the opening of the assistant's turn.

        For a backend that takes conversations it is one in JSON. A server's chat begins the response itself, so what
        the conversation begins it with is left out.
        """
        if self.backend.takes_messages:
            turns = [*messages][: -1 if messages[-1]["role"] == "assistant" else None]
            if self.args.system_prompt and turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": self.args.system_prompt})
            return json.dumps(turns, ensure_ascii=False)
        return self.files.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,  # an assistant message at the end is left open
            enable_thinking=self.args.enable_thinking,
            now=self.prompt_time,
        )

    @functools.cached_property
    def prompt_time(self) -> datetime | None:
        """The moment that all prompts of a run have if the chat template writes the date; else None."""
        # With the date of the day a run that is continued on another day would ask its items with other prompts.
        if not self.files.tokenizer.asks_for_the_time:
            return None
        began = functools.partial(self.get_or_compute, "prompt_time", lambda: datetime.now().isoformat("T", "seconds"))
        now = self.args.prompt_time or began()
        log.warning("%s: the chat template writes the date; in this run it is that of %s", self.args.pretrained, now)
        return datetime.fromisoformat(now)

    @functools.cached_property
    def beginning(self) -> str:
        """What the chat template writes before a conversation that has no system turn; "" where it adds nothing."""
        if self.backend.takes_messages or not self.has_template:
            return ""
        return self.files.tokenizer.beginning(enable_thinking=self.args.enable_thinking, now=self.prompt_time)

    def render_turns(self, turns: Turns) -> str:
        """The prompt of an item; without a chat template, its texts as lm-eval puts them together.

        Text around a gap is no conversation; as one, for a backend that takes no texts, it is refused with its item.
        """
        user, system, opened, behind, is_gap_in_response = turns
        gap = "" if behind is None else f"{GAP}{behind}"
        if gap and not is_gap_in_response:
            user += gap
            return self.render([{"role": "user", "content": user}]) if self.backend.takes_messages else user
        if not (self.backend.takes_messages or self.has_template):
            return f"{system}{user}{' ' * bool(opened or gap)}{opened}{gap}"
        if self.backend.takes_messages:
            opened, gap = f"{opened}{gap}", ""
        by_role = {"system": system, "user": user, "assistant": opened}
        messages = [{"role": role, "content": text} for role, text in by_role.items() if text or role == "user"]
        return f"{self.render(messages, add_generation_prompt=not opened)}{gap}"

    def unsealed(self, prompt: str, sealing: Sealing) -> tuple[str, tuple[str, ...]]:
        """As `Sealing.unseal`; in a conversation in each turn, so that the texts do not break the JSON."""
        if not self.backend.takes_messages:
            return sealing.unseal(prompt)
        turns = json.loads(prompt)
        parts = [sealing.unseal(turn["content"]) for turn in turns]
        real = [turn | {"content": text} for turn, (text, _) in zip(turns, parts, strict=True)]
        return json.dumps(real, ensure_ascii=False), tuple(text for _, found in parts for text in found)

    def encode_item(self, real_prompt: str, item: Item, gap: Gap | None) -> list[int]:
        """Token ids of the prompt of an item, with a hole for each token of its gap, if it has one."""
        if gap is None:
            return self.encode(real_prompt, plain=not self.has_template)
        if by := self.backend.ends_no_thoughts:
            raise ConfigError(f"item {item.id} has a gap, and {by} fills none; decode by the engine")
        tokenizer = self.files.tokenizer
        length = gap.length(item.row, lambda text: len(tokenizer.encode(text)))
        behind_text = item.turns.behind or ""
        before = self.encode(
            real_prompt.removesuffix(f"{GAP}{behind_text}"),
            plain=not (item.turns.is_gap_in_response and self.has_template),
        )
        behind = tokenizer.encode(behind_text)
        if item.turns.is_gap_in_response and behind:  # a response ends where its text does
            behind = [*behind, *self.checkpoint_settings.get("eos_ids", ())[:1]]
        if "expand_id" in self.checkpoint_settings:  # DreamOn has learned whole texts, between these two tokens
            begin, end = (
                [] if one is None else [one] for one in (tokenizer.inner.bos_token_id, tokenizer.inner.eos_token_id)
            )
            before, behind = begin * (before[:1] != begin) + before, behind + end
        prompt = [*before, *holes(gap.first or length, length), *behind]
        check_infilling(self.args.decoder, find_decoder(self.args.decoder), prompt, lambda: tokenizer.fim_ids)
        return prompt

    def encode(self, text: str, *, plain: bool) -> list[int]:
        """Token ids of a prompt, as `Tokenizer.encode`; with a BOS token in front if the arguments ask for one.

        Empty for a conversation, whose template is the server's.
        """
        if self.backend.takes_messages:
            return []
        tokens = self.files.tokenizer.encode(text, plain=plain)
        if not self.args.add_bos_token:
            return tokens
        bos = self.files.tokenizer.inner.bos_token_id
        if bos is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names no BOS token; leave out add_bos_token")
        return tokens if tokens[:1] == [bos] else [int(bos), *tokens]

    @functools.cached_property
    def checkpoint_settings(self) -> dict[str, Any]:
        """Decoder settings that the checkpoint determines (`Card.settings`), once it fits the decoder."""
        self.backend.check()
        settings = field_types(self.args.settings_type)
        left_out = ("block_length",) if self.args.loop == RELEASE else ()  # the loop has its own default
        found = self.files.card.settings.items()
        return {key: value for key, value in found if key in settings and key not in left_out}

    @functools.cached_property
    def tables(self) -> Mapping[bool, Table | None]:
        """The decoder's settings tables: for the benchmarks (False) and for the mini tasks (True)."""
        return load_tables(self.args, self.checkpoint_settings)

    def resolve(self, task: str, generation_kwargs: Mapping[str, Any], *, announce: bool = True) -> Resolved:
        """The settings of a task's requests under its generation arguments; logged the first time if `announce`."""
        cached = (task, json.dumps(generation_kwargs, sort_keys=True, default=str))
        if cached not in self._resolved:
            resolved = resolve_task(task, self.args, generation_kwargs, self.tables, self.checkpoint_settings)
            if has_budget(resolved.settings) and (by := self.backend.ends_no_thoughts):
                raise ConfigError(
                    f"{task}: thought_budget={resolved.settings.thought_budget} is for this project's own engine, and "
                    f"{by} ends no thoughts; leave thought_budget out, or decode by the engine"
                )
            self.backend.check(resolved.settings)
            self._check_samples(task, resolved.settings)
            if announce:
                before, is_own = next(iter(self._resolved.values()), None), self.args.decoder not in DECODERS
                if before is None:
                    self._check_end()
                    self._tell_beginning()
                log.info("%s, %s: %s", task, self.args.decoder, resolved.describe(before, with_defaults=is_own))
            self._resolved[cached] = resolved
        return self._resolved[cached]

    def _check_samples(self, task: str, settings: Any) -> None:
        """Raises ConfigError if several samples of an item would all be the same text."""
        draws = any(getattr(settings, name, False) for name in ("temperature", "is_random", "draws_order"))
        if self.args.samples > 1 and not draws:
            raise ConfigError(
                f"{task}: samples={self.args.samples}, but {self.args.decoder} draws nothing at temperature=0, so all "
                "texts of an item would be equal; set a temperature, such as temperature=0.7, or leave samples out"
            )

    def _check_end(self) -> None:
        """Warns where responses run on after the token with which the tokenizer ends a turn."""
        inner, eos_ids = self.files.tokenizer.inner, self.files.card.eos_ids
        end = inner.eos_token_id
        if self.has_template and end is not None and end not in eos_ids and "eos_ids" not in self.args.settings:
            log.warning(
                "%s: the tokenizer's EOS token %s (%d) is not among the EOS ids %s of generation_config.json, so "
                "responses run on after it; if turns end with it, give eos_ids=%s",
                *(self.args.pretrained, inner.eos_token, end, list(eos_ids)),
                "+".join(map(str, (*eos_ids, end))),
            )

    def _tell_beginning(self) -> None:
        if begins := self.beginning:
            self.get_or_compute("prompts_begin", lambda: begins)  # so that the record has it
            log.info("%s: %s", self.args.pretrained, TEMPLATE_BEGINS.format(json.dumps(begins, ensure_ascii=False)))

    def settings_by_task(self) -> dict[str, dict[str, Any]]:
        return {
            task: {"settings": dict(resolved.values), "source": dict(resolved.sources)}
            for (task, _), resolved in self._resolved.items()
        }

    def close(self) -> None:
        """No-op: the model is kept for the next system."""

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[TokenScore]]]:
        return ((number, self.score_part(part)) for number, part in enumerate(parts))

    def score_part(self, part: Part) -> list[TokenScore]:
        args = self.args
        return api.score_tokens_many(self.model, part, len(part), args.mc_samples, int(args.settings.get("seed", 0)))

    def run(self, jobs: Iterable[Job], batch_size: int | None = None) -> Iterator[Sample]:
        """Decodes jobs as the batch has room, and yields the record of each as it ends."""
        batch_size = batch_size or self.batch_size
        refused: list[Sample] = []
        with self.backend.open():
            for sample in self._decode(self._accept(jobs, refused, batch_size), batch_size):
                yield from refused
                refused.clear()
                yield self._warm_up.marked(sample)
        yield from refused

    def _accept(self, jobs: Iterable[Job], refused: list[Sample], batch_size: int) -> Iterator[Job]:
        """The jobs that can be decoded; the records of all others go to `refused`."""
        for job in jobs:
            refusal = self.backend.refusal(job)
            if refusal is None:
                yield job
            else:
                refused.append(record_error(job, refusal, batch_size=batch_size, stop=REFUSED))

    def _decode(self, jobs: Iterator[Job], batch_size: int) -> Iterator[Sample]:
        for job in jobs:
            if batch_size > 1 and not job.alone:
                yield from self._together(itertools.chain([job], jobs), batch_size)
            else:
                yield self._alone(job)

    def _alone(self, job: Job) -> Sample:
        return self._warm_up(job, self.backend.alone) or self.backend.alone(job)

    def _together(self, jobs: Iterator[Job], batch_size: int) -> Iterator[Sample]:
        failed: list[Sample] = []
        while True:
            # Where the times of a batch do not measure speed, no warm-up is spent on it.
            ready = self._warmed(jobs, failed) if self.backend.times_together else jobs
            left = yield from self.backend.together(ready, batch_size)
            yield from map(self._alone, left)
            if not failed:
                return
            yield replace(failed.pop(), batch_size=batch_size)

    def _warmed(self, jobs: Iterator[Job], failed: list[Sample]) -> Iterator[Job]:
        """The jobs up to one whose warm-up failed, the record of which goes to `failed` and is yielded at once."""
        for job in jobs:
            if failure := self._warm_up(job, self.backend.alone):
                failed.append(failure)
                return
            yield job


def fit(context: Sequence[int], continuation: Sequence[int], longest: int) -> Pair:
    """Drops the beginning of a text that has more than `longest` tokens; ConfigError if its continuation alone has."""
    num_tokens = len(continuation)
    if num_tokens >= longest:
        raise ConfigError(f"a continuation of {num_tokens} tokens is too long to be scored: it may have {longest - 1}")
    return context[max(0, len(context) + num_tokens - longest) :], continuation


def scores(
    score: Callable[[Sequence[Part]], Iterator[tuple[int, list[TokenScore]]]], pairs: Sequence[Pair], size: int
) -> Iterator[tuple[int, TokenScore]]:
    """Yields number and score of each pair, which fits, as `score` computes its part, in any order."""
    scored = [number for number, (_, continuation) in enumerate(pairs) if continuation]
    # A continuation is empty if the tokenizer merged it into its context.
    yield from ((number, TokenScore(0.0, True)) for number in range(len(pairs)) if not pairs[number][1])
    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    for part, part_scores in score([[pairs[number] for number in group] for group in groups]):
        yield from zip(groups[part], part_scores, strict=True)


def build_manifest(system: System, task_versions: Mapping[str, str]) -> Manifest:
    """Describes this invocation of a system and its tasks, with the versions that are known."""
    backend = system.backend
    return replace(
        identity(system),
        **of_command(system.args, task_versions, cuda_graphs=backend.cuda_graphs),
        batch_size=system.batch_size,
        warmup=system.args.warmup,
        hardware=backend.hardware(),
        versions=package_versions(),
        git_commit=git_commit(),
        roofline=backend.roofline(),
    )


def of_command(args: ModelArgs, task_versions: Mapping[str, str], *, cuda_graphs: bool) -> dict[str, Any]:
    """The fields of a manifest that the command of a run decides, whichever process decodes."""
    return {
        "tasks": dict(task_versions),
        "prompts": {name: task.benchmark.prompts_name for name in task_versions if (task := find_task(name))},
        "command": sys.argv,
        "arguments": run_arguments(args) | {"cuda_graphs": cuda_graphs},
        "protocol": args.protocol,
    }


def identity(system: System) -> Manifest:
    """The part of the manifest that decides texts: everything in its fingerprint, and nothing that is measured."""
    args, backend, files = system.args, system.backend, system.files
    tables = {table.label: table.benchmarks for table in system.tables.values() if table is not None}
    is_named = args.system is not None or files.card.display_name is None
    return Manifest(
        system=args.system_name if is_named else f"{args.system_name} on {files.card.display_name}",
        backbone=args.backbone or files.card.backbone,
        decoder=backend.decoder,
        settings={
            "model_args": dict(args.settings),
            "enable_thinking": args.enable_thinking,
            "checkpoint": system.checkpoint_settings,
            "tables": tables,
            **_added_facts(system),
            **backend.identity(),
        },
        checkpoint=args.pretrained,
        checkpoint_revision=files.revision or "",
        checkpoint_hash="" if files.revision or files.directory is None else _checkpoint_hash(files.directory),
        tasks={},
        seed=int(args.settings.get("seed", 0)),
        dtype=backend.dtype,
        device=backend.device,
        attention=backend.attention,
        package_version=__version__,
    )


def run_arguments(args: ModelArgs) -> dict[str, Any]:
    """The model arguments that decide texts or times, in the form in which they can be given again."""
    left_out = ("settings", "protocol", "run_dir", *LAUNCH_ARGUMENTS)
    given = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    given["batch_size"] = args.batch_size or "auto"
    return {name: value for name, value in given.items() if value is not None} | dict(args.settings)


def _added_facts(system: System) -> dict[str, str | bool]:
    """The additions of a user to the prompts: chat template, by its hash, and BOS token."""
    args = system.args
    facts: dict[str, str | bool] = {}
    if args.chat_template is not None:
        template = system.own_chat_template
        facts["chat_template"] = NO_TEMPLATE if template is None else hashed(template.encode())
    if args.add_bos_token:
        facts["add_bos_token"] = True
    return facts


def _checkpoint_hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for piece in range(NUM_PIECES):
                file.seek(piece * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:32]
