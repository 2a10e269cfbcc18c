"""How a field is refused: with its name, its value, and what would be right."""

import difflib
import typing


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """ "; did you mean ...?" with the valid names closest to a wrong one, or all of them when none is close."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; valid names: {', '.join(names)}"


def at_least(config: typing.Any, least: float, *names: str) -> None:
    """Refuse fields below ``least``; None passes.

    Raises:
        ValueError: one is.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def one_of(config: typing.Any, name: str, valid: typing.Iterable[str]) -> None:
    """Refuse a field that is none of the words it may be.

    Raises:
        ValueError: it is not; the nearest words are given.
    """
    value = getattr(config, name)
    if value not in valid:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(valid)}{nearest(str(value), valid)}")
