"""The whole suite in parts, two processes at a time: on two cores a little more than half the time of one.

Most tests compute in one thread, or wait for a host, a browser or a process that was killed. Each part is a pytest of
its own. All that parts share are the caches in .dev, where a file has its name only when it is whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from installation import BIN, PYTHON, ROOT

AT_A_TIME = 2


def parts(full: bool) -> dict[str, list[str]]:
    """{what is in it: its command}: each test is in one part. The longest first, so that none is left for the end."""
    chosen = "" if full else "not full"

    def pytest(marked: str, *arguments: str) -> list[str]:
        # the script, not `python -m pytest`: that would put the root, with its `nodes`, at the front of sys.path
        return [str(BIN / "pytest"), "-m", " and ".join(filter(None, (chosen, marked))), *arguments]

    files = sorted(path.name for path in (ROOT / "tests" / "host").glob("test_*.py"))
    first, second = ([f"tests/host/{name}" for name in files if (name < "test_n") == early] for early in (True, False))
    return {
        "tests without the host": pytest("", "tests", "--ignore=tests/host"),
        "tests on a booted host": pytest("server", "tests/host"),
        "tests on the host's modules, n to z": pytest("not server", *second),
        "tests on the host's modules, a to m": pytest("not server", *first),
        "types of the core": [str(PYTHON), "-m", "mypy"],
    }


def run_parts(wanted: dict[str, list[str]], environment: dict[str, str]) -> int:
    """Run the command of each part; its output comes when it ends.

    Returns 0, or the code of the first part that did not end with it. After Ctrl-C no further part begins.
    """
    stopped, printing = threading.Event(), threading.Lock()

    def run(name: str) -> int:
        if stopped.is_set():
            return 2
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = subprocess.run(wanted[name], cwd=ROOT, env=environment, stdout=output, stderr=output).returncode
            output.seek(0)
            said = output.read().decode("utf-8", "replace")
        with printing:
            print(f"\n===== {name}: {time.monotonic() - began:.0f} s, exit code {code}\n{said}", flush=True)
        return code

    print(f"{len(wanted)} parts, {AT_A_TIME} at a time; each tells what it did when it ends.", flush=True)
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())  # the children get it too, and tidy up
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            codes = list(pool.map(run, wanted))
    finally:
        signal.signal(signal.SIGINT, before)
    if failed := [name for name, code in zip(wanted, codes, strict=True) if code]:
        print(f"Failed, see above: {', '.join(failed)}.", flush=True)
    return next((code for code in codes if code), 0)


def run_suite(host: Path, full: bool) -> int:
    environment = {**os.environ, "REF2V_HOST": str(host), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if sys.stdout.isatty():
        environment["PY_COLORS"] = "1"
    return run_parts(parts(full), environment)
