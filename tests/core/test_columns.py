"""Tables in reports stay tables where text is read as Markdown."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "nodes" / "host" / "columns.py"
spec = importlib.util.spec_from_file_location("columns", FILE)
columns = importlib.util.module_from_spec(spec)
spec.loader.exec_module(columns)


def test_rows_become_a_code_block_and_sentences_do_not():
    text = "It fits.\n\npart   bytes\nMODEL  12\n\nOne  lonely line.\nThe end."
    wanted = "It fits.\n\n```\npart   bytes\nMODEL  12\n```\n\nOne  lonely line.\nThe end."
    assert columns.keep_columns(text) == wanted


def test_nothing_is_lost():
    text = "a  b\nc  d"
    assert columns.keep_columns(text).replace("```\n", "").replace("\n```", "") == text
