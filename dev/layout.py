"""How a workflow lies on the canvas: rows of groups of columns of nodes, with notes beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A node of the API file; a height where it needs room for a picture or text that comes when it runs."""

    id: int
    height: int | None = None
    width: int | None = None
    collapsed: bool = False

    def as_data(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class Note:
    """A yellow note, in Markdown."""

    title: str
    text: str
    height: int = 200
    width: int = 330

    def as_data(self) -> dict[str, Any]:
        return {"title": self.title, "note": self.text, "height": self.height, "width": self.width}


@dataclass(frozen=True)
class Group:
    title: str
    columns: list[list[Node | Note]]


Layout = list[list[Group]]

READ_ME = "Read me"

PICTURE = 320  # holds what comes when a node has run
