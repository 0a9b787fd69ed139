"""python -m training train: exit status, one line for what is wrong, Ctrl-C and going on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


# The command line as it is, but each step takes long enough to be caught in the middle of the run.
SLOWED_DOWN = """
import sys, time
from training.__main__ import main
from training.run.report.journal import Journal

write = Journal.write
Journal.write = lambda self, step, **values: (write(self, step, **values), time.sleep(0.3))
sys.exit(main())
"""


@pytest.fixture
def config_file(configure, tmp_path):
    """config_file(changes...) -> path of a JSON configuration."""

    def write(**changes):
        path = tmp_path / "run.json"
        path.write_text(configure(**changes).to_json())
        return path

    return write


def test_ctrl_c_leaves_a_run_that_a_second_start_finishes_to_the_same_bytes(
    config_file, configure, whole_run, environment
):
    """As at a terminal, the signal goes to the loader's workers too."""
    path = config_file(data__workers=2, validation__pictures=0)
    folder = configure().run
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED_DOWN, "train", "--config", str(path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment,
    )
    journal = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if journal.is_file() and '"step": 2' in journal.read_text():
            break
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    stopped = json.loads((folder / "status.json").read_text())
    assert stopped["state"] == "stopped" and 2 <= stopped["step"] < 12
    assert "Run the command again to go on" in out and "queue" not in out
    assert not (folder / "refiner.safetensors").exists()

    # the run's own config.json starts it again, and another process gives the bytes of the one in this process
    second = subprocess.run(
        [sys.executable, "-m", "training", "train", "--config", str(folder / "config.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment,
    )
    assert second.returncode == 0, second.stderr
    assert second.stdout.strip().splitlines()[-1] == str(folder / "refiner.safetensors")
    assert (folder / "refiner.safetensors").read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_finished_run_prints_its_refiner_and_exits_with_0(config_file, configure, capsys):
    path = config_file(validation__pictures=0, epochs=1)
    for _ in range(2):  # done, then reused
        assert main(["train", "--config", str(path)]) == 0
        assert capsys.readouterr().out.strip().splitlines()[-1] == str(configure().run / "refiner.safetensors")


def test_folders_can_be_given_on_the_command_line(config_file, dataset, tmp_path, capsys):
    path = config_file(dataset=Path("nowhere"), run=Path("nowhere"), validation__pictures=0, epochs=1)
    run = tmp_path / "elsewhere"
    assert main(["train", "--config", str(path), "--dataset", str(dataset), "--run", str(run)]) == 0
    assert (run / "refiner.safetensors").is_file()
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    "text, said",
    [
        (None, r"--config: expected a JSON file, cannot read .*run\.json \(No such file or directory\)"),
        ("{", r"--config: expected JSON"),
        ("[]", r"Training configuration: "),
        ('"x"', r"Training configuration: "),
        ("{}", r"Training configuration: dataset: Field required"),
        ('{"config": "x"}', r"Training configuration: "),
        ('{"config": {}}', r"Training configuration: dataset: Field required"),
        ('{"dataset": "d", "run": "r", "epochs": 0}', r"epochs: .* \(got 0\)"),
        ('{"dataset": "d", "run": "r", "optimizer": {"lr": 1}}', r"optimizer\.lr: .*"),
        ('{"dataset": "no such folder", "run": "r"}', r"no such folder"),
        (b"\xff\xfe{}", r"--config: expected JSON"),
    ],
)
def test_what_is_wrong_is_one_line_on_stderr(tmp_path, capsys, text, said):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["train", "--config", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and re.match(rf"error: {said}", captured.err) or re.search(said, captured.err)
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_configuration_from_an_editor_on_windows_is_read(config_file, configure, tmp_path, capsys):
    path = config_file(epochs=1, validation__pictures=0)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert main(["train", "--config", str(path)]) == 0


def test_a_run_that_fails_is_one_line_on_stderr(config_file, monkeypatch, capsys):
    from training.objectives.residual import flow

    monkeypatch.setattr(flow, "loss_per_sample", lambda output, *_: output.flatten(1).mean(1) * float("nan"))
    assert main(["train", "--config", str(config_file())]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "Step 1: expected a finite loss" in error[0]


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2 and "usage: python -m training" in capsys.readouterr().err
