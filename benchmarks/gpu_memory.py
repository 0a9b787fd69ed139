"""Estimates of memory against torch.cuda.max_memory_allocated: each attention kernel that is installed, a pass, a step.

Part of benchmarks/gpu_check.py; a backend that is not installed is left out and stays *not measured*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["kernels", "measured_peak", "memory_checks"]

SHAPES = ((2, 10, 4032, 4032, 64), (2, 8, 9216, 9216, 40), (2, 8, 9216, 77, 40), (1, 24, 4352, 4352, 128))


def kernels() -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """(backend, function of q, k, v as [b, N, h d] and h), each as ComfyUI calls it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(q, k, v, h, backends=None):
        b, d = q.shape[0], q.shape[2] // h
        q, k, v = (t.view(b, -1, h, d).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backends) if backends else contextlib.nullcontext():
            return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, h * d)

    yield "pytorch", sdpa
    yield "pytorch math", lambda q, k, v, h: sdpa(q, k, v, h, [SDPBackend.MATH])
    with contextlib.suppress(ImportError):
        from flash_attn import flash_attn_func

        def flash(q, k, v, h):
            b = q.shape[0]
            return flash_attn_func(*(t.view(b, t.shape[1], h, -1) for t in (q, k, v))).reshape(b, q.shape[1], -1)

        yield "flash", flash
    with contextlib.suppress(ImportError):
        import xformers.ops

        def xformers_attention(q, k, v, h):
            b = q.shape[0]
            parts = (t.view(b, t.shape[1], h, -1) for t in (q, k, v))
            return xformers.ops.memory_efficient_attention(*parts).reshape(b, q.shape[1], -1)

        yield "xformers", xformers_attention
    with contextlib.suppress(ImportError):
        from sageattention import sageattn

        def sage(q, k, v, h):
            b = q.shape[0]
            parts = (t.view(b, t.shape[1], h, -1) for t in (q, k, v))
            return sageattn(*parts, is_causal=False, tensor_layout="NHD").reshape(b, q.shape[1], -1)

        yield "sage", sage


def measured_peak(work: Callable[[], object]) -> int:
    """Bytes that `work` allocated at its peak, beside what was there. It runs once before: workspaces stay."""
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory_checks() -> list[tuple[str, int, int]]:
    """(what, estimate, measured) in bytes; the estimate without its assumed overhead."""
    return [*_attention(), *_pass(), *_steps()]


@torch.no_grad()
def _attention() -> Iterator[tuple[str, int, int]]:
    from training.memory.attention import AttentionCall, attention_peak

    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # as ComfyUI does
    for b, h, n, m, d in SHAPES:
        call = AttentionCall(b, h, n, m, d, 2)
        q, k, v = (torch.randn(b, tokens, h * d, device="cuda", dtype=torch.bfloat16) for tokens in (n, m, m))
        for backend, function in kernels():
            got = measured_peak(lambda function=function, h=h, q=q, k=k, v=v: function(q, k, v, h))
            words = f"{backend} attention, {b} x {h} heads of {d}, {n} x {m} tokens, bf16"
            yield words, attention_peak(call, backend).total - call.inputs, got


@torch.no_grad()
def _pass() -> Iterator[tuple[str, int, int]]:
    from training.memory.machine import planned_machine
    from training.memory.network_estimate import estimate_network
    from training.memory.training_trace import NETWORKS
    from training.objectives.residual.unet import call_unet

    network = NETWORKS["SD1.5"]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    net = network.build().to(**options)
    for side in (64, 96):

        def work(side: int = side) -> object:
            x, b = torch.randn(2, 4, side, side, **options), torch.randn(2, 0, side, side, **options)
            return call_unet(net, x, b, torch.rand(2, device="cuda"), torch.randn(2, 77, 768, **options))

        said = estimate_network("SD1.5", side * 8, side * 8, planned_machine(80)).phases[0].working
        yield f"SD1.5, {side * 8} px, CFG, bf16, pytorch", said, measured_peak(work)


def _steps() -> Iterator[tuple[str, int, int]]:
    from training.memory.optimizers import PARAMETERS
    from training.memory.training_trace import NETWORKS, TracedTraining, attention_of, prepare, training_step

    network = NETWORKS["sd15-half"]
    net, traced = network.build().to(device="cuda"), TracedTraining(network)
    for autocast in (None, torch.bfloat16):
        for checkpointing in (False, True):

            def work(autocast=autocast) -> None:
                net.zero_grad()
                batch = {name: torch.randn(2, 4, 96, 96, device="cuda") for name in "zb"}
                batch |= {"t": torch.rand(2, device="cuda"), "context": torch.randn(2, 77, 768, device="cuda")}
                with attention_of(net, "pytorch"):
                    training_step(network, net, batch, autocast)
                net.zero_grad()

            prepare(net, checkpointing)
            options = {"autocast": autocast, "checkpointing": checkpointing, "attention": "pytorch", "gpu": True}
            said = traced.trace(96, 96, 2, **options)
            words = f"training step, sd15-half, 768 px, batch 2, {'bf16 autocast' if autocast else 'fp32'}"
            words += ", checkpointing" if checkpointing else ""
            yield words, said.total - said.terms[PARAMETERS], measured_peak(work)
