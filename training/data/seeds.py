"""Random choices as functions of a name and a number, so that a run can be taken up at any place."""

from __future__ import annotations

import hashlib

import torch


def seeded_generator(seed: int, kind: str, index: int) -> torch.Generator:
    """A CPU generator that depends on its three arguments alone.

    Python's own `hash` changes from process to process, and one long-lived generator would have to be wound forward
    on resume; a digest of the three values does neither.
    """
    digest = hashlib.sha256(f"{seed}/{kind}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
