"""Shows a decoding in progress; a streamer of transformers cannot show slots that fill in out of order."""

import sys
from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TextIO, runtime_checkable

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from refusion_eval.types import Trace

MASK = "·"
STYLES = {"mask": "bright_black", "draft": "dim italic", "fixed": "", "newest": "bold green"}


@runtime_checkable
class SlotListener(Protocol):
    """Methods of a streamer, besides `put` (the prompt) and `end`, that receive all drafts and final tokens.

    Positions are response indices: 0 is the first generated position.
    """

    def begin(self, num_positions: int) -> None:
        """Called at the start with the number of positions, all of them masked."""
        ...

    def update(self, positions: Sequence[int], tokens: Sequence[int], final: bool) -> None:
        """Called with new final tokens, or with drafts, which replace all earlier drafts."""
        ...

    def finish(self, tokens: Sequence[int]) -> None:
        """Called before `end` with the tokens of the response; final tokens after these are dropped."""
        ...


class WatchedTrace(Trace):
    """A trace that also passes drafts and final tokens to a listener."""

    def __init__(self, listener: SlotListener) -> None:
        super().__init__()
        self.listener = listener

    def draft(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Records and passes on proposed tokens."""
        super().draft(positions, tokens)
        self.listener.update(positions, tokens, final=False)

    def fix(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Records and passes on final tokens."""
        super().fix(positions, tokens)
        self.listener.update(positions, tokens, final=True)


class FinishedPrefix:
    """Passes the response from its start to the first gap to a streamer of transformers, as it grows."""

    def __init__(self, streamer: Any, eos_ids: Container[int], gen_length: int) -> None:
        self._streamer = streamer
        self._eos_ids = eos_ids
        self._gen_length = gen_length
        self._fixed: dict[int, int] = {}
        self._num_put = 0
        self._ended = False

    def begin(self, num_positions: int) -> None:
        """Does nothing: no token is final yet."""

    def update(self, positions: Sequence[int], tokens: Sequence[int], final: bool) -> None:
        """Puts the final tokens that have no gap before them."""
        if not final:
            return
        self._fixed.update(zip(positions, tokens, strict=True))
        ready: list[int] = []
        while not self._ended and (position := self._num_put + len(ready)) in self._fixed:
            ready.append(self._fixed[position])
            self._ended = ready[-1] in self._eos_ids or position + 1 == self._gen_length
        self._put(ready)

    def finish(self, tokens: Sequence[int]) -> None:
        """Puts the tokens after a gap, which only a response with `release_compatible` has."""
        self._put(tokens[self._num_put :])

    def _put(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._num_put += len(tokens)
            self._streamer.put(torch.tensor(tokens))


class _Run(NamedTuple):
    """Consecutive positions in the same state, a key of `STYLES`."""

    state: str
    positions: list[int]


class SlotStreamer:
    """Shows a response while its slots fill in.

    On a terminal the response is redrawn in place: final text with the newest tokens highlighted, dim drafts, and a dot
    for each mask. At the end only the text remains. Elsewhere each step prints one line, with positions, for each run
    of tokens that it finished, and the text at the end. The prompt is not shown.

    With the other decoding methods of transformers, tokens arrive in order and are shown in the same way.
    """

    def __init__(self, tokenizer: Any, file: TextIO | None = None, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._file = sys.stdout if file is None else file
        self._console = Console(file=self._file, force_terminal=self._file.isatty(), highlight=False)
        self._redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._prompt_put = False
        self._reset(0)

    def _reset(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._fixed: dict[int, int] = {}
        self._drafts: dict[int, int] = {}
        self._newest: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """The final text so far, without gaps; the whole response after its end."""
        return self._decode([self._fixed[position] for position in sorted(self._fixed)])

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt, and with other decoding methods the tokens after it."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise ValueError(f"SlotStreamer shows one response, not {value.shape[0]}")
        if not self._prompt_put:
            self._prompt_put = True
            self._reset(0)
            return
        tokens = value.reshape(-1).tolist()
        start = self._num_positions
        self._num_positions += len(tokens)
        self.update(range(start, self._num_positions), tokens, final=True)

    def begin(self, num_positions: int) -> None:
        """Shows the masks."""
        self._reset(num_positions)
        self._draw()

    def update(self, positions: Sequence[int], tokens: Sequence[int], final: bool) -> None:
        """Shows drafts or final tokens."""
        new = dict(zip(positions, tokens, strict=True))
        if not final:
            self._drafts = new
        else:
            self._fixed |= new
            self._newest = frozenset(new)
            if not self._redraws:
                for run in self._runs(sorted(new)):
                    # With special tokens, so that a step that only ended the text is visible.
                    text = self._decode([new[position] for position in run.positions], with_special_tokens=True)
                    print(f"{run.positions[0]}-{run.positions[-1]}: {text!r}", file=self._file, flush=True)
        self._draw()

    def finish(self, tokens: Sequence[int]) -> None:
        """Replaces the tokens by those of the response."""
        self._reset(len(tokens))
        self._fixed = dict(enumerate(tokens))

    def end(self) -> None:
        """Prints the text and prepares for another response."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        print(self.text, file=self._file, flush=True)
        self._prompt_put = False

    def _decode(self, tokens: Sequence[int], *, with_special_tokens: bool = False) -> str:
        skipped = self._skip_special_tokens and not with_special_tokens
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=skipped, clean_up_tokenization_spaces=False
        )
        return text

    def _state(self, position: int) -> str:
        if position in self._fixed:
            return "newest" if position in self._newest else "fixed"
        return "draft" if position in self._drafts else "mask"

    def _runs(self, positions: Sequence[int]) -> Iterator[_Run]:
        """Runs of consecutive positions in one state, decoded as a whole: a character may take several tokens."""
        numbered = enumerate(positions)
        for (state, _), run in groupby(numbered, lambda pair: (self._state(pair[1]), pair[1] - pair[0])):
            yield _Run(state, [position for _, position in run])

    def _draw(self) -> None:
        if not self._redraws:
            return
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(self._window(), refresh=True)

    def _window(self) -> Text:
        """The styled text, cut to the lines around the newest tokens that fit the terminal."""
        shown, newest_end = Text(), 0
        for run in self._runs(range(self._num_positions)):
            if run.state == "mask":
                shown.append(MASK * len(run.positions), STYLES["mask"])
                continue
            known = self._fixed if run.state in ("fixed", "newest") else self._drafts
            shown.append(self._decode([known[position] for position in run.positions]), STYLES[run.state])
            if run.state == "newest":
                newest_end = len(shown)
        width, height = self._console.width, max(1, self._console.height - 1)
        lines = list(shown.wrap(self._console, width, overflow="fold"))
        newest_line = len(shown[:newest_end].wrap(self._console, width, overflow="fold"))
        first = max(0, min(newest_line - height // 2, len(lines) - height))
        return Text("\n").join(lines[first : first + height])
