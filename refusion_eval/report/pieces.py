"""The part of a text that each token is: what a replay shows at each position."""

from collections.abc import Callable, Sequence

from refusion_eval.report.replay import Replay

# Gives the text of token ids, special tokens spelled out.
Spell = Callable[[Sequence[int]], str]

# What a tokenizer writes for bytes that are not a whole character.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4


class Speller:
    """Spells tokens one by one and remembers them, since a vocabulary is small compared with all tokens of a run.

    Args:
        spell: gives the text of token ids; None if there is no tokenizer, and tokens are shown by number.
    """

    def __init__(self, spell: Spell | None) -> None:
        self._spell = spell
        self._known: dict[int, str] = {}

    def piece(self, token: int) -> str:
        """The text of one token."""
        if token not in self._known:
            self._known[token] = f"[{token}]" if self._spell is None else self._spell([token])
        return self._known[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of some consecutive tokens adds.

        A character of several tokens belongs to the last of them; the others add nothing.
        """
        result: list[str] = []
        waiting: list[int] = []
        for token in tokens:
            text = self.piece(token)
            if self._spell is None or (not waiting and _BROKEN not in text):
                result.append(text)
                continue
            waiting.append(token)
            text = self._spell(waiting)
            if _BROKEN not in text or len(waiting) == _LONGEST_CHARACTER:
                result += [*[""] * (len(waiting) - 1), text]
                waiting = []
        if waiting and self._spell is not None:
            result += [*[""] * (len(waiting) - 1), self._spell(waiting)]
        return result


def final_pieces(replay: Replay, speller: Speller) -> dict[int, str]:
    """Text of each final position of a replay, given its neighbours: a character may take several tokens."""
    tokens = {
        position: token
        for step in replay.steps
        for change in step.changes
        if change.state == "fixed"
        for position, token in zip(change.positions, change.tokens, strict=True)
    }
    positions = sorted(tokens)
    return dict(zip(positions, speller.pieces([tokens[position] for position in positions]), strict=True))
