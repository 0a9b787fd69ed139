"""Subsets of a folder of pictures: those below `10_fox` have the weight 10, as kohya's training scripts name them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ....training.data.pairs import check_subsets
from ....training.errors import BadInput

__all__ = ["subset_of", "subset_weights"]

_NAMED = re.compile(r"[0-9]+_[^/]*")


def subset_of(name: str) -> str:
    """The uppermost folder of a picture's name where it begins with a number and `_`, else "": the weight 1."""
    folder, slash, _ = name.partition("/")
    return folder if slash and _NAMED.fullmatch(folder) else ""


def subset_weights(names: Iterable[str]) -> dict[str, float]:
    """{subset: weight} of pictures. BadInput where there is none, or a weight is out of range."""
    subsets = sorted({subset for name in names if (subset := subset_of(name))})
    if not subsets:
        raise BadInput(
            "subset_weights needs a folder with subfolders that begin with a number and '_', such as 10_fox for the "
            "weight 10; there is none with pictures."
        )
    return check_subsets({subset: float(subset.partition("_")[0]) for subset in subsets})
