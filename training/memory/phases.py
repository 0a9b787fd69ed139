"""Memory as phases: what is held in each, beside the weights, and what that means for a machine."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors.markdown import markdown_table
from .estimate import in_words
from .machine import Machine, overhead
from .trace import WEIGHTS, Trace

__all__ = ["Phase", "Verdict", "judge", "table_of"]


@dataclass(frozen=True)
class Phase:
    """name: "sampling", "VAE decode". trace: what it holds. host: bytes that the host itself reckons, None: nothing."""

    name: str
    trace: Trace
    host: int | None = None

    @property
    def working(self) -> int:
        return self.trace.total

    def terms(self, weights: int, machine: Machine) -> dict[str, int]:
        """Every byte with its label; they sum to `needed`."""
        return {WEIGHTS: weights, **self.trace.terms, **overhead(machine, self.working)}

    def needed(self, weights: int, machine: Machine) -> int:
        return sum(self.terms(weights, machine).values())


@dataclass(frozen=True)
class Verdict:
    """fits: at least with weights offloaded. short: bytes missing with all weights on the device; negative: spare."""

    fits: bool
    short: int


def judge(working: int, weights: int, machine: Machine) -> Verdict:
    """working: bytes beside the weights, overhead not included. Weights can only be offloaded from a GPU."""
    short = weights + working + sum(overhead(machine, working).values()) - machine.free
    return Verdict(short <= (weights if machine.gpu else 0), short)


def table_of(columns: dict[str, dict[str, int]]) -> list[str]:
    """Lines of a table: one column for each entry, one row for each label, and the total in bytes."""
    labels = list(dict.fromkeys(label for terms in columns.values() for label in terms))
    rows = [
        [label, *(in_words(terms[label]) if label in terms else "" for terms in columns.values())] for label in labels
    ]
    totals = [sum(terms.values()) for terms in columns.values()]
    rows += [["total", *map(in_words, totals)], ["bytes", *(f"{total:,}" for total in totals)]]
    return markdown_table(["", *columns], rows)
