"""Model Memory inside the host: the connected MODEL, CLIP, VAE and ControlNet on this machine or another."""

from __future__ import annotations

from typing import Any

import comfy.cldm.cldm
import torch

from ....training.errors import BadInput
from ....training.memory.attention import BACKENDS
from ....training.memory.estimate import MOST_TOKENS, SIZES, in_words
from ....training.memory.machine import Machine, planned_machine
from ....training.memory.model_estimate import (
    DECODE,
    DECODE_TILED,
    ENCODE,
    ENCODE_TILED,
    SAMPLING,
    ModelEstimate,
)
from ....training.memory.models import Latent, ModelShape
from ....training.memory.phases import Phase
from ....training.memory.trace import Trace
from ....training.memory.weights import WeightRow, rows_of, total_bytes
from ....training.precision.dtypes import dtype_name
from ..model.shapes import compute_dtype, read_model_shape
from ..vae.halves import lacking_half
from ..vae.host_vae import latent_downscale
from ..vae.source import class_name, refuse_empty
from .estimate import CUSTOM, host_backend, host_machine
from .traced_model import TracedModel, TracedVAE, named_weights

__all__ = ["batches_together", "model_memory"]

_TILE = 512  # pixels, what the host's tiled nodes start with


def model_memory(
    model: Any,
    size: str,
    width: int,
    height: int,
    batch_size: int,
    frames: int,
    backend: str,
    cfg: bool,
    text_tokens: int,
    memory_gib: float,
    clip: Any = None,
    vae: Any = None,
    control_net: Any = None,
) -> ModelEstimate:
    """The inputs of the node -> its answer."""
    if size != CUSTOM:
        width, height = SIZES[size]
    if backend not in ("auto", *BACKENDS):
        raise BadInput(f"backend: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
    shape = read_model_shape(model)
    latent = shape.latent(width, height, batch_size, frames)
    lacks = "" if vae is None else _check_vae(vae, model, shape)
    controls = _controls(control_net)
    parts = {"MODEL": rows_of(named_weights(model.model.diffusion_model))}
    if controls:
        parts["CONTROL_NET"] = rows_of(named_weights(control_net.control_model))
    if clip is not None:
        parts["CLIP"] = rows_of(named_weights(clip.cond_stage_model))
    if vae is not None:
        parts["VAE"] = _vae_rows(vae)
    lora, remarks = _patches(model, clip)
    if lacks:
        remarks += (f"The VAE has no {lacks}, so nothing is said of it.",)
    if lora:
        parts["LoRA"] = lora
    if not 0 <= text_tokens <= MOST_TOKENS:
        raise BadInput(f"text_tokens: expected 0 (the usual number) to {MOST_TOKENS}, got {text_tokens}.")
    machine = planned_machine(memory_gib) if memory_gib else host_machine(model)
    if not machine.gpu:  # all that is connected lies in main memory already, and is about to be counted
        there = sum(total_bytes(rows) for name, rows in parts.items() if name != "MODEL")
        machine = machine.with_more(there)
    chosen = host_backend(model) if backend == "auto" else backend
    traced = TracedModel(model, controls, text_tokens or shape.text)
    traced_vae = None if vae is None else TracedVAE(vae)
    half_math = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()

    def phases_at(there: Latent, every: bool = False) -> tuple[Phase, ...]:
        together = cfg and batches_together(traced, there, machine)
        sampled = traced.trace(there, chosen, machine, cfg=together, half_math=half_math)
        phases = [Phase(SAMPLING, sampled, _host_sampling(traced, there, together))]
        if traced_vae is not None:
            phases += _vae_phases(traced_vae, there, shape.vae, machine, half_math, every, lacks)
        return tuple(phases)

    together = batches_together(traced, latent, machine)
    if cfg and not together:
        remarks += (
            "ComfyUI will take positive and negative one after the other here: its own figure for both, times 1.5, is "
            "more than is free.",
        )
    return ModelEstimate(
        shape, latent, compute_dtype(model), cfg and together, chosen,
        f"{chosen} (auto)" if backend == "auto" else chosen, machine, parts,
        phases_at(latent, every=True), remarks, phases_at,
    )  # fmt: skip


def _check_vae(vae: Any, model: Any, shape: ModelShape) -> str:
    """The half that the VAE lacks, as `lacking_half`. BadInput for one that has other latents than the MODEL."""
    refuse_empty(vae)
    name = class_name(vae)
    dimensions, channels = getattr(vae, "latent_dim", 2), getattr(vae, "latent_channels", shape.channels)
    if dimensions == 1 or getattr(vae, "output_channels", 3) < 3:
        raise BadInput(f"vae: expected one of pictures or video, got {name}, which gives sound or shapes.")
    if channels != shape.channels:
        raise BadInput(
            f"vae: {name} has latents of {channels} channels, {shape.name} takes {shape.channels}; connect the VAE "
            f"that belongs to the model."
        )
    if dimensions < model.get_model_object("latent_format").latent_dimensions:
        raise BadInput(f"vae: {shape.name} makes clips and {name} knows pictures only; connect a VAE of video.")
    ratio = latent_downscale(vae)
    if ratio != shape.vae:
        raise BadInput(
            f"vae: {name} makes {ratio} x {ratio} pixels of a latent cell, {shape.name} expects {shape.vae} x "
            f"{shape.vae}; connect the VAE that belongs to the model."
        )
    return lacking_half(vae)


def _vae_rows(vae: Any) -> tuple[WeightRow, ...]:
    """The weights that come to the device with this VAE: where a half is shared, the host loads the source's whole."""
    others = [other.model for other in vae.patcher.model_patches_models() if other is not vae.patcher]
    return rows_of(weight for module in (vae.first_stage_model, *others) for weight in named_weights(module))


def _controls(control_net: Any) -> list[Any]:
    """BadInput for a ControlNet that is called in another way than those of UNets."""
    if control_net is None:
        return []
    network = getattr(control_net, "control_model", None)
    if type(network) is not comfy.cldm.cldm.ControlNet:
        raise BadInput(
            f"control_net: expected a ControlNet for UNets, got {type(network).__name__}, which we cannot read."
        )
    return [control_net]


def batches_together(model: Any, latent: Latent, machine: Machine) -> bool:
    """Whether the host may put positive and negative into one batch: calc_cond_batch in comfy/samplers.py. Less than
    `machine.free` is free then (weights), so it may still decide otherwise, and need less.

    model: a TracedModel; or a MODEL, which answers for the clone of it that is loaded."""
    return _host_sampling(model, latent, True) * 1.5 < machine.believed


def _host_sampling(model: Any, latent: Latent, cfg: bool) -> int:
    """What the host reckons for a step."""
    sides = [latent.frames] if latent.frames > 1 else []
    batch = latent.batch * (2 if cfg else 1)
    return int(model.memory_required([batch, latent.channels, *sides, latent.height, latent.width]))


def _vae_phases(
    traced: TracedVAE, latent: Latent, ratio: int, machine: Machine, half_math: bool, every: bool, lacks: str = ""
) -> list[Phase]:
    """decode and encode, whole and in tiles; without `every` only what a run needs. lacks: the half that is not there,
    as `lacking_half` has it."""
    vae, options = traced.vae, {"half_math": half_math}
    clip = (latent.frames,) if vae.latent_dim == 3 else ()
    cells = (latent.height, latent.width)
    sides = tuple(side * ratio for side in cells)
    length = ((latent.frames - 1) * 4 + 1,) if clip and latent.frames > 1 else (1,) if clip else ()

    def in_turns(shape: tuple[int, ...], reckon: Any) -> tuple[tuple[int, ...], int]:
        """The host takes as many pictures at once as it believes to fit."""
        host = int(reckon(shape, vae.vae_dtype))
        at_once = max(1, min(shape[0], machine.believed // max(1, host)))
        return (at_once, *shape[1:]), host

    channels = latent.channels
    phases = []
    if lacks != "decoder":
        whole, host = in_turns((latent.batch, channels, *clip, *cells), vae.memory_used_decode)
        phases.append(Phase(DECODE, traced.decode(whole, machine, **options), host))
        # the latent, two passes' results, and the sum and divisor of the picture that is being put together
        beside = (latent.batch, channels, *clip, *cells), (2 * latent.batch + 2, 3, *length, *sides)
        tile = _tiled(traced.decode, (1, channels, *clip), cells, _TILE // ratio, beside, machine, options)
        phases.append(Phase(DECODE_TILED, tile))
    if every and lacks != "encoder":
        whole, host = in_turns((latent.batch, 3, *length, *sides), vae.memory_used_encode)
        phases.append(Phase(ENCODE, traced.encode(whole, machine, **options), host))
        # the pictures themselves stay in memory
        beside = ((latent.batch, 3, *length, *sides),)
        tile = _tiled(traced.encode, (1, 3, *length), sides, _TILE, beside, machine, options)
        phases.append(Phase(ENCODE_TILED, tile))
    return phases


def _tiled(
    run: Any, front: tuple[int, ...], sides: tuple[int, int], tile: int, beside: tuple[tuple[int, ...], ...],
    machine: Machine, options: dict[str, Any],
) -> Trace:  # fmt: skip
    """The largest of the tiles: for pictures the host goes over them three times, with square, flat and high tiles."""
    shapes = [(tile, tile)] if len(front) == 3 else [(tile, tile), (tile * 2, tile // 2), (tile // 2, tile * 2)]
    cut = {tuple(min(side, most) for side, most in zip(sides, shape, strict=True)) for shape in shapes}
    traces = [run((*front, *each), machine, beside=beside, **options) for each in sorted(cut)]
    return max(traces, key=lambda trace: trace.total)


def _patches(model: Any, clip: Any) -> tuple[tuple[WeightRow, ...], tuple[str, ...]]:
    """What LoRAs and the like have hung on the models, as weights and in words."""
    rows, remarks, seen = [], [], set()
    for name, patcher in (("MODEL", model), ("CLIP", None if clip is None else clip.patcher)):
        held: dict[str, list[int]] = {}
        for patches in () if patcher is None else patcher.patches.values():
            for tensor in _tensors(patches):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    row = held.setdefault(dtype_name(tensor.dtype), [0, 0])
                    row[0] += tensor.numel()
                    row[1] += tensor.numel() * tensor.element_size()
        rows += [WeightRow(f"patches of {name}", dtype, *row) for dtype, row in held.items()]
        if held:
            touched = _patched_bytes(patcher)
            remarks.append(
                f"{len(patcher.patches)} weights of {name} are patched (LoRA): ComfyUI adds the patches into them as "
                f"it loads the model and keeps the {in_words(touched)} of their originals in main memory."
            )
    return tuple(rows), tuple(remarks)


def _tensors(value: Any) -> Any:
    """All tensors in a patch, whatever it consists of."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "weights"):  # comfy.weight_adapter
        yield from _tensors(value.weights)


def _patched_bytes(patcher: Any) -> int:
    weights = {**dict(patcher.model.named_parameters()), **dict(patcher.model.named_buffers())}
    keys = {key if isinstance(key, str) else key[0] for key in patcher.patches}
    return sum(weights[key].numel() * weights[key].element_size() for key in keys if key in weights)
