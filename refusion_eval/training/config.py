"""What is learned, and what decides a training stage."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Literal, get_args

from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import Normalisation
from refusion_eval.training.objectives.corrupt import SLOT_SIZES

Objective = Literal["pretrain", "sft", "refusion", "llada", "bd3lm"]
MASKED_OBJECTIVES: tuple[Objective, ...] = ("llada", "bd3lm")  # not causal


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is learned: everything that decides how a sample becomes an example, and what its loss is.

    Attributes:
        objective: "pretrain" (next token, prompt included), "sft" (next token of the answer), "refusion" (hybrid),
            "llada" (masked answer, full attention) or "bd3lm" (masked answer, block by block).
        slot_sizes: k is drawn from these for each sample (refusion).
        eos_multiple: answers are filled with EOS up to a multiple of this many tokens (refusion, llada, bd3lm); 0 is
            none, as in ReFusion's release.
        block_size: tokens of a block, a divisor of `eos_multiple` (bd3lm); 0 for the other objectives.
        normalisation: of the losses, see `collate`; llada and bd3lm have one of their own, under "release".
        mdm_weight: lambda of Eq. 3, the factor of the MDM term in the hybrid loss (refusion); 1 for the others.
    """

    objective: Objective
    slot_sizes: tuple[int, ...] = SLOT_SIZES
    eos_multiple: int = 0
    block_size: int = 0
    normalisation: Normalisation = "release"
    mdm_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ConfigError(f"objective={self.objective!r} is unknown; known: {', '.join(get_args(Objective))}")
        if not self.slot_sizes or min(self.slot_sizes) < 1:
            raise ConfigError(f"slot_sizes is {self.slot_sizes}; name one or more sizes of at least 1")
        if self.eos_multiple < 0:
            raise ConfigError(f"eos_multiple is {self.eos_multiple}; use 0 for none or a block length")
        if self.objective == "bd3lm":
            if self.block_size < 1:
                raise ConfigError(f"block_size is {self.block_size}; objective=bd3lm needs blocks of at least 1 token")
            if not self.eos_multiple or self.eos_multiple % self.block_size:
                raise ConfigError(
                    f"eos_multiple is {self.eos_multiple} and block_size {self.block_size}; objective=bd3lm fills "
                    "answers up to whole blocks, so set eos_multiple to a multiple of block_size"
                )
        elif self.block_size:
            raise ConfigError(
                f"block_size is {self.block_size}; only objective=bd3lm has blocks, so leave it out of {self.objective}"
            )
        if self.objective in MASKED_OBJECTIVES and self.normalisation != "release":
            raise ConfigError(
                f"normalisation={self.normalisation}; objective={self.objective} has one of its own, so leave it out"
            )
        if not 0 <= self.mdm_weight < math.inf:
            raise ConfigError(f"mdm_weight is {self.mdm_weight}; lambda of Eq. 3 is a number of at least 0")
        if self.objective != "refusion" and self.mdm_weight != 1:
            raise ConfigError(
                f"mdm_weight is {self.mdm_weight}; objective={self.objective} has one term only, so leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ObjectiveConfig):
    """Everything that decides a stage of the loop in `train`.

    Attributes:
        num_steps: optimizer steps.
        tokens_per_batch: padded tokens of the samples of a batch, at most; what an objective adds to them (EOS
            filling, a noisy copy) is not counted, so that every objective sees equally many samples.
        peak_lr: learning rate of AdamW after warm-up; falls along a cosine to `final_lr_share` of it.
        muon_lr: likewise of Muon, which then trains the layers' matrices; 0 leaves them to AdamW.
        num_warmup_steps: linear warm-up.
        final_lr_share: last learning rate / peak.
        weight_decay: of AdamW, on matrices only.
        max_grad_norm: gradients are scaled down to this norm.
        seed: of batches and corruption.
        log_every: steps between two lines of metrics.
        save_every: steps between two resumable states.
    """

    num_steps: int
    tokens_per_batch: int = 4096
    peak_lr: float = 2e-3
    muon_lr: float = 0.0
    num_warmup_steps: int = 100
    final_lr_share: float = 0.02
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    log_every: int = 20
    save_every: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_steps", "tokens_per_batch", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def to_json(self) -> str:
        """All settings, as `is_that_of` reads them."""
        return json.dumps(asdict(self))

    def is_that_of(self, text: str) -> bool:
        """Whether `to_json` wrote this text from equal settings; one that it did not know yet had its default."""
        defaults = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        own = json.loads(self.to_json())
        return json.loads(json.dumps(defaults)) | json.loads(text) == own
