"""The entry of a decoder: everything that commands, tables, plots and checks need to know about it."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from refusion_eval.types import CheckpointKind, Decode

LineStyle = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Reads:
    """How a decoder uses a model.

    Attributes:
        attention: what a row sees: the rows before it, its own block and the blocks before it, or the whole text.
        masked: where the logits of a masked position are: in its "own" row, or in the row before it, which predicts the
            "next" position. None if the decoder feeds no masks and needs no mask token.
        clean: "next" if the row of a clean token predicts the token after it. Log-likelihoods are then exact where
            attention is causal.
    """

    attention: Literal["causal", "block_causal", "bidirectional"]
    masked: Literal["own", "next"] | None = None
    clean: Literal["next"] | None = None

    @property
    def left_to_right(self) -> bool:
        """Whether each token is predicted from the tokens before it alone, so that log-likelihoods are exact."""
        return self.attention == "causal" and self.clean == "next"

    @property
    def mask_shift(self) -> int | None:
        """Rows between a masked position and the row that predicts it, where masks see the whole text; else None."""
        if self.attention != "bidirectional" or self.masked is None:
            return None
        return 1 if self.masked == "next" else 0


@dataclass(frozen=True, slots=True)
class Style:
    """How plots draw the decoder, and its place in lists.

    Attributes:
        colour: "#rrggbb".
        marker: matplotlib's name of the marker.
        line: matplotlib's line style: a name, or (offset, lengths of dashes and gaps in points).
        order: place among the decoders that fit a checkpoint; the lowest is the checkpoint's main decoder.
    """

    colour: str = "#6b6b6b"
    marker: str = "*"
    line: LineStyle = "-"
    order: int = 100


@dataclass(frozen=True)
class Decoder:
    """The entry of a decoder.

    Attributes:
        decode: the generator function.
        Settings: its settings class.
        label: name of the system in tables and plots.
        reads: how it uses a model.
        fits: kinds of checkpoints that it decodes, unless their config.json names decoders.
        trained_by: objectives of `refusion_eval.training` whose checkpoints are for it and name it in config.json.
        style: how plots draw it, and its place in lists.
    """

    decode: Decode
    Settings: type[Any]
    label: str
    reads: Reads
    fits: tuple[CheckpointKind, ...] = ("masked",)
    trained_by: tuple[str, ...] = ()
    style: Style = Style()

    def __post_init__(self) -> None:
        has_mask = "mask_id" in {field.name for field in fields(self.Settings)}
        assert has_mask == (self.reads.masked is not None), f"{self.label}: a decoder that reads masks has a mask_id"
