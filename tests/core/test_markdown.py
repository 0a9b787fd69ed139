"""Tables in reports are tables where text is read as Markdown, and on a terminal."""

from itertools import takewhile

import pytest

from training.errors.markdown import markdown_table
from training.memory.estimate import estimate_attention
from training.memory.machine import planned_machine
from training.memory.models import PRESETS
from training.memory.network_estimate import estimate_network
from training.memory.training_estimate import TrainingQuestion, estimate_training

ESTIMATES = {
    "attention": lambda: estimate_attention(PRESETS["SD1.5"], 768, 768, planned_machine(8)),
    "model": lambda: estimate_network("pixel-small", 64, 64, planned_machine(8)),
    "training": lambda: estimate_training(TrainingQuestion("pixel-small", 64, 64), planned_machine(8)),
}


@pytest.mark.parametrize("estimate", ["attention", "model", "training"])
def test_every_table_of_an_estimate_is_markdown(estimate):
    text = ESTIMATES[estimate]().report()
    lines = text.splitlines()
    rules = [k for k, line in enumerate(lines) if set(line) <= set("|-: ") and "---" in line]
    assert len(rules) >= 2 and "```" not in text
    for k in rules:
        cells = lines[k].count("|")
        assert lines[k - 2] == "" and lines[k - 1].count("|") == cells  # the head, behind an empty line
        rows = list(takewhile(lambda line: line.startswith("|"), lines[k - 1 :]))
        assert len(rows) > 2 and {row.count("|") for row in rows} == {cells}
        assert len({len(row) for row in rows}) == 1  # below each other on a terminal, too
    assert not [line for line in lines if "  " in line.strip() and not line.startswith("|")]


def test_a_bar_in_a_cell_does_not_end_it():
    assert markdown_table(["a", "b"], [["x|y", "1"]]) == ["| a   |   b |", "| --- | --: |", "| x/y |   1 |"]
