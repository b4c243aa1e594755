"""Lossless draft-and-verify (FreeDave, arXiv 2510.00294): several steps of one token each in one forward.

After a forward the next steps can be guessed: they fill the most confident positions with the tokens of that forward.
The next forward has a copy of the text, a branch, for each number of guessed steps. A branch is right if the branch
before it is right and the prediction of that one makes just this next step. So the tokens are those of decoding one
token a step, and the branches that were right took one forward together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from refusion_eval.decoders.canvas import Canvas, Filling
from refusion_eval.errors import ConfigError
from refusion_eval.types import Forward, Readout

MakeForward = Callable[[Sequence[int], int], Forward]  # makes that of a step, which reads some response indices
Branch = Mapping[int, int]  # positions of the response that are filled besides, and their tokens


def check_drafts(settings: Any, names: Sequence[str], **fit: Sequence[Any]) -> None:
    """Raises ConfigError for drafts unless a step commits one greedy token.

    Args:
        settings: those of a decoder with `draft_steps`.
        names: settings that decide about it, which fit if they have their default.
        fit: other values that fit, of some of these settings.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    wrong = [name for name in names if getattr(settings, name) not in fit.get(name, (defaults[name],))]
    if settings.draft_steps and wrong:
        values = " and ".join(f"{name} {getattr(settings, name)}" for name in wrong)
        # Leaving one out would not help where a settings table gives it.
        advice = " and ".join(f"{name}={str(defaults[name]).lower()}" for name in wrong)
        where = f"{settings.decoder}: draft_steps is {settings.draft_steps} with {values}"
        raise ConfigError(f"{where}; drafts are of the most confident token a step, so set {advice}")


class Drafts(NamedTuple):
    """How steps are drafted.

    Attributes:
        most: branches of a forward, >= 1.
        block_length: length of blocks, counted from the end of the region, of which the earlier ones are filled first;
            None for one block.
        ahead: indices behind the region; some of them may be filled too.
    """

    most: int
    block_length: int | None = None
    ahead: Sequence[int] = ()


def fill_by_drafts(canvas: Canvas, region: range, forward: MakeForward, drafts: Drafts) -> Filling:
    """As `refusion_eval.decoders.filling.fill`; the rows of the forwards are consecutive positions."""
    indices = [*region, *drafts.ahead]

    def guesses(branch: Branch, readout: Readout | None) -> list[tuple[int, int]]:
        """Masked indices and their tokens, in the order in which steps fill them."""
        if readout is None:
            return []
        masked, length = _masked(canvas, indices, branch), drafts.block_length
        blocks = [0 if length is None else (index - region.stop) // length for index in masked]
        scores = canvas.settings.scores(readout, 0, masked).tolist()
        guessed = zip(blocks, scores, masked, readout.tokens.tolist(), strict=True)
        in_order = sorted(guessed, key=lambda guess: (guess[0], -guess[1]))
        return [(index, token) for _, _, index, token in in_order]

    if not canvas.masked(region):
        return None
    branches: list[Branch] = [{}]
    readouts = yield _branched(canvas, forward((), 0), branches, indices)
    best = guesses({}, *readouts)
    while masked := canvas.masked(region):
        branches = [dict(best[:number]) for number in range(1, min(drafts.most, len(best)) + 1)]
        accepted = branches[0]  # the step that is made without drafts
        if len(masked) > 1 or drafts.ahead:  # what a forward says after the last mask would not be used
            readouts = yield _branched(canvas, forward((), 0), branches, indices)
            # Only the last branch may have no masks, and then no readout.
            after = [guesses(*pair) for pair in zip(branches, [*readouts, None], strict=False)]
            number, last = 0, len(branches) - 1
            while number < last and branches[number + 1].items() - branches[number].items() == set(after[number][:1]):
                number += 1
            accepted, best = branches[number], after[number]
            if accepted.keys() >= set(masked):  # the next step is one behind the region, and known
                accepted = {**accepted, **dict(best[:1])}
        canvas.fix(sorted(accepted), [accepted[index] for index in sorted(accepted)])
        if reason := canvas.settled():
            return reason
    return None


def _masked(canvas: Canvas, indices: Sequence[int], branch: Branch) -> list[int]:
    return [index for index in canvas.masked(indices) if index not in branch]


def _branched(canvas: Canvas, text: Forward, branches: Sequence[Branch], indices: Sequence[int]) -> Forward:
    """A forward of independent copies of the text, one a branch, with reads of their masks, if any, at the indices."""
    size, first, tokens = len(text.tokens), text.positions[0], []
    for branch in branches:
        copy = list(text.tokens)
        for index, token in branch.items():
            copy[canvas.start + index - first] = token
        tokens += copy
    reads = [
        canvas.reads(_masked(canvas, indices, branch), 0, first - number * size)
        for number, branch in enumerate(branches)
    ]
    return replace(
        text,
        tokens=tokens,
        positions=[*text.positions] * len(branches),
        attention=tuple(
            replace(segment, sees=tuple((start + begin, start + end) for begin, end in segment.sees))
            for start in range(0, len(tokens), size)
            for segment in text.attention
        ),
        reads=tuple(read for one in reads for read in one),
    )
