"""A system under test: a checkpoint, a decoder, the settings and prompts of each task, and the decoding here."""

import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from refusion_eval import api
from refusion_eval.benchmarks import Turns, find_task
from refusion_eval.config import CheckpointOptions
from refusion_eval.decoders import DECODERS, find_decoder, name_with_code
from refusion_eval.decoders.thoughts import has_budget
from refusion_eval.engine.engine import Request
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.engine.width import WidthCost
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, cpu_threads, weight_bytes
from refusion_eval.runs.hardware import collect_hardware, cpuinfo, read_gpu
from refusion_eval.runs.job import Detokenizer, Job, WarmUp, record, record_error
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, ModelArgs
from refusion_eval.runs.settings_tables import Resolved, Table, load_tables, resolve_task
from refusion_eval.runs.systems import NO_FILES, published_systems
from refusion_eval.store import records
from refusion_eval.store.records import REFUSED, SERVER, STOCK_GENERATE, Hardware, Manifest, Sample
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import RunReader
from refusion_eval.types import Decode, Decoded
from refusion_eval.untrusted import read_text
from refusion_eval.version import __version__

if TYPE_CHECKING:
    from refusion_eval.runs.server import ServerLoop
    from refusion_eval.runs.stock_loop import StockLoop

log = logging.getLogger(__name__)

# Requests decoded together with batch_size=auto, by type of device; the KV budget may allow fewer.
AUTO_BATCH_SIZES = {"cpu": 16, "cuda": 64}
# Returns a measured fact: the value that is recorded under a name, or else the value that the function computes.
GetOrCompute = Callable[[str, Callable[[], Any]], Any]
# A request for log-likelihoods: contexts with their continuations.
Pair = tuple[Sequence[int], Sequence[int]]
Part = Sequence[Pair]

NO_TEMPLATE = "none"

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
        self.entry = find_decoder(args.decoder)
        self._resolved: dict[tuple[str, str], Resolved] = {}
        self._warm_up = WarmUp(args.warmup)

    @functools.cached_property
    def model(self) -> api.LoadedModel:
        args = self.args
        cuda_graphs = args.cuda_graphs if args.loop == "engine" else False
        options = replace(args.options, attention=self.wanted_attention(), cuda_graphs=cuda_graphs)
        if args.loop == SERVER:
            return self._open(options)
        return self.model_cache.get((options, args.chat_template), lambda: self._open(options))

    def _open(self, options: CheckpointOptions) -> api.LoadedModel:
        args, opened = self.args, self._files(options)
        published = [system.adapter for system in published_systems().values() if system.decoder == args.decoder]
        if args.adapter is None and any(published):
            what = f"decoder={args.decoder} without the adapter that it was published with"
            log.warning("%s: right only if %s has it merged", what, args.pretrained)
        if args.chat_template is not None:
            opened.tokenizer.inner.chat_template = self.own_chat_template
        return opened

    def _files(self, options: CheckpointOptions) -> api.LoadedModel:
        if self.args.loop != SERVER:
            opened = api.LoadedModel(options)
            log.info("%s: %s", self.args.pretrained, opened.place)
            return opened
        from refusion_eval.runs.server import ServedModel

        return ServedModel(self.args)

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

    def wanted_attention(self) -> str:
        """The attention backend of the arguments; with auto, the backend that a continued run was begun with."""
        args = self.args
        is_own = args.loop == "engine" and args.backend == "own"  # else transformers chooses its own
        if not is_own or args.attention != "auto" or not args.run_dir or not (Path(args.run_dir) / RUN_JSON).is_file():
            return args.attention
        with RunReader.open(args.run_dir) as reader:
            if next(reader.samples(traces=False), None) is None:
                return args.attention
            recorded = reader.run.manifest.attention.partition("+")[0].partition(":")[0]
            return args.attention if recorded == "transformers" else recorded

    @functools.cached_property
    def batch_size(self) -> int:
        return self.args.batch_size or AUTO_BATCH_SIZES.get(self.model.device.type, 1)

    @property
    def has_template(self) -> bool:
        return bool(self.model.tokenizer.inner.chat_template)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Renders a conversation with the chat template, up to the opening of the assistant's turn."""
        return self.model.tokenizer.render_chat(
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
        if not self.model.tokenizer.asks_for_the_time:
            return None
        began = functools.partial(self.get_or_compute, "prompt_time", lambda: datetime.now().isoformat("T", "seconds"))
        now = self.args.prompt_time or began()
        log.warning("%s: the chat template writes the date; in this run it is that of %s", self.args.pretrained, now)
        return datetime.fromisoformat(now)

    def render_turns(self, turns: Turns) -> str:
        """The prompt of an item; without a chat template, its texts as lm-eval puts them together."""
        user, system, opened = turns
        if not self.has_template:
            return f"{system}{user}{opened and ' '}{opened}"
        by_role = {"system": system, "user": user, "assistant": opened}
        messages = [{"role": role, "content": text} for role, text in by_role.items() if text or role == "user"]
        return self.render(messages, add_generation_prompt=not opened)

    def encode(self, text: str, *, plain: bool) -> list[int]:
        """Token ids of a prompt, as `Tokenizer.encode`; with a BOS token in front if the arguments ask for one."""
        tokens = self.model.tokenizer.encode(text, plain=plain)
        if not self.args.add_bos_token:
            return tokens
        bos = self.model.tokenizer.inner.bos_token_id
        if bos is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names no BOS token; leave out add_bos_token")
        return tokens if tokens[:1] == [bos] else [int(bos), *tokens]

    @functools.cached_property
    def detokenizer(self) -> Detokenizer:
        inner = self.model.tokenizer.inner
        special = {int(token): str(inner.convert_ids_to_tokens(token)) for token in inner.all_special_ids}
        special |= {int(token): str(added) for token, added in inner.added_tokens_decoder.items() if added.special}
        return Detokenizer(self.model.tokenizer.decode, special)

    @functools.cached_property
    def stock_loop(self) -> "StockLoop":
        from refusion_eval.runs.stock_loop import StockLoop  # transformers' models load slowly, and few runs need them

        return StockLoop.open(self.model.directory, self.model.dtype, self.model.device)

    @functools.cached_property
    def server(self) -> "ServerLoop":
        from refusion_eval.runs.server import ServerLoop

        model: Any = self.model
        return ServerLoop(self.args, model, self.detokenizer)

    @functools.cached_property
    def width_cost(self) -> WidthCost:
        """The costs of forwards, by which they are fused; a run keeps them, so that continuing changes no count."""
        cost = WidthCost(**self.get_or_compute("width_cost", lambda: self.model.width_cost._asdict()))
        log.info("fusing for a device with %d free rows, %g of a forward for each further one", *cost)
        return cost

    @functools.cached_property
    def checkpoint_settings(self) -> dict[str, Any]:
        """Decoder settings that the checkpoint determines, its mask token and end tokens, once it fits the decoder."""
        api.check_fit(self.model, self.args.decoder, "mask_id" in self.args.settings)
        tokens = {"mask_id": self.model.card.mask_id, "eos_ids": tuple(self.model.card.eos_ids)}
        settings = self.entry.Settings.__dataclass_fields__
        return {key: value for key, value in tokens.items() if key in settings and value is not None}

    @functools.cached_property
    def tables(self) -> Mapping[bool, Table | None]:
        """The decoder's settings tables: for the benchmarks (False) and for the mini tasks (True)."""
        return load_tables(self.args, self.checkpoint_settings)

    def resolve(self, task: str, generation_kwargs: Mapping[str, Any], *, announce: bool = True) -> Resolved:
        """The settings of a task's requests under its generation arguments; logged the first time if `announce`."""
        cached = (task, json.dumps(generation_kwargs, sort_keys=True, default=str))
        if cached not in self._resolved:
            resolved = resolve_task(task, self.args, generation_kwargs, self.tables, self.checkpoint_settings)
            if has_budget(resolved.settings) and self.args.loop != "engine":
                by = "a server" if self.args.loop == SERVER else f"loop={self.args.loop}"
                raise ConfigError(
                    f"{task}: thought_budget={resolved.settings.thought_budget} is for this project's own engine, and "
                    f"{by} ends no thoughts; leave thought_budget out, or decode by the engine"
                )
            api.decoder_settings(self.model, self.args.decoder, resolved.settings)
            self._check_samples(task, resolved.settings)
            if announce:
                before, is_own = next(iter(self._resolved.values()), None), self.args.decoder not in DECODERS
                if before is None:
                    self._check_end()
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
        inner, eos_ids = self.model.tokenizer.inner, self.model.card.eos_ids
        end = inner.eos_token_id
        if self.has_template and end is not None and end not in eos_ids and "eos_ids" not in self.args.settings:
            log.warning(
                "%s: the tokenizer's EOS token %s (%d) is not among the EOS ids %s of generation_config.json, so "
                "responses run on after it; if turns end with it, give eos_ids=%s",
                *(self.args.pretrained, inner.eos_token, end, list(eos_ids)),
                "+".join(map(str, (*eos_ids, end))),
            )

    def settings_by_task(self) -> dict[str, dict[str, Any]]:
        return {
            task: {"settings": dict(resolved.values), "source": dict(resolved.sources)}
            for (task, _), resolved in self._resolved.items()
        }

    def refusal(self, job: Job) -> str | None:
        if self.args.loop == SERVER:  # it knows its own limits
            return None
        try:
            settings = job.resolved.settings
            api.check_prompt(self.model, job.prompt_ids, api.num_positions(self.model, settings))
        except ConfigError as error:
            return str(error)
        return None

    def close(self) -> None:
        """No-op: the model is kept for the next system."""

    def score(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[TokenScore]]]:
        return ((number, self.score_part(part)) for number, part in enumerate(parts))

    def score_part(self, part: Part) -> list[TokenScore]:
        args = self.args
        return api.score_tokens_many(self.model, part, len(part), args.mc_samples, int(args.settings.get("seed", 0)))

    def _decode_of(self, job: Job) -> Decode:
        return api.decode_of(self.model, self.args.decoder, job.resolved.settings)

    def _settings(self, job: Job) -> Any:
        return api.with_width_cost(job.settings(self.detokenizer), lambda: self.width_cost)

    def run(self, jobs: Iterable[Job], batch_size: int | None = None) -> Iterator[Sample]:
        """Decodes jobs as the batch has room, and yields the record of each as it ends."""
        batch_size = batch_size or self.batch_size
        if self.args.loop == SERVER:
            yield from self.server.run(jobs, batch_size)
            return
        refused: list[Sample] = []
        for sample in self._decode(self._accept(jobs, refused, batch_size), batch_size):
            yield from refused
            refused.clear()
            yield sample
        yield from refused

    def _accept(self, jobs: Iterable[Job], refused: list[Sample], batch_size: int) -> Iterator[Job]:
        """The jobs that can be decoded; the records of all others go to `refused`."""
        for job in jobs:
            refusal = self.refusal(job)
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
        try:
            warm = self._warm_up(job, lambda: self._run(job))
            decoded = self._run(job)
        except (DecodeError, RuntimeError):  # torch raises the second when memory runs out or a kernel fails
            return record_error(job, traceback.format_exc(), batch_size=1)
        return record(job, decoded, self.detokenizer, batch_size=1, warm=warm)

    def _run(self, job: Job) -> Decoded:
        settings = self._settings(job)
        if self.args.loop != "engine":
            with cpu_threads(self.model.num_threads):
                return self.stock_loop.run(job.prompt_ids, settings)
        return self.model.engine.run(self._decode_of(job), job.prompt_ids, settings)

    def _together(self, jobs: Iterator[Job], batch_size: int) -> Iterator[Sample]:
        returned: deque[Job] = deque()  # jobs of a batch that failed
        while batch_size > 1:
            taken: dict[int, Job] = {}
            try:
                requests = self._requests(returned, jobs, taken)
                for number, outcome in self.model.engine.run_many(requests, batch_size):
                    job = taken.pop(number)
                    if isinstance(outcome, DecodeError):
                        yield record_error(job, "".join(traceback.format_exception(outcome)), batch_size=batch_size)
                    else:
                        # Times of a batch do not measure speed, so no warm-up is spent on it.
                        yield record(job, outcome, self.detokenizer, batch_size=batch_size, warm=False)
                return
            except RuntimeError as error:  # most likely memory ran out
                log.warning("a batch of %d failed (%s): half of it is tried", batch_size, error)
                returned.extendleft(reversed(taken.values()))
                batch_size //= 2
        for job in itertools.chain(returned, jobs):
            yield self._alone(job)

    def _requests(self, returned: deque[Job], jobs: Iterator[Job], taken: dict[int, Job]) -> Iterator[Request]:
        for number in itertools.count():
            job = returned.popleft() if returned else next(jobs, None)
            if job is None:
                return
            taken[number] = job
            yield Request(self._decode_of(job), job.prompt_ids, self._settings(job))


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
    model = system.model
    return replace(
        identity(system),
        tasks=dict(task_versions),
        prompts={name: task.benchmark.prompts_name for name in task_versions if (task := find_task(name))},
        batch_size=system.batch_size,
        warmup=system.args.warmup,
        hardware=machine(system),
        versions=records.package_versions(),
        git_commit=records.git_commit(),
        command=sys.argv,
        arguments=run_arguments(system.args) | {"cuda_graphs": model.cuda_graphs},
        protocol=system.args.protocol,
        roofline={} if model.is_stock or system.args.loop == SERVER else _roofline(model),
    )


def _roofline(model: api.LoadedModel) -> dict[str, float]:
    # The bytes that forwards of this project's transformer read, and how fast the device copies.
    with cpu_threads(model.num_threads):  # a forward reads no faster than its own threads can
        bandwidth = copy_bandwidth(model.device)
    return {
        "weight_bytes": weight_bytes(model.config, model.dtype),
        "cache_bytes_per_row": cache_bytes_per_row(model.config, model.dtype),
        "copy_bytes_per_second": bandwidth,
    }


def identity(system: System) -> Manifest:
    """The part of the manifest that decides texts: everything in its fingerprint, and nothing that is measured."""
    args, model = system.args, system.model
    tables = {table.label: table.benchmarks for table in system.tables.values() if table is not None}
    served = {"server": system.server.identity} if args.loop == SERVER else {}
    is_named = args.system is not None or model.card.display_name is None
    has_own_hash = not model.revision and args.pretrained != NO_FILES
    return Manifest(
        system=args.system_name if is_named else f"{args.system_name} on {model.card.display_name}",
        backbone=args.backbone or model.card.backbone,
        decoder={"engine": name_with_code(args.decoder), "generate": STOCK_GENERATE, SERVER: SERVER}[args.loop],
        settings={
            "model_args": dict(args.settings),
            "enable_thinking": args.enable_thinking,
            "checkpoint": system.checkpoint_settings,
            "tables": tables,
            **_added_facts(system),
            **served,
        },
        checkpoint=args.pretrained,
        checkpoint_revision=model.revision or "",
        checkpoint_hash="" if not has_own_hash else _checkpoint_hash(model.directory),
        tasks={},
        seed=int(args.settings.get("seed", 0)),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention=_recorded_attention(system),
        package_version=__version__,
    )


def _recorded_attention(system: System) -> str:
    """The attention as manifests have it: `BACKEND[:KERNELS][+graphs]`."""
    model = system.model
    if system.args.loop == SERVER:
        return SERVER
    if model.is_stock or system.args.loop != "engine":
        return "transformers"  # which chooses its own
    # The kernels that torch chooses from on CUDA, and the recording of graphs, decide the last bits of a text too.
    kernels = ":flash,efficient,math" if model.device.type == "cuda" and model.attention == "sdpa" else ""
    return model.attention + kernels + ("+graphs" if model.cuda_graphs else "")


def machine(system: System) -> Hardware:
    device = system.model.device
    if system.args.loop == SERVER:
        return system.server.hardware(functools.partial(collect_hardware, system.model.num_threads))
    return collect_hardware(system.model.num_threads, device if device.type == "cuda" else None, system.num_processes)


def machine_state(system: System) -> dict[str, Any]:
    """Further facts that decide times: threads, load of the last minute, clocks of the processors and the GPU."""
    device = system.model.device
    if system.args.loop == SERVER:
        return system.server.state()
    clocks = [float(text) for name, text in cpuinfo() if name == "cpu MHz"]
    state: dict[str, Any] = {"threads": system.model.num_threads, "load": round(os.getloadavg()[0], 2)}
    if clocks:
        state["cpu_mhz"] = round(sum(clocks) / len(clocks))
    if device.type == "cuda":
        detail = read_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        state |= {name: value for name, value in detail.items() if name.startswith("clocks")}
    return state


def run_arguments(args: ModelArgs) -> dict[str, Any]:
    """The model arguments that decide texts or times, in the form in which they can be given again."""
    left_out = ("settings", "protocol", "run_dir", *LAUNCH_ARGUMENTS)
    given = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    given["batch_size"] = args.batch_size or "auto"
    return {name: value for name, value in given.items() if value is not None} | dict(args.settings)


def _added_facts(system: System) -> dict[str, str | bool]:
    """The additions of a user to a checkpoint: adapter, chat template, BOS token; files by their hashes."""
    args, (name, revision) = system.args, (system.model.adapter, system.model.adapter_revision)
    facts: dict[str, str | bool] = {}
    if name is not None:
        files = [Path(name).expanduser() / file for file in ("adapter_config.json", "adapter_model.safetensors")]
        facts["adapter"] = f"{name}@{revision}" if revision else _hash(*(file.read_bytes() for file in files))
    if args.chat_template is not None:
        template = system.own_chat_template
        facts["chat_template"] = NO_TEMPLATE if template is None else _hash(template.encode())
    if args.add_bos_token:
        facts["add_bos_token"] = True
    return facts


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


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
