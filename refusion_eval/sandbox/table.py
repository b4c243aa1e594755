"""Objects that the judge and the guest both know by number, and values that hold such objects."""

# Immutable values are copied. A container that can be changed has a number and one copy on each side, and every message
# carries the new contents of those that have changed since the last one. So two names for one list stay two names for
# one list, and what either side does to it in place, however deep, the other side sees.

import builtins
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any
from zoneinfo import ZoneInfo

from refusion_eval.sandbox import wire
from refusion_eval.sandbox.containers import BOUNDS, BY_TAG, KINDS, LATE, VIEW_TAGS, VIEWS, frozen, same
from refusion_eval.sandbox.wire import WireError

_MAX_NAME_CHARS = 40
_MAX_DEPTH = 100  # of tuples and frozen sets
ONLY_OURS = 2  # references to an object that nobody else holds: one, and that of the count's argument


class ObjectTable:
    """One side's objects by number."""

    # `describe` returns a packed value for an object that is not data; it may call `add`, or raise to refuse. `build`
    # makes the object that an entry of the other side describes, from its tag and its other fields.
    def __init__(self, sign: int, describe: Callable[[Any], Any], build: Callable[[str, list[Any]], Any]) -> None:
        self._sign = self._next = sign
        self._describe, self._build = describe, build
        self._objects: dict[int, Any] = {}
        self._number_of: dict[int, int] = {}
        self._contents: dict[int, tuple[str, list[Any]]] = {}  # of containers, as both sides know them
        self._entries: list[list[Any]] = []
        self._filling = False
        self.mentioned: Counter[int] = Counter()
        self.newest = 0

    def number_of(self, value: Any) -> int | None:  # None if the other side does not know it
        return self._number_of.get(id(value))

    def pack_all(self, values: Iterable[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Pack values. Returns them with the entries that the other side needs first: new objects, changed contents."""
        entries: list[list[Any]] = []
        self._entries = entries
        if not self._filling:
            for number, (tag, _) in self._contents.items():
                if (items := self._changed(number)) is not None:
                    self._note(number, tag, None, None, items)
        packed = [self.pack(value) for value in values]
        for number, tag, *rest in entries:  # grows while containers are found in containers
            if tag in BY_TAG:
                rest[-1] += [self.pack(item) for item in self._contents[number][1]]
        return packed, entries

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Pack one value of a message that `pack_all` has begun."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if (packer := wire.PACKERS.get(kind)) is not None:
            return packer(value)
        if (number := self._number_of.get(id(value))) is not None:
            return ["@", number]
        if depth < _MAX_DEPTH and (kind is tuple or kind is frozenset):
            return ["t" if kind is tuple else "z", *[self.pack(item, depth + 1) for item in value]]
        if kind in KINDS:
            return self.add_container(value, kind, None)
        if kind is range or kind is slice:
            bounds = (value.start, value.stop, value.step)
            return ["r" if kind is range else "sl", *[self.pack(bound, depth + 1) for bound in bounds]]
        if kind is ZoneInfo and value.key:
            return ["zi", value.key]
        if kind in VIEW_TAGS:
            return [VIEW_TAGS[kind], *[self.pack(item, depth + 1) for item in value]]
        if kind.__module__ == "builtins" and issubclass(kind, BaseException) and not value.__dict__:
            return ["X", kind.__name__, [self.pack(item, depth + 1) for item in value.args]]
        if value is Ellipsis or value is NotImplemented:
            return ["E" if value is Ellipsis else "N"]
        if kind is type and vars(builtins).get(name := str(value.__name__)) is value:
            return ["T", name]
        return self._describe(value)

    def add_container(self, value: Any, base: type, kind: Any) -> list[Any]:
        """Begin to share a container; `kind` is its packed class where that is a subclass of `base`."""
        container = KINDS[base]
        option = self.pack(container.option(value))
        number = self._number(value)
        self._note(number, container.tag, kind, option, container.items(value))
        return ["@", number]

    def add(self, value: Any, *entry: Any) -> list[Any]:
        """Begin to share an object that is not a container; its entry is a tag and packed fields."""
        number = self._number(value)
        self._entries.append([number, *entry])
        return ["@", number]

    def _number(self, value: Any) -> int:
        self._keep(number := self._next, value)
        self._next += self._sign
        return number

    def _keep(self, number: int, value: Any) -> None:
        self._objects[number] = value
        self._number_of[id(value)] = number

    def _note(self, number: int, tag: str, kind: Any, option: Any, items: list[Any]) -> None:
        self._contents[number] = tag, items
        self._entries.append([number, tag, kind, option, []])  # `pack_all` adds the packed items

    def unpack_all(self, packed: list[Any], entries: list[list[Any]]) -> list[Any]:
        """Take up the entries of a message and return its values; WireError for what `pack_all` does not make."""
        filling = self._filling
        try:
            to_fill = [(number, tag, rest[-1]) for number, tag, *rest in entries if self._take_up(number, tag, rest)]
            self._filling = True  # a container that is half filled is no news
            to_fill.reverse()  # what is inside another comes behind it, and goes first, because hashes may need it
            for number, tag, contents in sorted(to_fill, key=lambda item: item[1] in LATE):
                items = [self.unpack(item) for item in contents]
                container = BY_TAG[tag][1]
                container.fill(self._objects[number], items)
                self._contents[number] = tag, container.items(self._objects[number])
            return [self.unpack(item) for item in packed]
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise WireError(f"malformed value: {type(error).__name__}") from None
        finally:
            self._filling = filling

    def _take_up(self, number: Any, tag: Any, rest: list[Any]) -> bool:
        """Make a new object; returns whether it is a container, which is to be filled."""
        shared = self._contents[number][0] if number in self._contents else None
        if type(number) is not int or (number in self._objects and shared != tag):
            raise WireError("malformed entry")
        if shared is None:
            if number * self._sign >= 0:
                raise WireError("a number of this side")
            if tag in BY_TAG:
                base, container = BY_TAG[tag]
                kind, option = rest[:2]
                value = container.start(base, base if kind is None else self.unpack(kind), self.unpack(option))
            else:
                value = self._build(tag, rest)
            self._keep(number, value)
            self.newest = number
        return tag in BY_TAG

    def unpack(self, message: Any, depth: int = 0) -> Any:
        """Turn a packed value into the value, as `unpack_all`, whose errors it leaves as they are."""
        if isinstance(message, str):  # Python keeps one object for all constants of a source that look like names
            return sys.intern(message) if len(message) <= _MAX_NAME_CHARS and message.isidentifier() else message
        if message is None or isinstance(message, bool | int | float):
            return message
        if not isinstance(message, list) or depth > _MAX_DEPTH + 2:
            raise WireError("malformed value")
        tag, *items = message
        if tag == "@":
            self.mentioned[items[0]] += 1
            return self._objects[items[0]]
        if tag in ("t", "z", "r", "sl") or tag in VIEWS:
            parts = [self.unpack(item, depth + 1) for item in items]
            if tag in VIEWS:
                return VIEWS[tag][1](parts)
            return tuple(parts) if tag == "t" else frozen(parts) if tag == "z" else BOUNDS[tag](*parts)
        if tag in ("ts", "ti") and type(items[-1]) is list:
            items[-1] = self.unpack(items[-1], depth + 1)
        if tag in ("n", "zo"):
            return self._build(tag, items)
        if tag == "X":
            return exception_of(vars(builtins)[items[0]], [self.unpack(item, depth + 1) for item in items[1]])
        return wire.unpack(tag, items)

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._number_of[id(self._objects.pop(number))]
            self._contents.pop(number, None)

    def forget_unused(self, kept: Container[int]) -> list[int]:
        """Stop sharing what nobody on this side can see any more, except some numbers; returns what was forgotten."""
        forgotten: list[int] = []
        for number in [] if self._filling else list(self._objects):
            unused = sys.getrefcount(self._objects[number]) <= ONLY_OURS and number not in kept
            # The other side has to hear of changes first.
            if unused and (number not in self._contents or self._changed(number) is None):
                forgotten.append(number)
                self.forget([number])
        return forgotten

    def _changed(self, number: int) -> list[Any] | None:
        """Contents of a container; None if the other side knows them."""
        tag, before = self._contents[number]
        items = BY_TAG[tag][1].items(self._objects[number])
        return None if same(items, before) else items


def exception_of(kind: Any, arguments: list[Any]) -> BaseException:
    """An exception of a builtin class; TypeError if it is not a class of exceptions."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError("not an exception")
    try:
        return kind(*arguments)
    except TypeError:  # UnicodeDecodeError and its like are particular
        return Exception(*arguments)
