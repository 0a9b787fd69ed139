"""Sampling with *Select Model Precision* at default against sampling without it, in turns, on the real host.

The time of the node is in it. "default, restored" is the worst case: an earlier selector chose BF16 and another node
made a clone, so default cannot hand the loader's object on and makes a new one, which the host loads anew.

    python -m benchmarks.sampling_precision [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.results import machine, report, spread, table

ROOT = Path(__file__).resolve().parents[1]
CHILD = Path(__file__).with_name("sampling_in_host.py")
HOST = Path(os.environ.get("REF2V_HOST") or os.environ.get("COMFYUI_PATH") or ROOT / ".dev" / "host" / "ComfyUI")
GOAL = 1.02


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """{way: seconds of each repetition}, from a process of the host."""
    settings = {"pairs": options.pairs, "steps": options.steps, "size": options.size // 8}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        env = {**os.environ, "REF2V_BENCHMARK": json.dumps(settings)}
        ran = subprocess.run([sys.executable, str(CHILD), str(options.host), str(out)], env=env, stderr=subprocess.PIPE)
        if not out.is_file():
            sys.exit(f"The host ended with code {ran.returncode}:\n{ran.stderr.decode(errors='replace')[-3000:]}")
        found = json.loads(out.read_text())["seconds"]
    if "failed" in found:
        sys.exit(found["failed"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=Path, default=HOST, help="folder of the host's main.py (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="repetitions of each")
    parser.add_argument("--steps", type=int, default=20, help="sampling steps")
    parser.add_argument("--size", type=int, default=256, help="side of the picture in pixels")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    seconds = measure(options)
    none = seconds.pop("none")
    ratios = {name: [a / b for a, b in zip(values, none, strict=True)] for name, values in seconds.items()}
    rows = [[f"{name} / none", spread(each), f"<= {GOAL}" * (name == "default")] for name, each in ratios.items()]
    rows += [[f"{name}, s", spread(values, 2), ""] for name, values in {"none": none, **seconds}.items()]
    met = median(ratios["default"]) <= GOAL
    body = "\n\n".join(
        [
            "### Sampling with Select Model Precision at default",
            f"A UNet of the SD 1.5 shape with one level (random weights), {options.size} px, {options.steps} steps, "
            f"CFG, {options.pairs} repetitions in turns, median (lowest..highest). All latents are equal to the bit.",
            table(["", "measured", "goal"], rows),
            f"The goal is {'met' if met else 'NOT met'}. {machine()}",
        ]
    )
    report("sampling-precision", body, write=options.write)


if __name__ == "__main__":
    main()
