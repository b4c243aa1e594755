"""What decodes the jobs of a system: the contract of this project's engine, of transformers' loop and of servers."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from refusion_eval.api import LoadedModel
from refusion_eval.config import CheckpointOptions
from refusion_eval.models.card import Card
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.runs.job import Detokenizer, Job
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import Sample

TEMPLATE_BEGINS = "the chat template begins a conversation without a system turn by {}"

# Returns a measured fact: the value that is recorded under a name, or else the value that the function computes.
GetOrCompute = Callable[[str, Callable[[], Any]], Any]


class Files(Protocol):
    """The files of a model that are read here, wherever its weights are; `LoadedModel` documents the attributes."""

    revision: str | None
    card: Card

    @property
    def directory(self) -> Path | None:
        """The folder of the files; None if there are none."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, read at the first use."""


F = TypeVar("F", bound=Files)


class Opener(Protocol):
    """What a backend is opened for: a `System`, which documents the attributes."""

    args: ModelArgs
    get_or_compute: GetOrCompute
    num_processes: int

    @property
    def checkpoint_settings(self) -> Mapping[str, Any]:
        """Decoder settings that the checkpoint determines."""

    @property
    def has_template(self) -> bool:
        """Whether prompts are conversations under a chat template."""

    @property
    def beginning(self) -> str:
        """What the chat template writes before a conversation."""

    def prepared(self, opened: F) -> F:
        """The files, with the chat template of the arguments."""

    def shared(self, options: CheckpointOptions) -> LoadedModel:
        """The checkpoint with its weights, which successive systems load once."""


class Description(NamedTuple):
    """What a backend would run."""

    facts: Mapping[str, Any]  # for programs; an empty entry `prompts` is for prompts of tasks
    lines: Sequence[str]  # for people


class Backend(ABC):
    """Decodes jobs. A further one is a file with such a class, and its line in `model_args.LOOPS`.

    What stands around decoding is in `System`, for every backend alike: warm-up, refusals, and who is decoded alone.
    Where backends run is a matter of a `JobRunner`: in this process, in those of a launcher, or on a Ray cluster.

    Attributes:
        files: what is read here of the model that decodes.
        dtype, device, attention: of the forwards, as manifests have them: `BACKEND[:KERNELS][+graphs]` for the last.
        cuda_graphs: whether forwards are recorded as CUDA graphs.
        ends_no_thoughts: what messages call a backend that knows no budget of thoughts; empty if it knows one.
        times_together: whether the times of requests that are decoded together are measured, after a warm-up.
        no_prompts: why the prompts of tasks cannot be shown; empty if they can.
        takes_messages: whether a prompt is a conversation in JSON, to which the backend applies a template.
    """

    ends_no_thoughts: ClassVar[str] = ""
    times_together: ClassVar[bool] = False
    no_prompts: ClassVar[str] = ""
    files: Files
    dtype: str
    device: str
    attention: str
    cuda_graphs = False

    @property
    def takes_messages(self) -> bool:
        return False

    @classmethod
    @abstractmethod
    def of(cls, opener: Opener) -> Self:
        """The backend of a system, which opens the files of the model, and its weights later."""

    @abstractmethod
    def describe(self, system: Opener) -> Description:
        """What would be run for the system that the backend is of; raises ConfigError if it cannot be. No weights."""

    @functools.cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer.of(self.files.tokenizer)

    @property
    @abstractmethod
    def decoder(self) -> str:
        """What records name as that which decoded."""

    def identity(self) -> Mapping[str, Any]:
        """Further facts that decide texts and tell this backend from others, for the settings of records."""
        return {}

    @abstractmethod
    def hardware(self) -> Hardware:
        """The machine that decodes."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Further facts that decide times, as they are now."""

    def roofline(self) -> dict[str, float]:
        """The bytes that forwards read, and how fast the device copies; empty if they are not known."""
        return {}

    def check(self, settings: Any = None) -> None:  # noqa: B027 - a server checks its requests itself
        """Raises ConfigError unless the model fits the decoder, and the settings, if they are given, fit the model."""

    def refusal(self, job: Job) -> str | None:
        """Why a job cannot be decoded; None if it can, or if only decoding tells."""
        return None

    def open(self) -> AbstractContextManager[object]:
        """The context in which jobs are decoded; its end ends the requests in flight."""
        return nullcontext()

    @abstractmethod
    def alone(self, job: Job) -> Sample:
        """The record of a job, or of its failure, after it was decoded without others. It is not marked as warm."""

    def together(self, jobs: Iterator[Job], batch_size: int) -> Generator[Sample, None, Iterable[Job]]:
        """Yields records as jobs end, with up to `batch_size` at once; returns the jobs that need it alone."""
        yield from ()
        return jobs
