"""The model `refusion` of lm-eval: Instances become jobs of a session, and records become the texts that lm-eval reads.

Weights are loaded at the first request, because lm-eval builds the model before it looks at the data.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from refusion_eval import api
from refusion_eval.benchmarks import OTHER, Task, is_sealed
from refusion_eval.benchmarks.rows import texts_of
from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.evaluation.loop import Session, Turn, run_worker_or_return
from refusion_eval.lm_eval_plugin.evaluation import Evaluation, observe, own_task
from refusion_eval.lm_eval_plugin.hooks import SEALING
from refusion_eval.lm_eval_plugin.local_rows import read_local_rows
from refusion_eval.runs.job import Job, response
from refusion_eval.runs.likelihood import LocalScorer, Scorer, fit, scores
from refusion_eval.runs.model_args import ModelArgs, parse_model_args
from refusion_eval.runs.system import ModelCache
from refusion_eval.runs.terminal import Interruption, ProgressDisplay
from refusion_eval.store.records import Sample, SampleKey

log = logging.getLogger(__name__)


@register_model("refusion")
class RefusionLM(TemplateLM):
    """A checkpoint under one of this project's decoders.

    Attributes:
        args: what to load and how to run it.
        session: decodes requests; it keeps their records where there is a run directory.
        system: the checkpoint and its decoder.

    Args:
        args: see above.
        model_cache: shares the opened model with other evaluations of this process.
        turn: the turn of the system, recorded with the run.
    """

    def __init__(self, args: ModelArgs, model_cache: ModelCache | None = None, turn: Turn | None = None) -> None:
        super().__init__()
        self.args = args
        self.session = Session(args, model_cache=model_cache, turn=turn)
        self.system = self.session.system
        self._evaluation = Evaluation(self.session)
        self._chat_applied = False
        self._chosen: Mapping[str, Sequence[int]] = {}  # task -> numbers of its documents, where not all are asked
        observe(RefusionLM)
        read_local_rows()
        # lm-eval closes no model: a second evaluation in the same process may want the same run directory.
        weakref.finalize(self, self.session.close_store)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """What lm-eval's command line calls. On the ranks above 0 of a launcher this is where the worker loop runs."""
        _log_like_lm_eval()
        args = parse_model_args(arg_dict, additional_config)
        run_worker_or_return(args)
        return cls(args)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """What lm-eval's Python API calls when the model arguments are a string; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def begin_evaluation(self, versions: Mapping[str, str], chosen: Mapping[str, Sequence[int]]) -> None:
        """Called before an evaluation; see `Evaluation.begin`."""
        self._chosen = chosen
        self._evaluation.begin(versions)

    def end_evaluation(self, results: dict[str, Any]) -> None:
        """Called with lm-eval's results; see `Evaluation.end`."""
        self._evaluation.end(results)

    @property
    def num_decoded(self) -> int:
        """Samples of the last evaluation that have a text."""
        return self._evaluation.num_samples

    def close(self) -> None:
        """Releases the run directory, and other processes."""
        self.session.close()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; lm-eval reads its special tokens and chat template."""
        return self.system.model.tokenizer.inner

    @property
    def tokenizer_name(self) -> str:
        """Part of lm-eval's key for cached requests."""
        return self.args.pretrained.replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """The first token that ends a response."""
        return next(iter(self.system.model.card.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context, for log-likelihoods: the tokenizer's BOS, else its EOS."""
        inner = self.tokenizer
        prefix = inner.bos_token_id if inner.bos_token_id is not None else inner.eos_token_id
        if prefix is None:
            raise ConfigError(f"{self.args.pretrained}: the tokenizer names neither a BOS nor an EOS token")
        return int(prefix)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results beside the model arguments."""
        system = self.system
        if self.args.engine == "ray":  # the workers decode, so the run's manifest describes one of them
            seen = self.session.manifest()
            dtype, device, attention = f"torch.{seen.dtype}", seen.device, seen.attention
        else:
            dtype, device, attention = str(system.model.dtype), str(system.model.device), system.model.attention
        return {
            "decoder": self.args.decoder,
            "decoder_settings": system.settings_by_task(),
            "model_dtype": dtype,
            "model_device": device,
            "model_attention": attention,
            "model_revision": system.model.revision or "",
            "warmup": self.args.warmup,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation; an assistant message at its end is left open if no generation prompt is wanted."""
        self._chat_applied = True
        return self.system.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids as Transformers gives them, with the tokenizer's own BOS unless the text begins with it."""
        return self.system.encode(string, add_special_tokens)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decodes every request and returns its text up to the first stop string; see `Session.run`.

        Raises:
            ConfigError: a prompt cannot be decoded; nothing was. lm-eval scores nothing unless every text is there, so
                a run that cannot succeed ends before it costs hours.
            DecodeError: samples failed; all others are recorded.
            Interrupted: a signal asked for an end; finished samples are recorded.
        """
        if not self._chat_applied and self.tokenizer.chat_template and self.args.chat_template is None:
            log.warning("this checkpoint has a chat template, and it is not applied: pass --apply_chat_template")
        jobs = self._jobs(requests)
        request_of = {job.key: request for job, request in zip(jobs, requests, strict=True)}
        texts: dict[SampleKey, str] = {}
        num_failed = 0

        def take(job: Job, sample: Sample) -> None:
            nonlocal num_failed
            texts[job.key] = response(sample)
            if sample.error is None:
                self.cache_hook.add_partial("generate_until", request_of[job.key].args, texts[job.key])
                self._evaluation.add(sample)
            else:
                num_failed += 1
            judge(request_of[job.key].doc, sample)

        with self._evaluation.judging() as judge:
            self.session.run(jobs, take, check_all=True)
        if num_failed:
            kept = f"the others are in {self.args.run_dir}; run again to retry" if self.args.run_dir else "see the log"
            raise DecodeError(f"{num_failed} of {len(jobs)} samples could not be decoded; {kept}")
        return [texts[job.key] for job in jobs]

    def _jobs(self, requests: Sequence[Instance]) -> list[Job]:
        # lm-eval asks for K samples of a document by passing its request K times.
        num_seen: Counter[tuple[str, int]] = Counter()
        num_documents: Counter[str] = Counter()
        jobs = []
        for request in requests:
            task, number = document = (str(request.task_name), int(request.doc_id or 0))
            sample = num_seen[document]
            num_documents[task] += not sample
            alone = not sample and num_documents[task] <= self.args.tps_samples
            jobs.append(self._job(request, task, number, sample, alone))
            num_seen[document] += 1
        return jobs

    def _job(self, request: Instance, task: str, doc_number: int, sample: int, alone: bool) -> Job:
        prompt, generation_kwargs = request.args
        resolved = self.system.resolve(task, generation_kwargs)
        real_prompt, sealed = SEALING.unseal(prompt)
        if not sealed and is_sealed(task):
            sealed = texts_of(request.doc, real_prompt)
        return Job(
            key=self._evaluation.key(task, request.doc, request.args, sample),
            benchmark=resolved.task.benchmark.name if resolved.task else task,
            item_id=_item_id(request.doc, self._chosen.get(task, range(doc_number + 1))[doc_number], resolved.task),
            prompt_ids=self.tok_encode(real_prompt),
            resolved=resolved,
            prompts=self._prompts_name(task, request.doc, prompt),
            sealed=sealed,
            alone=alone,
        )

    def _prompts_name(self, name: str, doc: Mapping[str, Any], prompt: str) -> str:
        """Which prompts an item is asked with: those of its task, unless options of lm-eval or a user changed them."""
        task = own_task(name)
        if task is None:
            return OTHER
        try:
            turns = task.benchmark.turns(doc)
        except KeyError:  # a caller's own documents under the name of the task lack its columns
            return OTHER
        return task.benchmark.prompts_name if prompt == self.system.render_turns(turns) else OTHER

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
        """Log-likelihoods of whole texts, in windows as long as the model reads, each token scored once.

        With a masked model each window's value is a bound given the window's context, so the sum is a bound as well.
        """
        longest = api.longest_scored(self.system.model)
        windows: list[tuple[list[int], list[int]]] = []
        text_of_window: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            of_text = get_rolling_token_windows(tokens, self.prefix_token_id, longest - 1, 1)
            windows += map(make_disjoint_window, of_text)
            text_of_window += [number] * (len(windows) - len(text_of_window))
        num_missing = Counter(text_of_window)
        values: list[list[float]] = [[] for _ in requests]
        for window, score in self._scores(windows):
            number = text_of_window[window]
            values[number].append(score.log_prob)
            num_missing[number] -= 1
            if not num_missing[number]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, math.fsum(values[number]))
        return [math.fsum(of_text) for of_text in values]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, TokenScore]]:
        """Yields number and score of each pair of context and continuation as it is computed.

        Raises:
            ConfigError: a continuation is too long, or log-likelihoods are not computed here; nothing was computed.
            Interrupted: a signal asked for an end.
        """
        if self.args.engine == "ray":
            raise ConfigError(
                "log-likelihoods are not computed on Ray: leave out engine=ray for such tasks, or start the processes "
                "with torchrun or accelerate launch"
            )
        system, runner = self.system, self.session.runner
        scorer = runner if isinstance(runner, Scorer) else LocalScorer(system)
        longest = api.longest_scored(system.model)
        fitting = [fit(context, continuation, longest) for context, continuation in pairs]
        name = "log-likelihoods"
        interruption = Interruption(
            lambda: f"{name} are kept only where lm-eval has a cache (--use_cache)", finish_first=False
        )
        with interruption, ProgressDisplay(self.args.system_name, {name: len(pairs)}) as progress:
            for number, score in scores(scorer, fitting, system.batch_size):
                yield number, score
                progress.scored(name)


def _item_id(doc: Mapping[str, Any], doc_number: int, task: Task | None) -> str:
    """The benchmark's id of an item; its number where the documents of a stock task lack the benchmark's id column."""
    if task is None or task.benchmark.id_column not in (None, *doc):
        return str(doc_number)
    return task.benchmark.id_of(doc, doc_number)


def _log_like_lm_eval() -> None:
    """Sends our log lines where lm-eval sends its own; without this its command line would show warnings only."""
    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("refusion_eval")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
