"""The lock of a folder that somebody works in."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.file_lock import hold_lock

ROOT = Path(__file__).resolve().parents[2]
FORKING = """
import os, sys, time
from pathlib import Path
from training.file_lock import hold_lock
held = hold_lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_it_is_held_once_and_free_when_closed(tmp_path):
    first = hold_lock(tmp_path / "lock")
    assert first is not None and hold_lock(tmp_path / "lock") is None
    first.close()
    again = hold_lock(tmp_path / "lock")
    assert again is not None
    again.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_fork_that_outlives_its_parent_does_not_keep_it(tmp_path):
    command = [sys.executable, "-c", FORKING, str(tmp_path / "lock")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        assert hold_lock(tmp_path / "lock") is None, "the parent holds it"
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        mine = hold_lock(tmp_path / "lock")
        assert mine is not None, "the fork kept it"
        mine.close()
    finally:
        parent.kill()
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
