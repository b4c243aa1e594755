"""Loads checkpoints: config and card first, tokenizer, weights and engine when they are needed."""

import logging
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from refusion_eval.decoders import fitting_decoders
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import recorder
from refusion_eval.engine.width import SHIPPED_COSTS, WidthCost, measure, weight_bytes
from refusion_eval.errors import ConfigError
from refusion_eval.models.adapter import LoraAdapter
from refusion_eval.models.attention import Backend
from refusion_eval.models.checkpoint import Card, Location, checkpoint_card, fetch_weights, locate
from refusion_eval.models.config import ModelConfig, model_config
from refusion_eval.models.device import choose_backend, choose_device, device_label
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import load_weights
from refusion_eval.paths import embedded_name, embedded_path
from refusion_eval.types import ONE_THREAD_BYTES

# Threads that torch computes with if nobody chooses.
ALL_THREADS = torch.get_num_threads()

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel:
    """A checkpoint ready for use; tokenizer and weights are loaded at their first use.

    Attributes:
        name: path or hub id of the checkpoint.
        revision: commit on the hub; None for a local directory.
        config: shapes of the model.
        card: mask id, EOS ids, backbone and kind of the checkpoint.
        dtype, device: dtype and device of the weights.
        attention: the attention backend.
        cuda_graphs: whether forwards are recorded as CUDA graphs.
        adapter: path or hub id of the LoRA adapter that is merged into the weights; None for none.
        adapter_revision: commit of the adapter on the hub; None for a local directory.
        is_stock: whether transformers computes the forwards.
    """

    def __init__(
        self,
        location: Location,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        attention: Backend,
        kv_budget: int | None = None,
        cuda_graphs: bool = False,
        adapter: Location | None = None,
        tune: bool = False,
        is_stock: bool = False,
    ) -> None:
        self._location = location
        self._adapter = adapter
        self.name = location.name
        self.revision = location.revision
        self.config = config
        self.card: Card = _in_vocabulary(checkpoint_card(location.name, location.directory), config.vocab_size)
        self.dtype = dtype
        self.device = device
        self.attention = attention
        self._kv_budget = kv_budget
        self.cuda_graphs = cuda_graphs
        self._tune = tune
        self.adapter = None if adapter is None else adapter.name
        self.adapter_revision = None if adapter is None else adapter.revision
        self.is_stock = is_stock

    @classmethod
    def open(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        revision: str | None = None,
        kv_budget_gib: float | None = None,
        cuda_graphs: bool | None = None,
        adapter: str | None = None,
        tune: bool = False,
        backend: str = "own",
    ) -> "LoadedModel":
        """Reads a checkpoint's config and card without its weights; arguments and errors as `load_model`."""
        packaged = embedded_name(str(name), "refusion")
        location = locate(str(name if packaged is None else embedded_path(packaged)), revision)
        if backend != "own":
            _check_backend(backend, attention=attention, cuda_graphs=cuda_graphs, adapter=adapter, tune=tune)
            return cls._open_stock(location, dtype, device)
        config = model_config(location.directory)
        torch_device = choose_device(device)
        torch_dtype = _dtype(dtype, config, torch_device)
        kernels = choose_backend(attention, torch_dtype, torch_device)
        kv_budget = None if kv_budget_gib is None else int(kv_budget_gib * 2**30)
        if cuda_graphs and torch_device.type != "cuda":
            raise ConfigError(f"cuda_graphs needs a CUDA device, not {torch_device.type}; leave it out")
        if cuda_graphs and kernels == "flash":
            raise ConfigError("attention='flash' is not recorded as graphs; leave out one of the two")
        graphs = torch_device.type == "cuda" and kernels != "flash" if cuda_graphs is None else cuda_graphs
        adapter_location = None if adapter is None else locate(str(adapter), None)
        if torch_device.type == "cpu":
            _choose_threads(weight_bytes(config, torch_dtype))
        opened = cls(location, config, torch_dtype, torch_device, kernels, kv_budget, graphs, adapter_location, tune)
        _ = opened._lora  # refuses a wrong adapter before gigabytes of weights are loaded
        return opened

    @classmethod
    def _open_stock(cls, location: Location, dtype: str, device: str) -> "LoadedModel":
        from refusion_eval.models.stock import stock_config

        config = stock_config(location.directory)
        torch_device = choose_device(device)
        log.warning(
            "backend=transformers: %s computes the whole text in every forward, without a cache and one request at a "
            "time; its forwards and tokens count, but its times measure no decoder",
            config.family,
        )
        return cls(location, config, _dtype(dtype, config, torch_device), torch_device, "sdpa", is_stock=True)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: it cannot be loaded, or belongs to another model.
        """
        tokenizer = Tokenizer(self._location.directory)
        tokenizer.check_vocabulary(self.config.vocab_size)
        return tokenizer

    @cached_property
    def _lora(self) -> LoraAdapter | None:
        """The adapter, which fits the model."""
        if self._adapter is None:
            return None
        fetch_weights(self._adapter)
        return LoraAdapter(self._adapter.directory, self.config)

    @property
    def place(self) -> str:
        """The device and the dtype of the weights, as people read them."""
        return f"{device_label(self.device)}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def decoders(self) -> tuple[str, ...]:
        """Names of the decoders that fit the checkpoint, its main one first."""
        return fitting_decoders(self.card.kind, self.card.decoders)

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint's files, weights included."""
        fetch_weights(self._location)
        return self._location.directory

    @cached_property
    def transformer(self) -> Transformer:
        """The checkpoint's weights, ready for forwards."""
        merge = None if self._lora is None else self._lora.merge
        return Transformer(self.config, load_weights(self.directory, self.config, self.dtype, self.device, merge))

    @cached_property
    def engine(self) -> Engine:
        """The engine over the checkpoint's weights."""
        if self.is_stock:  # transformers' models load slowly, and few runs need them
            from refusion_eval.engine.full_context import FullContextEngine
            from refusion_eval.models.stock import StockModel

            return FullContextEngine(StockModel.open(self.directory, self.config, self.dtype, self.device))
        record = recorder(self.device) if self.cuda_graphs else None
        return Engine(self.transformer, self.attention, self._kv_budget, record)

    @cached_property
    def width_cost(self) -> WidthCost:
        """How the time of a forward grows with its rows: as shipped for this kind of device, or measured (`tune`)."""
        if not self._tune:
            return SHIPPED_COSTS[self.device.type]
        return measure(self.engine.model, self.attention, self.engine.recorded)


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    revision: str | None = None,
    kv_budget_gib: float | None = None,
    cuda_graphs: bool | None = None,
    adapter: str | None = None,
    tune: bool = False,
    backend: str = "own",
) -> LoadedModel:
    """Loads a checkpoint.

    Args:
        name: directory in Hugging Face layout, hub id, "embedded" (the tiny ReFusion model of the package) or
            "embedded:NAME".
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's own on CUDA and float32 on a CPU.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is CUDA where there is one.
        attention: "sdpa", "flash" (causal forwards by flash-attn, the others as "sdpa"; no graphs), or "native", the
            compiled forward of a CPU in float32; "auto" is "native" where it can run, else "sdpa".
        revision: branch, tag or commit of a hub id.
        kv_budget_gib: GiB for the keys and values of a batch; None is the free memory when a batch begins.
        cuda_graphs: record forwards, one CUDA graph for each of a few widths, for single requests and for a batch; None
            is yes on CUDA, except with flash-attn.
        adapter: directory or hub id of a LoRA adapter in peft's layout, merged into the weights.
        tune: measure what a wider forward costs here, by which forwards of ReFusion are fused. By default that is a
            shipped value for each kind of device, so that TPF is equal on all machines.
        backend: "own", or "transformers" for any causal or masked language model that transformers loads without code
            of the checkpoint: its own forward computes the whole text each time, without a cache.

    Raises:
        CheckpointError: the checkpoint cannot be found or loaded.
        ConfigError: an argument is unknown or impossible here.
    """
    model = LoadedModel.open(
        name,
        dtype=dtype,
        device=device,
        attention=attention,
        revision=revision,
        kv_budget_gib=kv_budget_gib,
        cuda_graphs=cuda_graphs,
        adapter=adapter,
        tune=tune,
        backend=backend,
    )
    _ = model.engine
    return model


def _in_vocabulary(card: Card, vocab_size: int) -> Card:
    """The card without EOS ids that the model cannot write, unless no other is left; transformers ignores them too."""
    beyond = [token for token in card.eos_ids if token >= vocab_size]
    if not beyond or len(beyond) == len(card.eos_ids):
        return card
    log.warning("%s: EOS ids %s lie beyond the vocabulary of %d and are left out", card.name, beyond, vocab_size)
    return replace(card, eos_ids=tuple(token for token in card.eos_ids if token < vocab_size))


def _choose_threads(num_bytes: float) -> None:
    """Computes with one thread where more are slower, unless the user has chosen a number.

    A number is chosen by OMP_NUM_THREADS or `torch.set_num_threads`. One thread is for weights of up to
    `ONE_THREAD_BYTES`; it stays when another checkpoint is opened.
    """
    chosen = os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads() != ALL_THREADS
    if num_bytes <= ONE_THREAD_BYTES and not chosen:
        torch.set_num_threads(1)


def _check_backend(backend: str, **options: Any) -> None:
    """Refuses an unknown backend, and options that transformers' forward does not have."""
    if backend != "transformers":
        raise ConfigError(f"backend={backend!r} is unknown; choose own or transformers")
    for name, value in options.items():
        if value not in (None, False, "auto", "sdpa"):
            raise ConfigError(f"{name}={value} is for backend=own only; leave it out")


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # CPUs compute float32 fastest, and float32 represents the values of the checkpoint exactly.
        name = config.dtype if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]
