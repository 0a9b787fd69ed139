"""LoRA: adapters alone are trained, kept and averaged, and the file at the end is the refiner with them in it."""


import copy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.core.starts import write_start
from tests.core.test_resume import history, last_state
from training.config.start_file import start_file_hash
from training.data.batches import BatchSource
from training.errors import BadInput, TrainingFailed
from training.objectives.residual import objective as objectives
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.lora import add_adapters, choose_adapters, load_lora_meta
from training.objectives.residual.model import Refiner
from training.objectives.residual.objective import batch_loss
from training.objectives.residual.unet import build_unet
from training.objectives.trainables import fill, trainables
from training.run.checkpoints.checkpoint import load_newest
from training.run.optim.ema import EMA
from training.run.plan import make_plan


def adapted(start, config):
    """(refiner with untrained adapters, plan, batches) as a run makes them."""
    source = BatchSource(config.dataset, batch_size=2, seed=0)
    whole = make_plan(config, source.data, source.per_epoch)
    plan = whole.objective
    net = build_unet(plan.unet)
    plan.start.fill(net)
    torch.manual_seed(0)
    add_adapters(net, plan.adapters)
    return Refiner(net, plan.s, plan.c_v, whole.compute.autocast), plan, source


class Spy:
    """Keeps the network that a run trains, and what was in it before its first step.

    Adapters are put into two: the network itself, without memory yet, and the one that its first weights come from.
    """

    def __init__(self, monkeypatch):
        self.net, self.before = None, {}
        monkeypatch.setattr(objectives, "add_adapters", self)

    def __call__(self, net, adapters):
        add_adapters(net, adapters)
        self.net = self.net or net
        self.before = {name: p.detach().clone() for name, p in net.named_parameters()}


# -------------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16"])
def test_adapters_move_and_what_is_under_them_stays_to_the_bit(material, adapt, watch, monkeypatch, precision):
    spy = Spy(monkeypatch)
    watch().train(adapt(*material, precision=precision))
    low = torch.bfloat16 if precision == "pure_bf16" else torch.float32
    moved = {True: 0, False: 0}
    for name, parameter in spy.net.named_parameters():
        before = spy.before[name].to(low)
        assert parameter.dtype == low and parameter.requires_grad == ("lora_" in name), name
        assert torch.equal(parameter, before) != parameter.requires_grad, name
        assert parameter.requires_grad or parameter.grad is None, name
        moved[parameter.requires_grad] += 1
    assert all(moved.values())


def test_after_two_steps_every_adapter_has_moved_and_has_a_gradient(material, adapt):
    """Not after one: A's gradient passes through B, which begins at zero."""
    refiner, plan, source = adapted(material[0], adapt(*material))
    parameters = trainables(refiner.net)
    begun = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for step in (0, 1):
        optimizer.zero_grad()
        batch_loss(refiner, plan, collated(source, step), 0)[0].backward()
        zero = {name for name, p in parameters.items() if not p.grad.any()}
        assert zero == ({name for name in parameters if ".lora_A." in name} if step == 0 else set())
        optimizer.step()
    assert [name for name, p in parameters.items() if torch.equal(p, begun[name])] == []
    assert all(p.grad is None for p in refiner.net.parameters() if not p.requires_grad)


def collated(source, step):
    from contextlib import closing

    from training.data.loading import batches

    with closing(batches(source, step, 0, torch.device("cpu"))) as found:
        return next(found)


def test_gradients_are_the_same_with_gradient_checkpointing(material, adapt):
    """Non-reentrant, so that the inputs need no gradient of their own: nothing that is trained stands before them."""
    refiner, plan, source = adapted(material[0], adapt(*material))
    with torch.no_grad():
        for parameter in trainables(refiner.net).values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch, found = collated(source, 0), {}
    assert not batch["z"].requires_grad and not batch["b"].requires_grad
    for checkpointing in (False, True):
        refiner.net.train()
        (refiner.net.enable_gradient_checkpointing if checkpointing else lambda: None)()
        refiner.net.zero_grad()
        batch_loss(refiner, plan, batch, 0)[0].backward()
        found[checkpointing] = {name: p.grad.clone() for name, p in trainables(refiner.net).items()}
    assert refiner.net.is_gradient_checkpointing
    for name, gradient in found[False].items():
        assert gradient.any(), name
        torch.testing.assert_close(found[True][name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))


def test_a_run_with_gradient_checkpointing_gives_the_same_refiner(material, adapt, watch, tmp_path):
    plain = watch().train(adapt(*material, run=tmp_path / "plain"))
    less = watch().train(adapt(*material, gradient_checkpointing=True))
    expected, found = load_refiner(plain.refiner)[0], load_refiner(less.refiner)[0]
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_the_loss_falls(conv_start, dataset, adapt, watch):
    watcher = watch()
    watcher.train(adapt(conv_start, dataset, lora={"rank": 8}, epochs=15, optimizer__learning_rate=1e-2))
    assert sum(watcher.losses[-8:]) < 0.7 * sum(watcher.losses[:8])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_frozen_layer_that_gives_nan_is_named_and_no_adapter_moves(
    conv_start, dataset, adapt, watch, monkeypatch, precision
):
    spy = Spy(monkeypatch)

    class Poisoner(watch):
        def on_step(self, step, *given):
            super().on_step(step, *given)
            if step == 3:
                spy.net.conv_in.base_layer.bias.data[0] = float("nan")
                self.before = {name: p.detach().clone() for name, p in trainables(spy.net).items()}

    watcher = Poisoner()
    with pytest.raises(TrainingFailed, match="Step 4: expected a finite loss.*First not finite: .*layer conv_in"):
        watcher.train(adapt(conv_start, dataset, precision=precision))
    assert all(torch.equal(p, watcher.before[name]) for name, p in trainables(spy.net).items())


# ------------------------------------------------------------------------------------------------------ what is kept


def test_a_checkpoint_has_the_adapters_and_nothing_else(material, adapt, watch):
    config = adapt(*material)
    result = watch().train(config)
    count = choose_adapters(config.lora, load_meta(material[0]).unet).parameters
    found, _ = load_newest(result.folder / ".checkpoints")
    names = set(found.weights)
    assert names and names == set(found.ema) and all(".lora_A." in n or ".lora_B." in n for n in names)
    assert not any("default" in n or "base_layer" in n for n in names)
    assert {key.rpartition("/")[0] for key in found.optimizer} == names
    assert sum(t.numel() for t in found.weights.values()) == count
    path = result.folder / ".checkpoints" / f"step-{found.step:08d}"
    for name, copies in (("weights", 1), ("ema", 1), ("optimizer", 2)):
        file = path / f"{name}.safetensors"
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        counters = 4 * len(names) if name == "optimizer" else 0
        assert file.stat().st_size == header + copies * 4 * count + counters
    whole = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert whole < 4 * material[0].stat().st_size  # a full run's checkpoint has four times the network


def test_the_average_shares_what_is_frozen(conv_start, dataset, adapt):
    refiner, _, _ = adapted(conv_start, adapt(conv_start, dataset))
    ema = EMA(refiner.net, 0.5)
    assert set(ema.state_dict()) == set(trainables(refiner.net))
    live = {name: parameter.data_ptr() for name, parameter in refiner.net.named_parameters()}
    with ema.swapped(refiner.net) as net:
        assert all((p.data_ptr() == live[name]) != p.requires_grad for name, p in net.named_parameters())


def test_the_file_of_adapters_says_what_they_are_and_whose(conv_start, dataset, adapt, watch):
    result = watch().train(adapt(conv_start, dataset, lora={"rank": 3, "alpha": 6, "targets": ["conv1", "conv_in"]}))
    path = result.folder / "lora.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["ref2v_lora"]
    meta = load_lora_meta(path)
    assert (meta.rank, meta.alpha, meta.targets) == (3, 6.0, ["conv1", "conv_in"])
    assert meta.refiner == start_file_hash(conv_start) == load_meta(result.refiner).training["start"]["sha256"]
    assert meta.training == load_meta(result.refiner).training
    assert meta.training["config"]["lora"] == {"rank": 3, "alpha": 6.0, "targets": ["conv1", "conv_in"]}
    assert str(conv_start.parent) not in metadata["ref2v_lora"]  # no path
    kinds = {name.split(".", 1)[1] for name in load_file(path)}
    assert kinds == {"lora_down.weight", "lora_up.weight", "alpha"}
    with pytest.raises(BadInput, match="expected a refiner, got the adapters of one"):
        load_meta(path)
    with pytest.raises(BadInput, match="expected the adapters of a refiner, got another file"):
        load_lora_meta(result.refiner)


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_the_refiner_is_the_start_with_the_adapters_in_it(material, adapt, watch, precision):
    """Worked out from the two files alone, by the formula of LoRA; in pure_bf16, too, nothing else is rounded."""
    start, dataset = material
    result = watch().train(adapt(start, dataset, lora={"rank": 4, "alpha": 2}, precision=precision))
    before, (after, _, _) = load_refiner(start)[0], load_refiner(result.refiner)
    tensors = load_file(result.folder / "lora.safetensors")
    changed = 0
    for name, weight in before.items():
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        expected = weight.double()
        if name.endswith(".weight") and f"{key}.lora_up.weight" in tensors:
            up, down = (tensors[f"{key}.lora_{part}.weight"].double() for part in ("up", "down"))
            scale = float(tensors[f"{key}.alpha"]) / len(down)
            assert scale == 0.5
            expected = expected + scale * torch.einsum("or,r...->o...", up.flatten(1), down)
            changed += 1
        assert (after[name].double() - expected).abs().max() < 1e-6 and after[name].dtype == torch.float32
        assert torch.equal(after[name], weight) == (expected is weight or torch.equal(expected, weight.double()))
    assert changed == len(tensors) // 3 > 10


def test_merged_and_with_adapters_the_answer_is_the_same(material, adapt, watch):
    start, dataset = material
    config = adapt(start, dataset, optimizer__learning_rate=2e-2)
    result = watch().train(config)
    refiner, plan, source = adapted(start, config)
    ema = EMA(refiner.net, 0.5)
    ema.load_state_dict(load_newest(result.folder / ".checkpoints")[0].ema)
    merged, _, _ = Refiner.from_file(result.refiner)
    batch, t = collated(source, 0), torch.tensor([1.0, 0.3])
    condition = {"context": batch.get("context", torch.zeros(2, 1, plan.unet.context_dim))}
    with torch.no_grad():
        with ema.swapped(refiner.net) as net:
            wrapped = Refiner(net, plan.s, plan.c_v).output(batch["z"], batch["b"], t, condition)
        whole = merged.output(batch["z"], batch["b"], t, condition)
        untouched = Refiner.from_file(start)[0].output(batch["z"], batch["b"], t, condition)
    assert (wrapped - whole).abs().max() <= 1e-5
    assert (whole - untouched).abs().max() > 1e-2


def test_what_a_run_gives_can_be_adapted_again(conv_start, dataset, adapt, watch, tmp_path):
    first = watch().train(adapt(conv_start, dataset, run=tmp_path / "first"))
    second = watch().train(adapt(first.refiner, dataset))
    chain = load_meta(second.refiner).training["start"]
    assert chain["sha256"] == start_file_hash(first.refiner)
    assert chain["training"]["start"]["sha256"] == start_file_hash(conv_start)


def test_a_run_whose_adapters_were_deleted_is_not_finished(conv_start, dataset, adapt, watch):
    result = watch().train(adapt(conv_start, dataset))
    made = (result.folder / "lora.safetensors").read_bytes(), result.refiner.read_bytes()
    assert watch().train(adapt(conv_start, dataset)).status == "reused"
    (result.folder / "lora.safetensors").unlink()
    again = watch().train(adapt(conv_start, dataset))
    assert again.status == "done"
    assert ((again.folder / "lora.safetensors").read_bytes(), again.refiner.read_bytes()) == made


def test_a_start_that_changes_under_the_run_is_told_and_put_back_the_run_ends(conv_start, dataset, adapt, watch):
    whole, config = conv_start.read_bytes(), adapt(conv_start, dataset)

    class Meddler(watch):
        def on_step(self, step, *given):
            super().on_step(step, *given)
            if step == 3:
                write_start(conv_start, s=0.4)

    with pytest.raises(BadInput, match="was changed while the run was at work: put it back"):
        Meddler().train(config)
    assert not (config.run / "refiner.safetensors").exists()
    conv_start.write_bytes(whole)
    watcher = watch()
    assert watcher.train(config).status == "done" and watcher.steps == []


# ------------------------------------------------------------------------------------------------------------ resumed


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_ten_steps_and_fifteen_and_five_are_thirty(adapt, conv_start, watch, tmp_path, build_pairs, precision):
    changes = {
        "precision": precision, "epochs": 12, "flow__steps": 2, "data__workers": 2, "data__crop": 8,
        "data__batch_size": 1, "data__accumulation": 2, "validation__every": 4, "validation__crop": 8,
        "validation__pictures": 1, "keep_checkpoints": 1, "keep_best": False,
    }  # fmt: skip
    pairs, whole = build_pairs("few", pairs=6, held_out=1), watch()
    finished = whole.train(adapt(conv_start, pairs, run=tmp_path / "whole", **changes))
    assert finished.status == "done" and whole.steps == list(range(1, 31))

    losses = []
    for part, (first, last) in enumerate(((1, 10), (11, 25), (26, 30))):
        torch.manual_seed(part)  # whatever the process drew before
        watcher = watch(stop_after=last - first + 1 if last < 30 else None)
        result = watcher.train(adapt(conv_start, pairs, **changes))
        assert watcher.steps == list(range(first, last + 1)) and result.status == ("stopped" if last < 30 else "done")
        losses += watcher.losses
    assert losses == whole.losses
    for name in ("refiner.safetensors", "lora.safetensors"):
        assert (result.folder / name).read_bytes() == (finished.folder / name).read_bytes()
    assert last_state(result.folder) == last_state(finished.folder)
    assert history(result.folder) == history(finished.folder)


def test_a_checkpoint_of_another_rank_is_another_run(conv_start, dataset, adapt, watch):
    watch(stop_after=2).train(adapt(conv_start, dataset))
    with pytest.raises(BadInput, match="another configuration .*lora.rank 4 -> 5"):
        watch().train(adapt(conv_start, dataset, lora={"rank": 5}))


def test_a_copy_of_an_adapted_network_is_one(conv_start, dataset, adapt):
    """The average is a deep copy: what it learns must not reach the original."""
    refiner, _, _ = adapted(conv_start, adapt(conv_start, dataset))
    other = copy.deepcopy(refiner.net)
    fill(trainables(other), {name: torch.ones_like(p) for name, p in trainables(other).items()})
    assert not any(torch.equal(p, torch.ones_like(p)) for p in trainables(refiner.net).values())
