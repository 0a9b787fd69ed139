"""A VAE with a dtype for each half against the host's own VAE at the dtype of its decoder, and the memory that it adds.

SD's VAE (83.7 M parameters, random weights) in the real host, which a child process boots (vae_precision_in_host.py).
The two decode one latent in turns, and their pictures must be equal to the bit before the clock starts.

    python -m benchmarks.vae_precision [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import machine, report, spread, table

GOAL = 1.02
ROOT = Path(__file__).resolve().parents[1]
HOST = Path(os.environ.get("REF2V_HOST") or os.environ.get("COMFYUI_PATH") or ROOT / ".dev" / "host" / "ComfyUI")
CHILD = Path(__file__).with_name("vae_precision_in_host.py")


def measure(host: Path, pairs: int, side: int, threads: int) -> dict:
    """{"threads", "seconds": case -> [[ours, the host's], ...], "bytes": case -> half, added}"""
    with tempfile.TemporaryDirectory(prefix="ref2v-bench-") as scratch:
        out = Path(scratch) / "found.json"
        command = [sys.executable, str(CHILD), str(host), str(out), str(pairs), str(side), str(threads)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode or not out.is_file():
            sys.exit(f"{CHILD.name} ended with code {ran.returncode}:\n{ran.stderr[-4000:]}")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=Path, default=HOST, help="folder of the host's main.py (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="decodes of each kind")
    parser.add_argument("--side", type=int, default=128, help="pixels along a side of the picture")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    found = measure(options.host, options.pairs, options.side, options.threads)

    times = [
        [name, spread([ours / theirs for ours, theirs in taken]), f"<= {GOAL}", spread([theirs for _, theirs in taken])]
        for name, taken in found["seconds"].items()
    ]
    sizes = [
        [name, f"{held['half'] / 2**20:.1f}", f"{held['added'] / 2**20:.1f}", f"{held['added'] / held['half']:.4f}"]
        for name, held in found["bytes"].items()
    ]
    body = "\n".join(
        [
            "### A dtype for each half of a VAE",
            "",
            f"SD's VAE, {options.side} px, one picture. Time of `decode` over that of the host's own VAE at that "
            f"dtype, median (min..max) of {options.pairs} interleaved pairs; the pictures are equal to the bit. "
            "Less is better.",
            "",
            table(["decoder", "split / the host's", "goal", "the host's, s"], times),
            "",
            "What a selector holds beside the VAE that came in, in MiB: all weights that do not lie in that VAE's own "
            "memory.",
            "",
            table(["cast half", "size of the half", "held", "held / half"], sizes),
            "",
            # the line counts this process's threads; the measuring was the child's
            machine().replace(" threads,", f" threads ({found['threads']} in the host),"),
        ]
    )
    report("vae_precision", body, write=options.write)


if __name__ == "__main__":
    main()
