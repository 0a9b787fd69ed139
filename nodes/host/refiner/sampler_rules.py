"""Which samplers and which guidance do not fit a refiner, and what a person is told to use instead.

A refiner's noise is its own, much smaller than a sampler's, and its network has to see the base's picture.
"""

from __future__ import annotations

import logging
from typing import Any

from ....training.errors import BadInput

__all__ = ["FITTING", "NEEDS_TWO_STEPS", "REFUSED", "REFUSED_GUIDANCE", "check_guidance", "check_sampler"]

_LOG = logging.getLogger("ref2v")

_ADDS_NOISE = "it adds fresh noise of unit size at each step, and a refiner's noise is its own, much smaller s"
_RENOISES = "it takes the picture it has and noises it anew, and a refiner's state keeps a share of the base instead"

# Every sampler of the host was tried once on a residual whose distribution is known; docs/samplers.md has the table.
# Left: sampling functions of the host without "sample_". Right: why they do not fit, and the option that turns the
# noise off where that makes an ordinary sampler of them (sampler nodes have it; the KSampler's list does not).
REFUSED: dict[str, tuple[str, str | None]] = {
    "euler_ancestral": (_ADDS_NOISE, "eta"),
    "euler_ancestral_cfg_pp": (_ADDS_NOISE, "eta"),
    "dpm_2_ancestral": (_ADDS_NOISE, "eta"),
    "dpmpp_2s_ancestral": (_ADDS_NOISE, "eta"),
    "dpmpp_2s_ancestral_cfg_pp": (_ADDS_NOISE, None),
    "dpmpp_sde": (_ADDS_NOISE, "eta"),
    "dpmpp_sde_gpu": (_ADDS_NOISE, "eta"),
    "dpmpp_2m_sde": (_ADDS_NOISE, "eta"),
    "dpmpp_2m_sde_gpu": (_ADDS_NOISE, "eta"),
    "dpmpp_2m_sde_heun": (_ADDS_NOISE, "eta"),
    "dpmpp_2m_sde_heun_gpu": (_ADDS_NOISE, "eta"),
    "dpmpp_3m_sde": (_ADDS_NOISE, "eta"),
    "dpmpp_3m_sde_gpu": (_ADDS_NOISE, "eta"),
    "res_multistep_ancestral": (_ADDS_NOISE, "eta"),
    "res_multistep_ancestral_cfg_pp": (_ADDS_NOISE, "eta"),
    "seeds_2": (_ADDS_NOISE, "eta"),
    "seeds_3": (_ADDS_NOISE, "eta"),
    "er_sde": (_ADDS_NOISE, "s_noise"),
    "sa_solver": (_ADDS_NOISE, "s_noise"),
    "sa_solver_pece": (_ADDS_NOISE, "s_noise"),
    "ddpm": (_ADDS_NOISE, None),
    "lcm": (_RENOISES, None),
    "lcm_upscale": (_RENOISES, None),
}
FITTING = frozenset(
    {"euler", "euler_cfg_pp", "heun", "heunpp2", "dpm_2", "lms", "dpm_fast", "dpm_adaptive", "dpmpp_2m"}
    | {"dpmpp_2m_cfg_pp", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp", "gradient_estimation"}
    | {"gradient_estimation_cfg_pp", "unipc", "unipc_bh2"}
)

REFUSED_GUIDANCE = {
    "nodes_perpneg": (
        "The node PerpNeg does not fit a refiner: it asks the network without the base's picture, which a refiner "
        "has to see; take it away, or use PerpNegGuider."
    ),
    "nodes_sag": (
        "The node Self-Attention Guidance does not fit a refiner: it blurs by the attention of a middle block, which "
        "many refiners do not have, and asks the network about that blur instead of the base's picture; take it away."
    ),
}
"""Module of the host whose function is in a MODEL's options -> what to do."""

# With one step the predictor of unipc overshoots, and the other two stop at the last sigma above 0, where they began.
NEEDS_TWO_STEPS = frozenset({"unipc", "unipc_bh2", "dpm_fast", "dpm_adaptive"})


def _sampler_name(sampler: Any) -> str:
    function = getattr(sampler, "sampler_function", sampler)
    name = getattr(function, "__name__", type(function).__name__)
    return name.removeprefix("sample_").removesuffix("_function")


def check_sampler(sampler: Any, steps: int) -> None:
    """BadInput for a SAMPLER that does not fit residual flow, or so few steps. One that was never tried passes, and is
    logged."""
    name = _sampler_name(sampler)
    options = getattr(sampler, "extra_options", None) or {}
    if name in REFUSED:
        reason, switch = REFUSED[name]
        if switch is None or options.get(switch) != 0:
            instead = "use euler" if switch is None else f"use euler, or a sampler node with {switch} at 0"
            raise BadInput(f"The sampler {name} does not fit a refiner: {reason}; {instead}.")
        return
    if name in NEEDS_TWO_STEPS and steps < 2:
        shown = name.replace("unipc", "uni_pc")  # as the KSampler's list spells it
        raise BadInput(f"The sampler {shown} needs at least 2 steps, with {steps} it leaves the noise in: use euler.")
    for churn in ("s_churn", "eta"):
        if options.get(churn, 0) > 0:
            raise BadInput(f"The sampler {name} fits a refiner only with {churn} at 0: otherwise {_ADDS_NOISE}.")
    if name not in FITTING:
        _LOG.info("Sampler %s is unknown to Ref2V and was not tried with a refiner; samplers without noise fit.", name)


def check_guidance(model_options: dict[str, Any]) -> None:
    """BadInput for a node before the sampler whose guidance asks the network in a way that a refiner cannot answer."""
    for key in ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function"):
        functions = model_options.get(key) or ()
        for function in functions if isinstance(functions, (list, tuple)) else (functions,):
            module = str(getattr(function, "__module__", "")).rpartition(".")[2]
            if module in REFUSED_GUIDANCE:
                raise BadInput(REFUSED_GUIDANCE[module])
