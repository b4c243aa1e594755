"""Eso-LM's decoding (arXiv 2506.01928): tokens in a random order, several a forward, with exact keys and values.

Attention is causal in generation order; position ids say where a token stands. A forward feeds the tokens that became
clean in the one before it, then the masks that it predicts: a mask sees all that is clean and the masks before it in
the same forward. Clean tokens stay in the cache, masks never do; the last forward's tokens never enter it.

Read in the release (s-sahoo/Eso-LMs: algo.py, models/dit.py, trainer_base.py). It generates without a prompt; here the
prompt stands before everything else. It draws the numbers of tokens once a batch; here every request draws its own from
its seed. It samples; `temperature=0` takes the likeliest token. Left out: Eso-LM (A), which the release does not sample
from. No published checkpoint is of a kind that is read here, so no output of the release is compared.

ReFusion with `slot_size=1` comes close: causal in the order of acceptance, exact keys and values. Both give the same
tokens in two cases. First, `left_to_right=True` or `block_size=1`, whatever the thresholds, against `alpha_0=0` with
`early_stop=True`: with block_size=1 and fused, ReFusion drafts in each forward what this commits, from the same rows,
and ends with one forward more, which verifies the last token; not fused it takes two forwards a token. Second,
`tau_slot=0, block_size=gen_length` against `subcontext_len=1`: the first forward is the same, and ReFusion verifies in
a second. Otherwise certainty chooses the order, where here the seed does before anything is read; a plan feeds every
mask of the block, so that a mask also sees masks that are not decoded with it; unless fused, to store what was accepted
takes a forward of its own; and masks behind an accepted EOS are dropped, where here they are decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from refusion_eval.decoders import validate
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, causal

# The noise schedule is alpha_0 (1 - (1 - NOISE_FLOOR) t): at t = 1 not quite everything is masked.
NOISE_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class EsolmSettings(MaskedSettings):
    """Settings of Eso-LM, named as in its release.

    Attributes:
        alpha_0: share of the response that is decoded in parallel and in any order (diffusion part), in [0, 1]; the
            rest follows left to right, one token a forward (sequential part). It need not be the one of training.
        steps: of the diffusion part, >= 1; each of its tokens falls into one of them, and those without a token take
            no forward. None is one for each position.
        subcontext_len: in place of steps and a random order: so many steps, the i-th of which takes every position that
            leaves the remainder i when divided by their number. It divides gen_length.
        subcontext_shuffle: with `subcontext_len`, take its steps, and the positions of each, in random order.
        p_nucleus: above temperature 0, sample from the most probable tokens that reach this probability, in (0, 1].

    Raises:
        ConfigError: a value is out of its range, or settings exclude each other.
    """

    decoder: ClassVar[str] = "esolm"

    alpha_0: float = 1.0
    steps: int | None = None
    subcontext_len: int | None = None
    subcontext_shuffle: bool = False
    p_nucleus: float = 1.0

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        name = self.decoder
        validate.require_number(name, "alpha_0", self.alpha_0, 0.0, 1.0)
        validate.require_number(name, "p_nucleus", self.p_nucleus, 0.0, 1.0)
        validate.require_flags(name, subcontext_shuffle=self.subcontext_shuffle)
        for setting in ("steps", "subcontext_len"):
            if getattr(self, setting) is not None:
                validate.require_integer(name, setting, getattr(self, setting), at_least=1)
        if self.p_nucleus == 0:
            raise ConfigError(f"{name}: p_nucleus is 0, which leaves no token to sample; set it above 0, or 1 for all")
        if self.subcontext_len is not None:
            self._check_subcontexts(self.subcontext_len)
        elif self.subcontext_shuffle:
            raise ConfigError(f"{name}: subcontext_shuffle needs subcontext_len; set it too, or leave both out")

    def _check_subcontexts(self, num_steps: int) -> None:
        if self.steps is not None:
            raise ConfigError(
                f"esolm: steps {self.steps} and subcontext_len {num_steps} each say how much a forward decodes; give "
                "one of them"
            )
        if self.gen_length % num_steps:
            raise ConfigError(
                f"esolm: gen_length is {self.gen_length} and subcontext_len {num_steps}; every step takes equally many "
                "positions, so set gen_length to a multiple of subcontext_len"
            )
        if abs(self.alpha_0 * num_steps - round(self.alpha_0 * num_steps)) > 1e-9:
            raise ConfigError(
                f"esolm: alpha_0 is {self.alpha_0} of {num_steps} steps; the diffusion part takes whole steps, so set "
                f"alpha_0 to a multiple of 1/{num_steps}"
            )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """As `MaskedSettings.read`, from the nucleus."""
        return replace(MaskedSettings.read(self, rows, step, positions), top_p=self.p_nucleus)

    def schedule(self) -> list[list[int]]:
        """Response indices that each forward predicts, in generation order; each stands in one of them."""
        parallel = self._drawn_steps() if self.subcontext_len is None else self._subcontexts(self.subcontext_len)
        taken = {position for positions in parallel for position in positions}
        return parallel + [[position] for position in range(self.gen_length) if position not in taken]

    def _drawn_steps(self) -> list[list[int]]:
        """The steps of the diffusion part that have a token, each in random order.

        The release draws how many masks a step fills, one step after another, from the binomial distribution with
        probability (alpha_s - alpha_t) / (1 - alpha_t), and shuffles the positions. As alpha is linear in time, that is
        the same as to draw for each position by itself: with this share a step, all being equally likely.
        """
        share = self.alpha_0 * (1 - NOISE_FLOOR) / (1 - self.alpha_0 * NOISE_FLOOR)
        steps = self.gen_length if self.steps is None else self.steps
        drawn = zip(self.random_scores(0, range(self.gen_length)).tolist(), range(self.gen_length), strict=True)
        ordered = sorted((score, position) for score, position in drawn if score < share)
        by_step = groupby(ordered, key=lambda pair: int(pair[0] / share * steps))
        return [[position for _, position in group] for _, group in by_step]

    def _subcontexts(self, num_steps: int) -> list[list[int]]:
        """The steps of the diffusion part where each takes one position of every subcontext."""
        steps = [list(range(first, self.gen_length, num_steps)) for first in range(num_steps)]
        if self.subcontext_shuffle:
            within, between = self.random_scores(0, range(self.gen_length)), self.random_scores(1, range(num_steps))
            order = sorted(range(num_steps), key=between.tolist().__getitem__)
            steps = [sorted(steps[number], key=within.tolist().__getitem__) for number in order]
        return steps[: round(self.alpha_0 * num_steps)]


def decode(prompt: Sequence[int], settings: EsolmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in as many forwards as its schedule has steps, fewer only with `early_stop`."""
    canvas = Canvas(prompt, settings, trace)
    commit, clean = NOTHING, list(range(canvas.start))  # clean, but not in the cache once `commit` is done
    for step, positions in enumerate(settings.schedule()):
        masked = [canvas.start + position for position in positions]
        fed = clean + masked
        read = settings.read(range(len(clean), len(fed)), step, positions)
        tokens = [canvas.tokens[position] for position in fed]
        (readout,) = yield Forward(tokens, fed, causal(len(fed)), (read,), commit, "denoise")
        commit, clean = Commit(range(len(clean))), masked
        trace.select("token", positions, readout.probs.tolist(), positions)
        ascending = sorted(range(len(positions)), key=positions.__getitem__)
        canvas.fix([positions[row] for row in ascending], readout.tokens[ascending])
        if reason := canvas.settled():
            return canvas.finish(reason)
    return canvas.finish()


DECODER = Decoder(
    decode,
    EsolmSettings,
    label="Eso-LM",
    reads=Reads("causal", masked="own"),
    fits=("masked", "refusion"),
    style=Style("#8a6d1f", "h", (0, (1, 2)), order=3),
)
