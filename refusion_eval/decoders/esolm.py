"""Eso-LM (arXiv 2506.01928): decodes tokens in a random order, several a forward, with exact keys and values.

Attention is causal in generation order; position ids say where a token stands. A forward feeds the tokens that became
final in the forward before it, then the masks that it predicts. A mask sees all final tokens and the masks before it in
the same forward. Final tokens stay in the cache, masks never do; the tokens of the last forward never enter it.

| | release (s-sahoo/Eso-LMs: algo.py, models/dit.py, trainer_base.py) | here |
|---|---|---|
| prompt | none | stands before everything else |
| number of tokens of each step | drawn once a batch | drawn by each request from its seed |
| token | sampled | sampled; the likeliest one with temperature=0 |
| Eso-LM (A) | not sampled from | left out |

No published checkpoint has an architecture that this project reads, so no output of the release is compared. ReFusion
with `slot_size=1` is similar, but orders by certainty; tests/decoders/test_esolm_refusion.py compares the two.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar

from refusion_eval.config import Fraction, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.decoders.canvas import Canvas, MaskedSettings, PositiveFraction
from refusion_eval.errors import ConfigError
from refusion_eval.types import NOTHING, Commit, Decoding, Forward, Read, Trace, causal

# The noise schedule is alpha_0 (1 - (1 - NOISE_FLOOR) t): at t = 1 a small share is not masked.
NOISE_FLOOR = 1e-3


@settings_class("esolm")
class EsolmSettings(MaskedSettings):
    """Settings of Eso-LM, named as in its release.

    Attributes:
        alpha_0: share of the response that is decoded in parallel and in any order (diffusion part); the rest follows
            from left to right, one token a forward (sequential part). It may differ from that of training.
        steps: steps of the diffusion part. Each of its tokens falls into one step, and steps without a token take no
            forward. None is one for each position.
        subcontext_len: instead of `steps` and a random order: the number of steps, of which step i takes every position
            with the remainder i when divided by this number. It divides gen_length.
        subcontext_shuffle: with `subcontext_len`, put its steps, and the positions of each step, in random order.
        p_nucleus: above temperature 0, sample from the most probable tokens that reach this probability, in (0, 1].
    """

    decoder: ClassVar[str] = "esolm"

    alpha_0: Fraction = 1.0
    steps: PositiveInt | None = None
    subcontext_len: PositiveInt | None = None
    subcontext_shuffle: bool = False
    p_nucleus: PositiveFraction = 1.0

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        num_steps = self.subcontext_len
        if num_steps is None:
            if self.subcontext_shuffle:
                raise ConfigError("esolm: subcontext_shuffle needs subcontext_len; set it too, or leave both out")
            return
        if self.steps is not None:
            given = f"steps {self.steps} and subcontext_len {num_steps}"
            raise ConfigError(f"esolm: {given} each say how much a forward decodes; give one of them")
        if self.gen_length % num_steps:
            sizes = f"gen_length is {self.gen_length} and subcontext_len {num_steps}"
            raise ConfigError(f"esolm: {sizes}; set gen_length to a multiple of subcontext_len")
        if abs(self.alpha_0 * num_steps - round(self.alpha_0 * num_steps)) > 1e-9:
            where = f"esolm: alpha_0 is {self.alpha_0} of {num_steps} steps"
            raise ConfigError(f"{where}, which have to be whole; set alpha_0 to a multiple of 1/{num_steps}")

    @property
    def draws_order(self) -> bool:
        return self.subcontext_len is None or self.subcontext_shuffle

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(MaskedSettings.read(self, rows, step, positions), top_p=self.p_nucleus)

    def schedule(self) -> list[list[int]]:
        """The response indices that each forward predicts, in generation order; together they are all indices."""
        parallel = self._drawn_steps() if self.subcontext_len is None else self._subcontexts(self.subcontext_len)
        taken = {position for positions in parallel for position in positions}
        return parallel + [[position] for position in range(self.gen_length) if position not in taken]

    def _drawn_steps(self) -> list[list[int]]:
        """The steps of the diffusion part that have a token, each in random order."""
        # The release draws how many masks a step fills, one step after another, from the binomial distribution with
        # probability (alpha_s - alpha_t) / (1 - alpha_t), and shuffles the positions. As alpha is linear in time, this
        # is the same as drawing the step of each position independently: with probability `share` it is in the
        # diffusion part, and then every step is equally likely.
        share = self.alpha_0 * (1 - NOISE_FLOOR) / (1 - self.alpha_0 * NOISE_FLOOR)
        steps = self.gen_length if self.steps is None else self.steps
        drawn = zip(self.random_scores(0, range(self.gen_length)).tolist(), range(self.gen_length), strict=True)
        ordered = sorted((score, position) for score, position in drawn if score < share)
        by_step = groupby(ordered, key=lambda pair: int(pair[0] / share * steps))
        return [[position for _, position in group] for _, group in by_step]

    def _subcontexts(self, num_steps: int) -> list[list[int]]:
        """The steps of the diffusion part if each takes one position of every subcontext, far from each other."""
        steps = [list(range(first, self.gen_length, num_steps)) for first in range(num_steps)]
        if self.subcontext_shuffle:
            within, between = self.random_scores(0, range(self.gen_length)), self.random_scores(1, range(num_steps))
            order = sorted(range(num_steps), key=between.tolist().__getitem__)
            steps = [sorted(steps[number], key=within.tolist().__getitem__) for number in order]
        return steps[: round(self.alpha_0 * num_steps)]


def decode(prompt: Sequence[int], settings: EsolmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in as many forwards as its schedule has steps, or fewer with `early_stop`."""
    canvas = Canvas(prompt, settings, trace)
    commit, clean = NOTHING, canvas.given  # clean: final positions that `commit` does not cover
    for step, positions in enumerate(settings.schedule()):
        masked = [canvas.start + position for position in positions]
        fed = clean + masked
        read = settings.read(range(len(clean), len(fed)), step, positions)
        tokens = [canvas.tokens[position] for position in fed]
        (readout,) = yield Forward(tokens, fed, causal(len(fed)), (read,), commit, "denoise")
        # The rows of final tokens are exact, because they see nothing that comes later in generation order. The rows
        # of masks are not: their tokens are fed with the next forward.
        commit, clean = Commit(range(len(clean))), masked
        trace.select("token", positions, readout.probs.tolist(), positions)
        # Generation order may run backwards; traces have positions in ascending order.
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
    infills="gap",
    fits=("masked", "refusion"),
    style=Style("#8a6d1f", "h", (0, (1, 2)), order=3),
)
