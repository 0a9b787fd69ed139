"""Puts the numbers of a run into README.md and README.zh.md: python3 dev/write_numbers.py demo_output/report.json

Between the two marks of each file; nobody copies figures by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WORDS = {
    "README.md": {
        "text": (
            "From `report.json` of `python3 dev.py demo`: {held_out} held-out pictures that come with ComfyUI, at a "
            "third of their resolution; {train} pictures trained on, {parameters:.1f} million parameters, {epochs} "
            "epochs = {steps} steps, {minutes:.1f} minutes on {device}. Means over the pictures:"
        ),
        "head": ("", "PSNR (dB, more is better)", "SSIM (more is better)", "spectrum distance (less is better)"),
        "names": {"base": "base", "sharpening": "best fixed sharpening filter"},
        "steps": "refiner, {}",
        "cores": "{cores} CPU cores",
        "after": (
            "*Spectrum distance* sees missing detail; PSNR and SSIM do not, they reward softness. One step gives the "
            "more faithful picture, eight steps the one with the right amount of detail."
        ),
    },
    "README.zh.md": {
        "text": (
            "取自 `python3 dev.py demo` 的 `report.json`：{held_out} 张留出的图片（ComfyUI 自带），分辨率降到三分之一；"
            "训练用 {train} 张，{ten_thousands:.0f} 万参数，{epochs} 轮共 {steps} 步，"
            "在{device}上用时 {minutes:.1f} 分钟。各图片的平均值："
        ),
        "head": ("", "PSNR（dB，越高越好）", "SSIM（越高越好）", "频谱距离（越低越好）"),
        "names": {"base": "基底", "sharpening": "最佳固定锐化滤波器"},
        "steps": "精炼器，{} 步",
        "cores": " {cores} 核 CPU ",
        "after": ("*频谱距离*能看出细节的缺失，而 PSNR 和 SSIM 偏袒柔和的画面。一步更忠实，八步的细节量最合适。"),
    },
}


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
