"""From token ids to the text that a task sees: special tokens and stop strings.

A stop string may itself be a special token ("<|im_end|>", "</s>"). Stop strings are therefore searched in the text with
special tokens spelled out, and special tokens are left out of the text that is returned. Nothing else is removed.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from refusion_eval.types import StopRule


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """Writes text from token ids.

    Attributes:
        decode: turns ordinary token ids into text.
        special: id -> spelling of every special token.
    """

    decode: Callable[[Sequence[int]], str]
    special: Mapping[int, str]

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """Splits tokens into pieces of text, each with whether it is a special token."""
        result: list[tuple[str, bool]] = []
        run: list[int] = []
        for token in tokens:
            if token in self.special:
                if run:
                    result.append((self.decode(run), False))
                    run = []
                result.append((self.special[token], True))
            else:
                run.append(token)
        if run:
            result.append((self.decode(run), False))
        return result

    def spelled(self, tokens: Sequence[int]) -> str:
        """The text with special tokens spelled out."""
        return "".join(text for text, _ in self.pieces(tokens))

    def text(self, tokens: Sequence[int], until: Sequence[str] = ()) -> str:
        """The text without special tokens, up to the first occurrence of any stop string."""
        pieces = self.pieces(tokens)
        whole = "".join(text for text, _ in pieces)
        starts = [start for stop in until if (start := whole.find(stop)) >= 0]
        num_left = min(starts, default=len(whole))
        kept = []
        for text, is_special in pieces:
            if not is_special:
                kept.append(text[:num_left])
            num_left -= len(text)
            if num_left <= 0:
                break
        return "".join(kept)

    def kept(self, tokens: Sequence[int], until: Sequence[str]) -> Sequence[int]:
        """The shortest prefix of the tokens whose text contains a stop string; all tokens if there is none.

        A text that contains a stop string still does when tokens are appended, so bisection finds the end.
        """

        def has_stopped(length: int) -> bool:
            text = self.spelled(tokens[:length])
            return any(stop in text for stop in until)

        if not has_stopped(len(tokens)):
            return tokens
        return tokens[: bisect.bisect_left(range(len(tokens)), True, key=has_stopped)]

    def stop_rule(self, until: Sequence[str]) -> StopRule | None:
        """A rule that ends decoding once a stop string is complete. It has state, so every request needs its own.

        A request that is decoded again from its beginning may keep its rule: the rule starts over when it gets fewer
        tokens than before.

        Only the end of the text is spelled out each time. A token is at least one byte, so a stop string that has just
        become complete reaches back at most its own length in bytes.
        """
        if not until:
            return None
        reach = max(len(stop.encode()) for stop in until) + 4
        checked = 0

        def rule(tokens: Sequence[int]) -> bool:
            nonlocal checked
            if len(tokens) < checked:
                checked = 0
            tail = self.spelled(tokens[max(0, checked - reach) :])
            checked = len(tokens)
            return any(stop in tail for stop in until)

        return rule
