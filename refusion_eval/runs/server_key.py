"""The key of a server, which is kept out of every text."""

import base64
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from refusion_eval.errors import ConfigError

# How a character may stand in a text: after backslashes, as JSON, Python, URLs and HTML write it.
_ESCAPES = (
    *(r"\\*{char}", r"\\+u(?:0000)?00{code:02x}", r"\\+u\{{0*{code:x}\}}", r"\\+x{code:02x}", r"\\+{code:03o}"),
    *(r"%(?:25)*{code:02x}", r"&(?:amp;)*#x0*{code:x};", r"&(?:amp;)*#0*{code};"),
)


class Key:
    """A key in an environment variable; ConfigError if that holds none. Without a variable there is no key."""

    def __init__(self, variable: str) -> None:
        self._key = os.environ.get(variable, "").strip() if variable else ""
        if variable and not (self._key.isascii() and self._key.isprintable() and self._key):
            raise ConfigError(f"api_key_env={variable}: there is no such variable, or it holds no key of plain ASCII")
        forms = ("|".join(_ESCAPES).format(char=re.escape(char), code=ord(char)) for char in self._key)
        codes = ("".join(f"(?:{form})" for form in forms), self._key.encode().hex(), *_in_base64(self._key.encode()))
        self._secret = re.compile("|".join(codes), re.IGNORECASE)

    def headers(self, *, of_azure: bool) -> dict[str, str]:
        """The header of a request that carries the key."""
        named = {"api-key": self._key} if of_azure else {"Authorization": f"Bearer {self._key}"}
        return named if self._key else {}

    def clean(self, text: str) -> str:
        """The text with a placeholder for the key, in whatever escapes a server writes it."""
        return self._secret.sub("[API key]", text) if self._key else text

    def cleaned(self, value: Any) -> Any:
        """A value of JSON with clean texts; nested no deeper than `parse_json` allows."""
        if isinstance(value, Mapping):
            return {self.clean(name): self.cleaned(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.cleaned(inner) for inner in value]
        return self.clean(value) if isinstance(value, str) else value


def _in_base64(key: bytes) -> Iterator[str]:
    """Patterns of a key in base64, behind each number of bytes, as far as its own bits decide the letters."""
    for before in range(3 if key else 0):
        coded = base64.b64encode(bytes(before) + key)[(8 * before + 5) // 6 : 8 * (before + len(key)) // 6].decode()
        yield f"(?-i:{coded.replace('+', '[+-]').replace('/', '[/_]')})"
