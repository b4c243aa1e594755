"""Loads checkpoints: config and card first, tokenizer, weights and engine when they are needed."""

import logging
import os
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from refusion_eval.config import CheckpointOptions, build
from refusion_eval.decoders import fitting_decoders
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import recorder
from refusion_eval.engine.width import SHIPPED_COSTS, WidthCost, measure
from refusion_eval.errors import ConfigError
from refusion_eval.models.adapter import LoraAdapter
from refusion_eval.models.attention import Backend
from refusion_eval.models.card import Card, checkpoint_card
from refusion_eval.models.checkpoint import ModelConfig, is_diffusion_gemma, model_config, read_json
from refusion_eval.models.device import choose_backend, choose_device, cpu_threads, weight_bytes
from refusion_eval.models.location import fetch_weights, locate
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import SAFETENSORS, check_weights, load_weights
from refusion_eval.paths import embedded_name, embedded_path
from refusion_eval.types import ONE_THREAD_BYTES

# Threads that torch computes with if nobody chooses. No code of this package changes the number of the process.
DEFAULT_THREADS = torch.get_num_threads()

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel:
    """A checkpoint ready for use: config and card are read at once, tokenizer and weights at their first use.

    Attributes:
        options: the options that it was opened with.
        name, revision: path or hub id of the checkpoint, and its commit on the hub; None for a local directory.
        config, card: shapes of the model; mask id, EOS ids, backbone and kind of the checkpoint.
        dtype, device, attention: those of the weights, and the attention backend. The compiled forwards of a CPU
            compute in float32 whatever the dtype, and read 16 bits where the checkpoint has them (`weight_dtype`).
        cuda_graphs: whether forwards are recorded as CUDA graphs.
        adapter, adapter_revision: the same of the LoRA adapter that is merged into the weights; None for none.
        is_stock: whether transformers computes the forwards, as of DiffusionGemma always.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self.options = options
        packaged = embedded_name(options.pretrained, "refusion")
        place = options.pretrained if packaged is None else str(embedded_path(packaged))
        self._location = location = locate(place, options.revision)
        self.name = location.name
        self.revision = location.revision
        self._is_gemma = is_diffusion_gemma(read_json(location.directory / "config.json"))
        self.is_stock = self._is_gemma or options.backend != "own"
        if self._is_gemma:
            self.config = _gemma_config(location.directory, options)
        else:
            self.config = (_stock_config if self.is_stock else model_config)(location.directory)
        self.card: Card = _in_vocabulary(checkpoint_card(self.name, location.directory), self.config.vocab_size)
        self.device = choose_device(options.device)
        self.dtype = _dtype(options.dtype, self.config, self.device)
        attention = "sdpa" if self.is_stock else options.attention
        has_experts = self.config.experts is not None
        self.attention: Backend = choose_backend(attention, self.dtype, self.device, has_experts=has_experts)
        self.cuda_graphs = not self.is_stock and _records_graphs(options.cuda_graphs, self.attention, self.device)
        self._imposed_threads = None if self.is_stock else _imposed_threads(self.config, self.dtype, self.device)
        self._lora: LoraAdapter | None = None
        self.adapter: str | None = None
        self.adapter_revision: str | None = None
        if options.adapter is not None:  # a wrong adapter is refused before gigabytes of weights are loaded
            adapter = locate(options.adapter, None)
            self.adapter, self.adapter_revision = adapter.name, adapter.revision
            fetch_weights(adapter)
            self._lora = LoraAdapter(adapter.directory, self.config)

    @classmethod
    def open(cls, pretrained: str | PathLike[str], **options: Any) -> "LoadedModel":
        """Reads a checkpoint's config and card without its weights; arguments and errors as `load_model`."""
        return cls(build(CheckpointOptions, {"pretrained": str(pretrained), **options}, "load_model"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError if it cannot be loaded, or belongs to another model."""
        tokenizer = Tokenizer(self._location.directory)
        tokenizer.check_vocabulary(self.config.vocab_size)
        return tokenizer

    @property
    def place(self) -> str:
        """The device and the dtype of the weights, as people read them."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"{self.device}{name}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype that the matrices have in memory, as far as config.json tells."""
        if self._is_widened and self._lora is None and self.dtype == torch.float32:
            return DTYPES.get(self.config.dtype, self.dtype)
        return self.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of keys and values, in which forwards compute."""
        return torch.float32 if self._computes_in_float32 else self.dtype

    @property
    def _computes_in_float32(self) -> bool:
        if self.config.experts is None or self.options.attention != "auto":
            return self.attention == "native"
        # With experts, torch's forward calls the same compiled products.
        return choose_backend("auto", self.dtype, self.device) == "native"

    @property
    def _is_widened(self) -> bool:
        # Weights that the caches of a processor hold are computed with fastest if they are widened once.
        is_small = self.dtype == torch.float32 and weight_bytes(self.config, self.dtype) <= ONE_THREAD_BYTES
        return self._computes_in_float32 and not is_small

    @property
    def decoders(self) -> tuple[str, ...]:
        """Names of the decoders that fit the checkpoint, its main one first."""
        return fitting_decoders(self.card.kind, self.card.decoders)

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint's files, weights included."""
        fetch_weights(self._location)
        return self._location.directory

    def check_files(self) -> bool:
        """Refuses weights in a folder that do not fit its config.json; whether there are any, but for the hub's."""
        folder = self._location.directory
        if self.revision is not None:
            return True
        if not any(folder.glob(f"*{SAFETENSORS}")):
            return False
        if self.is_stock:
            self._stock_class.check_files(folder)
        else:
            check_weights(folder, self.config)
        return True

    @property
    def _stock_class(self) -> Any:
        """What computes the forwards where transformers does, which loads slowly and which few runs need."""
        if self._is_gemma:
            from refusion_eval.models.diffusion_gemma import EncoderDecoder

            return EncoderDecoder
        from refusion_eval.models.stock import StockModel

        return StockModel

    @cached_property
    def transformer(self) -> Transformer:
        """The checkpoint's weights, ready for forwards."""
        merge = None if self._lora is None else self._lora.merge
        place = (self.directory, self.config, self.dtype, self.device)
        return Transformer(self.config, load_weights(*place, merge, self._is_widened))

    @property
    def num_threads(self) -> int:
        """Threads that a forward computes with on a CPU: those of the process, or one for a small model."""
        return self._imposed_threads or torch.get_num_threads()

    @cached_property
    def engine(self) -> Engine:
        """The engine over the checkpoint's weights."""
        budget_gib = self.options.kv_budget_gib
        kv_budget = None if budget_gib is None else int(budget_gib * 2**30)
        if self.is_stock:
            model = self._stock_class(self.directory, self.config, self.dtype, self.device)
            if self._is_gemma:
                from refusion_eval.engine.encoder_decoder import EncoderDecoderEngine

                return EncoderDecoderEngine(model, kv_budget)
            from refusion_eval.engine.full_context import FullContextEngine

            return FullContextEngine(model)
        record = recorder(self.device) if self.cuda_graphs else None
        return Engine(self.transformer, self.attention, kv_budget, record, self._imposed_threads)

    @cached_property
    def width_cost(self) -> WidthCost:
        """How the time of a forward grows with its rows: as shipped for this kind of device, or measured (`tune`)."""
        if not self.options.tune:
            return SHIPPED_COSTS[self.device.type]
        with cpu_threads(self._imposed_threads):
            return measure(self.engine.model, self.attention, self.engine.recorded)


def load_model(pretrained: str | PathLike[str], **options: Any) -> LoadedModel:
    """Loads a checkpoint with its weights.

    Args:
        pretrained: directory in Hugging Face layout, GGUF file, hub id, "embedded" (the tiny ReFusion model of the
            package) or "embedded:NAME".
        **options: the other fields of `CheckpointOptions`, such as `dtype`, `device` and `adapter`.

    Raises:
        CheckpointError: the checkpoint cannot be found or loaded.
        ConfigError: an option is unknown or impossible here.
    """
    model = LoadedModel.open(pretrained, **options)
    _ = model.engine
    return model


def _gemma_config(directory: Path, options: CheckpointOptions) -> ModelConfig:
    from refusion_eval.models.diffusion_gemma import encoder_decoder_config  # as slow as the next function

    if options.backend != "own":
        raise ConfigError(f"{directory}: backend={options.backend} is not for DiffusionGemma; leave it out")
    try:
        replace(options, backend="transformers")  # refuses options of this project's own forwards
    except ConfigError as error:
        raise ConfigError(f"{directory}: transformers computes DiffusionGemma, and {error}") from error
    return encoder_decoder_config(directory)


def _stock_config(directory: Path) -> ModelConfig:
    from refusion_eval.models.stock import stock_config  # transformers' models load slowly, and few runs need them

    config = stock_config(directory)
    log.warning(
        "backend=transformers: %s computes the whole text in every forward, without a cache and one request at a "
        "time; its forwards and tokens count, but its times measure no decoder",
        config.family,
    )
    return config


def _records_graphs(wanted: bool | None, attention: Backend, device: torch.device) -> bool:
    """Whether forwards are recorded as CUDA graphs, which flash-attn's, chosen by length, cannot be."""
    # Unless asked for, not on a device without the instructions for which their kernels are written: there they take
    # minutes to compile and keep their registers in memory.
    if wanted and device.type != "cuda":
        raise ConfigError(f"cuda_graphs needs a CUDA device, not {device.type}; leave it out")
    if wanted and attention == "flash":
        raise ConfigError("attention='flash' is not recorded as graphs; leave out one of the two")
    can_record = device.type == "cuda" and attention != "flash"
    if wanted is None and can_record and _is_old(device):
        log.info("%s: forwards are not recorded on compute capability below 8.0", torch.cuda.get_device_name(device))
        return False
    return can_record and wanted is not False


def _is_old(device: torch.device) -> bool:
    # Before Ampere, GPUs have no bfloat16, and Triton no matrix instructions for them.
    return torch.cuda.get_device_capability(device) < (8, 0)


def _in_vocabulary(card: Card, vocab_size: int) -> Card:
    """The card without EOS ids that the model cannot write, unless no other is left; transformers ignores them too."""
    beyond = [token for token in card.eos_ids if token >= vocab_size]
    if not beyond or len(beyond) == len(card.eos_ids):
        return card
    log.warning("%s: EOS ids %s lie beyond the vocabulary of %d and are left out", card.name, beyond, vocab_size)
    return replace(card, eos_ids=tuple(token for token in card.eos_ids if token < vocab_size))


def _imposed_threads(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int | None:
    # One thread for a model whose forwards are slower with more, unless the user chose a number.
    is_small = device.type == "cpu" and weight_bytes(config, dtype) <= ONE_THREAD_BYTES
    has_own_number = os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads() != DEFAULT_THREADS
    return 1 if is_small and not has_own_number else None


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # CPUs compute float32 fastest, and float32 represents the values of the checkpoint exactly. What its matrices
        # are stored in is another question (`LoadedModel.weight_dtype`).
        name = config.dtype if device.type == "cuda" else "float32"
        if name == "bfloat16" and device.type == "cuda" and _is_old(device):
            name = "float16"
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} of the checkpoint is not supported; choose {', '.join(DTYPES)}")
    return DTYPES[name]
