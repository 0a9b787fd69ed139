"""Puts the numbers of a run into README.md and README.zh.md: python3 dev/write_numbers.py demo_output/report.json

Between the two marks of each file; nobody copies figures by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What is said around the numbers, by file. Not here: sources hold nothing that a Windows console cannot show.
WORDS = json.loads((ROOT / "dev" / "numbers_words.json").read_text(encoding="utf-8"))


def section(report: dict, words: dict) -> str:
    """The text between the marks, in the language of `words`."""
    training, evaluation, machine = report["training"], report["evaluation"], report["machine"]
    device = words["cores"].format(**machine) if machine["device"] == "cpu" else machine["device"]
    text = words["text"].format(
        **report["dataset"],
        parameters=report["parameters"] / 1e6,
        ten_thousands=report["parameters"] / 1e4,
        epochs=training["epochs"],
        steps=training["steps"],
        minutes=training["seconds"] / 60,
        device=device,
    )
    lines = [text, "", _row(words["head"]), _row(["---"] * 4)]
    for name, row in evaluation["measures"].items():
        steps = re.fullmatch(r"(\d+) steps?", name)
        shown = words["names"].get(name, name)
        if steps:
            shown = words["steps"].format(name if words is WORDS["README.md"] else steps[1])
        lines.append(_row([shown, f"{row['psnr']:.2f}", f"{row['ssim']:.3f}", f"{row['spectrum']:.2f}"]))
    return "\n".join([*lines, "", words["after"]])


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def main(path: str):
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    for name, words in WORDS.items():
        file = ROOT / name
        before, begin, rest = file.read_text(encoding="utf-8").partition("<!-- numbers: begin -->\n")
        _, end, after = rest.partition("<!-- numbers: end -->")
        file.write_text(f"{before}{begin}{section(report, words)}\n{end}{after}", encoding="utf-8")
        print(f"{name}: {len(report['evaluation']['measures'])} rows")


if __name__ == "__main__":
    main(sys.argv[1])
