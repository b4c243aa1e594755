"""Settings of ReFusion."""

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import check_mask_id
from refusion_eval.errors import ConfigError
from refusion_eval.types import StopRule

Order = Literal["confidence", "left_to_right", "random"]


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
        left_to_right: `order="left_to_right"` by its former name.
        recompute_kv: one more forward at the end of every iteration computes the tokens that became final in it once
            more, as one sequence after everything before them, and keeps these keys and values (section 5.5, Table 4).
            Only slots that were completed independently of each other get other keys and values by it. The paper's
            times say that the forward is made in any case: ARC-C takes 1.16 times as long, though its answers of two
            tokens end in the only slot of their only iteration. Fused, the forwards that change nothing are left out
            and the others carry the next plan: the same tokens at next to no cost, so measure the cost with
            `fuse=False`.
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (docs/explanations/paper-and-release.md).
        fuse: let verifications carry likely next plans and predictions, which gives the same tokens in fewer forwards.
            False is the paper's algorithm; None is True, except with `release_compatible`, which reproduces the forward
            counts of the release.
        free_rows, row_cost: how the time of a forward grows with its rows (see `ForwardCost`), which decides how many
            speculative branches a forward carries; None takes the values shipped for this kind of device, or those
            that `tune` measured (0 and 0.02 without either).
        order: how slots are selected: by "confidence" as above, or one at a time, "left_to_right" or at "random"
            (from the seed; compared in arXiv 2602.12586). Slots are drafted and verified whole in every order.
        serial: decode one token a forward from left to right, without drafts, thresholds and blocks: the paper's
            left-to-right point, which has the speed of an autoregressive model (Figure 1).
        stop_rule: gets the tokens decoded without a gap from the start; decoding ends when it returns True.
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
    order: Order = added_setting("confidence")
    serial: bool = added_setting(False)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            raise ConfigError(
                f"refusion: block_size is {self.block_size} and slot_size {self.slot_size}; a block holds whole slots "
                f"(App. C.4), so set block_size to a multiple of slot_size, for example {multiple}"
            )
        check_mask_id("refusion", self.mask_id, self.eos_ids)
        if self.left_to_right and self.order == "random":
            raise ConfigError("refusion: left_to_right=true and order=random exclude each other; give order alone")
        if self.serial:
            without_meaning = ("recompute_kv", "verify_independently", "left_to_right", "fuse")
            given = [f"{name}=true" for name in without_meaning if getattr(self, name)]
            given += [f"order={self.order}"] if self.order != "confidence" else []
            if given:
                raise ConfigError(f"refusion: serial=true decodes token by token, so leave out {', '.join(given)}")

    @property
    def num_positions(self) -> int:
        """Positions after the prompt that decoding may touch: `gen_length` in whole slots, rounded up."""
        return -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def fused(self) -> bool:
        """Whether forwards are fused."""
        # The forward counts of the release are part of what `release_compatible` reproduces.
        return not (self.release_compatible or self.serial) if self.fuse is None else self.fuse

    @property
    def slot_order(self) -> Order:
        """The order of slots, by whichever name it was given."""
        # The digest of every record contains `left_to_right`, so the name stays beside `order`.
        return "left_to_right" if self.left_to_right else self.order

    @property
    def without_effect(self) -> set[str]:
        """Settings that change nothing beside the others, so that a sweep of them shows noise."""
        # A block of one slot has nothing to select, and the first token of a slot is accepted in any case.
        thresholds = {"tau_slot": self.block_size == self.slot_size or self.slot_order != "confidence"}
        thresholds["tau_token"] = self.slot_size == 1
        return {name for name, is_dead in thresholds.items() if is_dead or self.serial}

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn from the seed."""
        return self.temperature > 0 or self.order == "random"

    @property
    def suppress(self) -> tuple[int, ...]:
        """Ids that may not be drafted."""
        # The release lets the mask token through, which would then stand in the text.
        return () if self.release_compatible else (self.mask_id,)

    def response_positions(self, slots: Sequence[int]) -> list[int]:
        """Response indices of all tokens of some slots, slot after slot."""
        return [slot + column for slot in slots for column in range(self.slot_size)]
