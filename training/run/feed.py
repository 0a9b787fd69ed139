"""The micro-batches of one rank, the next of them fetched while the device computes, and how long was waited."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

__all__ = ["BatchFeed"]


class BatchFeed:
    """An iterator over `batches`. failure: what the loader failed with when it was asked ahead; raised in its turn."""

    def __init__(self, batches: Generator[dict[str, Any], None, None]):
        self._batches = batches
        self._next: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self._waited = 0.0

    def __iter__(self) -> BatchFeed:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if self._next is None:
            return self._fetch()
        batch, self._next = self._next, None
        return batch

    def fetch_ahead(self) -> None:
        """Have the next batch here, and on its way to the device, before it is asked for."""
        try:
            self._next = self._fetch()
        except Exception as error:
            self.failure = error

    def waited(self) -> float:
        """Seconds spent on fetching since this was asked last."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the loader's thread or processes."""
        self._batches.close()

    def _fetch(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self._waited += time.perf_counter() - began
