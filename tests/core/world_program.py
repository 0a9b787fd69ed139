"""One of several real processes of test_world.py: `train_step` in a world of gloo against one process alone.

    python world_program.py RANK SIZE FOLDER

Every rank takes the steps of each case in the world. Afterwards each takes those of some cases alone as well, and
writes what came of both to FOLDER/cases-RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind everything else, as tests/conftest.py has it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.core.conftest import configuration  # noqa: E402
from training.config.train_config import HealthConfig, OptimizerConfig, TrainConfig  # noqa: E402
from training.data.batches import BatchSource  # noqa: E402
from training.data.loading import batches as load_batches  # noqa: E402
from training.distributed.world import GroupWorld, World  # noqa: E402
from training.errors import BadInput, TrainingFailed  # noqa: E402
from training.objectives.base import Compute  # noqa: E402
from training.objectives.choose import choose_objective, plan_objective  # noqa: E402
from training.objectives.trainables import build_on, trainables  # noqa: E402
from training.run.optim.build import build_optimizer  # noqa: E402
from training.run.step import TrainStep  # noqa: E402
from training.run.watch.health import StepHealth  # noqa: E402

CPU = torch.device("cpu")
WITH_ATTENTION = {
    "block_channels": [32], "layers_per_block": 1, "transformer_depth": [1], "middle_depth": 1, "heads": [1],
}
Spoil = Callable[[dict[str, Any]], dict[str, Any]]
NO_CLIP = 1e9  # so that the gradients that are looked at are the gradients
STEPS = 20


@dataclass
class Taken:
    """What some steps gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights before the step that failed
    error: str = ""
    kind: str = ""


def unspoilt(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


class Runner:
    """Takes steps of one configuration, alone or in a world."""

    def __init__(self, config: TrainConfig, compute: Compute, accumulation: int):
        self.config, self.compute, self.accumulation = config, compute, accumulation
        self.source = BatchSource(config.dataset, batch_size=2, seed=config.seed)

    def take(self, world: World, steps: int, spoil: Spoil = unspoilt) -> Taken:
        """spoil: what becomes of each micro-batch."""
        objective = choose_objective(
            self.config, plan_objective(self.config, self.source.data, []), self.source.data, self.compute
        )
        torch.manual_seed(0)
        net = build_on(CPU, objective.network, objective.first_weights).train()
        torch.nn.Module.to(net, self.compute.weights)
        wake(net)
        parameters = trainables(net)
        optimizer = build_optimizer(OptimizerConfig(learning_rate=1e-3), parameters, seed=0)
        scaler = torch.amp.GradScaler("cpu", enabled=self.compute.autocast == torch.float16, init_scale=256.0)
        step = TrainStep(
            objective, net, optimizer, scaler, StepHealth(HealthConfig(), optimizer, scaler, net, world),
            accumulation=self.accumulation, clip_norm=NO_CLIP, world=world,
        )
        taken = Taken()

        def batches(first: int) -> Iterator[dict[str, Any]]:
            with closing(load_batches(self.source, first + world.rank, 0, CPU, every=world.size)) as loaded:
                for batch in loaded:
                    yield spoil({**batch, "z": batch["z"].to(wide), "b": batch["b"].to(wide)})

        def look() -> None:
            if not taken.gradients:
                taken.gradients = {name: p.grad.clone() for name, p in parameters.items()}

        wide = torch.promote_types(self.compute.weights, torch.float32)
        with closing(batches(0)) as feed:
            for number in range(steps):
                taken.before = {name: p.detach().clone() for name, p in parameters.items()}
                try:
                    result = step(
                        number + 1, feed, 1e-3, before_update=look,
                        batches_again=lambda first=number * self.accumulation: batches(first),
                        which_checkpoint=lambda: f"kept: as rank {world.rank} says",
                    )
                except (TrainingFailed, BadInput, MemoryError) as error:
                    taken.error, taken.kind = str(error), type(error).__name__
                    break
                taken.losses.append(result.loss)
                taken.norms.append(result.norm)
                taken.updated.append(result.updated)
        taken.weights = {name: p.detach().clone() for name, p in parameters.items()}
        return taken


def wake(net: torch.nn.Module) -> None:
    """A last layer, or a LoRA's second factor, that begins at zero would stop all other gradients."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainables(net).values():
            if not parameter.any():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|ours - theirs| / |theirs|, by the norm over all tensors."""
    assert ours.keys() == theirs.keys()
    return distance([ours[name] - theirs[name] for name in theirs]) / distance(list(theirs.values()))


def distance(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors).sqrt())


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """`apart` of the one tensor of which it is largest."""
    return max(apart({name: ours[name]}, {name: theirs[name]}) for name in theirs if theirs[name].any())


def of_micro_batch(index: int, change: Callable[[dict[str, Any]], dict[str, Any]]):
    return lambda batch: change(batch) if batch["index"] == index else batch


def not_a_number(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "z": batch["z"] * float("nan")}


def too_large(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "z": batch["z"] * 1e30}


def no_memory(batch: dict[str, Any]) -> dict[str, Any]:
    raise MemoryError("this rank has none left")


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world, alone = GroupWorld(CPU), World(CPU)
    found: dict[str, dict[str, Any]] = {}
    together: list[tuple[str, Runner, int, Spoil, Taken]] = []

    def configured(kind: str) -> TrainConfig:
        changes = {
            "full": {},
            "lora": {"refiner": {"start_from": str(folder / "start" / "refiner.safetensors")}, "lora": {"rank": 2}},
            "sdxl_refiner": {"objective": "sdxl_refiner", "refiner__shape": WITH_ATTENTION},
        }[kind]
        return configuration(folder / kind, folder / "run", **changes)

    def steps_of(name: str, runner: Runner, steps: int, spoil: Spoil = unspoilt) -> None:
        together.append((name, runner, steps, spoil, runner.take(world, steps, spoil)))

    single, double = Compute(CPU, None, torch.float32), Compute(CPU, None, torch.float64)
    for kind in ("full", "lora", "sdxl_refiner"):
        for accumulation in (size, 2 * size):
            steps_of(f"{kind}, float32, {accumulation}", Runner(configured(kind), single, accumulation), 1)
        # above the ranks, so that sums are made in another order than alone; of the slow one not
        accumulation = size if kind == "sdxl_refiner" else 2 * size
        steps_of(f"{kind}, float64", Runner(configured(kind), double, accumulation), STEPS)
    # the third step's micro-batch of the last rank overflows: all of them leave the step out
    half = Runner(configured("full"), Compute(CPU, torch.float16, torch.float32), size)
    steps_of("fp16 skips", half, 5, of_micro_batch(2 * size + size - 1, too_large))

    # numbers that are not finite, and a failure, on one rank
    for name, change in (("nan", not_a_number), ("memory", no_memory)):
        runner = Runner(configured("full"), single, 2 * size)
        ours = runner.take(world, 5, of_micro_batch(2 * 2 * size + size + 1, change))
        report = {"steps": len(ours.losses), "error": ours.error, "kind": ours.kind,
                  "untouched": all(torch.equal(ours.weights[k], ours.before[k]) for k in ours.before)}  # fmt: skip
        (folder / f"{name}-{rank}.json").write_text(json.dumps(report))

    # what the world itself promises
    agreed = [world.agree(False), world.agree(rank == size - 1)]
    agreed.append(world.agree(rank == 0, BadInput("unheard") if rank == size - 1 else None))
    try:
        world.agree(False, BadInput("the disk is full") if rank == size - 1 else None)
        said = ""
    except (BadInput, TrainingFailed) as error:
        said = f"{type(error).__name__}: {error}"
    tensors = [torch.full((3,), float(rank + 1)), torch.full((2, 2), rank + 1.0).bfloat16(), torch.zeros(0)]
    world.sum_all(tensors)
    try:
        Runner(configured("full"), single, 2 * size + 1).take(world, 1)
        refused = ""
    except BadInput as error:
        refused = str(error)
    own = {
        "agreed": agreed, "said": said, "refused": refused, "sums": [t.flatten().tolist() for t in tensors],
        "told": [world.tell(f"rank {rank} \u00e9", source) for source in range(size)], "empty": world.tell("", 0),
        "any": [world.any(rank == 0), world.any(False)],
    }
    (folder / f"world-{rank}.json").write_text(json.dumps(own))

    # the same steps by one process alone, shared out among the ranks
    for name, runner, steps, spoil, ours in together[rank::size]:
        theirs = runner.take(alone, steps, spoil)
        found[name] = {
            "loss": max((abs(a / b - 1) for a, b in zip(ours.losses, theirs.losses, strict=True) if b), default=0.0),
            "gradients": worst(ours.gradients, theirs.gradients),
            "weights": apart(ours.weights, theirs.weights),
            "updated": [ours.updated, theirs.updated],
        }
    (folder / f"cases-{rank}.json").write_text(json.dumps(found))
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
