"""The optimizer in a checkpoint: training goes on bit for bit."""


import pytest
import torch
from torch import nn
from torch.nn import Linear

from training.run.checkpoints import checkpoint as checkpoints
from training.run.checkpoints.checkpoint import Checkpoint


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"

def loop(net, optimizer, first, last):
    for k in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
        (net(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(**options):
    torch.manual_seed(0)
    net = nn.Sequential(Linear(3, 8), nn.SiLU(), Linear(8, 2))
    kernels, others = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return net, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), **options)


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(folder, fused):
    whole, optimizer = fresh(fused=fused)
    loop(whole, optimizer, 0, 20)

    first, optimizer = fresh(fused=fused)
    loop(first, optimizer, 0, 8)
    names = {p: n for n, p in first.named_parameters()}
    tensors = checkpoints.optimizer_tensors(optimizer, names)
    checkpoints.save(folder, Checkpoint(8, first.state_dict(), {}, tensors, {}), keep=1)

    second, optimizer = fresh(fused=fused)
    found, _ = checkpoints.load_newest(folder)
    second.load_state_dict(found.weights)
    checkpoints.restore_optimizer(optimizer, dict(second.named_parameters()), found.optimizer)
    loop(second, optimizer, 8, 20)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))

    forgetful, optimizer = fresh(fused=fused)  # the moments do matter: without them the end is another
    forgetful.load_state_dict(found.weights)
    loop(forgetful, optimizer, 8, 20)
    assert not torch.equal(forgetful[0].weight, whole[0].weight)


@pytest.mark.parametrize("options, place", [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_step_counter_goes_where_the_optimizer_reads_it(options, place):
    """On a GPU a fused AdamW keeps it there; the meta device stands in for one."""
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter], **options)
    stored = {"w/step": torch.tensor(3.0), "w/exp_avg": torch.zeros(2)}
    checkpoints.restore_optimizer(optimizer, {"w": parameter}, stored)
    state = optimizer.state[parameter]
    assert state["step"].device.type == place and state["exp_avg"].device.type == "meta"


def test_an_optimizer_that_has_not_stepped_yet_is_saved_too(folder):
    net, optimizer = fresh()
    names = {p: n for n, p in net.named_parameters()}
    tensors = checkpoints.optimizer_tensors(optimizer, names)
    checkpoints.save(folder, Checkpoint(0, net.state_dict(), {}, tensors, {}), keep=1)
    found, passed_over = checkpoints.load_newest(folder)
    assert found.step == 0 and found.optimizer == {} and passed_over == []
