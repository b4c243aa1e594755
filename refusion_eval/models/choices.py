"""Which kernels a recorded forward runs on a card: switches that a measurement on that card decided.

A table belongs to a device name and to the sizes of a model's layers. `gpu-check --checks tune` writes tables to
results/gpu/CARD/choices.json. A checkout reads them there; a wheel carries them as refusion_eval/gpu/CARD/choices.json.
Without a table for the device and the sizes, every switch is off: torch's products at the rows that a forward has.

In a table, an entry belongs to forwards of up to so many rows, down to the entry before it. More rows than the last
entry has take the path without a table.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from refusion_eval.errors import ConfigError
from refusion_eval.models.checkpoint import ModelConfig

CHOICES = "choices.json"
Matrix = Literal["qkv", "out", "gate_up", "down", "head"]
MATRICES: tuple[Matrix, ...] = get_args(Matrix)
# Products: torch's; own ones without `tl.dot` (for one row), with it, and with it on the transposed operands.
Kernel = Literal["library", "row", "dot", "swapped"]
SPLIT: tuple[Matrix, ...] = ("out", "down")  # whose parts the norm after them sums
ONE_ORDER = 16  # rows up to which an own product sums in one order, so that a row's result does not depend on the width
MOST_ROWS = 64  # of an own product
MOST_PADDED = 512  # rows of the widest recording
LAUNCHES_EARLY = (3, 4)  # the first release of Triton that knows the option

T = TypeVar("T")
_closed = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_closed)
class Product:
    """How a matrix is multiplied; own products of gate_up compute SwiGLU too (`refusion_eval.models.product_kernels`).

    Attributes:
        kernel: torch's product, or an own one.
        padded_to: rows that torch's product computes, those beyond the forward for nothing; 0 is the forward's own.
        block_n: columns of the result that one program of an own product computes.
        block_k: entries of a row that one step of it reads.
        splits: programs that share a sum, each a part of the row; their results are summed in their order.
    """

    kernel: Kernel = "library"
    padded_to: int = 0
    block_n: int = 0
    block_k: int = 0
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        sizes = (self.block_n, self.block_k, self.splits, self.num_warps, self.num_stages)
        if self.kernel != "library" and (min(sizes) < 1 or self.padded_to):
            raise ValueError("an own product needs block_n, block_k, splits, num_warps and num_stages, not padded_to")
        if self.kernel != "library" and any(size & size - 1 for size in (self.block_n, self.block_k, self.num_warps)):
            given = f"block_n={self.block_n}, block_k={self.block_k} and num_warps={self.num_warps}"
            raise ValueError(f"{given} of an own product must be powers of two")

    @property
    def is_own(self) -> bool:
        return self.kernel != "library"

    @property
    def order(self) -> tuple[str, int, int, int] | None:
        """What decides the order of the terms of a sum; None for torch's products, whose order is not known."""
        # The warps of "row" each sum a part of a step.
        num_warps = self.num_warps if self.kernel == "row" else 0
        return (self.kernel, self.block_k, self.splits, num_warps) if self.is_own else None

    @property
    def tiles(self) -> list[int]:
        return [self.block_n, self.block_k, self.splits, self.num_warps, self.num_stages]


@dataclass(frozen=True, kw_only=True, config=_closed)
class Switches:
    """What changes a whole forward.

    Attributes:
        joins: the last program of attention joins the parts, instead of a kernel of its own.
        rotates: attention rotates queries and keys and stores keys and values, instead of a kernel of its own.
        early: kernels are launched while the one before still runs (programmatic dependent launch). It has no effect
            on devices before compute capability 9.0, or with Triton before 3.4.
    """

    joins: bool = False
    rotates: bool = False
    early: bool = False


@dataclass(frozen=True, kw_only=True, config=_closed)
class Sizes:
    """Sizes of a model's layers, as in its config.json, and its dtype. Its layers and its vocabulary do not matter."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> "Sizes":
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )

    def of_product(self, matrix: Matrix) -> tuple[int, int]:
        """Columns of the result of an own product, and the entries of a row that it sums."""
        queries = self.num_heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "out": (self.hidden_size, queries),
            "gate_up": (self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }[matrix]


@dataclass(frozen=True, kw_only=True, config=_closed)
class Choices:
    """The table of a device and of the sizes of a model.

    Attributes:
        device: name of the card, as `torch.cuda.get_device_name` gives it; "" for no table.
        origin: what the table was made from, for readers.
        products: by matrix and rows.
        switches: by rows.
        skipped: widths that are not recorded, because the next one is faster; the last one always is.
    """

    device: str = ""
    sizes: Sizes | None = None
    origin: str = ""
    products: Mapping[Matrix, Mapping[int, Product]] = field(default_factory=dict)
    switches: Mapping[int, Switches] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for matrix, by_rows in self.products.items():
            for rows, product in by_rows.items():
                where = f"products of {matrix}, up to {rows} rows"
                if product.padded_to and not rows <= product.padded_to <= MOST_PADDED:
                    raise ValueError(f"{where}: padded_to={product.padded_to} is not from {rows} to {MOST_PADDED}")
                if product.is_own and (rows > MOST_ROWS or matrix == "head"):
                    raise ValueError(f"{where}: own products have at most {MOST_ROWS} rows and are not of the head")
                if product.is_own and self.sizes is not None:
                    size, width = self.sizes.of_product(matrix)
                    if size % product.block_n or width % (product.block_k * product.splits):
                        shape = f"{size} columns are no multiple of block_n, or {width} entries of block_k times splits"
                        raise ValueError(f"{where}: {shape}")
                if product.is_own and product.splits > 1 and matrix not in SPLIT:
                    raise ValueError(f"{where}: splits={product.splits} is for {' and '.join(SPLIT)}; give splits=1")
            orders = {self.product(matrix, rows).order for rows in range(1, ONE_ORDER + 1)}
            if len(orders) > 1:
                kept = f"kernel, block_k, splits and num_warps of row must be the same for 1 to {ONE_ORDER} rows"
                raise ValueError(f"products of {matrix}: {kept}, so that no row's sum depends on the width")

    @cached_property
    def name(self) -> str:
        """Identifies the table in records: its device and the beginning of a hash of all of it; "" for none."""
        if not self.device:
            return ""
        return f"{self.device} {hashlib.sha256(_TABLE.dump_json(self)).hexdigest()[:12]}"

    def product(self, matrix: Matrix, num_rows: int) -> Product:
        return _entry(self.products.get(matrix, {}), num_rows) or Product()

    def switches_of(self, num_rows: int) -> Switches:
        return _entry(self.switches, num_rows) or Switches()


NO_CHOICES = Choices()
log = logging.getLogger(__name__)
_TABLE, _TABLES = TypeAdapter(Choices), TypeAdapter(tuple[Choices, ...])


def _entry(by_rows: Mapping[int, T], num_rows: int) -> T | None:
    return by_rows.get(min((rows for rows in by_rows if rows >= num_rows), default=-1))


def read_choices(path: Path) -> tuple[Choices, ...]:
    """The tables of a file; ConfigError if one is not as it must be."""
    try:
        return _TABLES.validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        advice = "measure again (gpu-check --checks tune), or remove the file"
        raise ConfigError(f"{path} is no table of choices: {reason}; {advice}") from error


def choices_text(tables: Sequence[Choices]) -> str:
    """The tables as the text of a file that `read_choices` reads."""
    return _TABLES.dump_json(tuple(tables), exclude_defaults=True, indent=1).decode() + "\n"


def shipped_folders() -> list[Path]:
    """The folders of a checkout and of a wheel in which each card has a folder with its tables."""
    package = Path(__file__).resolve().parents[1]
    return [package / "gpu", package.parent / "results" / "gpu"]


def shipped_files() -> list[Path]:
    return sorted(path for folder in shipped_folders() for path in folder.glob(f"*/{CHOICES}"))


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def launches_early(device: torch.device) -> bool:
    """Whether kernels of a device can be launched while the one before still runs, and this Triton knows how."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    import triton  # builds of torch for CPUs have none

    return tuple(map(int, triton.__version__.split(".")[:2])) >= LAUNCHES_EARLY


def choices_for(device: torch.device, config: ModelConfig, dtype: torch.dtype) -> Choices:
    """The shipped table for a device and a model; one without any switch if there is none.

    Raises:
        ConfigError: a file that names the device is not as it must be.
    """
    name, sizes = card_name(device), Sizes.of(config, dtype)
    tables = (table for path in shipped_files() for table in _tables_of(path, name)) if name else ()
    return next((table for table in tables if (table.device, table.sizes) == (name, sizes)), NO_CHOICES)


def _tables_of(path: Path, card: str) -> tuple[Choices, ...]:
    """The tables of a file; none of one that is damaged and is not about the card."""
    try:
        return read_choices(path)
    except ConfigError as error:
        if path.is_file() and f'"{card}"'.encode() in path.read_bytes():
            raise
        log.warning("the file is left out: %s", error)
        return ()
