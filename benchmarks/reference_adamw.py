"""AdamW steps written out, one per optimizer of training/memory/optimizers.py: what the estimate is measured against.

They do the arithmetic of each kind (FP32 moments, the update in FP32, one rounding) and hold the tensors that it needs;
they are no optimizer to train with.
"""

from __future__ import annotations

import torch

__all__ = ["make_stepper"]


def make_stepper(name: str, parameters: list[torch.nn.Parameter]):
    """(the state's tensors, a function that makes one step from the parameters' gradients)."""
    if name in ("AdamW", "AdamW, foreach"):
        fused = name == "AdamW"
        optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the state
        optimizer.zero_grad()
        state = [t for each in optimizer.state.values() for t in each.values() if torch.is_tensor(t)]
        return state, optimizer.step
    moments = [(torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32)) for p in parameters]
    state = [tensor for pair in moments for tensor in pair]
    extra: list[torch.Tensor] = []
    if "Kahan" in name:
        extra = [torch.zeros_like(p) for p in parameters]
    elif "master" in name:
        extra = [p.detach().float() for p in parameters]

    @torch.no_grad()
    def step() -> None:
        for index, (parameter, (first, second)) in enumerate(zip(parameters, moments, strict=True)):
            gradient = parameter.grad.float()
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            del gradient
            update = second.sqrt().add_(1e-8)
            torch.div(first, update, out=update)
            if "master" in name:
                parameter.copy_(extra[index].add_(update, alpha=-1e-3))
            elif "Kahan" in name:
                wanted = extra[index].float().add_(update, alpha=-1e-3)
                before = parameter.float()
                parameter.copy_(before + wanted)
                extra[index].copy_(wanted.sub_(parameter.float() - before))
            else:
                exact = parameter.float().add_(update, alpha=-1e-3)
                bits = exact.view(torch.int32).add_(torch.randint_like(exact, 0, 1 << 16, dtype=torch.int32))
                parameter.copy_(bits.bitwise_and_(-65536).view(torch.float32))

    return [*state, *extra], step
