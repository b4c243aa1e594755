"""lm-eval's view of a system: Instances in, strings out. The only importer of lm_eval.

Every generated sample goes to the run store, if there is one, the moment it is finished; what the store already has is
served from it. Weights are loaded at the first request, because lm-eval builds the model before it looks at the data.
"""

import functools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from refusion_eval import api
from refusion_eval.benchmarks import Task, is_sealed
from refusion_eval.benchmarks.sealing import texts_of
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.evaluate.choose import (
    choose_runner,
    choose_scorer,
    describe_run,
    device_facts,
    driver_args,
)
from refusion_eval.lm_eval_plugin.hooks import SEALING
from refusion_eval.runs.interrupt import Interruption, resume_hint
from refusion_eval.runs.job import Job, doc_hash, prompt_hash
from refusion_eval.runs.likelihood import fit, scores
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.progress import ProgressDisplay
from refusion_eval.runs.runner import JobRunner
from refusion_eval.runs.system import ModelCache, System
from refusion_eval.scaleout.launch import num_local_processes
from refusion_eval.scaleout.torchrun import run_worker_or_return
from refusion_eval.store.environment import Hardware
from refusion_eval.store.records import Sample, SampleKey
from refusion_eval.store.run_store import RunStore

log = logging.getLogger(__name__)


@register_model("refusion")
class RefusionLM(TemplateLM):
    """A checkpoint under one of this project's decoders.

    Under a launcher of several processes only the first one ever has one: see `run_worker_or_return`.

    Args:
        args: what to load and how to run it.
        task_versions: version of every task, recorded with its samples; lm-eval does not tell a model.
        keep_going: whether samples that fail are left to the caller (`failed`) instead of ending the run.
        model_cache: where the model may be open already, see `System`.

    Attributes:
        system: the checkpoint and its decoder.
        jobs: (task, document number, sample number) -> what was asked.
        failed: record of every sample that could not be decoded.
    """

    def __init__(
        self,
        args: ModelArgs,
        *,
        task_versions: Mapping[str, str] | None = None,
        keep_going: bool = False,
        model_cache: ModelCache | None = None,
    ) -> None:
        super().__init__()
        run_worker_or_return(args)
        self.args = args
        self.system = System(
            driver_args(args),
            model_cache,
            get_or_compute=self._get_or_compute,
            num_processes=num_local_processes(),
        )
        self.task_versions = dict(task_versions or {})
        self.keep_going = keep_going
        self.jobs: dict[tuple[str, int, int], Job] = {}
        self.failed: list[Sample] = []
        self._store: RunStore | None = None
        self._chat_applied = False

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """What lm-eval's command line calls."""
        _log_like_lm_eval()
        return cls(parse_model_args(arg_dict, additional_config))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """What lm-eval's Python API calls when the model arguments are a string."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def close(self) -> None:
        """Lets go of the run directory, and of other processes."""
        if "runner" in self.__dict__:
            self.__dict__.pop("runner").close()
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def store(self) -> RunStore | None:
        """The run store, opened at the first request; None without a run directory."""
        if self._store is None and self.args.run_dir is not None:
            manifest = describe_run(self.runner, self.system, self.task_versions)
            self._store = RunStore.open(self.args.run_dir, manifest)
            # lm-eval closes no model: a second evaluation in the same process may want the same run directory.
            weakref.finalize(self, self._store.close)
        return self._store

    @functools.cached_property
    def runner(self) -> JobRunner:
        """Decodes jobs: here, or in many processes."""
        return choose_runner(self.args, self.system, self._register_worker)

    def _get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        return compute() if self._store is None else self._store.settle(name, compute)

    def _register_worker(self, hardware: Hardware, pid: int) -> str:
        return self.store.register_process(hardware, pid=pid) if self.store else ""

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; lm-eval reads its special tokens and chat template."""
        return self.system.model.tokenizer.inner

    @property
    def tokenizer_name(self) -> str:
        """Part of lm-eval's key for cached requests."""
        return self.args.pretrained.replace("/", "__")

    @property
    def device(self) -> Any:
        """The device of the weights."""
        return self.system.model.device

    @property
    def eot_token_id(self) -> int | None:
        """The first token that ends a response."""
        return next(iter(self.system.model.card.eos_ids), None)

    @property
    def bos_token_id(self) -> int:
        """What `add_bos_token` puts before a prompt."""
        if self.tokenizer.bos_token_id is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names no BOS token; leave out add_bos_token")
        return int(self.tokenizer.bos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What log-likelihood puts before a text without context: the tokenizer's BOS, else its EOS."""
        inner = self.tokenizer
        prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
        if prefix is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names neither a BOS nor an EOS token")
        return int(prefix)

    @property
    def max_length(self) -> int:
        """Longest text that the checkpoint was made for."""
        return self.system.model.config.max_positions

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results beside the model arguments."""
        return {
            "decoder": self.args.decoder,
            "decoder_settings": self.system.settings_by_task(),
            **device_facts(self.runner, self.system),
            "model_revision": self.system.model.revision or "",
            "warmup": self.args.warmup,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation; an assistant message at its end is left open if no generation prompt is wanted."""
        self._chat_applied = True
        return self.system.model.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            enable_thinking=self.args.enable_thinking,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids as Transformers gives them, with the tokenizer's own BOS unless the text begins with it."""
        inner = self.tokenizer
        wants_bos = add_special_tokens is None and self.args.add_bos_token
        if add_special_tokens is None:
            add_special_tokens = not (inner.bos_token and string.startswith(inner.bos_token))
        tokens = list(inner.encode(string, add_special_tokens=add_special_tokens))
        return [self.bos_token_id, *tokens] if wants_bos and tokens[:1] != [self.bos_token_id] else tokens

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decodes every request and returns its text up to the first stop string.

        A first SIGINT or SIGTERM lets the samples in flight end, a second does not.

        Raises:
            ConfigError: a prompt cannot be decoded; nothing was.
            DecodeError: samples failed; all others are recorded.
            Interrupted: a signal asked for an end; what was finished is recorded.
        """
        if not self._chat_applied and self.tokenizer.chat_template and self.args.chat_template is None:
            log.warning("this checkpoint has a chat template, and it is not applied: pass --apply_chat_template")
        jobs = self._jobs(requests)
        totals = Counter(job.key.task for job in jobs)
        if self.store:
            self.store.expect(totals)
        texts: dict[SampleKey, str] = {}
        stopping = Interruption(lambda: resume_hint(self.args.run_dir), finish_first=True)
        with stopping, ProgressDisplay(self.args.system_name, dict(totals)) as progress:
            pending: dict[SampleKey, int] = {}
            for number, job in enumerate(jobs):
                sample = self.store.get(job.key) if self.store else None
                if sample is not None and sample.error is None:
                    self._take(requests[number], sample, texts)
                    progress.stored(job.key.task)
                else:
                    pending.setdefault(job.key, number)
            wanted = sorted((jobs[number] for number in pending.values()), key=lambda job: not job.alone)
            self._refuse(wanted)
            for sample in self.runner.run(stopping.stoppable(wanted)):
                if self.store:
                    self.store.append(sample)
                self._take(requests[pending[sample.key]], sample, texts)
                progress.decoded(sample)
        self._raise_failures(len(jobs))
        return [texts[job.key] for job in jobs]

    def _refuse(self, jobs: Sequence[Job]) -> None:
        """Ends a run that cannot succeed before it costs hours: lm-eval scores nothing unless every text is there."""
        if self.keep_going:
            return
        refused = [(job, refusal) for job in jobs if (refusal := self.runner.refusal(job))]
        if refused:
            job, refusal = refused[0]
            more = f" ({len(refused)} of {len(jobs)} prompts are refused; this is the first)" if refused[1:] else ""
            raise ConfigError(f"{job.key.task} item {job.item_id}: {refusal}{more}; nothing was decoded")

    def _take(self, request: Instance, sample: Sample, texts: dict[SampleKey, str]) -> None:
        texts[sample.key] = sample.text
        if sample.error is None:
            self.cache_hook.add_partial("generate_until", request.args, sample.text)
        else:
            self.failed.append(sample)
            log.error("%s %s failed: %s", sample.key.task, sample.item_id, sample.error.strip().splitlines()[-1])

    def _raise_failures(self, total: int) -> None:
        if self.failed and not self.keep_going:
            kept = f"the others are in {self.args.run_dir}; run again to retry" if self.args.run_dir else "see the log"
            raise DecodeError(f"{len(self.failed)} of {total} samples could not be decoded; {kept}")

    def _jobs(self, requests: Sequence[Instance]) -> list[Job]:
        # lm-eval asks for K samples of an item by handing over its request K times.
        seen: Counter[tuple[str, int]] = Counter()
        documents: Counter[str] = Counter()
        jobs = []
        for request in requests:
            task, doc_number = place = (str(request.task_name), int(request.doc_id or 0))
            if not seen[place]:
                documents[task] += 1
            alone = not seen[place] and documents[task] <= self.args.tps_samples
            jobs.append(self._job(request, task, doc_number, seen[place], alone))
            seen[place] += 1
        return jobs

    def _job(self, request: Instance, task: str, doc_number: int, sample: int, alone: bool) -> Job:
        prompt, generation_kwargs = request.args
        resolved = self.system.resolve(task, generation_kwargs)
        real_prompt, sealed = SEALING.unseal(prompt)
        if not sealed and is_sealed(task):
            sealed = texts_of(request.doc, real_prompt)
        key = SampleKey(
            task=task,
            task_version=self.task_versions.get(task, ""),
            doc_hash=doc_hash(request.doc),
            prompt_hash=prompt_hash(prompt),
            sample=sample,
            settings_hash=resolved.digest,
        )
        job = Job(
            key=key,
            benchmark=resolved.task.benchmark.name if resolved.task else task,
            item_id=_item_id(request.doc, doc_number, resolved.task),
            prompt_ids=self.tok_encode(real_prompt),
            resolved=resolved,
            sealed=sealed,
            alone=alone,
        )
        self.jobs[task, doc_number, sample] = job
        return job

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results: dict[int, tuple[float, bool]] = {}
        for number, score in self._scores([(context, continuation) for _, context, continuation in requests]):
            results[number] = (score.log_prob, score.is_greedy)
            text = requests[number][0]
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, results[number])
        return [results[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows as long as the model reads, each token scored once.

        Of a masked model it is a bound as well: that of every window given its context.
        """
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            longest = api.longest_scored(self.system.model)
            of_text = get_rolling_token_windows(tokens, self.prefix_token_id, longest - 1, 1)
            windows += map(make_disjoint_window, of_text)
            owners += [number] * (len(windows) - len(owners))
        num_windows = Counter(owners)
        found: dict[int, list[float]] = {number: [] for number in range(len(requests))}
        for number, score in self._scores(windows):
            owner = owners[number]
            found[owner].append(score.log_prob)
            if len(found[owner]) == num_windows[owner]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, math.fsum(found[owner]))
        return [math.fsum(values) for values in found.values()]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, TokenScore]]:
        """Yields number and score of each pair as it is done.

        Raises:
            ConfigError: a continuation is too long, or nothing here computes log-likelihoods; nothing was computed.
            Interrupted: a signal asked for an end.
        """
        scorer = choose_scorer(self.args, self.system, lambda: self.runner)
        longest = api.longest_scored(self.system.model)
        fitting = [fit(context, continuation, longest) for context, continuation in pairs]
        name = "log-likelihoods"
        kept = Interruption(lambda: f"{name} are kept only where lm-eval has a cache (--use_cache)", finish_first=False)
        with kept, ProgressDisplay(self.args.system_name, {name: len(pairs)}) as progress:
            for number, score in scores(scorer, fitting, self.system.batch_size):
                yield number, score
                progress.scored(name)


def _item_id(doc: Mapping[str, Any], doc_number: int, task: Task | None) -> str:
    """The benchmark's name for an item; its number where a stock task's documents lack the benchmark's id column."""
    known = task.benchmark if task else None
    has_id = known is not None and (known.id_column is None or known.id_column in doc)
    return known.id_of(doc, doc_number) if known is not None and has_id else str(doc_number)


def _log_like_lm_eval() -> None:
    """Sends our log lines where lm-eval sends its own; without this its command line would show warnings only."""
    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("refusion_eval")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
