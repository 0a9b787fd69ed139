"""What importing the training core does to a process that others work in, too: nothing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import multiprocessing, os, pkgutil, random, sys
import numpy, torch

def state():
    return (
        multiprocessing.get_start_method(allow_none=True), torch.get_rng_state().sum().item(), torch.initial_seed(),
        random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_num_threads(), torch.get_default_dtype(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        dict(os.environ), sys.path[:], torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32,
    )

sys.path.append(sys.argv[1])
before = state()
import training
for module in pkgutil.walk_packages(training.__path__, "training."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
after = state()
names = "start method, torch, seed, random, numpy, threads, dtype, matmul, deterministic, grad, environment, path"
for name, a, b in zip(names.split(", ") + ["cudnn", "tf32"], before, after):
    if a != b:
        print(name, "changed")
from training.data.batches import BatchSource
from training.data.loading import batches
if sys.argv[2:]:
    for _ in zip(range(1), batches(BatchSource(sys.argv[2], batch_size=2, seed=0), 0, 1, torch.device("cpu"))): pass
multiprocessing.set_start_method("spawn")
print("spawn")
"""


def run(*arguments: str) -> str:
    command = [sys.executable, "-c", IMPORTS, str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_seed_thread_count_or_start_method_is_decided_by_an_import():
    assert run() == "spawn\n"


def test_nor_is_the_start_method_by_a_run_with_loader_processes(dataset):
    assert run(str(dataset)) == "spawn\n"
