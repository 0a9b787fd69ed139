"""Model Memory without ComfyUI: the UNets of training/memory/training_trace.py in one pass of sampling."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BadInput
from ..objectives.residual.unet import call_unet
from ..precision.dtypes import DTYPES
from .attention import BACKENDS
from .machine import Machine
from .meter import StorageMeter
from .model_estimate import SAMPLING, ModelEstimate
from .models import Latent, Level, ModelShape
from .phases import Phase
from .trace import ACTIVATIONS, WEIGHTS, AttentionStandIn, Trace, attention_call
from .training_trace import NETWORKS, Network, TracedTraining
from .weights import weight_rows

__all__ = ["estimate_network", "traced_network_shape"]

LATENTS = "latents and text"


def traced_network_shape(network: Network) -> ModelShape:
    """Where the UNet attends: as many blocks down as it has layers, one more up, and the middle at the last level."""
    shape, levels = network.shape, []
    last = len(shape.block_channels) - 1
    for index, (width, heads, depth) in enumerate(
        zip(shape.block_channels, shape.heads, shape.transformer_depth, strict=True)
    ):
        blocks = depth * (2 * shape.layers_per_block + 1) + (shape.middle_depth if index == last else 0)
        if blocks:
            levels.append(Level(index, heads, width // heads, blocks, blocks))
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in network.build().parameters())
    return ModelShape(network.name, tuple(levels), shape.latent_channels, network.text, parameters, network.ratio)


def estimate_network(
    name: str,
    width: int,
    height: int,
    machine: Machine,
    *,
    batch: int = 1,
    dtype: str = "bf16",
    cfg: bool = True,
    backend: str = "pytorch",
) -> ModelEstimate:
    """Answer one question about one of NETWORKS; weights and computation in `dtype`. BadInput for what cannot be."""
    for field, given, options in (
        ("model", name, NETWORKS),
        ("dtype", dtype, ("fp32", "bf16", "fp16")),
        ("backend", backend, BACKENDS),
    ):
        if given not in options:
            raise BadInput(f"{field}: expected one of {', '.join(options)}, got {given!r}.")
    network = NETWORKS[name]
    shape = traced_network_shape(network)
    latent = shape.latent(width, height, batch)
    traced = TracedTraining(network, DTYPES[dtype])

    def phases_at(there: Latent) -> tuple[Phase, ...]:
        return (Phase(SAMPLING, _trace(traced, there, machine, backend, cfg)),)

    parts = {"UNet": weight_rows(traced.net)}
    return ModelEstimate(shape, latent, dtype, cfg, backend, backend, machine, parts, phases_at(latent), (), phases_at)


def _trace(traced: TracedTraining, latent: Latent, machine: Machine, backend: str, cfg: bool) -> Trace:
    net: Any = traced.net  # diffusers brings no types
    network = traced.network
    shape, batch = network.shape, latent.batch * (2 if cfg else 1)
    dtype = next(net.parameters()).dtype
    before = net.attn_processors
    with torch.inference_mode(False), torch.no_grad(), traced.mode, StorageMeter() as meter:
        meter.hold(WEIGHTS, [*net.parameters(), *net.buffers()])
        stand_in = AttentionStandIn(meter, backend, machine)
        net.set_attn_processor(_StandInProcessor(stand_in))
        size = (batch, latent.channels, latent.height, latent.width)
        with meter.labelled(LATENTS):
            x, t = torch.empty(size, dtype=dtype), torch.empty(batch)
            b = torch.empty(size if network.refiner else (batch, 0, *size[2:]), dtype=dtype)
            more = {"context": torch.empty(batch, network.text, shape.context_dim, dtype=dtype)}
            if shape.pooled_dim:
                more |= {"pooled": torch.empty(batch, shape.pooled_dim, dtype=dtype)}
                more |= {"time_ids": torch.empty(batch, 6, dtype=dtype)}
        with meter.labelled(ACTIVATIONS):
            call_unet(net, x, b, t, **more)
        net.set_attn_processor(dict(before))
        return stand_in.trace()


class _StandInProcessor:
    """diffusers' way to replace attention (cf. its AttnProcessor2_0, without masks and norms of its own)."""

    def __init__(self, stand_in: AttentionStandIn):
        self.stand_in = stand_in

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: Any = None, *_: Any, **__: Any):
        seen = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(seen), attn.to_v(seen)
        self.stand_in(attention_call(q, k, attn.heads))
        out = torch.empty_like(q)
        result = attn.to_out[1](attn.to_out[0](out))
        del k, v
        return result
