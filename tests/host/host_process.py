"""Runs a script of this folder beside the host, in a process of its own (in_host.py says why); reads its results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 1800  # a crowded machine takes many times as long as a quiet one


def run_in_host(
    script: str, host_path: Path, folder: Path, *wanted: str, flags: str = "", **environment: str
) -> dict[str, Any]:
    """{check: what it returned, or {"failed": traceback}} of tests/host/`script`.

    folder: where the results go. wanted: more of its command line, mostly names of checks. flags: of the host.
    """
    out = folder / "results.json"
    command = [sys.executable, str(Path(__file__).with_name(script)), str(host_path), str(out), *wanted]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "REF2V_HOST_FLAGS": flags, **environment}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env)
    if not out.is_file():
        pytest.fail(f"{script} ended with code {ran.returncode}:\n{ran.stderr[-4000:]}")
    return json.loads(out.read_text())


def passed(results: dict[str, Any], name: str) -> Any:
    """What the check of that name returned; the test fails with its traceback if it broke."""
    if isinstance(results[name], dict) and "failed" in results[name]:
        pytest.fail(results[name]["failed"])
    return results[name]


def all_passed(results: dict[str, Any]) -> dict[str, Any]:
    for name in results:
        passed(results, name)
    return results
