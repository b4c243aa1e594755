"""Settings of ReFusion (arXiv 2512.13586, section 4.2)."""

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from refusion_eval.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, added_setting, settings_class
from refusion_eval.decoders import check_mask_id
from refusion_eval.errors import ConfigError
from refusion_eval.types import StopRule

Order = Literal["confidence", "left_to_right", "random"]
CompletionRule = Literal["paper", "verifier"]


@settings_class("refusion")
class RefusionSettings:
    """Settings of the ReFusion decoder, named as in Table 6 of the paper.

    Attributes:
        gen_length: most tokens of the response, >= 1.
        slot_size: k, consecutive positions that are drafted and verified together, >= 1.
        block_size: b, consecutive positions decoded before the next block begins; a multiple of k (App. C.4: b >= k).
        tau_slot: a masked slot is selected when its certainty exceeds this; the best one always is.
        tau_token: a drafted token is accepted when its probability given the tokens before it exceeds this.
        temperature: temperature of the drafts (Eq. 4); thresholds always see untempered probabilities.
        seed: seed of the random draws.
        mask_id: the mask token.
        eos_ids: tokens that end the response; if there are none, it always has `gen_length` tokens.
        left_to_right: `order="left_to_right"` by its former name.
        recompute_kv: after each iteration compute the tokens that became final once more, as one sequence, and keep
            these keys and values (section 5.5, Table 4). Fused, this costs next to nothing: measure with `fuse=False`.
        verify_independently: begin a completion by verifying every slot on its own, as Eq. 7 is written, instead of
            keeping the prefixes that the global verification found.
        release_compatible: reproduce the defects of the public release (docs/explanations/paper-and-release.md).
        fuse: True lets verifications carry likely next plans and predictions: the same tokens in fewer forwards. False
            is the paper's algorithm, which commands and Python's functions take by default. None, the default of
            `Settings`, is True, and False with `release_compatible`, which reproduces the release's forwards.
        free_rows, row_cost: how the time of a forward grows with its rows (see `ForwardCost`), which decides how many
            branches a forward carries; None takes the values shipped for the device, or those that `tune` measured.
        order: how slots are selected: by "confidence" as above, or one at a time, "left_to_right" or at "random"
            (from the seed; compared in arXiv 2602.12586). Slots are drafted and verified whole in every order.
        serial: decode one token a forward from left to right, without drafts, thresholds and blocks: the paper's
            left-to-right point, which has the speed of an autoregressive model (Figure 1).
        completion: what follows the first rejected draft of a slot. "paper" (Eq. 7-8): the rest of the slot is drafted
            anew, and the first of these drafts is accepted whatever its probability. "verifier": the token that the
            verification itself chooses there is kept, as in speculative decoding, and only the tokens after it are
            drafted anew; drafts that are the verifier's own choice pass too. At a temperature above 0 a draft passes
            only if it is the verifier's sample (docs/explanations/verifier.md).
        whole_slots: decode positions in whole slots and cut the surplus; else the last slot has the positions that are
            left, as the slots at the end of answers in training. A gap is always decoded so.
        thought_budget: tokens after which a thought that goes on is ended, and the answer decoded in a part of its own
            (see `refusion_eval.decoders.thoughts`). None ends no thought, nor does a budget of `gen_length`.
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
    completion: CompletionRule = added_setting("paper")
    whole_slots: bool = added_setting(True)
    thought_budget: NonNegativeInt | None = added_setting(None)
    stop_rule: StopRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < self.slot_size or self.block_size % self.slot_size:
            multiple = max(1, round(self.block_size / self.slot_size)) * self.slot_size
            sizes = f"block_size is {self.block_size} and slot_size {self.slot_size}"
            raise ConfigError(f"refusion: {sizes}; set block_size to whole slots (App. C.4), for example {multiple}")
        check_mask_id("refusion", self.mask_id, self.eos_ids)
        if self.left_to_right and self.order == "random":
            raise ConfigError("refusion: left_to_right=true and order=random exclude each other; give order alone")
        if self.serial:
            without_meaning = ("recompute_kv", "verify_independently", "left_to_right", "fuse")
            given = [f"{name}=true" for name in without_meaning if getattr(self, name)]
            given += [f"order={self.order}"] if self.order != "confidence" else []
            given += ["completion=verifier"] if self.keeps_verifier else []
            if given:
                raise ConfigError(f"refusion: serial=true decodes token by token, so leave out {', '.join(given)}")
        if self.release_compatible and self.keeps_verifier:
            raise ConfigError(
                "refusion: the release completes slots by the paper's rule; leave out completion=verifier"
            )
        if self.release_compatible and not self.whole_slots:
            raise ConfigError(
                "refusion: the release decodes whole slots and fills no gap; leave out release_compatible=true"
            )

    @property
    def keeps_verifier(self) -> bool:
        return self.completion == "verifier"

    @property
    def num_positions(self) -> int:  # after the prompt, that decoding may touch
        return self.gen_length if not self.whole_slots else -(-self.gen_length // self.slot_size) * self.slot_size

    @property
    def blocks(self) -> list[range]:  # of slots
        k, b, length = self.slot_size, self.block_size, self.num_positions
        if self.release_compatible:
            length = length // b * b  # the release never decodes what does not fill a block
        return [range(start, min(start + b, length), k) for start in range(0, length, b)]

    @property
    def fused(self) -> bool:
        # The forward counts of the release are part of what `release_compatible` reproduces.
        return not (self.release_compatible or self.serial) if self.fuse is None else self.fuse

    @property
    def slot_order(self) -> Order:
        # The digest of every record contains `left_to_right`, so the name stays beside `order`.
        return "left_to_right" if self.left_to_right else self.order

    @property
    def without_effect(self) -> dict[str, str]:
        """Settings that change nothing beside the others, each with the reason and the settings that give it effect."""
        k, order = self.slot_size, self.slot_order
        reasons: dict[str, str] = {}
        if self.serial:
            serial = "serial=true decodes without thresholds; add `settings: {serial: false}`"
            return dict.fromkeys(("tau_slot", "tau_token"), serial)
        if order != "confidence":
            certain = "{left_to_right: false, order: confidence}"
            reasons["tau_slot"] = f"slots are selected by order={order}; add `settings: {certain}`"
        elif self.block_size == k:
            smaller = max(1, k // 4)
            sizes = f"{{slot_size: {smaller}, block_size: {8 * smaller}}}"
            reasons["tau_slot"] = f"a block holds one slot (slot_size = block_size = {k}); add `settings: {sizes}`"
        if k == 1:  # the first token of a slot is accepted in any case
            reasons["tau_token"] = "a slot holds one token; add `settings: {slot_size: 4, block_size: 32}`"
        elif self.keeps_verifier and self.temperature > 0:
            reasons["tau_token"] = f"completion={self.completion} samples exactly; add `settings: {{temperature: 0}}`"
        return reasons

    @property
    def is_random(self) -> bool:
        return self.temperature > 0 or self.order == "random"

    @property
    def suppress(self) -> tuple[int, ...]:
        # The release lets the mask token through, which would then stand in the text.
        return () if self.release_compatible else (self.mask_id,)

    def text_positions(self, slots: Sequence[int], start: int = 0) -> list[int]:
        """Response indices of all tokens of some slots, slot after slot; positions, if index 0 has that of `start`."""
        positions: list[int] = []
        for slot in slots:
            end = slot + self.slot_size if self.whole_slots else min(slot + self.slot_size, self.gen_length)
            positions += range(start + slot, start + end)
        return positions

    def num_tokens(self, slots: Sequence[int]) -> int:
        """Number of tokens of some slots."""
        return sum(self.sizes_of(slots))

    def sizes_of(self, slots: Sequence[int]) -> list[int]:
        """Number of tokens of each of some slots; only the last one of a response may have fewer than the others."""
        if self.whole_slots:
            return [self.slot_size] * len(slots)
        return [min(self.slot_size, self.gen_length - slot) for slot in slots]
