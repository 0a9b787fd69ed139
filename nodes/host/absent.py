"""What a node gives where nothing came in."""

from __future__ import annotations

from typing import Any

__all__ = ["absent", "absent_where_none"]


def absent(sentence: str) -> Any:
    """For an output of which nothing came in: whoever uses it is not run, and the host shows `sentence` there.

    None would come out as an error of that node's own, such as an attribute that 'NoneType' has not.
    """
    from comfy_execution.graph_utils import ExecutionBlocker  # so that a host without it loads the nodes all the same

    return ExecutionBlocker(sentence)


def absent_where_none(node: str, **outputs: Any) -> list[Any]:
    """The outputs of a node of that name that gives its inputs back, changed: absent those that did not come."""
    return [
        absent(f"The {node} got no {name}, so it has none to give: connect one to its input {name}.")
        if value is None
        else value
        for name, value in outputs.items()
    ]
