"""Reads the safetensors files of a checkpoint, one tensor at a time, and arranges them for a `Transformer`."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import Experts, ModelConfig, read_json

log = logging.getLogger(__name__)

_BASE = "model."  # the prefix of the base model inside a language model
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAFETENSORS = ".safetensors"
UNQUANTISED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHORT = (torch.bfloat16, torch.float16)
Merge = Callable[[str, Tensor], Tensor]  # a tensor by its name in the checkpoint, to that of the model
SMALL_MATRIX = 1 << 20  # entries that a CPU's caches hold
HEAD_ROWS = 128  # on CUDA the rows of the output head are a multiple of this


@dataclass(frozen=True)
class ExpertWeights:
    router: Tensor  # [E, C]
    bias: Tensor | None  # that chooses experts and is no part of their shares, [E]; None in families without
    gate_up: Tensor  # gate and up projection of each of the E experts in one matrix, [E, 2 I, C]
    down: Tensor  # [E, C, I]


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # scales before attention, [C]; matrices are [out, in]
    qkv: Tensor  # queries, keys and values in one matrix, [(H + 2G) D, C]
    out: Tensor  # [C, H D]
    mlp_norm: Tensor  # [C]
    gate_up: Tensor  # gate and up projection in one matrix, [2 I, C]; of the shared MLP where there are experts
    down: Tensor  # [C, I]
    qkv_bias: Tensor | None = None  # [(H + 2G) D]; None in families without biases
    qk_norm: Tensor | None = None  # scales of queries and keys, one row a head, [H + G, D]; None in families without
    experts: ExpertWeights | None = None  # None in a layer without


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [V, C]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [C]
    head: Tensor  # [V or more, C], whose first V rows count; the embedding itself if tied, of which as much holds


class CheckpointFiles:
    """The tensors of a checkpoint directory, in one file or in shards; raises CheckpointError for a damaged one."""

    # Files and tensors are chosen as transformers chooses them: one file before an index, the last of several tensors
    # of one name, and names with or without the prefix of the base model. What is passed over is said.

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard_of: dict[str, Path] = {}
        doubled = {}
        for path in _shard_paths(directory):
            for name in open_tensors(path).keys():  # noqa: SIM118 - a file, not a mapping
                if name in self._shard_of:
                    doubled[name] = f"{name} of {path.name}, not of {self._shard_of[name].name}"
                self._shard_of[name] = path
        if doubled:
            names = ", ".join(list(doubled.values())[:3])
            log.warning("%s: %d tensors are in several files; the last file counts: %s", directory, len(doubled), names)
        self._unread = set(self._shard_of)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        self.check(name, shape)
        tensor = self.find(name)
        assert tensor is not None
        return tensor

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuses a tensor that `read` would refuse; the entries of the tensor are not read."""
        if name not in self:
            absence = f"no tensor {name} (of {len(self._shard_of)} tensors)"
            raise CheckpointError(f"{self._directory} has {absence}; it is incomplete or does not fit its config.json")
        stored = self._stored(name)
        header = open_tensors(self._shard_of[stored]).get_slice(stored)
        place, saved, wanted = self.place_of(name), tuple(header.get_shape()), tuple(shape)
        if saved != wanted:
            advice = "take weights and config.json from the same checkpoint"
            raise CheckpointError(f"{place} has shape {saved}, but config.json means {wanted}; {advice}")
        if (dtype := header[:0].dtype) not in UNQUANTISED:
            raise CheckpointError(f"{place} is {dtype}; only unquantised checkpoints are read")

    def outlines(self) -> dict[str, Tensor]:
        """Every tensor by its name in the files, with its shape and without entries, which are not read."""
        shapes: dict[str, list[int]] = {}
        for path in dict.fromkeys(self._shard_of.values()):
            header = open_tensors(path)
            shapes |= {name: header.get_slice(name).get_shape() for name in header.keys()}  # noqa: SIM118
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is saved; None if it is not there."""
        stored = self._stored(name)
        path = self._shard_of.get(stored)
        return None if path is None else open_tensors(path).get_slice(stored)[:0].dtype

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._shard_of

    def find(self, name: str) -> Tensor | None:
        """One tensor whatever its shape and dtype; None if it is not there."""
        stored = self._stored(name)
        self._unread.discard(stored)
        path = self._shard_of.get(stored)
        # A file is opened again for each tensor: the pages of an open one would stay in memory beside the model.
        return None if path is None else open_tensors(path).get_tensor(stored)

    def _stored(self, name: str) -> str:
        """The name under which a tensor is saved, which may lack the prefix of the base model, or have it besides."""
        candidates = (name, name.removeprefix(_BASE), f"{_BASE}{name}")
        return next((candidate for candidate in candidates if candidate in self._shard_of), name)

    def place_of(self, name: str) -> str:
        return f"{self._shard_of[self._stored(name)]}: {name}"

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that were not read, without tables that this project computes."""
        return sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))


def _shard_paths(directory: Path) -> list[Path]:
    index_path, single_path = directory / INDEX_FILE, directory / "model.safetensors"
    if single_path.is_file():
        if index_path.is_file():
            log.warning("%s: %s is read, and not the shards of %s", directory, single_path.name, INDEX_FILE)
        return [single_path]
    if not index_path.is_file():
        raise no_weights(directory, f"neither model.safetensors nor {INDEX_FILE}")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map; download the file again")
    for name in weight_map.values():
        # An index leads neither out of its folder nor to a pickle.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SAFETENSORS):
            advice = f"only {SAFETENSORS} files beside it are read: correct the index or download it again"
            raise CheckpointError(f"{index_path} names the weight file {name!r}; {advice}")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        number = f"{len(missing)} of {len(names)} weight files"
        raise CheckpointError(f"{directory} lacks {number}: {', '.join(missing)}; download them")
    return [directory / name for name in names]


def no_weights(directory: Path, absent: str) -> CheckpointError:
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        danger = "which can run code when they are opened; convert them to safetensors first"
        return CheckpointError(f"{directory} has only pickled weights ({', '.join(pickled)}), {danger}")
    return CheckpointError(f"{directory} has no weights: {absent}; download them")


def open_tensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        place = f"{path} ({path.stat().st_size} bytes)"
        raise CheckpointError(f"{place} is truncated or not safetensors ({error}); download it again") from error


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    merge: Merge | None = None,
    widened: bool = False,
) -> Weights:
    """Loads a checkpoint, one tensor in memory at a time besides the model itself, and casts it to `dtype`.

    If forwards widen the weights to float32, norms and biases are float32, and matrices have 16 bits where `dtype` or
    the file has them. Those that an adapter changes are sums in float32, which 16 bits do not hold.
    """
    files = CheckpointFiles(directory)

    def kind_of(num_axes: int, names: Iterable[str]) -> torch.dtype:
        if not widened or (num_axes > 1 and (dtype in SHORT or merge is not None)):
            return dtype
        saved = {files.dtype_of(name) for name in names} if num_axes > 1 else set()
        return next((short for short in SHORT if saved == {short}), torch.float32)

    def stack(
        shape: tuple[int, ...],
        num_rows_of: Mapping[str, int],
        *,
        matrix: bool = False,
        head: bool = False,
        exact: bool = False,
    ) -> Tensor:
        # Stacked at once into the final tensor, so that the parts never lie beside the whole. A small `matrix` on a CPU
        # in float32 has a dense first axis: products with 8 to 24 rows were 1.4 to 1.9 times as fast as with dense rows
        # (192 to 1024 and 512 to 192 columns, one core), no other width was slower, and large matrices did not gain.
        # What is read from memory has dense rows, as `products` wants them.
        kind = torch.float32 if exact else kind_of(len(shape), num_rows_of)
        if (
            matrix
            and math.prod(shape) <= SMALL_MATRIX
            and (device.type, kind) == ("cpu", torch.float32)
            and not widened
        ):
            target = torch.empty(shape[::-1], dtype=kind).t()
        else:
            num_rows = padded_rows(shape[0], device) if head else shape[0]
            target = torch.empty((num_rows, *shape[1:]), dtype=kind, device=device)
            target[shape[0] :] = 0
        start = 0
        for name, num_rows in num_rows_of.items():
            tensor = files.read(name, (num_rows, *shape[1:]))
            rows = target[start : start + num_rows]
            value = tensor if merge is None else merge(name, tensor)
            rows.copy_(value.to(dtype) if len(shape) == 1 and not exact else value)
            # Checked at the destination: a GPU reads its own memory fastest.
            if not _is_finite(rows):
                raise _not_finite(files.place_of(name), tensor, dtype)
            start += num_rows
        return target

    weights = arrange(with_saved_experts(with_saved_head(config, files.find, str(directory)), files), stack)
    if files.unread:
        log.warning("%s: %d tensors are not used: %s", directory, len(files.unread), ", ".join(files.unread[:3]))
    return weights


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Refuses a checkpoint whose files lack a tensor that `load_weights` would read; only their headers are read."""
    files = CheckpointFiles(directory)
    if f"{config.family_layout.tensors.embedding}.weight" not in files:
        config = with_saved_head(config, files.find, str(directory))
    for name, shape in tensor_shapes(with_saved_experts(config, files)).items():
        files.check(name, shape)


def count_parameters(config: ModelConfig) -> int:
    """The number of weights in all tensors; a head that is the embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that `load_weights` reads, by its name."""
    shapes = {}

    def stack(shape: tuple[int, ...], num_rows_of: Mapping[str, int], **_: bool) -> Tensor:
        shapes.update({name: (num_rows, *shape[1:]) for name, num_rows in num_rows_of.items()})
        # The first operation on the device "meta" loads torch's compiler for seconds; only arranged weights need it.
        return torch.empty(1).expand(shape) if config.rotary_dim is None else torch.empty(shape, device="meta")

    arrange(config, stack)
    return shapes


def padded_rows(vocab_size: int, device: torch.device) -> int:
    """Rows of an output head in memory; those beyond the vocabulary are zeros, and their logits are never read."""
    # With an odd number of rows the logits of a row do not begin at multiples of 16 bytes, which the fastest kernels of
    # a product need.
    return -(-vocab_size // HEAD_ROWS) * HEAD_ROWS if device.type == "cuda" else vocab_size


def with_saved_head(config: ModelConfig, find: Callable[[str], Tensor | None], place: str) -> ModelConfig:
    """The config with the embedding and the output head that transformers loads where config.json ties them."""
    # They are one matrix where the checkpoint has one of them, or both with equal values. Otherwise each is its own.
    head = find(head_name(config)) if config.tied_head else None
    if head is None:
        return config
    embedding = find(f"{config.family_layout.tensors.embedding}.weight")
    if embedding is None:
        family = config.family_layout
        return replace(config, layout=replace(family, tensors=replace(family.tensors, embedding=family.tensors.head)))
    both = torch.promote_types(head.dtype, embedding.dtype)
    if head is embedding or torch.equal(head.to(both), embedding.to(both)):
        return config
    tied = "config.json ties the output head to the embedding (tie_word_embeddings)"
    log.warning("%s: %s, but %s has values of its own, which are used", place, tied, head_name(config))
    return replace(config, tied_head=False)


def with_saved_experts(config: ModelConfig, files: CheckpointFiles) -> ModelConfig:
    """The config with experts as the files have them: each apart, or all of a layer in one tensor."""
    if config.experts is None:
        return config
    tensors = config.family_layout.tensors
    packed = f"{tensors.layer.format(min(config.experts.layers))}{tensors.experts}.gate_up_proj"
    return replace(config, experts=replace(config.experts, packed=packed in files))


def head_name(config: ModelConfig) -> str:
    return f"{config.family_layout.tensors.head}.weight"


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape of every matrix of a layer without experts, by the name of its module."""
    names, width, mlp = config.family_layout.tensors, config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_rows = {names.q: q_rows, names.k: kv_rows, names.v: kv_rows}
    if names.qkv is not None:
        num_rows = {names.qkv: q_rows + 2 * kv_rows}
    num_rows |= {names.out: width, names.gate: mlp, names.up: mlp, names.down: width}
    num_columns = {names.out: q_rows, names.down: mlp}
    return {module: (rows, num_columns.get(module, width)) for module, rows in num_rows.items()}


def arrange(config: ModelConfig, stack: Callable[..., Tensor]) -> Weights:
    """Arranges the tensors of a checkpoint of any family; `stack` stacks them (name -> rows) along their first axis."""
    names, shapes = config.family_layout.tensors, matrix_shapes(config)
    width, head_dim = config.hidden_size, config.head_dim
    qkv = (names.q, names.k, names.v) if names.qkv is None else (names.qkv,)
    num_turned = (config.num_heads + config.num_kv_heads) * head_dim  # rows of queries and keys
    shared = [f"{names.shared}.{part}_proj" for part in ("gate", "up", "down")]
    if config.experts is not None:
        rows = config.experts.shared_width
        shapes |= dict(zip(shared, ((rows, width), (rows, width), (width, rows)), strict=True))

    def arranged(rows: Tensor) -> Tensor:
        # Where a part of each head turns, the entries of queries and keys are arranged so that entry i is turned with
        # entry i + D/2 all the same, and those that do not turn have an angle of 0. No product of two heads changes.
        if config.rotary_dim is None:
            return rows
        half, rest = config.rotary_dim // 2, torch.arange(config.rotary_dim, head_dim)
        turned = torch.arange(config.rotary_dim)
        order = torch.cat([part for pair in zip(turned.split(half), rest.chunk(2), strict=True) for part in pair])
        heads = rows[:num_turned].unflatten(0, (-1, head_dim))
        heads.copy_(heads[:, order.to(rows.device)])
        return rows

    def experts_of(prefix: str, experts: Experts) -> ExpertWeights:
        number, inner, names_of = experts.num_experts, experts.width, f"{prefix}{names.experts}."
        is_sigmoid = experts.score == "sigmoid"  # of a router that computes in float32
        router = stack((number, width), {f"{prefix}{names.router}.weight": number}, exact=is_sigmoid)
        bias = stack((number,), {f"{prefix}{names.router}.expert_bias": number}, exact=True) if is_sigmoid else None
        if experts.packed:
            gate_up = stack((number, 2 * inner, width), {f"{names_of}gate_up_proj": number})
            return ExpertWeights(router, bias, gate_up, stack((number, width, inner), {f"{names_of}down_proj": number}))
        both = {f"{names_of}{index}.{part}_proj.weight": inner for index in range(number) for part in ("gate", "up")}
        gate_up = stack((2 * number * inner, width), both)
        down = stack((number * width, inner), {f"{names_of}{index}.down_proj.weight": width for index in range(number)})
        return ExpertWeights(router, bias, gate_up.unflatten(0, (number, -1)), down.unflatten(0, (number, -1)))

    def layer(index: int) -> LayerWeights:
        prefix = names.layer.format(index)

        def matrix(*modules: str) -> Tensor:
            num_rows_of = {f"{prefix}{module}.weight": shapes[module][0] for module in modules}
            shape = (sum(num_rows_of.values()), shapes[modules[0]][1])
            return stack(shape, num_rows_of, matrix=True) if math.prod(shape) else torch.empty(shape)

        def vector(module: str, size: int) -> Tensor:
            return stack((size,), {f"{prefix}{module}.weight": size})

        qkv_bias = qk_norm = None
        if config.family_layout.qkv_bias:
            num_rows_of = {f"{prefix}{module}.bias": shapes[module][0] for module in qkv}
            qkv_bias = arranged(stack((sum(num_rows_of.values()),), num_rows_of))
        if config.family_layout.qk_norm:
            q_norm, k_norm = vector(names.q_norm, head_dim), vector(names.k_norm, head_dim)
            # One scale for all heads of a kind; a row for each head lets one call norm queries and keys.
            qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
            arranged(qk_norm.view(-1))
        experts, mlp = config.experts, [names.gate, names.up, names.down]
        if experts is not None and index in experts.layers:
            mlp = shared
        else:
            experts = None
        return LayerWeights(
            input_norm=vector(names.input_norm, width),
            qkv=arranged(matrix(*qkv)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            out=matrix(names.out),
            mlp_norm=vector(names.mlp_norm, width),
            gate_up=matrix(*mlp[:2]),
            down=matrix(mlp[2]),
            experts=None if experts is None else experts_of(prefix, experts),
        )

    def vocabulary(name: str, *, head: bool) -> Tensor:
        return stack((config.vocab_size, width), {name: config.vocab_size}, head=head)

    embedding = vocabulary(f"{names.embedding}.weight", head=config.tied_head)
    return Weights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=stack((width,), {f"{names.final_norm}.weight": width}),
        head=embedding if config.tied_head else vocabulary(head_name(config), head=True),
    )


def _is_finite(tensor: Tensor) -> bool:
    # The extremes are NaN or infinite if any entry is, and finding them needs no copy.
    return tensor.numel() == 0 or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


def _not_finite(place: str, saved: Tensor, dtype: torch.dtype) -> CheckpointError:
    """The error for a weight that is NaN or infinite in the file, or became so when it was merged or cast."""
    if _is_finite(saved):
        advice = "load it with dtype=bfloat16 or float32, without or with another adapter"
        return CheckpointError(f"{place} is beyond the range of {dtype}, or the adapter makes it so; {advice}")
    kind = "NaN" if bool(saved.isnan().any()) else "infinite"
    advice = "the file is damaged or the training diverged: download it again, or take an earlier checkpoint"
    return CheckpointError(f"{place} holds {kind} values; {advice}")
