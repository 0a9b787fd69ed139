"""Low-rank adapters on a refiner (LoRA, Hu et al. 2021): which layers get them, and what is left of them at the end.

A layer's weight W [out, in, ...] stays as it is; trained are A [rank, in, ...] and B [out, rank, ...], and the layer
works with W + alpha / rank * B A. B starts at 0, so the first step begins at the refiner that was given.

lora.safetensors has A and B under the names that kohya's scripts and ComfyUI's own LoRA loaders use (lora_down,
lora_up, alpha), and one metadata entry `ref2v_lora`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from einops import rearrange
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...config.network import UNetConfig
from ...errors import BadInput, first_error
from ...errors.packages import needed, require
from .file import LORA, open_safetensors, save_tensors
from .unet import build_unet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...config.sections import LoRAConfig
    from .start import Start

__all__ = [
    "Adapters",
    "LoRAMeta",
    "add_adapters",
    "choose_adapters",
    "load_lora_meta",
    "merge",
    "save_lora",
]

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
A, B = ".lora_A.weight", ".lora_B.weight"


class LoRAMeta(BaseModel):
    """What travels in lora.safetensors beside the adapters."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["ref2v-lora"] = "ref2v-lora"
    version: Literal[1] = 1
    refiner: str  # SHA-256 of the refiner.safetensors that it belongs to
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: str | list[str]
    training: dict[str, Any]  # provenance, as in the refiner's own file


@dataclass(frozen=True)
class Adapters:
    """LoRA on one network: `layers` are the plain names of the layers that get adapters."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    layers: tuple[str, ...]
    parameters: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def sentence(self, of: int) -> str:
        """of: parameters of the network."""
        what = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        return (
            f"LoRA of rank {self.rank}, alpha {self.alpha:g}, on {len(self.layers)} layers ({what}): "
            f"{self.parameters:,} parameters are trained, {self.parameters / of:.1%} of the network's own, which stay "
            "as they are"
        )


def choose_adapters(lora: LoRAConfig, shape: UNetConfig) -> Adapters:
    """Which layers of a network of this shape get adapters. BadInput where `targets` means none. Allocates nothing."""
    import torch
    from torch import nn

    require("peft", "LoRA")  # before a run has a folder
    with torch.device("meta"):
        net = build_unet(shape)
    there = {name: layer for name, layer in net.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))}
    if lora.targets == "all":
        chosen = list(there)
    elif lora.targets == "attention":
        chosen = [name for name in there if any(_ends_with(name, end) for end in ATTENTION)]
        if not chosen:
            raise BadInput(
                "lora.targets: 'attention' means no layer of this network, which has none; expected 'all', or endings "
                'of names such as ["conv1", "conv2"].'
            )
    else:
        for end in lora.targets:
            if not any(_ends_with(name, end) for name in there):
                raise BadInput(
                    "lora.targets: expected endings of the names of this network's convolutions and linear layers, "
                    f"such as {sorted({name.rpartition('.')[2] for name in there})}, got {end!r}."
                )
        chosen = [name for name in there if any(_ends_with(name, end) for end in lora.targets)]
    count = 0
    for name in chosen:
        weight = there[name].weight
        count += lora.rank * (weight[0].numel() + weight.shape[0])
    return Adapters(lora.rank, lora.alpha or float(lora.rank), lora.targets, tuple(chosen), count)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def add_adapters(net: nn.Module, adapters: Adapters) -> None:
    """Put them into a network, in place: from then on they alone ask for gradients. Draws A from torch's generator."""
    with needed("peft", "LoRA"):
        from peft import LoraConfig, inject_adapter_in_model

    # one expression that has to fit the whole name: peft would take entries of a list as endings
    layers = "|".join(re.escape(name) for name in adapters.layers)
    with needed("peft", "LoRA"):  # it imports its quantizers only here
        inject_adapter_in_model(LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=layers), net)


def merge(weights: dict[str, Tensor], trained: dict[str, Tensor], adapters: Adapters) -> dict[str, Tensor]:
    """W + alpha / rank * B A for the layers with adapters, the other tensors as they are.

    weights: float32 on the CPU, under the network's names.
    trained: "<layer>.lora_A.weight" and "<layer>.lora_B.weight".
    """
    merged = dict(weights)
    for layer in adapters.layers:
        weight = weights[f"{layer}.weight"]
        a, b = (trained[layer + part].detach().float().cpu() for part in (A, B))
        # a convolution's A takes its whole window, [rank, in, height, width]; its B is 1 x 1, [out, rank, 1, 1]
        down, up = rearrange(a, "rank ... -> rank (...)"), rearrange(b, "out ... -> out (...)")
        merged[f"{layer}.weight"] = weight + adapters.scale * (up @ down).reshape(weight.shape)
    return merged


def save_lora(
    path: Path, trained: dict[str, Tensor], adapters: Adapters, start: Start, training: dict[str, Any]
) -> None:
    """Write lora.safetensors, whole or not at all."""
    import torch

    tensors: dict[str, Tensor] = {}
    for layer in adapters.layers:
        name = "lora_unet_" + layer.replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = trained[layer + A]
        tensors[f"{name}.lora_up.weight"] = trained[layer + B]
        tensors[f"{name}.alpha"] = torch.tensor(adapters.alpha)
    targets = adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets)
    meta = LoRAMeta(
        refiner=start.sha256, rank=adapters.rank, alpha=adapters.alpha, targets=targets, training=training
    )
    save_tensors(path, tensors, {LORA: json.dumps(meta.model_dump(mode="json"), sort_keys=True)})


def load_lora_meta(path: Path) -> LoRAMeta:
    """The metadata alone; BadInput where the file is missing, truncated or something else."""
    text = (open_safetensors(path).metadata() or {}).get(LORA)
    if text is None:
        raise BadInput(f"{path.name}: expected the adapters of a refiner, got another file (no {LORA} metadata).")
    try:
        return LoRAMeta.model_validate_json(text)
    except ValidationError as error:
        raise BadInput(f"{path.name}: its metadata does not fit this version: {first_error(error)}.") from error
