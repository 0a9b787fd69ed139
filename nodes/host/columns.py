"""Reports with columns, for the places in the graph that read text as Markdown."""

from __future__ import annotations

from itertools import groupby

__all__ = ["keep_columns"]


def keep_columns(text: str) -> str:
    """`text` with its tables as code blocks: Preview Any would run lines aligned by spaces together into a paragraph.

    A table is at least two lines in a row that have two spaces between words.
    """
    parts = []
    for is_row, lines in groupby(text.splitlines(), key=lambda line: "  " in line.strip()):
        block = list(lines)
        parts += ["```", *block, "```"] if is_row and len(block) > 1 else block
    return "\n".join(parts)
