"""The main job on real input: train a refiner on the host's template pictures, then refine one with it.

`python3 dev.py demo` runs this with the Python of .dev/venv. All goes through the host's queue, as from a browser.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.host.client import HostDied, Result  # noqa: E402
from tests.host.server import HostServer, has_gpu  # noqa: E402
from training.run.report.labels import MEASURES, measure_label, row_label  # noqa: E402

BASE, RESULTS = ROOT / ".dev" / "base", ROOT / "demo_output"
PICTURES = "ref2v_demo"  # folder in input/ that the workflow reads
SMALLEST_SIDE = 256


# --------------------------------------------------------------------------------------------------------- the pictures


def template_folders() -> list[Path]:
    """Where the packages that the host requires keep the pictures of its template browser."""
    places = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    return sorted(folder for place in places for folder in place.glob("comfyui_workflow_templates_media_*/templates"))


def copy_pictures(folder: Path) -> int:
    """Put every still template picture of at least 256 px into `folder`, as it is; returns how many."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    count = 0
    for templates in template_folders():
        for path in sorted(templates.glob("*.webp")):
            with Image.open(path) as picture:
                still = not getattr(picture, "is_animated", False)
                if still and min(picture.size) >= SMALLEST_SIDE:
                    shutil.copy2(path, folder / path.name)
                    count += 1
    return count


def copy_asked_for(prompt: dict, folder: Path):
    """Put the pictures that a workflow loads beside `folder`: the host offers only what lies in input/ itself."""
    for entry in prompt.values():
        if entry["class_type"] == "LoadImage":
            shutil.copy2(folder / entry["inputs"]["image"], folder.parent)


# -------------------------------------------------------------------------------------------------------- the workflows


def read_workflow(name: str) -> dict:
    return json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))


def run_folder(prompt: dict) -> Path:
    """Where the training node of a prompt writes."""
    (name,) = (entry["inputs"]["run_name"] for entry in prompt.values() if "run_name" in entry["inputs"])
    return BASE / "output" / "refiners" / name


def run_workflow(host: HostServer, name: str, prompt: dict) -> Result:
    """Queue a prompt and show its progress, one bar for each node that reports any."""
    from tqdm import tqdm

    titles = {node: entry.get("_meta", {}).get("title", entry["class_type"]) for node, entry in prompt.items()}
    bars: dict[str, tqdm] = {}

    def show(kind: str, data: dict):
        if kind == "executing":  # what is done must not count the seconds on
            for node, bar in bars.items():
                if node != data["node"]:
                    bar.close()
        if kind == "text" and data["node"] in bars:
            bars[data["node"]].set_postfix_str(data["text"])
        if kind != "progress" or data["node"] is None:
            return
        node, total = data["node"], data["max"]
        if node not in bars or bars[node].total != total:
            if node in bars:
                bars[node].close()
            bars[node] = tqdm(total=total, desc=titles.get(node, node), dynamic_ncols=True, mininterval=0.5)
        bars[node].update(data["value"] - bars[node].n)

    print(f"\n{name}.json")
    try:
        result = host.run(prompt, timeout=3600, on_event=show)
    finally:
        for bar in bars.values():
            bar.close()
    if result.status != "success":
        sys.exit(f"\n{name}.json ended as '{result.status}': {result.error}")
    print(f"done in {result.seconds:.0f} s")
    return result


# ---------------------------------------------------------------------------------------------------------- the results


def gather(run: Path, host: HostServer, refined: Result) -> dict:
    """Copy the run's files and the refined pictures into demo_output/; returns the report."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    for path in run.iterdir():
        if path.is_file() and path.suffix:  # all but the lock
            shutil.copy2(path, RESULTS / path.name)
    for picture in host.pictures(refined):
        three = picture.width > 2 * picture.height  # base, refined and original side by side
        picture.save(RESULTS / ("compare.png" if three else "refined.png"))
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def print_table(rows: dict[str, dict[str, float]]):
    """Rows of named numbers, aligned."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    first = max(len(row_label(name)) for name in rows)
    widths = [max(len(MEASURES[name].short), 8) for name in columns]
    heads = (f"{MEASURES[name].short:>{width}}" for name, width in zip(columns, widths, strict=True))
    print(" " * first, *heads, sep="  ")
    for name, row in rows.items():
        cells = [
            f"{row[key]:>{width}.3f}" if key in row else " " * width for key, width in zip(columns, widths, strict=True)
        ]
        print(f"{row_label(name):<{first}}", *cells, sep="  ")


def print_report(report: dict):
    """The numbers of training/run/report/report.py."""
    training, evaluation = report["training"], report["evaluation"]
    print(f"\nMeans over {evaluation['pairs']} {evaluation['on']}:")
    print_table(evaluation["measures"])
    print(f"({'; '.join(measure_label(name) for name in evaluation['measures']['base'])})")
    losses = "  ".join(f"{sigma}: {loss:.3f}" for sigma, loss in evaluation["loss_per_sigma"].items())
    print(f"\nLoss at each sigma:  {losses}")
    size, steps, seconds = report["parameters"] / 1e6, training["steps"], training["seconds"]
    print(f"{size:.2f} M parameters, {steps} steps, {seconds:.0f} s of training")


def main():
    began = time.perf_counter()
    count = copy_pictures(BASE / "input" / PICTURES)
    print(f"{count} template pictures are in {BASE / 'input' / PICTURES}")
    train, refine = read_workflow("train_refiner"), read_workflow("refine")
    copy_asked_for(refine, BASE / "input" / PICTURES)
    run = run_folder(train)
    shutil.rmtree(run, ignore_errors=True)  # a finished run would be reused, and here a person wants to see one trained
    with HostServer(Path(os.environ["REF2V_HOST"]), base=BASE, cpu=not has_gpu()) as host:
        run_workflow(host, "train_refiner", train)
        refined = run_workflow(host, "refine", refine)
        report = gather(run, host, refined)
    print_report(report)
    print(f"\n{time.perf_counter() - began:.0f} s in all. Everything is in {RESULTS}:")
    print("  " + "  ".join(sorted(path.name for path in RESULTS.iterdir())))


if __name__ == "__main__":
    try:
        main()
    except HostDied as died:
        sys.exit(str(died))
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
