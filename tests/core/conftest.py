"""Tiny pairs, a tiny network and tiny runs: what the tests of the core train on. A whole run takes about a second."""

import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from training.config.train_config import TrainConfig
from training.data.shards import DatasetWriter
from training.run.report.journal import read as read_journal
from training.run.train import RunResult, train

PIXELS = {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
SHAPE = {
    "block_channels": [32], "layers_per_block": 1, "transformer_depth": [0], "middle_depth": 0, "heads": [1],
    "context_dim": 8,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Networks this small gain nothing from a second thread, and on a busy machine wait for it a hundred times over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watcher:
    """An observer that remembers, and stops the run where it is told to."""

    def __init__(self, stop_after: int | None = None, pictures: bool = False):
        self.pictures, self.stop_after = pictures, stop_after
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.etas: list[float] = []
        self.shown: list = []
        self.messages: list[str] = []
        self.measured: list[tuple[int, int]] = []

    def on_step(self, step, total, loss, eta):
        self.steps.append(step)
        self.losses.append(loss)
        self.etas.append(eta)

    def on_picture(self, picture):
        self.shown.append(picture)

    def on_measure(self, done, total):
        self.measured.append((done, total))

    def on_message(self, text):
        self.messages.append(text)

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.steps) >= self.stop_after

    def train(self, config: TrainConfig) -> RunResult:
        return train(config, self, self.should_stop)


def wave(seed: int, side: int) -> torch.Tensor:
    """A smooth picture with fine stripes on it, [3, side, side] in [-1, 1]."""
    turn = 2 * math.pi * torch.rand(4, generator=torch.Generator().manual_seed(seed))
    y, x = torch.meshgrid(torch.arange(side) * 1.0, torch.arange(side) * 1.0, indexing="ij")
    broad = torch.stack([torch.sin(0.2 * x + 0.1 * y + turn[k]) for k in range(3)])
    return 0.6 * broad + 0.4 * torch.sin(1.3 * x + 0.9 * y + turn[3])


def step_lines(folder: Path) -> list[dict]:
    """The journal's lines of the optimizer steps, without those of the validation."""
    return [line for line in read_journal(folder / "metrics.jsonl") if "learning_rate" in line]


def blurred(z: torch.Tensor) -> torch.Tensor:
    return functional.avg_pool2d(z[None], 5, 1, 2, count_include_pad=False)[0]


def write_dataset(
    folder: Path,
    *,
    pairs: int = 9,
    held_out: int = 1,
    side: int | list[int] = 16,
    base_of: Callable[[torch.Tensor], torch.Tensor] = blurred,
    latent: dict = PIXELS,
    text: dict | None = None,
    empty: bool = True,
) -> Path:
    """Waves as targets, by default blurred as base; `text` gives each pair a random context. side: all or in turn."""

    def condition(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + seed)
        found = {"context": torch.randn(text["tokens"], text["dim"], generator=generator)}
        if text["pooled"]:
            found["pooled"] = torch.randn(text["pooled"], generator=generator)
        return found

    base = {"kind": "degradation", "name": None}
    described = {"context": text, "empty": condition(-1) if text and empty else None}
    with DatasetWriter(folder, latent=latent, vae=None, base=base, **described) as writer:
        for i in range(pairs):
            z = wave(i, side if isinstance(side, int) else side[i % len(side)])
            b = base_of(z)
            channels = [k % 3 for k in range(latent["channels"])]
            writer.add(
                z[channels], b[channels], source=f"{i}.png", sha256=f"{i:064x}", group=f"{i}",
                split="held_out" if i < held_out else "train", **(condition(i) if text else {}),
            )
    return folder


def configuration(dataset: Path, run: Path, **changes) -> TrainConfig:
    """12 steps of the tiny network; `changes` are dotted fields: data__workers=2 is data.workers."""
    values = {
        "dataset": str(dataset),
        "run": str(run),
        "refiner": {"shape": SHAPE},
        "data": {"batch_size": 2},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "validation": {"pictures": 1, "every": "epoch"},
        "checkpoint": {"every": "epoch"},
        "epochs": 3,
        "ema_decay": 0.9,
    }
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        (values.setdefault(section, {}) if section else values)[name] = value
    return TrainConfig.build(values)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """8 training pairs and a held-out one, pixels of 16 x 16."""
    return write_dataset(tmp_path_factory.mktemp("core") / "pairs")


@pytest.fixture
def configure(dataset, tmp_path):
    """configure(data__workers=2, ...) -> configuration of a run in the test's own folder "run"."""
    return lambda dataset=dataset, run=tmp_path / "run", **changes: configuration(dataset, run, **changes)


@pytest.fixture
def build_pairs(tmp_path):
    """build_pairs("name", side=8, text=...) -> folder of a dataset in the test's own folder."""
    return lambda name="pairs", **options: write_dataset(tmp_path / name, **options)


@pytest.fixture
def watch():
    """watch(stop_after=3) -> an observer with a train() method."""
    return Watcher


@pytest.fixture(scope="session")
def whole_run(dataset, tmp_path_factory):
    """The uninterrupted run that others are compared with. Read only."""
    watcher = Watcher(pictures=True)
    result = watcher.train(configuration(dataset, tmp_path_factory.mktemp("core") / "whole"))
    return result, watcher


@pytest.fixture
def environment():
    """For runs in a process of their own: as many threads as here, since sums in another order differ in their bits."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def small_disk(tmp_path):
    """small_disk("64k") -> a mounted file system of that size; skips where mounting is not allowed."""
    mounted = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if not hasattr(os, "geteuid") or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["convolutions", "attention"])
def material(request, tmp_path, build_pairs):
    """(refiner to go on from, dataset) for a network of convolutions alone, and for one with attention and text."""
    from tests.core.starts import TEXT, write_start

    text = TEXT if request.param == "attention" else None
    start = write_start(tmp_path / "earlier" / "refiner.safetensors", text=text)
    return start, build_pairs(pairs=6, held_out=1, text=text)


@pytest.fixture
def adapt(configure, tmp_path):
    """adapt(start, dataset, ...) -> configuration of a LoRA run on them."""

    def build(start, dataset, lora=None, **changes):
        values = {"epochs": 2, "validation__pictures": 0, **changes}
        lora = {"rank": 4} if lora is None else lora
        return configure(dataset=dataset, refiner={"start_from": str(start)}, lora=lora, **values)

    return build


@pytest.fixture
def conv_start(tmp_path):
    """A refiner to go on from, of convolutions alone."""
    from tests.core.starts import write_start

    return write_start(tmp_path / "earlier" / "refiner.safetensors")
