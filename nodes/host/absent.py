"""What a node gives where nothing came in."""

from __future__ import annotations

from typing import Any

__all__ = ["absent"]


def absent(sentence: str) -> Any:
    """For an output of which nothing came in: whoever uses it is not run, and the host shows `sentence` there.

    None would come out as an error of that node's own, such as an attribute that 'NoneType' has not.
    """
    from comfy_execution.graph_utils import ExecutionBlocker  # so that a host without it loads the nodes all the same

    return ExecutionBlocker(sentence)
