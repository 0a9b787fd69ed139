"""What the pack adds to the host's boot: the host with the pack linked in against the host without, in turns.

Two clocks: the wall time until the host answers /system_stats, and the host's own line in "Import times for custom
nodes" (it prints tenths of a second). Then one more boot of each under Python's import profiler, to say which
modules the pack is the first to import.

    python -m benchmarks.import_time [--write]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.results import machine, report, spread, table
from tests.host.server import PACK, PACK_NAME, HostServer

GOAL = 0.2  # seconds
HOST = Path(os.environ.get("REF2V_HOST") or os.environ.get("COMFYUI_PATH") or PACK / ".dev" / "host" / "ComfyUI")


def boot(host: Path, *, with_pack: bool, profile: bool = False) -> tuple[float, str]:
    """(seconds until the host answers, its log)."""
    env = {"PYTHONPROFILEIMPORTTIME": "1"} if profile else {}
    with HostServer(host, pack=PACK if with_pack else None, env=env) as server:
        return server.boot_seconds, server.log


def host_says(log: str) -> float:
    """Seconds of our line in the host's list of import times."""
    found = re.search(rf"^\s*([\d.]+) seconds(.*): .*{re.escape(PACK_NAME)}\s*$", log, re.MULTILINE)
    if not found:
        sys.exit(f"The host's log has no import time for {PACK_NAME}:\n{log[-3000:]}")
    if found[2]:
        sys.exit(f"The host could not import {PACK_NAME}:\n{log[-3000:]}")
    return float(found[1])


def imported(log: str) -> dict[str, float]:
    """Module -> seconds of its own, from the lines of `python -X importtime`."""
    lines = re.findall(r"import time:\s*(\d+) \|\s*\d+ \| *(\S.*)$", log, re.MULTILINE)
    return {name.strip(): int(micros) / 1e6 for micros, name in lines}


def package_of(module: str) -> str:
    """The pack under its name (its module name is a path), everything else under its top package."""
    if PACK_NAME in module:
        inside = module.rpartition(PACK_NAME)[2].lstrip(".")
        return f"the pack: {'.'.join(inside.split('.')[:2]) or '__init__'}"
    return module.partition(".")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=Path, default=HOST, help="folder of the host's main.py (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=11, help="boots of each kind")
    parser.add_argument("--top", type=int, default=8, help="packages listed")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    boot(options.host, with_pack=True), boot(options.host, with_pack=False)  # compiled files and the disk's cache
    without, with_pack, said = [], [], []
    for number in range(options.pairs):
        for ours in (True, False) if number % 2 else (False, True):  # neither is always the second
            seconds, log = boot(options.host, with_pack=ours)
            (with_pack if ours else without).append(seconds)
            if ours:
                said.append(host_says(log))
        print(f"pair {number + 1} of {options.pairs}", flush=True)
    pairs = list(zip(with_pack, without, strict=True))
    rows = [
        ["boot with the pack / without", spread([a / b for a, b in pairs]), ""],
        ["boot with the pack - without, s", spread([a - b for a, b in pairs], 2), f"<= {GOAL}"],
        ["the host's own import time of the pack, s", spread(said, 1), f"<= {GOAL}"],
        ["fastest boot with the pack - fastest without, s", f"{min(with_pack) - min(without):.2f}", f"<= {GOAL}"],
        ["boot without the pack, s", spread(without, 1), ""],
    ]

    before = imported(boot(options.host, with_pack=False, profile=True)[1])
    after = imported(boot(options.host, with_pack=True, profile=True)[1])
    added = {module: seconds for module, seconds in after.items() if module not in before}
    total = sum(added.values())
    packages: Counter[str] = Counter()
    for module, seconds in added.items():
        packages[package_of(module)] += seconds
    shares = [[f"`{name}`", f"{seconds / total:.0%}"] for name, seconds in packages.most_common(options.top)]

    body = "\n".join(
        [
            "### What the pack adds to the host's boot",
            "",
            f"Median (min..max) of {options.pairs} pairs of boots that took turns.",
            "",
            table(["", "measured", "goal"], rows),
            "",
            f"What it consists of: {len(added)} modules that only the boot with the pack imports, {total:.2f} s by "
            f"`python -X importtime` ({total / median(without):.1%} of a boot), and their shares:",
            "",
            table(["package", "share"], shares),
            "",
            machine(),
        ]
    )
    report("import_time", body, write=options.write)


if __name__ == "__main__":
    main()
