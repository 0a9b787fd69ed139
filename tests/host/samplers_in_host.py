"""Every sampler and scheduler of the host, tried on a residual whose distribution is known.

The network is replaced by the exact posterior mean of a toy: each element of z - b is drawn from two Gaussians,
+-0.08 with standard deviation 0.06 (RMS 0.1), and s = 0.1. A sampler that fits must then turn b + s e into residuals of
that very distribution. Two figures per run, both relative to the residual's RMS:

    distance   Wasserstein-1 distance of the sampled residuals from the true distribution
    path       RMS distance from the exact solution of the flow's differential equation for the same noise
               (says nothing for samplers that add noise of their own)

`python tests/host/samplers_in_host.py HOST_FOLDER RESULT.json [samplers] [schedulers]`
See in_host.py; docs/samplers.md holds the table.
"""

import math
from pathlib import Path

from in_host import WORK, comfy, pack, refusal, sample, torch, write_results  # boots the host

model_module = pack("nodes.host.refiner.model")
sampler_rules = pack("nodes.host.refiner.sampler_rules")
flow = pack("training.objectives.residual.flow")
file_module = pack("training.objectives.residual.file")
unet_module = pack("training.objectives.residual.unet")

MEAN, WIDTH, S = 0.08, 0.06, 0.1
RMS = math.hypot(MEAN, WIDTH)
CHANNELS, SIDE = 4, 64
PROBABILITIES = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)


def residual_mean(d, t):
    """E[r | (1 - t) r + t s e = d] for r from the two Gaussians. d: any shape, float64; t: number or broadcastable."""
    keep = 1 - t
    variance = keep**2 * WIDTH**2 + t**2 * S**2
    plus = torch.sigmoid(2 * d * keep * MEAN / variance)  # posterior weight of the upper Gaussian
    gain = keep * WIDTH**2 / variance
    return sum(w * (sign * MEAN + gain * (d - keep * sign * MEAN)) for w, sign in ((plus, 1), (1 - plus, -1)))


class ExactNetwork(torch.nn.Module):
    """v / c_v of the toy, in the place of the host's UNet."""

    dtype = torch.float32

    def __init__(self, c_v):
        super().__init__()
        self.c_v = c_v
        self.calls = 0

    def forward(self, xc, timesteps, context=None, **_):
        self.calls += 1
        x, b = xc.double().chunk(2, dim=1)
        t = flow.expand(timesteps.double() / 1000, x)
        z = b + residual_mean(x - b, t)
        return ((x - z) / t / self.c_v).float()


def toy_model():
    """A refiner file as MODEL and CONDITIONING, with the toy's exact network in it."""
    config = unet_module.UNetConfig(
        latent_channels=CHANNELS,
        block_channels=(32,),
        layers_per_block=1,
        transformer_depth=(0,),
        middle_depth=0,
        heads=(1,),
        context_dim=8,
    )
    latent = {"name": "measured", "channels": CHANNELS, "scale": 1.0, "shift": 0.0, "downscale": 8}
    c_v = flow.velocity_scale(RMS, S)
    meta = file_module.RefinerMeta(
        unet=config,
        latent=latent,
        noise_scale=S,
        residual_rms=RMS,
        c_v=c_v,
        sigmas=flow.sigmas(8).tolist(),
        training={},
    )
    path = Path(WORK.name) / "toy.safetensors"
    file_module.save_refiner(path, unet_module.build_unet(config).state_dict(), {"context": torch.zeros(1, 8)}, meta)
    model, conditioning = model_module.load_refiner_model(path, 1.0)
    model.model.diffusion_model = ExactNetwork(c_v)
    return model, conditioning


def true_quantiles():
    """Of the residual's distribution, at PROBABILITIES."""
    grid = torch.linspace(-0.6, 0.6, 200001, dtype=torch.float64)
    cumulative = sum(0.5 * (1 + torch.erf((grid - sign * MEAN) / WIDTH / math.sqrt(2))) for sign in (1, -1)) / 2
    return grid[torch.searchsorted(cumulative, PROBABILITIES)]


def exact_solution(noise, steps=4000):
    """The residuals that the flow's differential equation gives for the noise: a fine Heun walk, [.] -> [.]."""
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    d = S * noise.double()
    for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        slope = (d - residual_mean(d, now)) / now
        ahead = d + (then - now) * slope
        if then > 0:
            slope = (slope + (ahead - residual_mean(ahead, then)) / then) / 2
        d = d + (then - now) * slope
    return d


class Bench:
    """One model, one base, one noise; measures one way of sampling."""

    def __init__(self):
        self.model, self.conditioning = toy_model()
        generator = torch.Generator().manual_seed(0)
        self.b = torch.randn(1, CHANNELS, SIDE, SIDE, generator=generator)
        self.noise = comfy.sample.prepare_noise(self.b, 1)
        self.truth = true_quantiles()
        points = torch.linspace(-6, 6, 4001, dtype=torch.float64)  # the flow is one-dimensional: solve on a grid
        solved = exact_solution(points)
        at = (self.noise.double() + 6) / 12 * 4000
        low = at.floor().long().clamp(0, 3999)
        self.exact = torch.lerp(solved[low], solved[low + 1], at - low)

    def measure(self, sampler="euler", scheduler="simple", steps=8):
        """The KSampler with these settings."""
        options = dict(sampler=sampler, scheduler=scheduler, steps=steps, noise=self.noise)
        return self.measured(lambda: sample(self.model, self.conditioning, self.b, **options))

    def measured(self, run):
        """{"distance", "path", "calls"} of what `run` samples, or {"refused": sentence}, or {"failed": what came}."""
        network = self.model.model.diffusion_model
        network.calls = 0
        out = []
        said = refusal(lambda: out.append(run()))
        if not out:
            return {"failed" if said.startswith("NOT A SENTENCE") else "refused": said}
        r = (out[0] - self.b).double()
        if not torch.isfinite(r).all():
            return {"failed": "not finite"}
        quantiles = torch.quantile(r.flatten(), PROBABILITIES)
        return {
            "distance": float((quantiles - self.truth).abs().mean() / RMS),
            "path": float((r - self.exact).square().mean().sqrt() / RMS),
            "calls": network.calls,
        }


def check_samplers(names=None):
    """Each sampler, 8 and 16 steps, simple: the pack's word on it, and how it does when nothing refuses it."""
    bench, found = Bench(), {}
    for name in names or comfy.samplers.SAMPLER_NAMES:
        sampler = comfy.samplers.sampler_object(name)
        entry = {"refusal": refusal(lambda sampler=sampler: sampler_rules.check_sampler(sampler, 8))}
        kept = dict(sampler_rules.REFUSED)
        sampler_rules.REFUSED.clear()
        try:
            for steps in (8, 16):
                entry[str(steps)] = bench.measure(name, steps=steps)
        finally:
            sampler_rules.REFUSED.update(kept)
        found[name] = entry
    return found


def check_few_samplers():
    """What the test measures again."""
    return check_samplers(["euler", "heun", "dpmpp_2m", "deis", "uni_pc", "euler_ancestral", "dpmpp_2m_sde", "lcm"])


def check_refused():
    """The pack's word on each sampler of the host, through the KSampler."""
    bench = Bench()
    return {name: bench.measure(name) for name in comfy.samplers.SAMPLER_NAMES}


def check_schedulers():
    """Each scheduler with euler, 8 and 16 steps."""
    bench = Bench()
    return {
        name: {str(steps): bench.measure(scheduler=name, steps=steps) for steps in (8, 16)}
        for name in comfy.samplers.SCHEDULER_NAMES
    }


def check_options():
    """Samplers with the options of the host's sampler nodes."""
    bench = Bench()
    sigmas = comfy.samplers.calculate_sigmas(bench.model.get_model_object("model_sampling"), "simple", 8)
    found = {}
    for name, options in (
        *((name, {switch: 0}) for name, (_, switch) in sampler_rules.REFUSED.items() if switch),
        ("euler", {"s_churn": 1.0}),
        ("dpm_adaptive", {"eta": 1.0}),
        ("dpmpp_2m_sde", {"eta": 0.5}),
        ("dpmpp_2s_ancestral_cfg_pp", {"eta": 0}),
    ):
        sampler = comfy.samplers.ksampler(name, options)
        found[f"{name} {options}"] = bench.measured(
            lambda sampler=sampler: comfy.sample.sample_custom(
                bench.model, bench.noise, 1.0, sampler, sigmas, *[bench.conditioning] * 2, bench.b, disable_pbar=True
            )
        )
    return found


if __name__ == "__main__":
    checks = (check_few_samplers, check_refused, check_options, check_samplers, check_schedulers)
    write_results({check.__name__.removeprefix("check_"): check for check in checks})
