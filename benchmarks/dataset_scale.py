"""A dataset of 100,000 pairs: what a kill costs its build, and how long and how much memory a training start takes.

The pairs are drawn and tiny (4 x 8 x 8 cells, a caption of 4 x 16 numbers for every fourth), since none of the four
figures depends on how large a latent is. Each figure is that of a process of its own; opening is the median of five.

    python -m benchmarks.dataset_scale [--pairs 100000] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.problem import SD15
from benchmarks.results import machine, report, table
from training.data.batches import BatchSource
from training.data.shards import DatasetWriter, RefinerDataset
from training.run.watch.leak_watch import memory_of

ROOT = Path(__file__).resolve().parent.parent
TEXT = {"tokens": 4, "dim": 16, "pooled": 0, "fingerprint": "drawn"}
PAIRS, BATCH = 100_000, 16
MiB = 2**20


def build(folder: Path, pairs: int, die_at: int | None = None) -> int:
    """Draw and write the dataset; returns how many pairs were there already. die_at: end the process at that pair."""
    noise = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
    texts = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    options = {"context": TEXT, "empty": {"context": texts}, "dtype": "float16", "resume": "drawn"}
    with DatasetWriter(folder, latent=SD15, vae=None, base={"kind": "drawn"}, **options) as writer:
        for i in range(writer.resumed, pairs):
            if i == die_at:
                os._exit(9)
            width = 8 - i % 3
            z = (noise + i / pairs)[:, :, :width]
            writer.add(
                z, z * 0.9, source=f"folder/picture-{i:06d}.png", sha256=f"{i:064x}", group=f"picture-{i:06d}",
                split="held_out" if i % 100 == 0 else "train", caption=f"a drawn picture, number {i // 4}",
                context=texts * (1 + i // 4 / pairs),
            )  # fmt: skip
        return writer.resumed


def start(folder: Path, batches: int) -> dict[str, float]:
    """What a training start on the dataset takes, and its memory after so many batches."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    before, began = memory_of(cpu).get("resident", 0), time.perf_counter()
    data = RefinerDataset.open(folder)
    opened = time.perf_counter()
    read = data.verify()
    verified = time.perf_counter()
    source = BatchSource(data, batch_size=BATCH, accumulation=2)
    source[0]
    first, after_first = time.perf_counter(), memory_of(cpu).get("resident", 0)
    for k in range(1, batches):
        source[k]
    return {
        "pairs": len(data.pairs), "shards": len(data.info["shards"]), "shards_read": len(read),
        "open": opened - began, "verify": verified - opened, "first_batch": first - began,
        "batches_a_second": batches / (time.perf_counter() - first),
        "open_bytes": after_first - before, "grown_bytes": memory_of(cpu).get("resident", 0) - after_first,
    }  # fmt: skip


def in_a_process(call: str, *, killed: bool = False) -> dict | int:
    """`call`, a function of this module with its arguments, in a process of its own; its answer."""
    program = "import json; from pathlib import Path; from benchmarks.dataset_scale import build, start\n"
    program += f"print(json.dumps({call}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if killed and run.returncode == 9:
        return 0
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["REF2V_CACHE"] = f"{place}/cache"
        folder, small, killed_at = Path(place) / "pairs", Path(place) / "small", asked.pairs * 6 // 10
        began = time.perf_counter()
        in_a_process(f"build(Path({str(folder)!r}), {asked.pairs}, {killed_at})", killed=True)
        resumed = in_a_process(f"build(Path({str(folder)!r}), {asked.pairs})")
        seconds = time.perf_counter() - began
        build(small, 1000)
        time.sleep(2.1)  # what was written this moment is read through once
        batches = 2 * asked.pairs // BATCH
        starts = [in_a_process(f"start(Path({str(folder)!r}), {n})") for n in (1, 1, 1, 1, batches)]
        little = in_a_process(f"start(Path({str(small)!r}), 100)")
    last = starts[-1]
    rows = [
        ["build, killed at 60 % and gone on with", f"{seconds:.0f} s"],
        ["of its pairs kept after the kill", f"{resumed:,} of {killed_at:,}"],
        ["index opens", f"{median(row['open'] for row in starts):.3f} s (goal 2 s)"],
        ["shards read through at the first start", f"{starts[0]['shards_read']} of {last['shards']}"],
        ["shards read through at the next", f"{last['shards_read']} of {last['shards']} (goal 0)"],
        ["first batch, from opening on", f"{median(row['first_batch'] for row in starts):.3f} s (goal 5 s)"],
        ["memory of the open dataset and its order", f"{last['open_bytes'] / MiB:.0f} MiB"],
        ["the same of 1,000 pairs", f"{little['open_bytes'] / MiB:.0f} MiB"],
        [f"growth over {batches:,} batches (two epochs)", f"{last['grown_bytes'] / MiB:.1f} MiB"],
        [f"batches of {BATCH} a second", f"{last['batches_a_second']:.0f}"],
    ]
    body = f"{table([f'{asked.pairs:,} pairs', ''], rows)}\n\n{machine()}"
    report("dataset scale", body, write=asked.write)


if __name__ == "__main__":
    main()
