"""One training step on tensors without data: diffusers' UNet forward and backward, every byte counted.

The attention is chosen explicitly: "pytorch" runs PyTorch's fused kernel (its backward keeps q, k, v, the output and
one number a query), "basic" holds the scores.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import autocast as torch_autocast
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.network import PRESETS, UNetConfig
from ..config.sections import LoRAConfig
from ..errors import BadInput
from ..errors.packages import needed
from ..objectives.residual import flow
from ..objectives.residual.lora import add_adapters, choose_adapters
from ..objectives.residual.unet import build_unet, call_unet
from ..objectives.trainables import trainables
from .meter import StorageMeter
from .optimizers import GRADIENTS, PARAMETERS
from .trace import fake_tensors

__all__ = ["ATTENTION", "NETWORKS", "Network", "StepTrace", "TracedTraining", "attention_of", "prepare"]

ATTENTION = ("pytorch", "basic")
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Network:
    """What can be trained. ratio: pixels of one latent cell; refiner: it sees [x_t, b], a base model x_t alone."""

    name: str
    shape: UNetConfig
    ratio: int
    refiner: bool
    text: int = 77

    def build(self, lora_rank: int = 0) -> torch.nn.Module:
        """With adapters of that rank on all convolutions and linear layers, which then learn alone."""
        net = build_unet(self.shape, None if self.refiner else self.shape.latent_channels)
        if lora_rank:
            add_adapters(net, choose_adapters(LoRAConfig(rank=lora_rank), self.shape))
        return net


def _whole(**shape: Any) -> UNetConfig:
    return UNetConfig(latent_channels=4, layers_per_block=2, **shape)


NETWORKS: dict[str, Network] = {
    **{
        name: Network(name, UNetConfig(**shape, latent_channels=3 if name.startswith("pixel") else 4),
                      1 if name.startswith("pixel") else 8, True, 1 if name.startswith("pixel") else 77)
        for name, shape in PRESETS.items()
    },
    "SD1.5": Network(
        "SD1.5",
        _whole(
            block_channels=(320, 640, 1280, 1280), transformer_depth=(1, 1, 1, 0), heads=(8, 8, 8, 8), context_dim=768
        ),
        8,
        False,
    ),
    "SDXL": Network(
        "SDXL",
        _whole(
            block_channels=(320, 640, 1280), transformer_depth=(0, 2, 10), middle_depth=10, heads=(5, 10, 20),
            context_dim=2048, linear_projection=True, pooled_dim=1280,
        ),
        8,
        False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class StepTrace:
    """terms: label -> bytes at the peak of forward and backward. most: the most activations at whatever time."""

    terms: dict[str, int]
    most: int

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass
class TracedTraining:
    """A network without data, built once and traced as often as asked. lora_rank: 0, the whole network is trained."""

    network: Network
    weights: torch.dtype = torch.float32
    lora_rank: int = 0
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    net: Any = field(init=False)  # a UNet2DConditionModel, for which diffusers brings no types

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            with torch.device("meta"):
                net = self.network.build(self.lora_rank)
            learns = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
            for parameter in net.parameters():
                parameter.data = parameter.data.to(self.weights)
            with self.mode:
                memo = fake_tensors(net)
            self.net = copy.deepcopy(net, memo).train()
            for name, parameter in self.net.named_parameters():
                parameter.requires_grad_(learns[name])

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each parameter that learns."""
        return tuple(parameter.numel() for parameter in trainables(self.net).values())

    @property
    def parameters(self) -> int:
        """All of them, those that stay as they are among them."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    def largest_unit(self) -> int:
        """Parameters of the largest block that is gathered as one: a residual or transformer block, or what is left."""
        kinds = ("ResnetBlock2D", "BasicTransformerBlock")
        units = [part for part in self.net.modules() if type(part).__name__ in kinds]
        counts = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
        return max([*counts, self.parameters - sum(counts)])

    def split_share(self) -> float:
        """The share of parameters in the matrices of attention and feed-forward."""
        blocks = [part for part in self.net.modules() if type(part).__name__ == "BasicTransformerBlock"]
        linear = [m for block in blocks for m in block.modules() if isinstance(m, torch.nn.Linear)]
        return sum(parameter.numel() for m in linear for parameter in m.parameters()) / self.parameters

    def trace(
        self,
        height: int,
        width: int,
        batch: int,
        *,
        autocast: torch.dtype | None,
        checkpointing: bool,
        attention: str,
        gpu: bool,
        gradients_kept: bool = False,
    ) -> StepTrace:
        """Forward and backward of `batch` latents of height x width cells.

        gpu: norms (and the softmax, where scores are held) in FP32, as CUDA's autocast computes them; a CPU's does not.
        gradients_kept: those of an earlier micro-batch are there already.
        """
        net, shape = self.net, self.network.shape
        learning = list(trainables(net).values())
        prepare(net, checkpointing)
        net.zero_grad()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.mode)
            stack.enter_context(attention_of(net, attention))
            if gpu and autocast is not None:
                stack.enter_context(_norms_in_fp32(net))
            meter = stack.enter_context(StorageMeter())
            meter.hold(PARAMETERS, [*net.parameters(), *net.buffers()])
            if gradients_kept:
                for parameter in learning:
                    parameter.grad = torch.empty_like(parameter)
                meter.hold(GRADIENTS, [parameter.grad for parameter in learning])
            for parameter in learning:
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda parameter: meter.hold(GRADIENTS, [parameter.grad])
                )
                stack.callback(handle.remove)
            training_step(self.network, net, self._batch(height, width, batch, shape), autocast)
        return StepTrace(meter.terms, meter.most[ACTIVATIONS])

    def _batch(self, height: int, width: int, batch: int, shape: UNetConfig) -> dict[str, torch.Tensor]:
        size = (batch, shape.latent_channels, height, width)
        made = {"z": torch.empty(size), "b": torch.empty(size), "t": torch.empty(batch)}
        made["context"] = torch.empty(batch, self.network.text, shape.context_dim)
        if shape.pooled_dim:
            made |= {"pooled": torch.empty(batch, shape.pooled_dim), "time_ids": torch.empty(batch, 6)}
        return made


def training_step(
    network: Network, net: torch.nn.Module, batch: dict[str, torch.Tensor], autocast: torch.dtype | None
) -> None:
    """Forward, loss, backward, as a run does it. batch: z, b [B, C, H, W], t [B], context, pooled, ..."""
    z, b, t = batch["z"], batch["b"], batch["t"]
    more = {name: batch[name] for name in ("context", "pooled", "time_ids") if name in batch}
    weights = next(net.parameters()).dtype
    e = torch.randn_like(z)
    x = flow.state(z, b, e, t, 1.0)
    seen = b if network.refiner else b[:, :0]
    with torch_autocast(z.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        cast = {name: each.to(weights) for name, each in more.items()}
        output = call_unet(net, x.to(weights), seen.to(weights), t, **cast)
    flow.loss_per_sample(output, flow.velocity(z, b, e, 1.0), 1.0).mean().backward()


def prepare(net: Any, checkpointing: bool) -> None:
    """Gradient checkpointing on or off: diffusers keeps the inputs of every residual and transformer block."""
    if checkpointing:
        net.enable_gradient_checkpointing()
    else:
        net.disable_gradient_checkpointing()


class attention_of:  # noqa: N801
    """`with attention_of(net, "pytorch" or "basic"):` the network computes attention that way."""

    def __init__(self, net: Any, name: str):
        if name not in ATTENTION:
            raise BadInput(f"attention: expected one of {', '.join(ATTENTION)}, got {name!r}.")
        self.net, self.name = net, name
        self.kernel: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with needed("diffusers", "The estimate"):
            from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.before = self.net.attn_processors
        fused = self.name == "pytorch"
        self.net.set_attn_processor(AttnProcessor2_0() if fused else AttnProcessor())
        if fused:  # never the math kernel, which holds the scores
            self.kernel = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
            self.kernel.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.kernel is not None:
            self.kernel.__exit__(*error)
        self.net.set_attn_processor(dict(self.before))


class _norms_in_fp32:  # noqa: N801
    """CUDA's autocast runs norms and softmax in FP32 (torch/amp docs, "CUDA Ops that can autocast to float32")."""

    def __init__(self, net: torch.nn.Module):
        self.norms = [m for m in net.modules() if isinstance(m, (torch.nn.GroupNorm, torch.nn.LayerNorm))]
        self.attentions: list[Any] = [m for m in net.modules() if hasattr(m, "upcast_softmax")]

    def __enter__(self) -> None:
        self.handles = [
            norm.register_forward_pre_hook(lambda _, given: tuple(each.float() for each in given))
            for norm in self.norms
        ]
        self.before = [attention.upcast_softmax for attention in self.attentions]
        for attention in self.attentions:
            attention.upcast_softmax = True

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        for attention, before in zip(self.attentions, self.before, strict=True):
            attention.upcast_softmax = before


def cells(network: Network, width: int, height: int) -> tuple[int, int]:
    """(height, width) in latent cells. BadInput for sizes that no latent has, or that are a slip of the keyboard."""
    for name, side in (("width", width), ("height", height)):
        if not network.ratio <= side <= 2**14:
            raise BadInput(f"{name}: expected {network.ratio} to {2**14} pixels, got {side}.")
    size = height // network.ratio, width // network.ratio
    if math.prod(size) > 2**24:
        raise BadInput(f"width, height: expected at most {2**24} latent cells, got {math.prod(size)}.")
    return size
