"""JSON that a person wrote."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["RepeatedKey", "parse_json"]


class RepeatedKey(ValueError):
    """One object names a key twice. The message says which, as the end of a sentence."""


def parse_json(text: str) -> Any:
    """As `json.loads`, also behind a byte order mark, which editors on Windows put in front.

    Raises RepeatedKey where the later of two values would win silently, ValueError or RecursionError for what is no
    JSON.
    """
    return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise RepeatedKey(f"{key!r} stands twice in one object, and only one of them can be meant")
        values[key] = value
    return values
