"""Settings of the ReFusion decoder, and values that follow from them alone."""

from collections.abc import Sequence
from dataclasses import field

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders.canvas import check_mask_id
from refusion_eval.decoders.speculation import ForwardCost
from refusion_eval.errors import ConfigError
from refusion_eval.types import StopRule


@settings_class("refusion")
class RefusionSettings:
    """Settings of the ReFusion decoder, named as in Table 6 of the paper.

    Attributes:
        gen_length: most tokens of the response, >= 1. Positions are decoded in whole slots; the surplus is cut.
        slot_size: k, consecutive positions that are drafted and verified together, >= 1.
        block_size: b, consecutive positions decoded before the next block begins; a multiple of k (App. C.4: b >= k).
        tau_slot: a masked slot is selected when its certainty exceeds this; the best one always is.
        tau_token: a drafted token is accepted when its probability given the tokens before it exceeds this.
        temperature: temperature of the drafts (Eq. 4); thresholds always see untempered probabilities.
        seed: seed of the random draws.
        mask_id: the mask token.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        left_to_right: select slots one after another in position order (Figure 1) instead of by certainty.
        recompute_kv: after slots were completed independently, one more forward lets them see each other and keeps
            those keys and values instead (section 5.5, Table 4).
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (README, "Paper and release").
        fuse: let verifications carry likely next plans and predictions, which gives the same tokens in fewer forwards.
            False is the paper's algorithm; None is True, except with `release_compatible`, which reproduces the forward
            counts of the release.
        free_rows, row_cost: how the time of a forward grows with its rows (see `ForwardCost`), which decides how many
            speculative branches a forward carries; None takes what was measured on the device (0 and 0.02 if
            nothing was).
        stop_rule: gets the tokens decoded without a gap from the start; decoding ends when it returns True.

    Raises:
        ConfigError: a value is out of its range, or sizes do not fit each other.
    """

    gen_length: PositiveInt = 512
    slot_size: PositiveInt = 32
    block_size: PositiveInt = 128
    tau_slot: Fraction = 0.9
    tau_token: Fraction = 0.4
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    mask_id: NonNegativeInt
    eos_ids: tuple[NonNegativeInt, ...] = ()
    left_to_right: bool = False
    recompute_kv: bool = False
    verify_independently: bool = False
    release_compatible: bool = False
    fuse: bool | None = None
    free_rows: NonNegativeInt | None = None
    row_cost: NonNegativeFloat | None = None
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            raise ConfigError(
                f"refusion: block_size is {self.block_size} and slot_size {self.slot_size}; a block holds whole slots "
                f"(App. C.4), so set block_size to a multiple of slot_size, for example {multiple}"
            )
        check_mask_id("refusion", self.mask_id, self.eos_ids)

    @property
    def num_positions(self) -> int:
        """Positions after the prompt that decoding may touch: `gen_length` in whole slots."""
        return -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def fused(self) -> bool:
        """Whether forwards are fused."""
        return not self.release_compatible if self.fuse is None else self.fuse

    @property
    def forward_cost(self) -> ForwardCost:
        """How the time of a forward grows with its rows."""
        return ForwardCost(self.free_rows or 0, 0.02 if self.row_cost is None else self.row_cost)

    @property
    def suppress(self) -> tuple[int, ...]:
        """Ids that may not be drafted: the mask token, except where the release lets it through."""
        return () if self.release_compatible else (self.mask_id,)

    def response_positions(self, slots: Sequence[int]) -> list[int]:
        """Response indices of all tokens of some slots, slot after slot."""
        return [slot + column for slot in slots for column in range(self.slot_size)]
