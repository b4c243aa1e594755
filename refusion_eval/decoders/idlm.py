"""I-DLM (introspective strided decoding): drafts some tokens from masks and verifies them in the next forward.

Attention is causal and every row predicts the next position, also the row of a mask. With N = `gen_block_size`, a
forward feeds the last token, the N - 1 drafts of the forward before it, and N - 1 masks. The rows of the tokens are
those of autoregressive decoding, so they judge the drafts from left to right. If all are accepted, the row of the last
one gives one more token, and the masks give the next drafts. The first draft that is rejected is replaced, and the next
forward has no drafts. Rows of masks and of rejected drafts never stay in the cache.

Greedy decoding accepts a draft that is the most probable token, so its tokens are those of autoregressive decoding.
Above temperature 0 a draft, which is the most probable one of its mask's distribution q, is accepted with probability
min(1, p / q) of the token, where p is the distribution of the row before it, and replaced from norm(max(0, p - q)).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from refusion_eval.config import NonNegativeFloat, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, accepted_prefix, first_eos
from refusion_eval.decoders.canvas import Canvas, MaskedSettings, PositiveFraction
from refusion_eval.types import Commit, Confidence, Decoding, Forward, ProbArray, Read, Readout, Trace, causal, draw_key

# Last counters of the keys of draws, which tell apart the draws of one position.
ACCEPT, REPLACE = 1, 2


@settings_class("idlm")
class IdlmSettings(MaskedSettings):
    """Settings of I-DLM, named as in its release.

    Decoding ends at one of `eos_ids`.

    Attributes:
        early_stop: end at a stop string too.
        gen_block_size: N, tokens that a forward can add: N - 1 drafts that it accepts, and one more.
        top_k, top_p: above temperature 0, which tokens may be sampled (0 and 1: all), as in `refusion_eval.types.Read`;
            drafts are judged by whole distributions.
        verify_alpha: factor of q; below 1 more drafts are accepted, and with 0 all.
        fast_verify: accept a draft if it is one of the `fast_verify_topk` most probable tokens, and replace one that is
            rejected by the most probable token.
        fast_verify_topk: with `fast_verify`, number of tokens that are accepted.
        release_compatible: pad forwards without drafts to the length of the others, draft beyond `gen_length`, and keep
            the token that the prompt predicts back until the forward after it, as released.
    """

    decoder: ClassVar[str] = "idlm"
    shift: ClassVar[int] = 1

    early_stop: bool = True
    gen_block_size: PositiveInt = 4
    top_k: NonNegativeInt = 50
    top_p: PositiveFraction = 0.95
    verify_alpha: NonNegativeFloat = 1.0
    fast_verify: bool = False
    fast_verify_topk: PositiveInt = 5
    release_compatible: bool = False

    @property
    def num_positions(self) -> int:
        return self.gen_length + (2 * self.gen_block_size if self.release_compatible else 0)

    @property
    def confidence(self) -> Confidence:
        # A token of the top k may be too improbable for float32, in which its probability would be 0.
        return Confidence(
            temperature=self.temperature or 1.0, dtype="float64" if self.fast_verify else self.confidence_dtype
        )

    @property
    def draws_drafts(self) -> bool:
        return self.temperature > 0 and not self.fast_verify

    def next_token(self, row: int, position: int) -> Read:
        """Reads the token of a position from the row of the token before it."""
        read = self.read((row,), position, (position,))
        return replace(read, top_k=self.top_k, top_p=self.top_p) if self.temperature > 0 else read

    def guesses(self, rows: Sequence[int]) -> Read:
        """Reads the most probable tokens, with their probabilities if these decide about drafts."""
        read = Read(rows, suppress=(self.mask_id,))
        return replace(read, confidence=self.confidence, logits=True) if self.draws_drafts else read

    def judgement(self, drafts: Sequence[int]) -> Read:
        """Reads what decides about the drafts that follow the first row."""
        read = self.guesses(range(len(drafts)))
        if self.fast_verify:
            return replace(read, given=drafts, top_k=self.fast_verify_topk, confidence=self.confidence)
        return replace(read, given=drafts) if self.draws_drafts else read

    def accepted(self, judged: Readout, drafted: Readout, position: int) -> npt.NDArray[np.bool_]:
        """Which drafts pass; `position` is that of the first one."""
        if judged.given is None:
            return judged.tokens == drafted.tokens
        if self.fast_verify:
            return judged.given > 0  # all other tokens are cut off
        uniforms = [self._uniform(position + index, ACCEPT) for index in range(len(judged.given))]
        return accepts(judged.given, drafted.probs, np.array(uniforms), self.verify_alpha)

    def replacement(self, judged: Readout, drafted: Readout, index: int, position: int) -> int:
        """The token instead of a rejected draft, which stands at `position`."""
        if judged.logits is None or drafted.logits is None:
            return int(judged.tokens[index])
        probs = residual(judged.logits(index), drafted.logits(index), self.temperature)
        probs[self.mask_id] = 0
        if not probs.any():  # where the mask alone is likelier than in the draft
            probs = _softmax(judged.logits(index).astype(np.float64) / self.temperature)
            probs[self.mask_id] = 0
        sums = probs.cumsum()
        return int(np.searchsorted(sums, self._uniform(position, REPLACE) * sums[-1], side="right"))

    def _uniform(self, position: int, purpose: int) -> float:
        return draw_key(self.seed, position, purpose) / 2**64


def accepts(p: ProbArray, q: ProbArray, uniforms: ProbArray, alpha: float) -> npt.NDArray[np.bool_]:
    """Which tokens of probability p are accepted where they were drafted with q: each with min(1, p / (alpha q))."""
    return (uniforms * alpha * q < p) | (alpha == 0)


def residual(clean_logits: ProbArray, draft_logits: ProbArray, temperature: float) -> npt.NDArray[np.float64]:
    """norm(max(0, p - q)), float64, [V], of two softmaxes at a temperature; p itself where that is 0."""
    p, q = (_softmax(logits.astype(np.float64) / temperature) for logits in (clean_logits, draft_logits))
    rest = np.maximum(p - q, 0)
    return rest / rest.sum() if rest.any() else p


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def decode(prompt: Sequence[int], settings: IdlmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; each forward after the first adds 1 to `gen_block_size` tokens."""
    canvas, length, num_rows = Canvas(prompt, settings, trace), settings.gen_length, len(prompt)
    read = settings.next_token(num_rows - 1, 0)
    (clean,) = yield Forward(list(prompt), range(num_rows), causal(num_rows), (read,), kind="prefill")
    # The last token of the text, and it alone, is not in the cache once `commit` is done.
    text, commit = clean.tokens.tolist(), Commit(range(num_rows))
    num_fixed, is_held_back = 0, settings.release_compatible
    drafted: Readout | None = None
    while True:
        if not is_held_back:
            canvas.fix(range(num_fixed, len(text)), text[num_fixed:])
            num_fixed, reason = len(text), canvas.settled()
            if reason or num_fixed == length or text[-1] in settings.eos_ids:
                return canvas.finish(reason)
        is_held_back, position = False, len(text)
        drafts = [] if drafted is None else drafted.tokens.tolist()
        forward = _forward(canvas, settings, text, drafts, commit)
        clean, *others = yield forward
        num_accepted, token = len(drafts), int(clean.tokens[0])
        if drafted is not None:
            judged = others.pop(0)
            num_accepted = accepted_prefix(settings.accepted(judged, drafted, position))
            if num_accepted < len(drafts):
                token = settings.replacement(judged, drafted, num_accepted, position + num_accepted)
                others = []
        text += [*drafts[:num_accepted], token]
        end = first_eos(text, settings.eos_ids)
        text = text[: length if end is None else min(end + 1, length)]
        commit, drafted = Commit(range(num_accepted + 1)), others[0] if others else None
        if drafted is not None:
            trace.draft(range(len(text), len(text) + len(drafted.tokens)), drafted.tokens.tolist())


def _forward(
    canvas: Canvas, settings: IdlmSettings, text: Sequence[int], drafts: Sequence[int], commit: Commit
) -> Forward:
    """Feeds the last token, its drafts and masks; reads the token after the last draft, the judgement, new drafts."""
    position, num_drafts = len(text), len(drafts)
    num_masks, padding = settings.gen_block_size - 1, 0
    if settings.release_compatible:
        padding = num_masks - num_drafts
    else:
        num_masks = max(0, min(num_masks, settings.gen_length - 1 - position - num_drafts))
    tokens = [text[-1], *drafts, *[settings.mask_id] * (num_masks + padding)]
    start = canvas.start + position - 1
    reads = [settings.next_token(num_drafts, position + num_drafts)]
    reads += [settings.judgement(drafts)] if drafts else []
    reads += [settings.guesses(range(num_drafts + 1, num_drafts + 1 + num_masks))] if num_masks else []
    kind = "verify" if drafts else "cold"
    return Forward(tokens, range(start, start + len(tokens)), causal(len(tokens)), tuple(reads), commit, kind)


DECODER = Decoder(
    decode,
    IdlmSettings,
    label="I-DLM",
    reads=Reads("causal", masked="next", clean="next"),
    trained_by=("idlm",),
    adapts_masks_only=True,  # R-ISD
    style=Style("#117733", "8", (0, (3, 1)), order=14),
)
