"""The model `refusion` of lm-eval: requests become jobs of a session, records the texts that lm-eval reads."""

import contextlib
import functools
import inspect
import json
import logging
import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM, TemplateLM, hash_args
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from refusion_eval import api
from refusion_eval.benchmarks import OTHER, Task, is_sealed
from refusion_eval.benchmarks.rows import Sealing, texts_of
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError, DecodeError, RefusionEvalError
from refusion_eval.evaluation.loop import Session, run_worker_or_return
from refusion_eval.lm_eval_plugin.evaluation import (
    Evaluation,
    ask_for_samples,
    leave_question_out,
    own_task,
    read_local_rows,
)
from refusion_eval.lm_eval_plugin.hooks import SANDBOX_VARIABLE
from refusion_eval.runs.job import Job, response
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.plan import Turn
from refusion_eval.runs.system import ModelCache, fit, scores
from refusion_eval.runs.terminal import Interruption, ProgressDisplay
from refusion_eval.store.records import Sample, SampleKey

log = logging.getLogger(__name__)

# Kinds of entries in lm-eval's cache of responses.
_GENERATED, _SCORED = "text", "log-likelihood"


@register_model("refusion")
class RefusionLM(TemplateLM):
    """A checkpoint under one of this project's decoders."""

    def __init__(
        self,
        args: ModelArgs,
        model_cache: ModelCache | None = None,
        turn: Turn | None = None,
        *,
        sandbox: str = "auto",
    ) -> None:
        super().__init__()
        self.args = args
        self.session = Session(args, model_cache=model_cache, turn=turn)
        self.system = self.session.system
        self.evaluation = Evaluation(self.session, sandbox)
        self._chat_applied = False
        self._sealing = Sealing()
        self._chosen: Mapping[str, Sequence[int]] = {}  # task -> numbers of its documents, where not all are asked
        observe()
        read_local_rows()
        # lm-eval closes no model: a second evaluation in the same process may want the same run directory.
        weakref.finalize(self, self.session.close_store)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """The call of lm-eval's command line."""
        _log_like_lm_eval()
        program = Path(sys.argv[0])
        if program.name in ("lm_eval", "lm-eval") or program.parent.name == "lm_eval":  # or `python -m lm_eval`
            _end_in_one_line()
        args = parse_model_args(arg_dict, additional_config)
        run_worker_or_return(args)  # the worker loop of a launcher's ranks above 0
        return cls(args, sandbox=os.environ.get(SANDBOX_VARIABLE, "auto"))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """The call of lm-eval's Python API when the model arguments are a string."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def begin_evaluation(
        self, versions: Mapping[str, str], chosen: Mapping[str, Sequence[int]], sealing: Sealing
    ) -> None:
        self._chosen, self._sealing = chosen, sealing
        self._chat_applied = False
        self.evaluation.begin(versions)

    def end_evaluation(self, results: dict[str, Any]) -> None:
        if self.cache_hook.dbdict is not None:
            self.cache_hook.dbdict.commit()
        self.evaluation.end(results)

    def close(self) -> None:
        self.session.close()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; lm-eval reads its special tokens and chat template."""
        return self.system.files.tokenizer.inner

    @property
    def tokenizer_name(self) -> str:
        # Part of lm-eval's key for cached requests, which are not used (see `observe`).
        return self.args.pretrained.replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        return next(iter(self.system.files.card.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context, for log-likelihoods: the tokenizer's BOS, else its EOS."""
        inner = self.tokenizer
        prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
        if prefix is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names neither a BOS nor an EOS token")
        return int(prefix)

    def get_model_info(self) -> dict[str, Any]:
        system = self.system
        if self.args.engine == "ray" or not isinstance(system.files, api.LoadedModel):
            seen = self.session.manifest()  # which describes a worker, or the server
            dtype, device, attention = str(getattr(torch, seen.dtype, seen.dtype)), seen.device, seen.attention
        else:
            dtype, device, attention = str(system.model.dtype), str(system.model.device), system.model.attention
        return {
            "decoder": self.args.decoder,
            "decoder_settings": system.settings_by_task(),
            "model_dtype": dtype,
            "model_device": device,
            "model_attention": attention,
            "model_revision": system.files.revision or "",
            "warmup": self.args.warmup,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self._chat_applied = True
        return self.system.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a prompt or of its beginning; those of transformers where the caller says what is added."""
        if add_special_tokens is None:
            # Nothing is added to a rendered text; all prompts of an evaluation are either rendered or plain.
            return self.system.encode(string, plain=not self._chat_applied)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decodes every request and returns its text up to the first stop string."""
        if not self._chat_applied and self.system.backend.takes_messages:
            raise ConfigError("the chat of a server takes conversations; add --apply_chat_template")
        if not self._chat_applied and self.tokenizer.chat_template and self.args.chat_template is None:
            log.warning("this checkpoint has a chat template, and it is not applied: pass --apply_chat_template")
        jobs = self._jobs(requests)
        request_of = {job.key: request for job, request in zip(jobs, requests, strict=True)}
        cached = {job.key: self._from_cache(_GENERATED, *_parts(job)) for job in jobs}
        texts: dict[SampleKey, str] = {key: text for key, text in cached.items() if text is not None}
        num_failed = 0

        def take(job: Job, sample: Sample) -> None:
            nonlocal num_failed
            texts[job.key] = response(sample)
            if sample.error is None:
                self._to_cache(_GENERATED, *_parts(job), value=texts[job.key])
                self.evaluation.add(sample)
            else:
                num_failed += 1
            judge(request_of[job.key].doc, sample)

        for task in filter(own_task, {key.task for key in request_of}):
            self.session.check_samples(task)
        # lm-eval scores nothing unless every text is there, so a run that cannot succeed ends before it costs hours.
        with self.evaluation.judging() as judge:
            self.session.run([job for job in jobs if job.key not in texts], take, check_all=True)
        if num_failed:
            kept = f"the others are in {self.args.run_dir}; run again to retry" if self.args.run_dir else "see the log"
            raise DecodeError(f"{num_failed} of {len(jobs)} samples could not be decoded; {kept}")
        return [texts[job.key] for job in jobs]

    def _from_cache(self, *parts: Any) -> Any:
        """The entry of lm-eval's cache of responses (`--use_cache`) for a request of this system; None for nothing."""
        # The keys that lm-eval makes hold the prompt and the generation arguments alone, so a file would serve the
        # texts of another checkpoint, decoder or settings table. The keys here hold all that decides a text.
        cache = self.cache_hook.dbdict
        return None if cache is None else cache.get(hash_args(self._identity, parts))

    def _to_cache(self, *parts: Any, value: Any) -> None:
        if self.cache_hook.dbdict is not None:
            self.cache_hook.add_partial(self._identity, parts, value)

    @functools.cached_property
    def _identity(self) -> str:
        """Hash of all that decides the texts and likelihoods of requests, these apart."""
        facts = self.session.manifest().fingerprint() | {"mc_samples": self.args.mc_samples}
        spelling = {"vocabulary": self.tokenizer.get_vocab(), "special": self.tokenizer.special_tokens_map}
        return hash_args(json.dumps(facts | spelling, sort_keys=True), [])

    def _jobs(self, requests: Sequence[Instance]) -> list[Job]:
        # lm-eval asks for K samples of a document by passing its request K times.
        num_seen: Counter[tuple[str, int]] = Counter()
        jobs = []
        for request in requests:
            task, number = document = (str(request.task_name), int(request.doc_id or 0))
            sample = num_seen[document]
            # In a turn lm-eval numbers the documents of this turn alone.
            item = self._chosen.get(task, range(number + 1))[number]
            alone = not sample and item < self.args.tps_samples
            jobs.append(self._job(request, task, item, sample, alone))
            num_seen[document] += 1
        return jobs

    def _job(self, request: Instance, task: str, item: int, sample: int, alone: bool) -> Job:
        prompt, generation_kwargs = request.args
        resolved = self.system.resolve(task, generation_kwargs)
        real_prompt, sealed = self.system.unsealed(prompt, self._sealing)
        if not sealed and is_sealed(task):
            sealed = texts_of(request.doc, real_prompt)
        return Job(
            key=self.evaluation.key(task, request.doc, request.args, sample),
            benchmark=resolved.task.benchmark.name if resolved.task else task,
            item_id=_item_id(request.doc, item, resolved.task),
            prompt_ids=self.tok_encode(real_prompt),
            prompt=real_prompt,
            resolved=resolved,
            prompts=self._prompts_name(task, request.doc, prompt),
            sealed=sealed,
            alone=alone,
        )

    def _prompts_name(self, name: str, doc: Mapping[str, Any], prompt: str) -> str:
        task = own_task(name)
        if task is None:
            return OTHER
        try:
            turns = task.benchmark.turns(doc)
        except KeyError:  # a caller's own documents under the name of the task lack its columns
            return OTHER
        return task.benchmark.prompts_name if prompt == self.system.render_turns(turns) else OTHER

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in lm-eval, after a check that the run directory has no document with another prompt."""
        keys = {
            self.evaluation.key(str(request.task_name), request.doc, request.args): str(request.doc_id)
            for request in requests
            if not request.idx  # what is recorded of a document is the request of its first continuation
        }
        self.session.check_prompts(keys)
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results = dict(self._scores([(context, continuation) for _, context, continuation in requests]))
        return [(results[number].log_prob, results[number].is_greedy) for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows as long as the model reads, each token scored once."""
        longest = api.longest_scored(self.system.model)
        windows: list[tuple[list[int], list[int]]] = []
        text_of_window: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.system.encode(request.args[0], plain=True)  # lm-eval renders no such text
            of_text = get_rolling_token_windows(tokens, self.prefix_token_id, longest - 1, 1)
            windows += map(make_disjoint_window, of_text)
            text_of_window += [number] * (len(windows) - len(text_of_window))
        # With a masked model the value of a window is a bound given its context, so the sum is a bound as well.
        values: list[list[float]] = [[] for _ in requests]
        for window, score in self._scores(windows):
            values[text_of_window[window]].append(score.log_prob)
        return [math.fsum(of_text) for of_text in values]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, TokenScore]]:
        """Yields number and score of each pair of context and continuation: cached ones, then others as they come."""
        if self.args.engine == "ray":
            raise ConfigError(
                "log-likelihoods are not computed on Ray: leave out engine=ray for such tasks, or start the processes "
                "with torchrun or accelerate launch"
            )
        system = self.system
        runner: Any = self.session.runner  # of this process or of its launcher, because Ray is refused above
        longest = api.longest_scored(system.model)
        fitting = [fit(context, continuation, longest) for context, continuation in pairs]
        cached = [self._from_cache(_SCORED, *pair) for pair in fitting]
        yield from ((number, TokenScore(*score)) for number, score in enumerate(cached) if score is not None)
        missing = [number for number, score in enumerate(cached) if score is None]
        name = "log-likelihoods"
        hint = f"{name} are kept only where lm-eval has a cache (--use_cache)"
        interruption = Interruption(lambda: hint, finish_first=False)
        with interruption, ProgressDisplay(self.args.system_name, {name: len(missing)}) as progress:
            for number, score in scores(runner.score, [fitting[number] for number in missing], system.batch_size):
                self._to_cache(_SCORED, *fitting[missing[number]], value=tuple(score))
                yield missing[number], score
                progress.scored(name)


def observe() -> None:
    """Has lm-eval's `evaluate` tell a `RefusionLM` when an evaluation begins and ends; further calls do nothing."""
    # lm-eval itself tells a model neither the version of a task nor how its texts were judged.
    original = evaluator.evaluate
    if hasattr(original, "observed"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        model = call.arguments["lm"]
        model = model.lm if isinstance(model, CachingLM) else model
        if not isinstance(model, RefusionLM):
            return original(*args, **kwargs)
        # Its keys hold neither the task nor the settings. The model looks into the same file under keys that do.
        call.arguments["lm"] = model
        if call.arguments["cache_requests"]:
            log.warning(
                "lm-eval's cache of requests (--cache_requests) is not used: its keys hold neither the generation "
                "settings nor the chat template; every request is built anew"
            )
            call.arguments["cache_requests"] = False
        tasks = call.arguments["task_dict"]
        tasks = tasks.get("tasks", tasks)
        versions = {name: str(task.VERSION) for name, task in tasks.items() if hasattr(task, "VERSION")}
        sealing = Sealing()
        for task in tasks.values():
            if isinstance(task, ConfigurableTask):
                leave_question_out(task)
                ask_for_samples(task, model.args.samples)
            sealing.update(getattr(getattr(task, "dataset", None), "sealing", Sealing()))
        model.begin_evaluation(versions, call.arguments["samples"] or {}, sealing)
        keeps_samples = call.arguments["log_samples"]
        call.arguments["log_samples"] = True
        results = original(*call.args, **call.kwargs)
        if results is not None:
            model.end_evaluation(results)
            if not keeps_samples:
                del results["samples"]
        return results

    evaluate.observed = True  # type: ignore[attr-defined] # says that there is nothing left to wrap
    evaluator.evaluate = evaluate
    ask_git = evaluator.get_git_commit_hash  # which lets git complain on the terminal outside a repository

    def commit_hash() -> str | None:
        with contextlib.suppress(OSError):  # there is no git
            if subprocess.run(["git", "rev-parse"], capture_output=True, check=False).returncode:
                return None
        return ask_git()

    evaluator.get_git_commit_hash = commit_hash


def _parts(job: Job) -> tuple[Any, ...]:
    return *astuple(job.key), list(job.prompt_ids)


def _item_id(doc: Mapping[str, Any], doc_number: int, task: Task | None) -> str:
    """The benchmark's id of an item; its number where the documents of a stock task lack the benchmark's id column."""
    if task is None or task.benchmark.id_column not in (None, *doc):
        return str(doc_number)
    return task.benchmark.id_of(doc, doc_number)


def _end_in_one_line() -> None:
    """Has the process end with one line, without a traceback, where nobody catches an error of this project."""
    # lm-eval's command line catches nothing. A user's own program is left as it is.
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, RefusionEvalError) and not log.isEnabledFor(logging.DEBUG):
            print(f"error: {error}", file=sys.stderr)
        else:
            show(kind, error, traceback)

    sys.excepthook = hook


def _log_like_lm_eval() -> None:
    """Sends log lines where lm-eval sends its own; without this its command line would show warnings only."""
    of_lm_eval, own = logging.getLogger("lm_eval"), logging.getLogger("refusion_eval")
    if of_lm_eval.handlers and not own.handlers:
        own.handlers = list(of_lm_eval.handlers)
        own.setLevel(of_lm_eval.level)
        own.propagate = False
