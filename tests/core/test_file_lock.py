"""The lock of a folder that somebody works in."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.storage import file_lock
from training.storage.file_lock import hold_lock, release_lock

ROOT = Path(__file__).resolve().parents[2]
FORKING = """
import os, sys, time
from pathlib import Path
# before that of the lock, so that the fork keeps what it inherits until this is over
os.register_at_fork(after_in_child=lambda: time.sleep(float(sys.argv[2])))
from training.storage.file_lock import hold_lock
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


@pytest.fixture
def forked(tmp_path):
    """forked(seconds) -> (process that holds tmp_path/lock, pid of its fork, which closes the lock after `seconds`)."""
    if not hasattr(os, "fork"):
        pytest.skip("Windows has no fork")
    children = []

    def start(seconds: float):
        command = [sys.executable, "-c", FORKING, str(tmp_path / "lock"), str(seconds)]
        parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        children.append((parent, int(parent.stdout.readline())))
        return children[-1]

    yield start
    for parent, child in children:
        parent.kill()
        parent.wait()
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_fork_that_outlives_its_parent_does_not_keep_it(tmp_path, forked, seconds):
    parent, child = forked(seconds)
    assert hold_lock(tmp_path / "lock") is None, "the parent holds it"
    parent.kill()
    parent.wait()
    os.kill(child, 0)
    mine = hold_lock(tmp_path / "lock")
    assert mine is not None, "the fork kept it"
    mine.close()


def test_a_fork_whose_parent_was_not_reaped_yet_does_not_keep_it(tmp_path, forked):
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    parent, _ = forked(1)
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until it is waited for
    mine = hold_lock(tmp_path / "lock")
    assert mine is not None
    mine.close()


def test_who_lets_go_of_it_has_let_go_whatever_its_forks_still_have_open(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("Windows has no fork")
    held = hold_lock(tmp_path / "lock")
    inherited = os.dup(held.fileno())  # what a fork has until it closes it: the same open file
    release_lock(held)
    again = hold_lock(tmp_path / "lock")
    assert again is not None
    again.close()
    os.close(inherited)


def test_a_living_process_is_not_waited_for(tmp_path, monkeypatch):
    held = hold_lock(tmp_path / "lock")
    monkeypatch.setattr(file_lock.time, "sleep", lambda _: pytest.fail("waited for a process that is at work"))
    assert hold_lock(tmp_path / "lock") is None
    held.close()


@pytest.mark.parametrize("said", [b"", b"x", b"1234567 another-machine"])
def test_whoever_may_be_at_work_is_not_waited_for_either(tmp_path, monkeypatch, said):
    """An older version's lock has no number in it, and that of another machine's process says nothing here."""
    held = hold_lock(tmp_path / "lock")
    (tmp_path / "lock").write_bytes(said)
    monkeypatch.setattr(file_lock.time, "sleep", lambda _: pytest.fail("waited for a process that may be at work"))
    assert hold_lock(tmp_path / "lock") is None
    held.close()


def test_a_disk_without_locks_is_told_in_one_sentence(tmp_path, monkeypatch, caplog):
    if not file_lock.HAS_LOCKS:
        pytest.skip("no flock here")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)
    held = hold_lock(tmp_path / "lock")
    assert held is not None
    (record,) = caplog.records
    said = record.getMessage()
    assert "No locks available" in said and "see to it that no other process" in said and "\n" not in said
    release_lock(held)


def test_a_full_disk_takes_and_gives_back_the_lock_all_the_same(small_disk):
    """Only who holds it cannot be written; that must not come up when the run is over."""
    disk = small_disk("16k")
    (disk / "lock").touch()
    with open(disk / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(b"\0" * 4096)
    held = hold_lock(disk / "lock")
    assert held is not None and hold_lock(disk / "lock") is None
    release_lock(held)
    again = hold_lock(disk / "lock")
    assert again is not None
    release_lock(again)
