"""What a run asks of the process and of its machine: numbers, generators, settings of torch, devices, kernels."""

import json
import math
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional

from tests.core.starts import TEXT, WITH_ATTENTION, write_start
from training.config.section import Section
from training.config.train_config import TrainConfig
from training.errors import BadInput
from training.run.checkpoints.checkpoint import list_steps
from training.run.plan import find_device
from training.storage.checksums import write_checksums

ROOT = Path(__file__).resolve().parents[2]
BRIEF = {"validation__pictures": 0, "epochs": 1}


def sections(model=TrainConfig, prefix=()):
    """(section, field) of every field that takes a number."""
    for name, field in model.model_fields.items():
        kinds = [kind for kind in getattr(field.annotation, "__args__", (field.annotation,)) if isinstance(kind, type)]
        inner = [kind for kind in kinds if issubclass(kind, Section)]
        if inner:
            yield from sections(inner[0], (*prefix, name))
        elif field.annotation is not bool and any(issubclass(kind, (int, float)) for kind in kinds):
            yield (*prefix, name)


@pytest.mark.parametrize(
    "number", [math.inf, -math.inf, math.nan, 10**400, -(10**400), 10**5000, 1e300],
    ids=["inf", "-inf", "nan", "10^400", "-10^400", "10^5000", "1e300"],
)
@pytest.mark.parametrize("place", list(sections()), ids=".".join)
def test_a_number_that_nobody_can_mean_is_refused_by_name(place, number):
    *above, name = place
    values = {"dataset": "d", "run": "r", "objective": "sdxl_refiner" if "sdxl_refiner" in above else "residual"}
    at = values
    for section in above:
        at = at.setdefault(section, {})
    at[name] = number
    with pytest.raises(BadInput, match=rf"configuration: {re.escape('.'.join(place))}: ") as caught:
        TrainConfig.build(values)
    assert len(str(caught.value)) < 300


def test_numbers_inside_lists_and_shapes_are_looked_at_too():
    for values, name in [
        ({"optimizer": {"betas": [0.9, math.nan]}}, "optimizer.betas"),
        ({"refiner": {"shape": {"block_channels": [10**400]}}}, "refiner.shape"),
    ]:
        with pytest.raises(BadInput, match=name):
            TrainConfig.build({"dataset": "d", "run": "r", **values})


# ---- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_a_run_multiplies_in_float32_and_restores_what_another_pack_had_set(configure, watch, precision):
    seen = set()

    class Looking(watch):
        def on_step(self, *given):
            super().on_step(*given)
            seen.add(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision(precision)
    try:
        Looking().train(configure(**BRIEF))
        assert seen == {"highest"} and torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_begins_where_another_pack_speaks_to_torch_of_each_kind_of_matrix(configure, watch):
    """From 2.9 on torch has a setting for each backend, and then refuses to give them in one word."""
    matrices = torch.backends.cuda.matmul
    if not hasattr(matrices, "fp32_precision"):
        pytest.skip("this torch has one word for all of them")
    before, seen = matrices.fp32_precision, set()

    class Looking(watch):
        def on_step(self, *given):
            super().on_step(*given)
            seen.add(matrices.fp32_precision)

    matrices.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="legacy and new"):
            torch.get_float32_matmul_precision()
        Looking().train(configure(**BRIEF))
        assert seen == {"ieee"} and matrices.fp32_precision == "tf32"
    finally:
        matrices.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_deterministic_algorithms_are_asked_for_and_given_back(configure, watch, whole_run):
    seen = set()

    class Looking(watch):
        def on_step(self, *given):
            super().on_step(*given)
            seen.add((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))

    config = configure(deterministic=True)
    result = Looking().train(config)
    assert seen == {(True, True)}
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    # on a CPU it changes nothing but the metadata, which say how it was trained
    assert config.identity()["deterministic"] is True and "deterministic" not in configure().identity()
    assert Looking.__mro__[1]().train(config).status == "reused"
    from training.objectives.residual.file import load_refiner

    one, other = (load_refiner(path)[0] for path in (result.refiner, whole_run[0].refiner))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_callers_random_numbers_are_where_they_were(configure, watch):
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    watch().train(configure(epochs=1, data__workers=1))
    after = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_nothing_seeds_the_generators_of_every_device():
    """torch.manual_seed also seeds those of CUDA, MPS and XPU, which fork_rng gives back only where they are named."""
    sources = [path for folder in ("training", "nodes") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    calls = re.compile(r"torch\.(cuda\.|mps\.|xpu\.|random\.)?(manual_seed|seed)(_all)?\(|\brandom\.seed\(")
    assert [path.name for path in sources if calls.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_callers_random_numbers_on_a_gpu_are_where_they_were(configure, watch):
    torch.cuda.manual_seed_all(5)
    before = torch.cuda.get_rng_state_all()
    watch().train(configure(**BRIEF))
    assert all(torch.equal(*pair) for pair in zip(before, torch.cuda.get_rng_state_all(), strict=True))


# ---- devices, rates, kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hpu", "privateuseone", "xpu", "mtia", "meta", "hip", "fairy", ""])
def test_a_device_that_is_not_here_is_one_sentence(configure, watch, name):
    assert find_device(name) is None
    with pytest.raises(BadInput, match=f"device: expected a device of this machine or auto, got {name!r}"):
        watch().train(configure(device=name, **BRIEF))


@pytest.mark.parametrize(
    "warmup, horizon, said", [(4, None, "80.0%"), (400, None, "1.0%"), (3, 3, "75.0%"), (3, None, ""), (2, 3, "")]
)
def test_a_warm_up_that_the_run_does_not_finish_is_said(configure, watch, warmup, horizon, said):
    watcher = watch(stop_after=0)
    watcher.train(configure(optimizer__warmup_steps=warmup, optimizer__horizon_steps=horizon, **BRIEF))
    remarks = [text for text in watcher.messages if text.startswith(f"optimizer.warmup_steps {warmup} is not over")]
    assert len(remarks) == bool(said) and (not said or f"comes to {said} of 0.003 at most" in remarks[0])


def other_rate(folder, factor):
    """Write into the newest checkpoint a learning rate that is `factor` times what it is."""
    path = list_steps(folder / ".checkpoints")[-1]
    state = json.loads((path / "state.json").read_text())
    state["schedule"]["learning_rate"] *= factor
    (path / "state.json").write_text(json.dumps(state))
    (path / "SHA256SUMS").unlink()
    write_checksums(path)


def test_a_rate_that_differs_in_its_last_place_is_the_same_rate(configure, watch, whole_run):
    """The cosine of another libm."""
    stopped = watch(stop_after=5).train(configure())
    other_rate(stopped.folder, 1 + 2**-52)
    assert watch().train(configure()).refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_rate_that_differs_otherwise_is_refused(configure, watch):
    stopped = watch(stop_after=5).train(configure())
    other_rate(stopped.folder, 1 + 1e-8)
    with pytest.raises(BadInput, match="goes on with learning rate"):
        watch().train(configure())


def no_backward(query, key, value, *given, **named):
    """Attention as some kernels compute it: right, and without a way back."""
    with torch.no_grad():
        return torch._C._nn.scaled_dot_product_attention(query, key, value)


def test_attention_without_a_backward_pass_is_named_at_the_first_step(
    configure, watch, build_pairs, tmp_path, monkeypatch
):
    start = write_start(tmp_path / "start" / "refiner.safetensors", text=TEXT)
    config = configure(dataset=build_pairs(text=TEXT), refiner={"start_from": str(start)}, **BRIEF)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", no_backward)
    said = r"Step 1: expected a gradient for each of \d+ trained parameters, got none for \d+, .*to_q\.weight"
    with pytest.raises(BadInput, match=rf"{said}.*computed by \S*test_run_settings\.no_backward") as caught:
        watch().train(config)
    assert "\n" not in str(caught.value)
    assert json.loads((config.run / "status.json").read_text())["state"] == "failed"
    monkeypatch.undo()
    assert watch().train(config).status == "done"
    assert WITH_ATTENTION["middle_depth"] == 1
