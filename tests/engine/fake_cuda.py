"""CUDA tensors without storage on a machine without a GPU, and a count of the kernels and copies that a forward makes.

Torch's FakeTensorMode computes shapes, dtypes and devices only, and refuses operations whose tensors are on different
devices. Values are missing, so `fetch` and the like are replaced by random answers.
"""

import ctypes
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from refusion_eval.engine import readout, recorded, width
from refusion_eval.models import choices, fused
from refusion_eval.models import device as devices
from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.choices import MATRICES, SPLIT, Choices, Product, Sizes, Switches
from refusion_eval.models.transformer import Transformer
from refusion_eval.models.weights import ExpertWeights, LayerWeights, Weights

SOURCE = Path(__file__).with_name("cuda_guard.cpp")
NO_KERNEL = ("empty", "empty_strided", "new_empty", "empty_like", "lift_fresh", "_unsafe_view", "unbind", "split")
# Kernels of an operation of torch that has several; the fused ones are counted by `kernels_of`.
SEVERAL = {"index_copy": 2, "index_fill": 2, "masked_fill": 2, "logsumexp": 9}
WHOLE = ("rms_norm", "scaled_dot_product_attention")  # one fused kernel each
WAITS = ("_local_scalar_dense", "nonzero", "item", "equal")


# Results of the right shape, of operations whose tensors have no storage.
fused.mix_experts.register_fake(lambda x_TC, *_: torch.empty_like(x_TC))
fused.read_rows.register_fake(lambda *_: None)


@fused.add_rms_norm.register_fake
def _(x_WC, added, weight_C, eps, num_rows=0, early=False):
    return torch.empty_like(x_WC), x_WC.new_empty(max(len(x_WC), num_rows), x_WC.shape[1])


@fused.swiglu.register_fake
def _(gate_up_WI, num_rows=0, early=False):
    return gate_up_WI.new_empty(max(len(gate_up_WI), num_rows), gate_up_WI.shape[1] // 2)


@fused.attend_rows.register_fake
def _(queries_WHD, keys_SGKD, values, places, bits, *rest):
    return queries_WHD.new_empty(max((len(queries_WHD), *rest[:1])), *queries_WHD.shape[1:])


@fused.rotate_and_store.register_fake
def _(qkv_WO, *rest):
    num_groups, head = rest[4].shape[1], rest[4].shape[3]
    return qkv_WO.new_empty(len(qkv_WO), qkv_WO.shape[1] // head - 2 * num_groups, head)


@fused.rotate_and_attend.register_fake
def _(qkv_WO, *rest):
    num_groups, head = rest[4].shape[1], rest[4].shape[3]
    return qkv_WO.new_empty(max((len(qkv_WO), *rest[8:9])), qkv_WO.shape[1] // head - 2 * num_groups, head)


@fused.product.register_fake
def _(x_RI, weight_OI, num_rows, *rest):
    return x_RI.new_empty(num_rows, len(weight_OI))


@fused.product_parts.register_fake
def _(x_RI, weight_OI, num_rows, kernel, tiles, early=False):
    return x_RI.new_empty(tiles[2], num_rows, len(weight_OI), dtype=torch.float32)


@fused.gated_product.register_fake
def _(x_RI, gate_up_QI, rows_read, kernel, tiles, *rest):
    return x_RI.new_empty(max((rows_read, *rest[:1])), len(gate_up_QI) // 2)


def make_guard(folder: Path) -> None:
    """Compiles and loads the device guard, or skips the test and says why."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: the tests marked gpu run on it")
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("fake CUDA tensors need g++ on Linux")
    torch_folder = Path(torch.__file__).parent
    library = folder / "cuda_guard.so"
    includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch_folder / 'lib'}", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", *includes, str(SOURCE), "-o", str(library), *links]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(library))


def shape_8b(num_layers: int) -> ModelConfig:
    """The shape of Qwen3-8B, from which ReFusion was trained, with fewer layers."""
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=8192,
        tied_head=False,
        dtype="bfloat16",
    )


def fake_transformer(config: ModelConfig) -> Transformer:
    """A model of fake bfloat16 weights on CUDA; to be called in a FakeTensorMode."""
    hidden, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    experts, mixture = config.experts, None
    if experts is not None:
        mixture = ExpertWeights(
            router=weight(experts.num_experts, hidden).float(),
            bias=weight(experts.num_experts).float(),
            gate_up=weight(experts.num_experts, 2 * experts.width, hidden),
            down=weight(experts.num_experts, hidden, experts.width),
        )
    layer = LayerWeights(
        input_norm=weight(hidden),
        qkv=weight((heads + 2 * groups) * config.head_dim, hidden),
        qk_norm=weight(heads + groups, config.head_dim),
        out=weight(hidden, heads * config.head_dim),
        mlp_norm=weight(hidden),
        gate_up=weight(2 * config.intermediate_size, hidden),
        down=weight(hidden, config.intermediate_size),
        experts=mixture,
    )
    vocab = weight(config.vocab_size, hidden)
    return Transformer(config, Weights(vocab, (layer,) * config.num_layers, weight(hidden), vocab))


def all_switches(config: ModelConfig) -> Choices:
    """A table with every own product and switch on, for forwards of up to 64 rows."""
    own = {"kernel": "dot", "block_n": 32, "block_k": 128, "num_warps": 4, "num_stages": 4}
    products = {matrix: {64: Product(**own, splits=2 if matrix in SPLIT else 1)} for matrix in MATRICES[:-1]}
    switches = {64: Switches(joins=True, rotates=True, early=True)}
    return Choices(sizes=Sizes.of(config, torch.bfloat16), products=products, switches=switches)


@dataclass
class Launches(TorchDispatchMode):
    """Counts what operations on fake CUDA tensors would do on a device."""

    kernels: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    pageable: Counter = field(default_factory=Counter)  # copies from or to memory that is not pinned
    pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    zeroed: int = 0  # bytes
    awaited: list[int] = field(default_factory=list)  # sizes of the copies whose end was awaited

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in WHOLE:
            with self:  # in inference mode an operation that is made of others arrives whole
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        if func.is_view and id(args[0]) in self.pinned:
            self.pinned[id(out)] = out
        if name == "zero_":
            self.zeroed += args[0].numel() * args[0].itemsize
        places = {tensor.device.type for tensor in _tensors((args, kwargs, out)) if tensor.numel()}
        if name in WAITS:
            self.waits[name] += 1
        elif places == {"cpu", "cuda"} and name in ("copy_", "_to_copy"):
            target = args[0] if name == "copy_" else out
            source = args[1] if name == "copy_" else args[0]
            host = source if target.device.type == "cuda" else target
            where = "to the device" if target.device.type == "cuda" else "to the host"
            self.copies[where] += 1
            if id(host) not in self.pinned:
                self.pageable[where] += 1
        elif func.namespace != "prim" and "cuda" in places and not func.is_view and name not in NO_KERNEL:
            self.kernels[name] += kernels_of(name, args)
        return out

    @property
    def num_kernels(self) -> int:
        return sum(self.kernels.values())


def kernels_of(name: str, args: tuple) -> int:
    """Kernels of one call of an operation."""
    if name in ("attend_rows", "rotate_and_attend"):
        from refusion_eval.models.attention_kernels import num_splits  # needs Triton, which exists for Linux alone

        rotates = name == "rotate_and_attend"
        args = (*args, *12 * [None])  # defaults are left out
        queries, keys, counters = (args[0], args[5], args[10]) if rotates else (args[0], args[1], args[6])
        num_heads = queries[0].numel() // keys.shape[3] - (2 * keys.shape[1] if rotates else 0)
        return 2 if num_splits(len(queries), num_heads, *keys.shape[1:3]) > 1 and counters is None else 1
    return 2 if name == "read_rows" else SEVERAL.get(name, 1)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Iterator[Launches]:
    """In it tensors on "cuda" are fake, and whatever is read of them is random: probabilities from 0.3 to 1."""
    random = np.random.default_rng(seed)

    def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> tuple[torch.Tensor, np.ndarray, Any]:
        made = np.zeros(shape, dtype=np.int64)
        if dtype != torch.int64:  # what answers are copied to
            made = random.uniform(0.3, 1, shape).astype(np.float32)
            rows = made.reshape(-1, made.size // 3 if made.ndim == 1 else shape[-1])
            rows[0] = random.integers(0, 1000, rows.shape[1])
        with _disable_current_modes():
            buffer = torch.from_numpy(made)  # a true tensor, into which numbers can be written
        launches.pinned[id(buffer)] = buffer
        return (
            buffer,
            made,
            SimpleNamespace(record=lambda: None, synchronize=lambda: launches.awaited.append(made.size)),
        )

    for module in (readout, recorded):
        monkeypatch.setattr(module, "host_buffer", host_buffer)
    for module in (devices, width):
        monkeypatch.setattr(module, "synchronize", lambda device: None)

    def tensor(data: object, dtype: torch.dtype | None = None, device: object = "cpu") -> torch.Tensor:
        made = torch.from_numpy(np.array(data))  # a mode of fake tensors would compute a constant, which needs a device
        return (made if dtype is None else made.to(dtype)).to(device)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(choices, "card_name", lambda device: "a fake card")
    monkeypatch.setattr(fused, "launches_early", lambda device: True)
    monkeypatch.setattr(recorded, "_on", lambda device: nullcontext())
    monkeypatch.setattr(recorded.RecordedForwards, "_check", lambda self: None)
    readout._kept_ids.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Launches() as launches:
            yield launches
    finally:
        readout._kept_ids.cache_clear()
