"""What our nodes note on a model that they make: what it was made of, and which NaN guard watches it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MadeOnce", "Provenance", "guard_of", "provenance_of"]


@dataclass(frozen=True)
class Provenance:
    """What a selector has made a VAE, CLIP or MODEL of; each adds what its "default" needs to find the way back.

    source: the object that came into the first selector of a chain. On VAE and CLIP it is `ref2v_provenance` of the
    module that is called, so that it survives what others do with the host's object; on a MODEL it is an attachment.
    """

    source: Any

    def __deepcopy__(self, _memo: dict) -> Provenance:
        return self  # a copy of the module comes from the same source, which is not copied with it


def provenance_of(module: torch.nn.Module) -> Any:
    """The Provenance that a selector has noted on the module of a VAE or CLIP, or None."""
    return getattr(module, "ref2v_provenance", None)


def guard_of(module: torch.nn.Module) -> Any:
    """The NaN guard around the module of a VAE or CLIP, or None. `unwrap(host object)` gives that object without it,
    `wrap(host object)` puts it around another.
    """
    return getattr(module, "ref2v_guard", None)


class MadeOnce:
    """What is made of a source, one for all who ask with the same key; gone when nobody uses it, or the source is."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref]] = weakref.WeakKeyDictionary()

    def get(self, source: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What is there for `source` and `key`, else `make()`."""
        made = self._made.setdefault(source, {})
        value = made.get(key, lambda: None)()
        if value is None:
            value = make()
            made[key] = weakref.ref(value)
        return value
