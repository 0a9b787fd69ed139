"""Estimates of memory against measured peaks: sampling and VAE in the real host, training steps, resident processes.

    python -m benchmarks.memory_estimate [--write] [--small]      the table, about 20 minutes
    python -m benchmarks.memory_estimate --cost [--write]         what an estimate itself costs

Needs the host (REF2V_HOST, or .dev/host/ComfyUI). Never under, at most 15 % over is the goal; a process' peak resident
size (VmHWM) must be below what it held before, the estimate and the assumed overhead together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import machine, report, spread, table

ROOT = Path(__file__).resolve().parents[1]
HOST = Path(os.environ.get("REF2V_HOST") or ROOT / ".dev" / "host" / "ComfyUI")
MIB = 2**20
BACKENDS = ("basic", "split", "sub-quadratic", "pytorch")


def host_cases(small: bool) -> dict[str, Any]:
    """What the host runs: true widths, fewer blocks, so that it fits a small machine."""
    sizes = [((16, 16), 1)] if small else [((16, 16), 1), ((32, 32), 2), ((24, 40), 4), ((64, 64), 1)]
    kinds, dtypes = (("SD15",), ("float32",)) if small else (("SD15", "SDXL"), ("float32", "bfloat16"))
    sampling = [
        (kind, dtype, size, batch, backend, 0)
        for kind in kinds
        for dtype in dtypes
        for size, batch in sizes
        for backend in (("pytorch",) if small else BACKENDS)
    ]
    if not small:
        sampling += [("SD15", "float32", (48, 48), 1, backend, 128 * MIB) for backend in ("split", "sub-quadratic")]
    vae = [("float32", (16, 16), 1, "normal_attention", "VAE decode", 0)]
    if not small:
        vae += [
            ("float32", (32, 48), 2, "pytorch_attention", "VAE decode", 0),
            ("bfloat16", (32, 32), 1, "pytorch_attention", "VAE decode", 0),
            ("float32", (48, 48), 1, "normal_attention", "VAE decode", 64 * MIB),
            ("float32", (96, 96), 1, "pytorch_attention", "decode in tiles", 0),
            ("float32", (32, 32), 1, "normal_attention", "VAE encode", 0),
            ("float32", (96, 96), 1, "pytorch_attention", "encode in tiles", 0),
        ]
    return {"sampling": sampling, "vae": vae}


def in_host(check: str, cases: dict[str, Any]) -> Any:
    """What a check of tests/host/model_memory_in_host.py says, in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="ref2v-memory-") as folder:
        out = Path(folder) / "result.json"
        script = ROOT / "tests" / "host" / "model_memory_in_host.py"
        environment = {**os.environ, "REF2V_CASES": json.dumps(cases)}
        ran = subprocess.run(
            [sys.executable, str(script), str(HOST), str(out), check], env=environment, capture_output=True, text=True
        )
        if not out.is_file():
            raise SystemExit(f"{script.name} {check} failed:\n{ran.stderr[-3000:]}")
        found = json.loads(out.read_text())[check]
    if isinstance(found, dict) and "failed" in found:
        raise SystemExit(f"{check}: {found['failed']}")
    return found


def training_rows(small: bool) -> list[list[object]]:
    """[what, estimate, measured] of real forward and backward passes and optimizer steps."""
    import torch

    from benchmarks.optimizer_steps import measure_step
    from training.memory.meter import StorageMeter
    from training.memory.optimizers import OPTIMIZERS, PARAMETERS
    from training.memory.training_trace import NETWORKS, TracedTraining, attention_of, prepare, training_step

    rows: list[list[object]] = []
    names = ("pixel-small",) if small else ("pixel-small", "sd15-half")
    for name in names:
        network, traced = NETWORKS[name], TracedTraining(NETWORKS[name])
        net = network.build()
        for autocast in (None, torch.bfloat16):
            for checkpointing in (False, True):
                for attention in ("pytorch",) if small else ("pytorch", "basic"):
                    options = {"autocast": autocast, "checkpointing": checkpointing, "attention": attention}
                    said = traced.trace(24, 32, 2, gpu=False, **options).total
                    net.zero_grad()
                    prepare(net, checkpointing)
                    shape, size = network.shape, (2, network.shape.latent_channels, 24, 32)
                    batch = {"z": torch.randn(size), "b": torch.randn(size), "t": torch.rand(2)}
                    batch["context"] = torch.randn(2, network.text, shape.context_dim)
                    meter = StorageMeter()
                    meter.hold(PARAMETERS, [*net.parameters(), *net.buffers()])
                    with attention_of(net, attention), meter:
                        training_step(network, net, batch, autocast)
                    words = f"{name}, 32x24 cells, batch 2, {'bf16 autocast' if autocast else 'fp32'}, {attention}"
                    rows.append([words + (", checkpointing" if checkpointing else ""), said, meter.peak])
    counts = [4_000_000, 2_000_000, 64_000, 32_000]
    for name, optimizer in OPTIMIZERS.items():
        kept = (optimizer.parameters + optimizer.gradients) * sum(counts)
        for gpu in (False, True) if optimizer.rounding else (False,):
            state, peak = measure_step(name, counts, gpu=gpu)
            said = optimizer.per_parameter * sum(counts) + optimizer.step_bytes(counts, gpu=gpu)
            chunks = " (a GPU's chunks, on the CPU)" if gpu else ""
            rows.append([f"a step of {name}, 6 M parameters{chunks}", said, kept + state + peak])
    return rows


def resident_training(checkpointing: bool) -> dict[str, int]:
    """A real training step of pixel-small in this process, which is a fresh one."""
    import torch

    from training.memory.machine import Machine, overhead
    from training.memory.training_estimate import TrainingQuestion, estimate_training
    from training.memory.training_trace import NETWORKS, prepare, training_step

    question = TrainingQuestion("pixel-small", 128, 128, 8, precision="fp32", checkpointing=checkpointing)
    here = Machine(2**40, 2**40, False, "")
    answer = estimate_training(question, here, compare=False)
    network = NETWORKS["pixel-small"]
    net = network.build()
    del net  # so that diffusers and everything else is imported before the clock of memory starts
    before = _resident()
    net = network.build()
    prepare(net, checkpointing)
    average = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for _ in range(2):
        size = (8, 3, 128, 128)
        batch = {"z": torch.randn(size), "b": torch.randn(size), "t": torch.rand(8)}
        batch["context"] = torch.randn(8, network.text, network.shape.context_dim)
        training_step(network, net, batch, None)
        optimizer.step()
        optimizer.zero_grad()
    del average
    working = sum(answer.peak_terms().values())
    more = sum(overhead(here, working).values())
    return {"process": before, "estimate": working, "overhead": more, "resident": _resident()}


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def child(checkpointing: bool) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.memory_estimate", "--child", str(int(checkpointing))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"the child process failed:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def training_seconds(compare: bool) -> float:
    """CPU seconds of a Training Memory for SDXL at 768x768, the report included, in a process that is warm."""
    from training.memory.machine import planned_machine
    from training.memory.training_estimate import TrainingQuestion, estimate_training

    estimate_training(TrainingQuestion("pixel-small", 64, 64), planned_machine(80), compare=False)
    began = time.process_time()
    estimate_training(TrainingQuestion("SDXL", 768, 768), planned_machine(80), compare=compare).report()
    return time.process_time() - began


def cost() -> str:
    """The table of what an estimate takes itself."""
    runs = [in_host("cost", {}) for _ in range(3)]
    rows = [
        ["SDXL, 1344x768, with chart, CPU seconds", spread([run["seconds"] for run in runs], 1), "<= 2"],
        ["training SDXL at 768x768, CPU seconds", spread([training_seconds(False) for _ in range(3)], 1), "<= 6"],
        ["the same, and with gradient checkpointing for the advice, as the node does it",
         spread([training_seconds(True) for _ in range(3)], 1), "<= 6"],
        ["memory that the estimate of SDXL took, MB", f"{max(max(run['grown']) for run in runs) / 1e6:.0f}", "< 200"],
    ]  # fmt: skip
    return "\n".join(
        [
            "### What an estimate of memory costs itself",
            "",
            "Median (min..max) of three.",
            "",
            table(["an estimate costs", "measured", "goal"], rows),
            "",
            machine(),
        ]
    )


def ratio_rows(rows: list[list[Any]]) -> list[list[object]]:
    found = []
    for name, said, got in rows:
        estimate, measured = (sum(each.values()) if isinstance(each, dict) else each for each in (said, got))
        ratio = estimate / measured
        verdict = "" if 1 <= ratio <= 1.15 else "**under**" if ratio < 1 else "**over**"
        terms = ""
        if isinstance(said, dict) and len(said) > 1:
            terms = ", ".join(f"{term} {said[term] / got[term]:.2f}" for term in said if got.get(term))
        found.append([name, f"{measured / MIB:.1f}", f"{ratio:.3f}", terms, verdict])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    parser.add_argument("--small", action="store_true", help="one case of each kind, to try the script")
    parser.add_argument("--cost", action="store_true", help="measure the estimates' own cost instead")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(resident_training(bool(options.child))))
        return 0
    if options.cost:
        report("memory_estimate_cost", cost(), write=options.write)
        return 0
    cases = host_cases(options.small)
    wide = in_host("wide", cases)
    rows = ratio_rows([*wide["sampling"], *wide["vae"], *training_rows(options.small)])
    processes = [("SD15", "float32", (32, 32), 2, "sub-quadratic")]
    if not options.small:
        processes += [("SD15", "float32", (64, 64), 1, "basic"), ("SDXL", "bfloat16", (64, 64), 1, "pytorch")]
    residents = [
        [f"sampling, {kind}, {size[1]}x{size[0]} cells, batch {batch}, {dtype}, {backend}",
         in_host("resident", {"resident": (kind, dtype, size, batch, backend)})]
        for kind, dtype, size, batch, backend in processes
    ]  # fmt: skip
    residents += [[f"training, pixel-small, 128 px, batch 8, fp32{', checkpointing' if on else ''}", child(on)]
                  for on in (False, True)]  # fmt: skip
    resident_rows = []
    for name, found in residents:
        bound = found["process"] + found["estimate"] + found["overhead"]
        holds = "" if found["resident"] <= bound else "**over the bound**"
        sizes = [f"{found[part] / MIB:.0f}" for part in ("process", "estimate", "overhead", "resident")]
        resident_rows.append([name, *sizes, holds])
    body = "\n".join(
        [
            "### Estimates of memory against measured peaks",
            "",
            "Peak of living tensors (a meter on every storage) beside the weights; for training the weights count too.",
            "Estimate over measured: 1 is exact. Goal: never below 1, at most 1.15. The host's networks have true",
            "widths and fewer blocks. Kernels of a GPU (flash, xformers, sage, PyTorch on CUDA) are **not measured**.",
            "",
            table(["what ran on the CPU", "measured, MiB", "estimate / measured", "its terms", ""], rows),
            "",
            "A fresh process: its peak resident size (VmHWM) against what it held before, the estimate and",
            "the assumed overhead. MiB.",
            "",
            table(["process", "before", "estimate", "overhead", "resident", ""], resident_rows),
            "",
            machine(),
        ]
    )
    report("memory_estimate", body, write=options.write)
    return 1 if any(row[-1] for row in (*rows, *resident_rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
