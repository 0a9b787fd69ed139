"""Faults from outside: kills, broken files, full and read-only disks, loader processes that fail.

The tiny pairs, network and runs are those of the core's tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.conftest import (  # noqa: F401 (fixtures)
    build_pairs,
    configure,
    dataset,
    environment,
    one_thread,
    small_disk,
    watch,
    whole_run,
)
from tests.faults.kill import Nursery


@pytest.fixture(scope="session")
def nursery():
    """A process that has imported everything, and whose forks can be killed."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        pytest.skip("needs fork")
    with Nursery() as found:
        yield found


@pytest.fixture
def read_only():
    """read_only(folder) makes it so until the test ends or the function that it returns is called; skips without mount.

    Root may write anywhere, so the folder is mounted over itself.
    """
    mounted: list[Path] = []

    def release() -> None:
        while mounted:
            subprocess.run(["umount", "-l", str(mounted.pop())], check=True)

    def mount(folder: Path):
        if not hasattr(os, "geteuid") or os.geteuid():
            pytest.skip("mounting needs root")
        if subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
        mounted.append(folder)
        remount = ["mount", "-o", "remount,bind,ro", str(folder)]
        if subprocess.run(remount, capture_output=True).returncode:
            pytest.skip("read-only mounts are not permitted here")
        return release

    yield mount
    release()
