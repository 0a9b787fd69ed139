"""Tables for people: Markdown, whose columns also stand below each other on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["markdown_table"]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table. left: so many columns are aligned to the left, the others to the right, as numbers are.

    A bar within a cell becomes a slash, for it would end the cell. Markdown wants an empty line before and after.
    """
    cells = [[cell.replace("|", "/") for cell in line] for line in (head, *rows)]
    widths = [max(3, *(len(line[k]) for line in cells)) for k in range(len(head))]
    rule = ["-" * width if k < left else "-" * (width - 1) + ":" for k, width in enumerate(widths)]
    sides = ["<" if k < left else ">" for k in range(len(head))]
    padded = [
        [f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in cells
    ]
    return [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]
