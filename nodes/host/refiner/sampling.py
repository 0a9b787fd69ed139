"""Residual flow in the host's samplers: its model sampling, and the checks and the blend around a whole run.

The mathematics is in training/objectives/residual/flow.py; here it meets the host's conventions. The host calls sigma
what we call t, hands the network's output to `calculate_denoised`, and starts a run from `noise_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_sampling
import torch
from torch import Tensor

from ....training.errors import BadInput
from ....training.objectives.residual import flow
from ....training.objectives.residual.file import RefinerMeta
from ....training.precision.guard import FirstBadLayer
from .sampler_rules import check_guidance, check_sampler

__all__ = ["RefinerRun", "ResidualFlowSampling"]

_SIGMA_TOLERANCE = 1e-3  # one of the host's 1000 sigmas


def _like(sigma: Tensor, x: Tensor) -> Tensor:
    """A sigma of the host (a number, or one a sample, or already of x's dimensions) shaped to multiply x."""
    return sigma if sigma.ndim in (0, x.ndim) else flow.expand(sigma, x)


class ResidualFlowSampling(comfy.model_sampling.ModelSamplingDiscreteFlow):
    """sigma = t in (0, 1], timestep 1000 t, x_1 = b + s e, and a network that predicts v / c_v.

    The host's own flow (CONST) starts from pure noise and divides by 1 - sigma at the end of a split; neither suits a
    flow that starts at the base latent.
    """

    def __init__(self, model_config: Any, noise_scale: float, velocity_scale: float) -> None:
        super().__init__(model_config)
        self.noise_scale = noise_scale
        self.velocity_scale = velocity_scale

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        return noise

    def calculate_denoised(self, sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor:
        """z = x_t - t v."""
        return model_input - _like(sigma, model_output) * (self.velocity_scale * model_output)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent_image: Tensor, max_denoise: bool = False) -> Tensor:
        """x_1 = b + s e at sigma = 1. A second half gets no noise, and its latent_image is x_t already."""
        return latent_image + _like(sigma, noise) * (self.noise_scale * noise)

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent


def _is_one_frame(latent: Tensor) -> bool:
    return latent.ndim == 5 and latent.shape[2] == 1


def _picture(latent: Tensor) -> Tensor:
    """[B, C, 1, H, W] -> [B, C, H, W]; anything else as it is."""
    return latent.squeeze(2) if _is_one_frame(latent) else latent


class RefinerRun:
    """What happens around one sampling run of a refiner (an OUTER_SAMPLE wrapper of the host).

    Before it: says in one sentence what does not fit. After it: blends base and refined latent by `strength`, 0..1.
    The object holds no state of a run, so clones of the MODEL share it.
    """

    def __init__(self, meta: RefinerMeta, strength: float) -> None:
        self.meta = meta
        self.strength = strength

    def __call__(
        self,
        executor: Any,
        noise: Tensor,
        latent_image: Tensor,
        sampler: Any,
        sigmas: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        conditions = [condition for conditions in executor.class_obj.conds.values() for condition in conditions]
        for condition in conditions:
            if condition.get("concat_latent_image") is not None:
                condition["concat_latent_image"] = _picture(condition["concat_latent_image"])
        of_video = _is_one_frame(latent_image)
        if of_video:
            # [B, C, 1, H, W], as VAEs of video models encode a picture: the network knows pictures, the graph stays 5-D
            noise, latent_image = _picture(noise), _picture(latent_image)
            if "latent_shapes" in kwargs:
                kwargs["latent_shapes"] = [latent_image.shape]
        denoise_mask = kwargs.get("denoise_mask", args[0] if args else None)
        b = self._check(executor.class_obj, conditions, noise, latent_image, sampler, sigmas, denoise_mask)
        if torch.count_nonzero(latent_image) == 0:
            latent_image = b.expand_as(latent_image).to(latent_image)  # an empty latent beside a base: start from b
        result = self._refined(
            executor.class_obj.model_patcher,
            lambda: executor(noise, latent_image, sampler, sigmas, *args, **kwargs),
            b.expand(latent_image.shape[0], -1, -1, -1),
            finishes=float(sigmas[-1]) == 0.0,
        )
        return result.unsqueeze(2) if of_video else result

    def _check(
        self,
        guider: Any,
        conditions: list[dict[str, Any]],
        noise: Tensor,
        latent_image: Tensor,
        sampler: Any,
        sigmas: Tensor,
        denoise_mask: Tensor | None,
    ) -> Tensor:
        """The base latent b, [B or 1, C, H, W]; BadInput for what does not fit. Latents are pictures, [B, C, H, W]."""
        self._check_model(guider)
        check_guidance(guider.model_options)
        self._check_sigmas(sigmas)
        b = self._base(conditions, latent_image, sigmas)
        self._check_latent(latent_image, b)
        self._check_second_half(noise, sigmas, denoise_mask)
        self._check_conditions(conditions)
        check_sampler(sampler, len(sigmas) - 1)
        return b

    def _refined(self, patcher: Any, run: Callable[[], Tensor], b: Tensor, *, finishes: bool) -> Tensor:
        """What `run()` samples, blended with b. `finishes`: the run ends at sigma 0."""
        if finishes and self.strength == 0.0:
            return b.to(device=patcher.load_device, dtype=torch.float32, copy=True)
        refined = run()
        if not torch.isfinite(refined).all():
            # Once more, the same, with an eye on each layer: it takes as long again, and only where all is lost.
            with FirstBadLayer(patcher.model.diffusion_model) as bad:
                run()
            raise self._not_finite(bad.name, patcher)
        if not finishes:  # the first half of a split run: x_t, for the second half to go on from
            return refined
        # model space is an affine map of this one, so blending here is blending there
        return flow.blend(b.to(refined), refined, self.strength)

    @staticmethod
    def _not_finite(layer: str, patcher: Any) -> BadInput:
        where = f"layer {layer}" if layer else "no single layer, so in the sampler or in guidance"
        dtype = getattr(patcher.model, "manual_cast_dtype", None) or patcher.model.get_dtype()
        dtype = str(dtype).removeprefix("torch.")
        return BadInput(
            f"The refiner's UNet gives NaN or infinity, first in {where}, computing in {dtype}: start ComfyUI with "
            "--force-fp32 if that is less than float32, and take away LoRAs, patches and a high cfg."
        )

    def _check_model(self, guider: Any) -> None:
        if not isinstance(guider.model_patcher.get_model_object("model_sampling"), ResidualFlowSampling):
            raise BadInput(
                "Another node replaced the refiner's model sampling (a ModelSampling... node, for example); "
                "connect the MODEL of Load Refiner without it."
            )

    def _check_sigmas(self, sigmas: Tensor) -> None:
        values = sigmas.tolist()
        if values[0] > 1 + _SIGMA_TOLERANCE:
            raise BadInput(
                f"A refiner's sigmas run from 1 to 0, but these start at {values[0]:.4g}: they were made for another "
                "model; use the node Refiner Sigmas, or a scheduler that has the refiner's MODEL."
            )
        if any(then >= now for now, then in zip(values[:-1], values[1:], strict=True)):
            raise BadInput(f"A refiner's sigmas must fall from step to step, but they are {_shown(values)}.")
        if self.meta.noise_scale == 0 and len(values) > 2:
            raise BadInput(
                f"This is a one-shot refiner (trained with noise scale 0): set steps to 1; got {len(values) - 1}."
            )

    def _base(self, conditions: list[dict[str, Any]], latent_image: Tensor, sigmas: Tensor) -> Tensor:
        """b in the latent's own space: what the conditioning carries, else latent_image. [B or 1, C, H, W]

        Where only some of the conditions carry it (Refiner Conditioning before `positive` alone), the others get it.
        """
        carried = [c["concat_latent_image"] for c in conditions if c.get("concat_latent_image") is not None]
        for other in carried[1:]:
            if other is not carried[0] and not (other.shape == carried[0].shape and torch.equal(other, carried[0])):
                raise BadInput("Positive and negative conditioning carry different base latents; give both the same.")
        if carried:
            for condition in conditions:
                condition["concat_latent_image"] = carried[0]
        for latent in (latent_image, *carried[:1]):
            if not torch.isfinite(latent).all():
                raise BadInput(
                    "The latent that the refiner got holds NaN or infinity: the VAE encoder or the sampler before it "
                    "gave that, in the precision it runs in or with the weights it has."
                )
        if torch.count_nonzero(carried[0] if carried else latent_image) == 0:
            raise BadInput(
                "A refiner starts from the base's picture, but the latent it got is empty (all zeros): "
                "connect the base's LATENT instead of an Empty Latent Image."
            )
        if carried:
            return carried[0]
        if float(sigmas[0]) < 1 - _SIGMA_TOLERANCE:
            raise BadInput(
                f"A refiner starts at sigma 1, but this run starts at {float(sigmas[0]):.4g}: set denoise to 1 and "
                "use the strength of Load Refiner instead, take another scheduler than ddim_uniform, and in the "
                "second part of a split run give the base's LATENT through Refiner Conditioning."
            )
        return latent_image

    def _check_latent(self, latent_image: Tensor, b: Tensor) -> None:
        channels = self.meta.unet.latent_channels
        for what, latent in (("latent_image", latent_image), ("the base latent in the conditioning", b)):
            if latent.ndim != 4 or latent.shape[1] != channels:
                name = self.meta.latent.get("name", "")
                raise BadInput(
                    f"This refiner was trained on {name} latents of {channels} channels, [batch, {channels}, height, "
                    f"width], but {what} is {list(latent.shape)}; use the VAE that its dataset was built with."
                )
        if b.shape[2:] != latent_image.shape[2:]:
            raise BadInput(
                f"The base latent in the conditioning is {b.shape[3]} x {b.shape[2]} cells and latent_image is "
                f"{latent_image.shape[3]} x {latent_image.shape[2]}; both must be of one size."
            )
        if b.shape[0] not in (1, latent_image.shape[0]):
            raise BadInput(
                f"The base latent in the conditioning is a batch of {b.shape[0]} and latent_image a batch of "
                f"{latent_image.shape[0]}; both must hold the same pictures."
            )

    def _check_second_half(self, noise: Tensor, sigmas: Tensor, denoise_mask: Tensor | None) -> None:
        if float(sigmas[0]) >= 1 - _SIGMA_TOLERANCE:
            return
        if torch.count_nonzero(noise) > 0:
            raise BadInput(
                f"This run starts at sigma {float(sigmas[0]):.4g} and adds noise, which gives a state that no refiner "
                "knows: set denoise to 1 and use the strength of Load Refiner, or, in the second part of a split run, "
                "turn add_noise off."
            )
        if denoise_mask is not None:
            raise BadInput("A noise mask works with a refiner in one whole run only; do not split the run, or no mask.")

    def _check_conditions(self, conditions: list[dict[str, Any]]) -> None:
        unet = self.meta.unet
        for condition in conditions:
            if condition.get("control") is not None or condition.get("gligen") is not None:
                raise BadInput("A refiner takes no ControlNet or GLIGEN: connect the CONDITIONING without it.")
            context = condition.get("cross_attn")
            width = None if context is None else context.shape[-1]
            if width != unet.context_dim:
                raise BadInput(
                    f"This refiner was trained with text conditioning {unet.context_dim} wide, but it got "
                    f"{'none' if width is None else width}; use the text encoder that its dataset was built with, or "
                    "the CONDITIONING of Load Refiner."
                )
            pooled = condition.get("pooled_output")
            if unet.pooled_dim and pooled is not None and pooled.shape[-1] != unet.pooled_dim:
                raise BadInput(
                    f"This refiner was trained with pooled text {unet.pooled_dim} wide, but it got {pooled.shape[-1]}; "
                    "use the text encoder that its dataset was built with, or the CONDITIONING of Load Refiner."
                )


def _shown(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
