"""The host's networks on tensors without data: what a MODEL, a ControlNet or a VAE holds while it runs.

A private twin of the network is traced (training/memory/trace.py); the network itself is only read, and what other
clones of its patcher have put on it is taken off the twin again (model/selected.py). Attention is
replaced where the host lets it be: `optimized_attention_override` in the transformer options, and the
attribute of the twin's own VAE blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.ldm.modules.attention as host_attention
import torch
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.attention import CrossAttention
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.ldm.wan.model import WanModel
from einops import rearrange
from torch._subclasses.fake_tensor import FakeTensorMode

from ....training.errors import BadInput
from ....training.memory.attention import AttentionCall
from ....training.memory.machine import Machine
from ....training.memory.meter import StorageMeter
from ....training.memory.models import Latent
from ....training.memory.trace import (
    ACTIVATIONS,
    WEIGHTS,
    AttentionStandIn,
    Trace,
    attention_call,
    fake_like,
)
from ..model.selected import as_selected, keeps_softmax
from ..patching.float32_modules import FP32Softmax
from ..patching.private_copy import LOADED_STATE, forget_loading
from ..progress import CANCELLED
from ..vae.copies import named_layers
from ..vae.source import recognise

__all__ = ["TracedModel", "TracedVAE", "named_weights", "twin", "vae_backend"]

_VAE_FUNCTIONS = {"normal_attention": "split", "pytorch_attention": "pytorch", "xformers_attention": "xformers"}
LATENTS = "latents and text"
_NOTED = "_comfy_model_dtype"  # newer hosts: the attribute of a layer beside its weight


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
    """(name, weight or buffer, the dtype that it has at work), those that two modules share too.

    Newer hosts keep weights as they are in the file and note the dtype to bring them to the device in.
    """
    for where, layer in named_layers(module):
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            yield ".".join(filter(None, (where, name))), tensor, getattr(layer, f"{name}{_NOTED}", None) or tensor.dtype


def twin(module: torch.nn.Module, name: str, mode: FakeTensorMode) -> torch.nn.Module:
    """`module` again, with weights of `mode` that have no data; takes no memory.

    BadInput for weights that are no plain tensors.
    """
    weights = [*named_weights(module)]
    for key, tensor, _ in weights:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise BadInput(
                f"{name}: expected plain weights, got {type(tensor).__name__} in {key}, which we cannot read."
            )
    with torch.inference_mode(False), torch.no_grad(), mode:
        memo: dict[int, Any] = {id(tensor): fake_like(tensor, dtype) for _, tensor, dtype in weights}
    layers = [layer for _, layer in named_layers(module)]
    for part in layers:
        for attribute in (*LOADED_STATE, "current_patcher"):
            held = part.__dict__.get(attribute)
            if held is not None and not isinstance(held, (bool, int)):
                memo[id(held)] = None
    with torch.inference_mode(False):  # and outside of `mode`: small tensors that are no weights are copied as they are
        made = copy.deepcopy(module, memo)
    for _, part in named_layers(made):
        forget_loading(part)
    return made


@contextmanager
def _readable(name: str, module: torch.nn.Module):
    """What a network of another kind raises is one sentence for the person who asked."""
    try:
        yield
    except (BadInput, MemoryError, CANCELLED):  # a cancel says nothing about the network
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(
            f"{name}: {type(module).__name__} cannot be traced, so there is no estimate of it ({reason})."
        ) from error


class TracedModel:
    """A MODEL, and its ControlNets, ready to be traced at any size. BadInput for a network that we cannot call."""

    def __init__(self, model: Any, controls: list[Any], text: int):
        self.base, self.controls, self.text = model.model, controls, text
        network = self.base.diffusion_model
        self.name = type(self.base.model_config).__name__
        self.inputs = _inputs_of(network, self.name)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _readable(self.name, network):
            self._twin = twin(self.base, self.name, self._mode)
            self._selected = as_selected(self._twin, model)
            self._controls = [twin(each.control_model, "control_net", self._mode) for each in controls]
        for each in self._controls:
            for part in each.modules():
                if isinstance(part, CrossAttention):  # a ControlNet passes no transformer options on
                    part.register_forward_pre_hook(self._give_options, with_kwargs=True)
        self._options: dict[str, Any] = {}
        self._softmax = keeps_softmax(model)

    def memory_required(self, shape: list[int]) -> float:
        """What the host reckons for a step on latents of `shape`, with this MODEL loaded."""
        return self._twin.memory_required(shape)

    def _give_options(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "transformer_options": self._options}

    def trace(self, latent: Latent, backend: str, machine: Machine, *, cfg: bool, half_math: bool) -> Trace:
        """One step of sampling: the networks' pass, and the latents that a sampler holds meanwhile."""
        base, batch = self._twin, latent.batch * (2 if cfg else 1)
        dtype = base.manual_cast_dtype or base.get_dtype()
        sides = (latent.frames, latent.height, latent.width) if self.inputs["frames"] else (latent.height, latent.width)
        weights = [t for part in (base, *self._controls) for t in (*part.parameters(), *part.buffers())]
        # the mode is entered again, not made again: its cache makes the next trace of this model quick
        with torch.inference_mode(False), torch.no_grad(), self._mode, StorageMeter() as meter:
            meter.hold(WEIGHTS, weights)
            stand_in = AttentionStandIn(meter, backend, machine, half_math)
            attend = _override(stand_in)
            self._options["optimized_attention_override"] = attend
            options = {"optimized_attention_override": FP32Softmax(attend) if self._softmax else attend}
            with meter.labelled(LATENTS):
                held = [torch.empty(latent.batch, latent.channels, *sides) for _ in range(_LATENTS_OF_A_SAMPLER)]
                # the two prompts as the text encoder gave them, and repeated for a batch, beside what the network gets
                prompts = 2 + (batch if latent.batch > 1 else 0)
                widths = self.inputs["given"]
                held.append(torch.empty(prompts, self.text, widths["c_crossattn"]))
                held.append(torch.empty(prompts, widths.get("y", _POOLED)))
                x = torch.empty(batch, latent.channels, *sides)
                given = {
                    name: torch.empty(batch, *((self.text,) if name == "c_crossattn" else ()), width)
                    for name, width in widths.items()
                }
                if "guidance" in given:
                    given["guidance"] = torch.empty(batch)
                missing = self.inputs["channels"] - latent.channels
                if missing:
                    given["c_concat"] = torch.empty(batch, missing, *sides)
            with _readable(self.name, self.base.diffusion_model), meter.labelled(ACTIVATIONS):
                control = self._control(x, given, dtype)
                result = base._apply_model(
                    x, torch.ones(batch), control=control, transformer_options=options, **given
                )
            del held, result
            if not stand_in.moments:
                raise BadInput(f"{self.name}: its attention does not go through ComfyUI's functions, so it is unknown.")
            return stand_in.trace()

    def _control(self, x: torch.Tensor, given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, list] | None:
        """What the ControlNets hand to the network, added up as comfy/controlnet.py does it."""
        total: dict[str, list] | None = None
        hints: list[torch.Tensor] = []
        for control, network in zip(self.controls, self._controls, strict=True):
            own = control.manual_cast_dtype or network.dtype
            channels = network.input_hint_block[0].weight.shape[1]
            sides = [side * control.compression_ratio for side in x.shape[-2:]]
            hint = torch.empty(x.shape[0], channels, *sides, dtype=own)
            hints.append(torch.empty(2, channels, *sides))  # as it came, and scaled to the latent
            more = {"y": given["y"].to(own)} if "y" in given else {}
            made = network(
                x=x.to(own), hint=hint, timesteps=torch.ones(x.shape[0], dtype=own),
                context=given["c_crossattn"].to(own), **more,
            )  # fmt: skip
            made = {part: [each.to(dtype) for each in made.get(part, [])] for part in ("input", "middle", "output")}
            if total is not None:
                made = {part: [a + b for a, b in zip(total[part], made[part], strict=True)] for part in made}
            total = {**made, "hints": hints}
        return total


# x, the noise, the latent, the last result, conditional and unconditional sums with their counts, and what the
# sampler makes of them: samplers of the second order hold one more or two.
_LATENTS_OF_A_SAMPLER = 12
_POOLED = 1280  # numbers that a text encoder gives beside its tokens, whether or not the network takes them


def _inputs_of(network: torch.nn.Module, name: str) -> dict[str, Any]:
    """Widths of what the network is called with. frames: its latents have a time axis."""
    kind = type(network)
    if kind is UNetModel:
        first = next(m for m in network.input_blocks[0] if hasattr(m, "weight"))
        texts = {m.to_k.weight.shape[1] for m in network.modules() if isinstance(m, CrossAttention)}
        given = {"c_crossattn": max(texts, default=1)}
        if network.num_classes is not None:
            given["y"] = network.label_emb[0][0].weight.shape[1]
        return {"frames": False, "channels": first.weight.shape[1], "given": given}
    if isinstance(network, MMDiT):
        text = network.context_embedder.weight.shape[1]
        given = {"c_crossattn": text, "y": network.y_embedder.mlp[0].weight.shape[1]}
        return {"frames": False, "channels": network.x_embedder.proj.weight.shape[1], "given": given}
    if kind is Flux:
        cells = network.patch_size**2
        given = {"c_crossattn": network.txt_in.weight.shape[1]}
        if network.params.vec_in_dim is not None:
            given["y"] = network.vector_in.in_layer.weight.shape[1]
        if network.params.guidance_embed:
            given["guidance"] = 1
        return {"frames": False, "channels": network.img_in.weight.shape[1] // cells, "given": given}
    if kind is WanModel:
        given = {"c_crossattn": network.text_embedding[0].weight.shape[1]}
        return {"frames": True, "channels": network.patch_embedding.weight.shape[1], "given": given}
    raise BadInput(
        f"model: expected a UNet, SD3, Flux or Wan network, got {name} ({kind.__name__}), which we cannot read."
    )


def _override(stand_in: AttentionStandIn) -> Callable[..., torch.Tensor]:
    """What the host calls instead of its attention function."""

    def attend(
        function, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **more
    ):
        precision = host_attention.get_attn_precision(attn_precision, q.dtype)
        stand_in(attention_call(q, k, heads, split_heads=skip_reshape, upcast=precision == torch.float32))
        if not skip_reshape:
            q = rearrange(q, "batch tokens (heads dim) -> batch heads tokens dim", heads=heads)
        batch, heads, tokens, dim = q.shape
        if skip_output_reshape:
            return torch.empty(batch, heads, tokens, dim, dtype=q.dtype)
        return torch.empty(batch, tokens, heads * dim, dtype=q.dtype)

    return attend


def vae_backend(module: torch.nn.Module) -> str:
    """How the VAE's blocks compute attention; "none" where there are none."""
    for _, part in named_layers(module):
        function = getattr(part, "optimized_attention", None)
        if callable(function):
            name = getattr(function, "__name__", str(function))
            if name not in _VAE_FUNCTIONS:
                raise BadInput(f"vae: its attention is {name}, for which there is no formula.")
            return _VAE_FUNCTIONS[name]
    return "none"


class TracedVAE:
    """A VAE, ready to be traced at any size."""

    def __init__(self, vae: Any):
        vae = recognise(vae).bare  # a guard looks at numbers, and there are none here
        self.vae, self.module = vae, vae.first_stage_model
        self.name = type(self.module).__name__
        self.backend = vae_backend(self.module)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _readable("vae", self.module):
            self._twin = twin(self.module, "vae", self._mode)
        self._stand_in: AttentionStandIn | None = None
        for _, part in named_layers(self._twin):
            if callable(getattr(part, "optimized_attention", None)):
                part.optimized_attention = self._attend

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens = q.shape[2:].numel()
        self._stand_in(AttentionCall(q.shape[0], 1, tokens, tokens, q.shape[1], q.element_size()))
        return torch.empty_like(q)

    def _trace(self, machine: Machine, half_math: bool, work: Callable[[], Any]) -> Trace:
        with torch.inference_mode(False), torch.no_grad(), self._mode, StorageMeter() as meter:
            meter.hold(WEIGHTS, [tensor for _, tensor, _ in named_weights(self._twin)])
            self._stand_in = AttentionStandIn(meter, f"VAE {self.backend}", machine, half_math)
            with _readable("vae", self.module):
                work()
            return self._stand_in.trace()

    def decode(
        self, shape: tuple[int, ...], machine: Machine, *, half_math: bool, beside: tuple[tuple[int, ...], ...] = ()
    ) -> Trace:
        """One call of decode on latents of `shape`, as comfy/sd.py's VAE.decode and decode_tiled_ make it.

        On the CPU the picture lies in the same memory, so that its copies count. beside: shapes of what is held in FP32
        all the while (the whole latent that tiles are cut from, their sums and divisors).
        """

        def work() -> None:
            vae = self.vae
            held = [] if machine.gpu else [torch.empty(each) for each in beside]
            latent = torch.empty(shape)
            samples = latent.to(vae.vae_dtype)
            made = self._twin.decode(samples)
            if not machine.gpu:
                made = vae.process_output(made.float())
                picture = torch.empty(made.shape)
                del made, held, picture

        return self._trace(machine, half_math, work)

    def encode(
        self, shape: tuple[int, ...], machine: Machine, *, half_math: bool, beside: tuple[tuple[int, ...], ...] = ()
    ) -> Trace:
        """One call of encode on pictures of `shape`, channels second; `beside` as in `decode`."""

        def work() -> None:
            vae = self.vae
            held = [] if machine.gpu else [torch.empty(each) for each in beside]
            pixels = torch.empty(shape, dtype=vae.vae_dtype if machine.gpu else torch.float32)
            made = pixels if machine.gpu else vae.process_input(pixels).to(vae.vae_dtype)
            made = self._twin.encode(made)
            if not machine.gpu:
                made = torch.empty(made.float().shape)
            del made, pixels, held

        return self._trace(machine, half_math, work)
