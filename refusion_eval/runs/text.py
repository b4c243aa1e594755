"""From token ids to the text that a task sees: special tokens, and stop strings.

A stop string may itself be a special token ("<|im_end|>", "</s>"), so stop strings are looked for in the text with
special tokens spelled out, and special tokens are left out of what is returned. Nothing else is removed.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from refusion_eval.types import StopRule


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """What is needed of a tokenizer to write text.

    Attributes:
        decode: turns ordinary token ids into text.
        special: every special token's id and spelling.
    """

    decode: Callable[[Sequence[int]], str]
    special: Mapping[int, str]

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """Splits tokens into stretches of text and whether each is a special token."""
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
        found = [start for stop in until if (start := whole.find(stop)) >= 0]
        left = min(found, default=len(whole))
        kept = []
        for text, is_special in pieces:
            if not is_special:
                kept.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
        return "".join(kept)

    def kept(self, tokens: Sequence[int], until: Sequence[str]) -> Sequence[int]:
        """The shortest beginning of the tokens whose text holds a stop string; all tokens if none does.

        A text that holds a stop string still does when tokens are added, so the end is found by halving.
        """

        def stopped(length: int) -> bool:
            text = self.spelled(tokens[:length])
            return any(stop in text for stop in until)

        if not stopped(len(tokens)):
            return tokens
        return tokens[: bisect.bisect_left(range(len(tokens)), True, key=stopped)]

    def stop_rule(self, until: Sequence[str]) -> StopRule | None:
        """A rule that ends decoding once a stop string is complete; for one request, as it remembers what it saw.

        A request that begins again may keep its rule: fewer tokens than before mean that it does.

        Only the end of the text is spelled out each time. A token is at least one byte, so a stop string that became
        complete reaches back at most its own length in bytes.
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
