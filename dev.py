#!/usr/bin/env python3
"""Everything a developer runs, from a fresh clone on: python3 dev.py setup | demo | test | host.

Each command first does all the set-up, once, and reuses it after. What it makes lies in .dev/ (and demo_output/):
    .dev/venv           a virtual environment of our own; nothing outside it is touched
    .dev/host/ComfyUI   the real host, unless COMFYUI_PATH names a checkout of yours
    .dev/base           the base directory of `demo` and `host`: input, output, models, this pack as a custom node
To start over, delete .dev/. Standard library only; runs on Linux, macOS and Windows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "dev"))  # a package `dev` would be this file
from installation import BASE, BIN, PYTHON, ROOT, set_up  # noqa: E402
from suite import run_suite  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # as tests/host/browser.py


# --------------------------------------------------------------------------------------------------------- the commands


def call(command: list, **env: str) -> int:
    """Run a command in the foreground, return its exit code; Ctrl-C is the child's to handle, so that it can tidy."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **env}).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def demo(host: Path) -> int:
    return call([PYTHON, ROOT / "dev" / "demo.py"], REF2V_HOST=str(host))


def bring_chromium():
    """The browser of the front-end tests, where we may install one (Debian, as root); elsewhere they are skipped.

    It is the one thing that is installed outside of .dev/: it is said before, and REF2V_BROWSER=no leaves it out.
    """
    if any(map(shutil.which, BROWSERS)) or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    if os.environ.get("REF2V_BROWSER", "").lower() in ("no", "0", "false"):
        print("No browser is installed, as REF2V_BROWSER says: the front-end tests will be skipped.", flush=True)
        return
    print(
        "The front-end tests need a browser, and there is none. You are root on a system with apt, so Chromium is "
        "now installed for the whole system (`apt-get update`, `apt-get install chromium`). REF2V_BROWSER=no leaves it "
        "out.",
        flush=True,
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for step in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(["apt-get", "-q", *step], env=environment, **quiet).returncode:
            print(f"`apt-get {step[0]}` failed: the front-end tests will be skipped.", flush=True)
            return


def test(host: Path, full: bool, extra: list) -> int:
    bring_chromium()
    style = call([PYTHON, "-m", "ruff", "check", "--no-cache", "."])
    if not extra:
        return run_suite(host, full) or style
    chosen = ["-m", ""] if full else []
    threads = os.environ.get("OMP_NUM_THREADS", "2")
    return call([BIN / "pytest", *chosen, *extra], REF2V_HOST=str(host), OMP_NUM_THREADS=threads) or style


def serve(host: Path, port: int, extra: list) -> int:
    print("Two of ComfyUI's own audio nodes will fail to import: they need torchaudio, which is not set up here.")
    command = [PYTHON, "-m", "tests.host.server", "--host", host, "--base", BASE, "--port", port]
    return call([*command, "--", *extra])


def main() -> int:
    arguments, extra = sys.argv[1:], []
    if "--" in arguments:
        extra = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
    parser = argparse.ArgumentParser(prog="dev.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="only the set-up")
    commands.add_parser("demo", help="train a refiner on the host's template pictures and refine one with it")
    tests = commands.add_parser("test", help="style, types and all tests; after --, arguments for a pytest of your own")
    tests.add_argument("--full", action="store_true", help="also the slow tests")
    person = commands.add_parser("host", help="ComfyUI with this pack, for the browser; after --, its own options")
    person.add_argument("--port", type=int, default=8188)
    asked = parser.parse_args(arguments)

    host = set_up()
    if asked.command == "demo":
        return demo(host)
    if asked.command == "test":
        return test(host, asked.full, extra)
    if asked.command == "host":
        return serve(host, asked.port, extra)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
