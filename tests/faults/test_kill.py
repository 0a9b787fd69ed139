"""kill -9 at random instants: what is on the disk then is valid, and the run ends with the bytes of one left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.kill import Kill
from training.objectives.residual.file import load_refiner
from training.run.checkpoints.checkpoint import load_newest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"keep_checkpoints": 1, "validation__every": 3, "validation__crop": 8, "data__crop": 8}
TENSORS = ("weights.safetensors", "ema.safetensors", "optimizer.safetensors")


def make_plan(kills: int, seed: int, seconds: float, events: int) -> list[Kill]:
    """Half at a random thing that a save does, a fifth a little after one, the rest at a random time."""
    draw = random.Random(seed)
    kinds = [
        lambda: Kill(event=draw.randint(1, events)),
        lambda: Kill(after=draw.uniform(0, seconds)),
        lambda: Kill(event=draw.randint(1, events)),
        lambda: Kill(event=draw.randint(1, events), delay=draw.uniform(0, 0.005)),
        lambda: Kill(event=draw.randint(1, events)),
        lambda: Kill(after=draw.uniform(0, seconds)),
        lambda: Kill(event=draw.randint(1, events)),
        lambda: Kill(event=draw.randint(1, events), delay=draw.uniform(0, 0.005)),
        lambda: Kill(event=draw.randint(1, events)),
        lambda: Kill(after=draw.uniform(0, seconds)),
    ]
    return [kinds[i % len(kinds)]() for i in range(kills)]


def end_of(folder: Path) -> dict[str, bytes]:
    """What must be the same to the bit: the refiner, the last checkpoint's tensors, the history."""
    last = folder / ".checkpoints" / "step-00000012"
    files = [folder / "refiner.safetensors", folder / "metrics.jsonl", *(last / name for name in TENSORS)]
    return {path.name: path.read_bytes() for path in files}


def check_what_is_left(folder: Path) -> int | None:
    """Everything under a final name is whole. The newest checkpoint's step."""
    found, passed_over = load_newest(folder / ".checkpoints")
    assert passed_over == []
    for name in ("config.json", "status.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_text())
    if (folder / "refiner.safetensors").exists():
        load_refiner(folder / "refiner.safetensors")
    return found.step if found else None


def kill_and_go_on(nursery, configure, tmp_path, kills: int, seed: int) -> None:
    config = configure(run=tmp_path / "whole", **SETTINGS)
    whole = nursery.train(config)
    assert not whole.killed and whole.events > 20
    expected = end_of(config.run)

    saving, steps, runs, plan = 0, set(), 0, make_plan(kills, seed, whole.seconds, whole.events // 2)
    run = tmp_path / "run-0"
    waiting = list(plan)
    while waiting or run.exists():
        kill = waiting.pop(0) if waiting else None
        ended = nursery.train(configure(run=run, **SETTINGS), kill)
        assert "passed over" not in ended.said
        if ended.killed:
            saving += ended.saving
            steps.add(check_what_is_left(run))
            continue
        # it came to its end before its time was up: compare, and kill the next one instead
        assert end_of(run) == expected
        shutil.rmtree(run)
        runs += 1
        run = tmp_path / f"run-{runs}"
        if kill is not None:
            waiting.insert(0, kill)
        assert runs < 10 + kills
    print(f"{kills} kills in {runs} runs, {saving} inside a save; newest checkpoints found: {steps}")
    assert saving >= 0.4 * kills
    assert len(steps) > 1  # they did not all fall into one place


def test_ten_kills_at_random_instants_lose_nothing(nursery, configure, tmp_path):
    kill_and_go_on(nursery, configure, tmp_path, kills=10, seed=1)


@pytest.mark.full
def test_a_hundred_kills_at_random_instants_lose_nothing(nursery, configure, tmp_path):
    kill_and_go_on(nursery, configure, tmp_path, kills=100, seed=2)


def test_a_kill_at_each_removal_and_rename_of_a_save_loses_nothing(nursery, configure, tmp_path):
    """The last save of a run that keeps one checkpoint: from its first event to its last, in strides."""
    config = configure(run=tmp_path / "run", **SETTINGS, epochs=2)
    whole = nursery.train(config)
    shutil.rmtree(config.run)
    first = nursery.train(config, Kill(event=whole.events * 3 // 4))
    assert first.killed and first.saving
    kept = tmp_path / "kept"
    os.replace(config.run, kept)
    for event in range(1, whole.events // 2, 9):
        shutil.copytree(kept, config.run)
        nursery.train(config, Kill(event=event))
        assert check_what_is_left(config.run) is not None
        shutil.rmtree(config.run)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_run_leaves_no_loader_process(configure, environment):
    config = configure(data__workers=2, validation__pictures=0, epochs=100_000)
    path = config.run.parent / "run.json"
    path.write_text(config.to_json())
    command = [sys.executable, "-m", "training", "train", "--config", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(children(process.pid)) == 2 and (config.run / "metrics.jsonl").exists(), 240)
        workers = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until(done, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < limit, f"not within {seconds} s"
        time.sleep(0.05)
