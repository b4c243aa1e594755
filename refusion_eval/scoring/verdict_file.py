"""The verdicts of `score` and `rescore` while the command is under way."""

import contextlib
from collections import UserDict
from pathlib import Path

from refusion_eval.errors import StoreError
from refusion_eval.scoring.judge import ERROR, Verdict
from refusion_eval.store.atomic_write import append_line
from refusion_eval.store.records import dump
from refusion_eval.untrusted import parse_json, read_plain
from refusion_eval.version import __version__


class VerdictFile(UserDict[str, Verdict]):
    """Verdicts by key, each written as soon as it is put in, so that a command that is killed and run again keeps it.

    The file lies beside the command's result as `RESULT.partial`, until `remove` is called after the result is written.
    The verdict "error" is not kept, because it says nothing about the text.

    Args:
        rule: what verdicts depend on besides their keys; those of another rule or version are not read.
    """

    def __init__(self, result: Path, rule: str) -> None:
        super().__init__()
        self._path = result.with_name(f"{result.name}.partial")
        self._scorer = f"{rule} {__version__}"
        for line in self._lines():
            with contextlib.suppress(ValueError, TypeError):  # a part of a line, left by a killed process
                scorer, key, (extracted, *words) = parse_json(line)
                if scorer == self._scorer and isinstance(extracted, str | None) and {str} >= set(map(type, words)):
                    self.data[key] = Verdict(extracted, *words)

    def _lines(self) -> list[bytes]:
        try:
            if self._path.is_symlink():
                raise OSError("it is a symbolic link, not a plain file")
            return read_plain(self._path).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read ({error.strerror or error}); remove it") from error

    def __setitem__(self, key: str, verdict: Verdict) -> None:
        if verdict.verdict != ERROR:
            append_line(self._path, dump([self._scorer, key, verdict]))
        self.data[key] = verdict

    def remove(self) -> None:
        """Removes the file: the result holds the verdicts now."""
        self._path.unlink(missing_ok=True)
