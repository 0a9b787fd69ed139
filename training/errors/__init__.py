"""The one exception that a person is meant to read."""

from __future__ import annotations


class BadInput(ValueError):
    """Something that came from outside (a picture, a folder, a setting, a file) cannot be used.

    The message is one plain sentence: what was expected, what came, and which file or field it is about. It is shown
    as it stands in the node's error and on the terminal, so it never needs a traceback to be understood.
    """


def first_error(error) -> str:
    """The first complaint of a pydantic ValidationError as "field.path: reason (got value)", for one clear sentence."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    got = "" if isinstance(value, dict) or first["type"] == "missing" else f" (got {_short(value)})"
    return f"{field + ': ' if field else ''}{reason}{got}"


def _short(value) -> str:
    """A value as a sentence can hold it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:100]}..."


class TrainingFailed(RuntimeError):
    """A run that stopped because its numbers went wrong; the message says at which step, what, and what was kept."""
