"""This project's engine as a backend: it decodes alone or in batches, in this process."""

import functools
import hashlib
import itertools
import json
import logging
import os
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from refusion_eval import api
from refusion_eval.decoders import name_with_code
from refusion_eval.engine.engine import Request
from refusion_eval.engine.width import WidthCost
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.models.choices import choices_for
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, cpu_threads, expert_bytes, weight_bytes
from refusion_eval.models.weights import count_parameters
from refusion_eval.runs.backend import TEMPLATE_BEGINS, Backend, Description, Opener
from refusion_eval.runs.hardware import collect_hardware, cpuinfo, read_gpu
from refusion_eval.runs.job import Job, record, record_error
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import Sample
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import RunReader
from refusion_eval.types import Decode, Decoded

log = logging.getLogger(__name__)


class OwnEngine(Backend):
    own_forwards: ClassVar[bool] = True  # whether they are this engine's, which may be recorded
    scores: ClassVar[bool] = True  # whether log-likelihoods are computed

    def __init__(self, opener: Opener, model: api.LoadedModel) -> None:
        self.args, self.files, self.model = opener.args, model, model
        self._get_or_compute, self._num_processes = opener.get_or_compute, opener.num_processes
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = model.device.type
        # The kernels that torch chooses from on CUDA, and the recording of graphs, decide the last bits of a text too.
        kernels = ":flash,efficient,math" if self.device == "cuda" and model.attention == "sdpa" else ""
        own = model.attention + kernels + ("+graphs" if model.cuda_graphs else "")
        # Transformers chooses its own.
        self.attention = own if self.own_forwards and not model.is_stock else "transformers"
        self.cuda_graphs = model.cuda_graphs

    @classmethod
    def of(cls, opener: Opener) -> Self:
        args = opener.args
        cuda_graphs = args.cuda_graphs if cls.own_forwards else False
        options = replace(args.options, attention=wanted_attention(args), cuda_graphs=cuda_graphs)
        return cls(opener, opener.shared(options))

    def describe(self, system: Opener) -> Description:
        """Layout, sizes, context, chat template and device of the checkpoint, and whether its folder has weights."""
        model, name, decoder = self.model, self.args.pretrained, self.args.decoder
        has_weights, config, settings = self._check_files(), model.config, system.checkpoint_settings
        facts: dict[str, Any] = {"model": name, "decoder": decoder, "family": config.family}
        facts |= {"num_layers": config.num_layers, "weights": model.card.display_name}
        brought = "".join(f", {key}={value}" for key, value in settings.items())
        has_template = f"{'a' if system.has_template else 'no'} chat template"
        lines = [] if model.card.display_name is None else [f"weights of {model.card.display_name}"]
        lines.append(f"{config.family}, {config.num_layers} layers{brought}; {decoder} can run it")
        lines.append(f"context of {config.max_positions:,} tokens, {has_template}")
        if not model.is_stock:  # whose tensors transformers alone knows
            number, num_bytes = count_parameters(config), weight_bytes(config, model.weight_dtype)
            facts |= {"num_parameters": number, "weight_bytes": num_bytes}
            digits = 0 if num_bytes >= 1e7 else 2
            read = f"a forward reads {num_bytes / 1e6:,.{digits}f} MB of them"
            unit, size = ("million", 1e6) if number >= 1e5 else ("thousand", 1e3)
            lines.append(f"{number / size:,.1f} {unit} parameters; {read}")
        facts |= {"context": config.max_positions, "has_template": system.has_template}
        facts |= {"prompts_begin": system.beginning, "prompts": {}, "settings": settings, "place": model.place}
        lines += [model.place, *([] if has_weights else ["the folder has no weights yet"])]
        if begins := system.beginning:
            lines.append(TEMPLATE_BEGINS.format(json.dumps(begins, ensure_ascii=False)))
        return Description(facts, [f"{name}: {line}" for line in lines])

    def _check_files(self) -> bool:
        """Refuses tensors of a folder that no forward could use; whether there are any, but for the hub's."""
        return self.model.check_files()

    @property
    def decoder(self) -> str:
        return name_with_code(self.args.decoder)

    def identity(self) -> dict[str, Any]:
        """The adapter that a user merges into the weights, a local one by the hash of its files."""
        name, revision = self.model.adapter, self.model.adapter_revision
        if name is None or revision:
            return {} if name is None else {"adapter": f"{name}@{revision}"}
        files = [Path(name).expanduser() / file for file in ("adapter_config.json", "adapter_model.safetensors")]
        return {"adapter": hashed(*(file.read_bytes() for file in files))}

    def hardware(self) -> Hardware:
        model = self.model
        gpu = model.device if self.device == "cuda" else None
        choices = choices_for(model.device, model.config, model.dtype).name if self.cuda_graphs else ""
        return collect_hardware(model.num_threads, gpu, self._num_processes, choices)

    def state(self) -> dict[str, Any]:
        """Threads, load of the last minute, clocks of the processors and the GPU."""
        clocks = [float(text) for name, text in cpuinfo() if name == "cpu MHz"]
        state: dict[str, Any] = {"threads": self.model.num_threads, "load": round(os.getloadavg()[0], 2)}
        if clocks:
            state["cpu_mhz"] = round(sum(clocks) / len(clocks))
        if self.device == "cuda":
            detail = read_gpu(f"GPU-{torch.cuda.get_device_properties(self.model.device).uuid}")
            state |= {name: value for name, value in detail.items() if name.startswith("clocks")}
        return state

    def roofline(self) -> dict[str, float]:
        """The bytes that forwards of this project's transformer read, and how fast the device copies."""
        model = self.model
        if model.is_stock:
            return {}
        with cpu_threads(model.num_threads):  # a forward reads no faster than its own threads can
            bandwidth = copy_bandwidth(model.device)
        experts, sizes = model.config.experts, {}
        if experts is not None:
            sizes = {"expert_bytes": expert_bytes(model.config, model.weight_dtype)}
            sizes["experts_of_a_row"] = len(experts.layers) * experts.num_chosen
        return {
            "weight_bytes": weight_bytes(model.config, model.weight_dtype),
            "cache_bytes_per_row": cache_bytes_per_row(model.config, model.cache_dtype),
            "copy_bytes_per_second": bandwidth,
            **sizes,
        }

    def check(self, settings: Any = None) -> None:
        if settings is None:
            api.check_fit(self.model, self.args.decoder, "mask_id" in self.args.settings)
        else:
            api.decoder_settings(self.model, self.args.decoder, settings)

    def refusal(self, job: Job) -> str | None:
        try:
            api.check_request(self.model, self.args.decoder, job.prompt_ids, job.resolved.settings)
        except ConfigError as error:
            return str(error)
        return None

    @functools.cached_property
    def width_cost(self) -> WidthCost:
        """The costs of forwards, by which they are fused; a run keeps them, so that continuing changes no count."""
        cost = WidthCost(**self._get_or_compute("width_cost", lambda: self.model.width_cost._asdict()))
        log.info("fusing for a device with %d free rows, %g of a forward for each further one", *cost)
        return cost

    def _decode_of(self, job: Job) -> Decode:
        return api.decode_of(self.model, self.args.decoder, job.resolved.settings, job.prompt_ids)

    def _settings(self, job: Job) -> Any:
        return api.with_width_cost(job.settings(self.detokenizer), lambda: self.width_cost)

    def _run(self, job: Job) -> Decoded:
        return self.model.engine.run(self._decode_of(job), job.prompt_ids, self._settings(job))

    def alone(self, job: Job) -> Sample:
        try:
            decoded = self._run(job)
        except (DecodeError, RuntimeError):  # torch raises the second when memory runs out or a kernel fails
            return record_error(job, traceback.format_exc(), batch_size=1)
        return record(job, decoded, self.detokenizer, batch_size=1)

    def together(self, jobs: Iterator[Job], batch_size: int) -> Generator[Sample, None, Iterable[Job]]:
        """As `Backend.together`; halves a batch that fails, most likely because memory runs out."""
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
                        yield record(job, outcome, self.detokenizer, batch_size=batch_size)
                return ()
            except RuntimeError as error:
                log.warning("a batch of %d failed (%s): half of it is tried", batch_size, error)
                returned.extendleft(reversed(taken.values()))
                batch_size //= 2
        return itertools.chain(returned, jobs)

    def _requests(self, returned: deque[Job], jobs: Iterator[Job], taken: dict[int, Job]) -> Iterator[Request]:
        for number in itertools.count():
            job = returned.popleft() if returned else next(jobs, None)
            if job is None:
                return
            taken[number] = job
            yield Request(self._decode_of(job), job.prompt_ids, self._settings(job))


def wanted_attention(args: ModelArgs) -> str:
    """The attention backend of the arguments; with auto, the backend that a continued run was begun with."""
    is_own = args.loop == "engine" and args.backend == "own"  # else transformers chooses its own
    if not is_own or args.attention != "auto" or not args.run_dir or not (Path(args.run_dir) / RUN_JSON).is_file():
        return args.attention
    with RunReader.open(args.run_dir) as reader:
        if next(reader.samples(traces=False), None) is None:
            return args.attention
        recorded = reader.run.manifest.attention.partition("+")[0].partition(":")[0]
        return args.attention if recorded == "transformers" else recorded


def hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]
