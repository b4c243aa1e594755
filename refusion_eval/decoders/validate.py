"""Checks that the settings of every decoder share; each failure is one sentence with the offending numbers."""

from collections.abc import Sequence

from refusion_eval.errors import ConfigError


def require_integer(decoder: str, name: str, value: object, at_least: int) -> None:
    """Raises ConfigError unless the value is an int (not a bool) of at least the given size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{decoder}: {name} is {value!r}; it must be a whole number of at least {at_least}")


def require_number(decoder: str, name: str, value: object, low: float, high: float = float("inf")) -> None:
    """Raises ConfigError unless the value is a finite number with low <= value <= high."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= float(value) <= high or float(value) == float("inf"):  # type: ignore[arg-type]
        bounds = f"of at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ConfigError(f"{decoder}: {name} is {value!r}; it must be a number {bounds}")


def require_flags(decoder: str, **flags: object) -> None:
    """Raises ConfigError unless every value is a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{decoder}: {name} is {value!r}; it must be true or false")


def require_choice(decoder: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raises ConfigError unless the value is one of the choices."""
    if value not in choices:
        known = ", ".join(str(choice) for choice in choices)
        raise ConfigError(f"{decoder}: {name} is {value!r}; choose one of {known}")


def require_token_ids(decoder: str, name: str, values: Sequence[object]) -> None:
    """Raises ConfigError unless every value is a possible token id."""
    for value in values:
        require_integer(decoder, name, value, at_least=0)
