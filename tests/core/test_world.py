"""Several real processes that train together do what one does alone: world_program.py is each of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.conftest import write_dataset
from tests.core.starts import TEXT, write_start
from tests.core.test_sdxl_refiner import LATENT
from tests.core.test_sdxl_refiner import TEXT as SDXL_TEXT

PROGRAM = Path(__file__).with_name("world_program.py")
KINDS = ("full", "lora", "sdxl_refiner")


@pytest.fixture(scope="module", params=[2, 3])
def together(request, tmp_path_factory):
    """(number of processes, folder with what they wrote). All cases in one world: its start is what takes long."""
    size, folder = request.param, tmp_path_factory.mktemp(f"world-{request.param}")
    write_dataset(folder / "full")
    write_dataset(folder / "lora", text=TEXT)
    write_dataset(folder / "sdxl_refiner", side=8, latent=LATENT, text=SDXL_TEXT)
    write_start(folder / "start" / "refiner.safetensors", text=TEXT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(folder)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n\n".join(told)
    return size, folder


def cases(folder):
    return {name: case for file in folder.glob("cases-*.json") for name, case in json.loads(file.read_text()).items()}


def of_all_ranks(together, name):
    size, folder = together
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_many_processes_has_the_loss_and_the_gradients_of_one(together, kind):
    size, folder = together
    for accumulation in (size, 2 * size):
        case = cases(folder)[f"{kind}, float32, {accumulation}"]
        assert case["loss"] <= 1e-6 and case["gradients"] <= 1e-6, case


@pytest.mark.parametrize("kind", KINDS)
def test_after_twenty_steps_in_float64_the_weights_are_those_of_one_process(together, kind):
    case = cases(together[1])[f"{kind}, float64"]
    assert case["weights"] <= 1e-10 and case["loss"] <= 1e-10, case
    assert case["updated"] == [[True] * 20] * 2


def test_a_step_that_one_rank_must_skip_is_skipped_by_all(together):
    case = cases(together[1])["fp16 skips"]
    assert case["updated"] == [[True, True, False, True, True]] * 2
    assert case["weights"] <= 1e-3, case


def test_a_number_that_is_not_finite_on_one_rank_ends_all_at_that_step_with_its_rank_and_layer(together):
    told = of_all_ranks(together, "nan")
    assert all(each["kind"] == "TrainingFailed" and each["steps"] == 2 and each["untouched"] for each in told), told
    assert len({each["error"] for each in told}) == 1
    error = told[0]["error"]
    assert error.startswith("Step 3: expected a finite loss and gradient, got loss nan") and "first on rank 1" in error
    assert "First not finite: " in error and "layer conv_in" in error
    assert error.endswith("The weights are as they were before; kept: as rank 0 says.")


def test_a_failure_of_one_rank_ends_all_at_that_step_and_names_it(together):
    size, _ = together
    told = of_all_ranks(together, "memory")
    assert all(each["steps"] == 2 and each["untouched"] for each in told), told
    assert (told[1]["kind"], told[1]["error"]) == ("MemoryError", "this rank has none left")
    others = {(each["kind"], each["error"]) for each in (told[:1] + told[2:])}
    assert others == {("TrainingFailed", f"Rank 1 of {size} failed: this rank has none left")}


def test_the_verdict_is_one_and_the_first_rank_that_failed_is_named(together):
    size, _ = together
    told = of_all_ranks(together, "world")
    assert [each["agreed"] for each in told] == [[False, True, True]] * size
    assert told[-1]["said"] == "BadInput: the disk is full"
    assert {each["said"] for each in told[:-1]} == {
        f"TrainingFailed: Rank {size - 1} of {size} failed: the disk is full"
    }


def test_sums_and_sentences_are_the_same_on_all_ranks(together):
    size, _ = together
    total = float(sum(range(1, size + 1)))
    for each in of_all_ranks(together, "world"):
        assert each["sums"] == [[total] * 3, [total] * 4, []]
        assert each["told"] == [f"rank {rank} \u00e9" for rank in range(size)] and each["empty"] == ""
        assert each["any"] == [True, False]


def test_accumulation_that_the_ranks_do_not_divide_is_refused_with_what_would_do(together):
    size, _ = together
    ranks = {2: "1 and 5", 3: "1 and 7"}[size]
    assert {each["refused"] for each in of_all_ranks(together, "world")} == {
        f"data.accumulation: expected a number of micro-batches that {size} ranks divide, such as {size} or "
        f"{2 * size}, got {2 * size + 1}, which {ranks} would divide."
    }
