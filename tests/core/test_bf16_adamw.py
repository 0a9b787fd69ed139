"""AdamW for bfloat16 weights against AdamW for float32 ones: what the plain one loses, ours keeps."""

import pytest
import torch
from torch import nn

from training.errors import BadInput
from training.run.checkpoints.checkpoint import optimizer_tensors, restore_optimizer
from training.run.optim.bf16_adamw import BF16AdamW
from training.run.optim.noise import Block
from training.run.optim.rounding import join_float32

METHODS = ["stochastic", "kahan", "master"]
MOMENTS = ["fp32", "bf16"]


def ours(parameters, **options):
    """BF16AdamW over a dictionary of named parameters."""
    names = {parameter: name for name, parameter in parameters.items()}
    return BF16AdamW([{"params": list(parameters.values())}], names, **{"lr": 1e-3, **options})


def plain(parameters, **options):
    return torch.optim.AdamW(parameters.values(), **{"lr": 1e-3, **options})


def ones(count=4096, dtype=torch.bfloat16, start=1.0):
    return {"w": nn.Parameter(torch.full((count,), start, dtype=dtype))}


def walk(optimizer, parameters, steps, gradient=lambda step, p: torch.zeros_like(p)):
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = gradient(step, parameter)
        optimizer.step()
    return parameters


def shrunk(make, steps, lr, weight_decay, count=1024, *, kept=False, **options):
    """Share of their start that weights of many sizes keep without gradients; `kept`: with what is kept beside them."""
    start = torch.linspace(1, 2, count).bfloat16()
    parameters = {"w": nn.Parameter(start.clone())}
    optimizer = make(parameters, lr=lr, weight_decay=weight_decay, **options)
    walk(optimizer, parameters, steps)
    end, state = parameters["w"].detach(), optimizer.state[parameters["w"]]
    if kept and "compensation" in state:
        end = join_float32(end, state["compensation"])
    elif kept:
        end = state.get("master", end)
    return float(end.double().mean() / start.double().mean())


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding", METHODS)
def test_weights_decay_as_they_do_in_float32(rounding, moments):
    assert shrunk(ours, 1000, 1e-3, 0.1, rounding=rounding, moments=moments) == pytest.approx(0.905, abs=0.005)


@pytest.mark.parametrize("rounding", METHODS)
def test_a_decay_of_a_millionth_a_step_is_not_lost(rounding):
    """A thousand of them are less than the gap to the next bfloat16: most nearest weights have not moved yet."""
    found = shrunk(ours, 1000, 1e-3, 1e-3, 2**14, kept=True, rounding=rounding)
    assert 1 - found == pytest.approx(1e-3, rel=0.15)


@pytest.mark.full
@pytest.mark.parametrize("rounding", METHODS)
def test_a_decay_of_a_millionth_a_step_over_sixty_thousand(rounding):
    assert shrunk(ours, 60_000, 1e-3, 1e-3, rounding=rounding) == pytest.approx(0.942, abs=0.002)


@pytest.mark.parametrize("lr, weight_decay", [(1e-3, 0.1), (1e-3, 1e-3)])
def test_plain_adamw_on_bfloat16_weights_loses_the_decay(lr, weight_decay):
    assert shrunk(plain, 1000, lr, weight_decay) == 1.0


def noisy_quadratic(make, dtype, **options):
    """300 steps on |w - target|^2 / 2 with noisy gradients, the same for all. Returns start and end in double."""
    generator = torch.Generator().manual_seed(0)
    start, target = (torch.randn(1024, generator=generator).bfloat16() for _ in range(2))
    parameters = {"w": nn.Parameter(start.clone().to(dtype))}
    noise = [torch.randn(1024, generator=generator) for _ in range(16)]
    optimizer = make(parameters, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, **options)
    walk(
        optimizer, parameters, 300,
        lambda step, p: (p.detach().float() - target + noise[step % 16]).bfloat16().to(dtype),
    )
    return start.double(), parameters["w"].detach().double()


def error_of_the_update(make, **options):
    start, exact = noisy_quadratic(plain, torch.float32)
    _, found = noisy_quadratic(make, torch.bfloat16, **options)
    return float((found - exact).norm() / (exact - start).norm())


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding, most", [("stochastic", 0.15), ("kahan", 0.012), ("master", 0.012)])
def test_the_update_is_that_of_adamw_in_float32(rounding, moments, most):
    """What is left for kahan and master is the rounding of the end to bfloat16, for stochastic the noise of it."""
    assert error_of_the_update(ours, rounding=rounding, moments=moments) < most


def test_plain_adamw_on_bfloat16_weights_loses_most_of_the_update():
    assert error_of_the_update(plain) > 0.9


def test_stochastic_rounding_is_right_on_average():
    start, exact = noisy_quadratic(plain, torch.float32)
    ends = [noisy_quadratic(ours, torch.bfloat16, seed=seed)[1] for seed in range(6)]
    one = float((ends[0] - exact).norm() / (exact - start).norm())
    mean = float((torch.stack(ends).mean(0) - exact).norm() / (exact - start).norm())
    assert mean < 0.55 * one  # errors that go the same way would not cancel


def test_the_master_weights_are_those_of_float32_adamw():
    """Gradients that do not depend on the weights: nothing differs but the order of a few float32 operations."""
    gradients = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    start = torch.randn(300, generator=torch.Generator().manual_seed(2)).bfloat16()
    full, low = {"w": nn.Parameter(start.float())}, {"w": nn.Parameter(start.clone())}
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-6}
    walk(plain(full, **options), full, 20, lambda step, p: gradients[step].float())
    optimizer = ours(low, rounding="master", **options)
    walk(optimizer, low, 20, lambda step, p: gradients[step])
    torch.testing.assert_close(optimizer.state[low["w"]]["master"], full["w"].detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(low["w"], optimizer.state[low["w"]]["master"].bfloat16())


def test_kahan_compensation_equals_master_weights_to_the_bit():
    _, kahan = noisy_quadratic(ours, torch.bfloat16, rounding="kahan")
    _, master = noisy_quadratic(ours, torch.bfloat16, rounding="master")
    differ = kahan != master
    assert float(differ.double().mean()) < 1e-3  # a tie goes up in one and to the even neighbour in the other
    torch.testing.assert_close(kahan, master, rtol=2**-7, atol=0)


def second_moment_after_the_gradients_stop(make, dtype, **options):
    """Its share of its peak, 5,000 steps after gradients of 1 became 0."""
    parameters = ones(256, dtype)
    optimizer = make(parameters, betas=(0.9, 0.999), weight_decay=0.0, **options)
    walk(optimizer, parameters, 200, lambda step, p: torch.ones_like(p))
    peak = optimizer.state[parameters["w"]]["exp_avg_sq"].double().mean()
    walk(optimizer, parameters, 5000)
    return float(optimizer.state[parameters["w"]]["exp_avg_sq"].double().mean() / peak)


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_second_moment_falls_when_the_gradients_do(moments):
    assert second_moment_after_the_gradients_stop(ours, torch.bfloat16, moments=moments) < 0.02


def test_a_second_moment_rounded_to_nearest_does_not_fall():
    assert second_moment_after_the_gradients_stop(plain, torch.bfloat16) > 0.5


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding", METHODS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1])
def test_a_nan_stays_one(rounding, moments, bits):
    bad = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    parameters = ones(8, torch.bfloat16)
    optimizer = ours(parameters, rounding=rounding, moments=moments)
    for step in range(3):
        parameters["w"].grad = torch.ones(8).bfloat16()
        if step == 1:  # as a gradient in float32, such as a fused backward may hand over
            optimizer.state[parameters["w"]]["exp_avg"].view(-1)[3] = bad.item()
        optimizer.step()
    assert parameters["w"].isnan().tolist() == [False] * 3 + [True] + [False] * 4


# ---- one element, one noise -----------------------------------------------------------------------------------------


def steps_of(parameters, gradient, blocks=None, **options):
    optimizer = ours(parameters, seed=5, blocks=blocks, **options)
    walk(optimizer, parameters, 3, lambda step, p: gradient[p])
    return optimizer


@pytest.mark.parametrize("moments", MOMENTS)
def test_every_way_to_split_a_parameter_rounds_alike(moments):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator).bfloat16()
    given = torch.randn(6, 8, generator=generator).bfloat16()
    whole = nn.Parameter(start.clone())
    steps_of({"w": whole}, {whole: given}, moments=moments)
    assert not torch.equal(whole, start)
    for rows, columns in [((0, 3), (0, 8)), ((3, 6), (0, 8)), ((0, 6), (2, 5)), ((1, 5), (5, 8))]:
        part = slice(*rows), slice(*columns)
        piece = nn.Parameter(start[part].clone())
        blocks = {"w": Block((6, 8), (rows[0], columns[0]))}
        steps_of({"w": piece}, {piece: given[part]}, blocks, moments=moments)
        assert torch.equal(piece, whole[part])


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding", METHODS)
def test_the_neighbours_in_a_chunk_change_nothing(rounding, moments, monkeypatch):
    """Large and small parameters, in chunks of any size and in any order."""
    from training.run.optim import bf16_adamw

    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7,), "b": (5, 11), "c": (1,), "d": (3, 4, 2), "e": (0,)}
    start = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    given = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    ends = []
    for chunk, order in [(2**16, "abcde"), (10, "abcde"), (1, "edcba"), (16, "cadeb")]:
        monkeypatch.setattr(bf16_adamw, "CPU_CHUNK", chunk)
        parameters = {name: nn.Parameter(start[name].clone()) for name in order}
        steps_of(
            parameters, {p: given[name] for name, p in parameters.items()}, rounding=rounding, moments=moments
        )
        ends.append({name: p.detach() for name, p in parameters.items()})
    for end in ends[1:]:
        assert all(torch.equal(end[name], ends[0][name]) for name in shapes)
    assert not torch.equal(ends[0]["b"], start["b"])


def test_the_memory_layout_of_a_kernel_changes_nothing():
    start = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        kernel, other = (nn.Parameter(start.clone().to(memory_format=layout)) for _ in range(2))
        steps_of({"w": kernel, "o": other}, {kernel: given, other: given})
        ends.append(kernel.detach().clone(memory_format=torch.contiguous_format))
    assert torch.equal(*ends) and not torch.equal(ends[0], start)


def test_float32_parameters_beside_bfloat16_ones_are_plain_adamw():
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mixed = {"low": nn.Parameter(torch.ones(50).bfloat16()), "full": nn.Parameter(torch.ones(50))}
    alone = {"full": nn.Parameter(torch.ones(50))}
    walk(ours(mixed), mixed, 5, lambda step, p: gradient.to(p.dtype))
    walk(plain(alone), alone, 5, lambda step, p: gradient)
    torch.testing.assert_close(mixed["full"], alone["full"], rtol=1e-6, atol=1e-7)
    assert mixed["full"].dtype == torch.float32 and mixed["low"].dtype == torch.bfloat16


def test_a_parameter_without_gradient_stays_and_another_dtype_is_refused():
    parameters = {"a": nn.Parameter(torch.ones(3).bfloat16()), "b": nn.Parameter(torch.ones(3).bfloat16())}
    optimizer = ours(parameters, lr=0.1)
    parameters["a"].grad = torch.ones(3).bfloat16()
    optimizer.step()
    assert torch.equal(parameters["b"], torch.ones(3).bfloat16()) and not torch.equal(*parameters.values())
    with pytest.raises(ValueError, match="expected bfloat16 or float32, got w in torch.float16"):
        ours(ones(3, torch.float16))
    with pytest.raises(ValueError, match="found none for one of"):
        BF16AdamW([{"params": [nn.Parameter(torch.ones(3))]}], {}, lr=1e-3)


# ---- its state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rounding", METHODS)
@pytest.mark.parametrize("way", ["named tensors", "state_dict"])
def test_a_restored_optimizer_goes_on_to_the_same_bits(rounding, moments, way, tmp_path):
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, 40, generator=generator).bfloat16()
    whole = ones(40)
    walk(ours(whole, rounding=rounding, moments=moments), whole, 6, lambda step, p: gradients[step])

    first = ones(40)
    optimizer = ours(first, rounding=rounding, moments=moments)
    walk(optimizer, first, 3, lambda step, p: gradients[step])
    second = {"w": nn.Parameter(first["w"].detach().clone())}
    resumed = ours(second, rounding=rounding, moments=moments)
    if way == "state_dict":
        resumed.load_state_dict(optimizer.state_dict())
    else:
        save_file(optimizer_tensors(optimizer, {first["w"]: "w"}), tmp_path / "optimizer.safetensors")
        restore_optimizer(resumed, second, load_file(tmp_path / "optimizer.safetensors"))
    walk(resumed, second, 3, lambda step, p: gradients[3 + step])
    assert torch.equal(second["w"], whole["w"])


@pytest.mark.parametrize(
    "rounding, moments, expected",
    [
        ("stochastic", "bf16", 6), ("kahan", "bf16", 8), ("master", "bf16", 10),
        ("stochastic", "fp32", 10), ("kahan", "fp32", 12), ("master", "fp32", 14),
    ],
)
def test_bytes_a_parameter(rounding, moments, expected):
    parameters = ones(1000)
    optimizer = ours(parameters, rounding=rounding, moments=moments)
    walk(optimizer, parameters, 1)
    state = sum(t.nbytes for name, t in optimizer.state[parameters["w"]].items() if name != "step")
    assert (state + parameters["w"].nbytes) / 1000 == expected


@pytest.mark.full
@pytest.mark.parametrize("rounding, moments", [("stochastic", "bf16"), ("kahan", "fp32")])
def test_the_compiled_update_is_the_same_but_for_the_last_places(rounding, moments):
    pytest.importorskip("torch._inductor")
    generator = torch.Generator().manual_seed(0)
    start, given = (torch.randn(3000, generator=generator).bfloat16() for _ in range(2))
    ends = []
    for compiled in (False, True):
        parameters = {name: nn.Parameter(start.clone()) for name in "ab"}
        optimizer = ours(parameters, rounding=rounding, moments=moments, compiled=compiled, lr=1e-2)
        walk(optimizer, parameters, 5, lambda step, p: given * (1 + step))
        ends.append(torch.cat([p.detach() for p in parameters.values()]))
    assert float((ends[0] != ends[1]).double().mean()) < 0.01
    torch.testing.assert_close(*ends, rtol=2**-6, atol=1e-4)


def test_a_machine_that_cannot_compile_is_told_so_in_one_sentence(monkeypatch):
    def fails(*_):
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no C++ compiler\nfound"), None)

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    parameters = ones(3)
    with pytest.raises(BadInput, match="optimizer.compiled: expected .* false trains without it") as caught:
        walk(ours(parameters, compiled=True), parameters, 1)
    assert "\n" not in str(caught.value)
