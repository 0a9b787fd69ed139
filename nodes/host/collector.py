"""The garbage collector kept out of the host's list of loaded models while the host works on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collector"]


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect, then hold the collector back until the block ends.

    To be used around `unload_all_models` and `free_memory` of the host. They walk over the list of loaded models by
    index, and a model that dies takes its own entry out of it. One that only the collector can free (a reference cycle)
    may die in the middle of that walk, which then ends in an IndexError or unloads the wrong model.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
