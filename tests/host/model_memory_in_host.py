"""Model Memory against the real host: peaks of real sampling, decoding and encoding, for test_model_memory.py.

`python tests/host/model_memory_in_host.py HOST_FOLDER RESULT.json [check ...]`, see in_host.py.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from in_host import WANTED, pack, refusal, sample, torch, write_results  # boots the host
from memory_probes import (
    CPU,
    FUNCTIONS,
    MIB,
    OTHERS,
    PLENTY,
    SD15,
    SDXL,
    StorageMeter,
    comfy_attention,
    compare_sampling,
    compare_vae,
    estimate_sampling,
    estimates,
    grouped,
    machine_module,
    make_model,
    make_vae,
    measure_sampling,
    shapes,
    traced,
)

# isort: split
from torch.nn import Linear


def check_sampling():
    cases = []
    for kind, shape in (("SD15", SD15), ("SDXL", SDXL)):
        for dtype in (torch.float32, torch.bfloat16):
            for backend in FUNCTIONS:
                cases.append((kind, shape, dtype, (16, 16), 1, True, backend, PLENTY))
        cases.append((kind, shape, torch.float32, (17, 25), 3, False, "pytorch", PLENTY))
        for backend in ("split", "sub-quadratic"):
            cases.append((kind, shape, torch.float32, (24, 24), 1, True, backend, 12 * MIB))
    return compare_sampling(cases)


def check_transformers():
    """As check_sampling, for SD3, Flux and Wan, small."""
    rows = []
    for kind, shape in OTHERS.items():
        model = make_model(kind, torch.float32, **shape)
        latent = shapes.read_model_shape(model).latent(256, 192, 1, 9 if kind.startswith("WAN") else 1)
        for backend in ("basic", "pytorch"):
            said = estimate_sampling(model, latent, backend, 77)
            got = measure_sampling(model, latent, FUNCTIONS[backend], 77)
            rows.append([f"{kind}, {backend}", grouped(said), grouped(got)])
    return rows


def check_control():
    """[a ControlNet's estimate with the network, the network's alone], and the peak of a real pass of both."""
    import comfy.cldm.cldm
    import comfy.controlnet

    model = make_model("SD15", torch.float32, **SD15)
    network = comfy.cldm.cldm.ControlNet(
        image_size=32, in_channels=4, hint_channels=3, model_channels=64, num_res_blocks=[1, 1], channel_mult=[1, 2],
        transformer_depth=[1, 1], transformer_depth_middle=1, num_heads=8, use_spatial_transformer=True,
        context_dim=768, legacy=False, dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    ).requires_grad_(False)  # fmt: skip
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    control = comfy.controlnet.ControlNet(network, load_device=CPU)
    latent = shapes.read_model_shape(model).latent(128, 128, 1)
    machine = machine_module.Machine(PLENTY, PLENTY, False, "")
    options = {"cfg": True, "half_math": False}
    both, alone = (
        traced.TracedModel(model, controls, 77).trace(latent, "sub-quadratic", machine, **options).total
        for controls in ([control], [])
    )
    meter = StorageMeter()
    meter.hold("weights", [*model.model.parameters(), *model.model.buffers(), *network.parameters()])
    with meter:
        hint = control.copy().set_cond_hint(torch.rand(1, 3, 128, 128))
        given = {"pooled_output": torch.zeros(1, 1280), "control": hint, "control_apply_to_uncond": True}
        positive, negative = ([[torch.randn(1, 77, 768), dict(given)]] for _ in range(2))
        sample(model, positive, torch.randn(1, 4, 16, 16), steps=1, cfg=7.0, negative=negative)
    return {"both": both, "alone": alone, "measured": meter.peak - meter.labels["weights"]}


def check_vae():
    cases = [
        (torch.float32, (16, 16), 1, "normal_attention", "VAE decode", PLENTY),
        (torch.float32, (16, 24), 2, "pytorch_attention", "VAE decode", PLENTY),
        (torch.bfloat16, (16, 16), 1, "pytorch_attention", "VAE decode", PLENTY),
        (torch.float32, (16, 16), 1, "normal_attention", "VAE encode", PLENTY),
    ]
    return compare_vae(cases)


def check_untouched():
    """Whether tracing left the model as it was, and what its patches and refused networks say."""
    model = make_model("SD15", torch.float32, **SD15)
    before = {key: (id(value), value.sum().item()) for key, value in model.model.state_dict(keep_vars=True).items()}
    attributes = {name: set(part.__dict__) for name, part in model.model.named_modules()}
    key = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    model.add_patches({key: ("diff", (torch.zeros(64, 64),))})
    options = dict(
        size="custom", width=128, height=64, batch_size=1, frames=1, backend="basic", cfg=True, text_tokens=0
    )
    answer = estimates.model_memory(model, memory_gib=4.0, **options)
    after = {key: (id(value), value.sum().item()) for key, value in model.model.state_dict(keep_vars=True).items()}
    same = before == after and attributes == {name: set(part.__dict__) for name, part in model.model.named_modules()}
    odd = SimpleNamespace(model=SimpleNamespace(diffusion_model=Linear(2, 2), model_config=None))
    return {
        "same": same,
        "report": answer.report(),
        "patches": [row.size for row in answer.parts["LoRA"]],
        "refused": refusal(lambda: traced.TracedModel(odd, [], 77)),
        "control": refusal(lambda: estimates._controls(SimpleNamespace(control_model=Linear(2, 2)))),
    }


def check_solved():
    """[what was solved, whether it fits by a trace of its own, whether the next one does not]."""
    model, rows = make_model("SD15", torch.float32, **SD15), []
    # without CFG: with it the host may take the conditionings apart where memory is short, and then more fits
    options = dict(size="custom", batch_size=1, frames=1, backend="basic", cfg=False, text_tokens=0)
    for width, height, gib in ((1024, 512, 1.4), (256, 128, 1.4)):
        answer = estimates.model_memory(model, width=width, height=height, memory_gib=gib, **options)

        def fits(width, height, batch=1, gib=gib):
            again = {**options, "batch_size": batch}
            return estimates.model_memory(model, width=width, height=height, memory_gib=gib, **again).fits

        large = answer.largest_size
        rows.append([answer.fits, large, fits(*large), fits(int(large[0] * 1.15), int(large[1] * 1.15))])
        most = answer.largest_batch
        rows.append(
            [answer.fits, most, most == 0 or fits(width, height, most), fits(width, height, int(most * 1.2) + 1)]
        )
    return rows


def check_consistent():
    """{backend: [asked, whether it fits, the largest size said]} with a VAE, on a GPU of 2 GiB."""
    model, vae, found = make_model("SD15", torch.bfloat16, **SD15), make_vae(torch.float32), {}
    options = dict(size="custom", batch_size=1, frames=1, cfg=True, text_tokens=0, memory_gib=2.0, vae=vae)
    for backend in ("basic", "sub-quadratic"):
        found[backend] = []
        for side in (64, 1536, 16384):
            answer = estimates.model_memory(model, width=side, height=side, backend=backend, **options)
            found[backend].append([side, answer.fits, answer.largest_size])
    return found


def peak_resident():
    """Bytes that this process ever held in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def check_wide():
    """compare_sampling and compare_vae for the cases of REF2V_CASES, in the host's true widths."""
    asked = json.loads(os.environ["REF2V_CASES"])
    named = {"SD15": {**SD15, "model_channels": 320}, "SDXL": {**SDXL, "model_channels": 320}}
    rows = compare_sampling(
        (kind, named[kind], getattr(torch, dtype), size, batch, True, backend, budget or PLENTY)
        for kind, dtype, size, batch, backend, budget in asked["sampling"]
    )
    cases = [
        (getattr(torch, dtype), size, batch, function, work, budget or PLENTY)
        for dtype, size, batch, function, work, budget in asked["vae"]
    ]
    return {"sampling": rows, "vae": compare_vae(cases)}


def check_resident():
    """What this process held before the model came, the estimate, the overhead, and the most that it ever held."""
    kind, dtype, (height, width), batch, backend = json.loads(os.environ["REF2V_CASES"])["resident"]
    before = peak_resident()
    model = make_model(kind, getattr(torch, dtype), **{**(SD15 if kind == "SD15" else SDXL), "model_channels": 320})
    latent = shapes.read_model_shape(model).latent(width * 8, height * 8, batch)
    budget = comfy_attention.model_management.get_free_memory(CPU)
    working = sum(estimate_sampling(model, latent, backend, 77, budget=budget).values())
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    machine = machine_module.Machine(budget, budget, False, "")
    model.model_options["transformer_options"] = {
        "optimized_attention_override": lambda _, *args, **kwargs: FUNCTIONS[backend](*args, **kwargs)
    }
    text = traced._inputs_of(model.model.diffusion_model, "")["given"]["c_crossattn"]
    positive, negative = (
        [[torch.randn(1, 77, text), {"pooled_output": torch.zeros(1, 1280), "width": 64, "height": 64}]]
        for _ in range(2)
    )
    sample(model, positive, torch.randn(batch, 4, height, width), steps=2, cfg=7.0, negative=negative)
    overhead = sum(machine_module.overhead(machine, working).values())
    return {"process": before, "estimate": weights + working, "overhead": overhead, "resident": peak_resident()}


def check_cost():
    """(seconds of CPU, bytes by which the process grew) of an estimate for the whole SDXL with its chart, warm."""
    import comfy.model_patcher
    import comfy.supported_models

    config_class = comfy.supported_models.SDXL
    unet = {"image_size": 32, "in_channels": 4, "out_channels": 4, "legacy": False, "use_spatial_transformer": True}
    unet |= config_class.unet_config
    unet |= dict(
        num_classes="sequential", num_head_channels=64, channel_mult=[1, 2, 4], num_res_blocks=[2, 2, 2],
        transformer_depth_output=[0] * 3 + [2] * 3 + [10] * 3, transformer_depth_middle=10,
    )  # fmt: skip
    config = config_class(unet)
    config.set_inference_dtype(torch.bfloat16, None)
    base = config.get_model({}, "", device="meta")
    model = comfy.model_patcher.ModelPatcher(base, load_device=CPU, offload_device=CPU)
    options = dict(
        size="1344x768", width=8, height=8, batch_size=1, frames=1, backend="pytorch", cfg=True, text_tokens=0
    )
    grown, before = [], peak_resident()
    for _ in range(2):
        began = time.process_time()
        answer = estimates.model_memory(model, memory_gib=24.0, **options)
        pack("nodes.host.memory.estimate").columns_image(answer)
        answer.report()
        seconds = time.process_time() - began
        grown.append(peak_resident() - before)
    return {"seconds": seconds, "grown": grown, "report": answer.report(), "weights": answer.weights}


if __name__ == "__main__":
    # "wide" and "resident" are for benchmarks/memory_estimate.py
    names = WANTED or ["sampling", "transformers", "control", "vae", "untouched", "solved", "consistent", "cost"]
    write_results({name: globals()[f"check_{name}"] for name in names})
