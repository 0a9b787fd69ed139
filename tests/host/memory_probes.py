"""What a model allocates, measured on the CPU, and what is estimated of it. Boots the host (in_host.py)."""

import contextlib

from in_host import comfy, pack, sample, torch  # boots the host

# isort: split
comfy_attention = comfy.ldm.modules.attention
StorageMeter = pack("training.memory.meter").StorageMeter
machine_module = pack("training.memory.machine")
trace_module = pack("training.memory.trace")
traced = pack("nodes.host.memory.traced_model")
shapes = pack("nodes.host.model.shapes")
estimates = pack("nodes.host.memory.model_memory")
FUNCTIONS = {
    "basic": comfy_attention.attention_basic,
    "split": comfy_attention.attention_split,
    "sub-quadratic": comfy_attention.attention_sub_quad,
    "pytorch": comfy_attention.attention_pytorch,
}
MIB = 2**20
CPU = torch.device("cpu")
PLENTY = 2**40


def make_model(kind, dtype, **changes):
    """A MODEL of the host's class `kind` ("SD15", "SDXL") with random weights in `dtype`, its UNet changed."""
    import comfy.model_patcher
    import comfy.supported_models

    config_class = getattr(comfy.supported_models, kind)
    unet = {"image_size": 32, "in_channels": 4, "out_channels": 4, "legacy": False, "use_spatial_transformer": True}
    unet |= config_class.unet_config
    if kind in OTHERS or kind.startswith("WAN"):
        unet = {**config_class.unet_config}
    elif kind == "SDXL":
        unet |= {"num_classes": "sequential", "num_head_channels": 64}
    else:
        unet |= {"num_heads": 8, "num_head_channels": -1}
    config = config_class({**unet, **changes})
    config.set_inference_dtype(dtype, None)
    base = config.get_model({}, "", device=CPU)
    for parameter in base.parameters():
        parameter.requires_grad_(False)
        torch.nn.init.normal_(parameter, std=0.02)
    return comfy.model_patcher.ModelPatcher(base, load_device=CPU, offload_device=CPU)
# a fifth of the width, fewer blocks; benchmarks/memory_estimate.py has the true ones
SD15 = dict(
    model_channels=64, channel_mult=[1, 2], num_res_blocks=[1, 1], transformer_depth=[1, 1], context_dim=768,
    transformer_depth_output=[1, 1, 1, 1], transformer_depth_middle=1,
)  # fmt: skip
SDXL = dict(
    model_channels=64, channel_mult=[1, 2], num_res_blocks=[1, 1], transformer_depth=[0, 2], context_dim=2048,
    transformer_depth_output=[0, 0, 2, 2], transformer_depth_middle=2, adm_in_channels=2816,
)  # fmt: skip


@contextlib.contextmanager
def free_memory(free):
    """The host believes that free() bytes are free."""
    module = comfy_attention.model_management
    kept = module.get_free_memory
    module.get_free_memory = lambda device=None, torch_free_too=False: (free(), free()) if torch_free_too else free()
    try:
        yield
    finally:
        module.get_free_memory = kept


def measure_sampling(model, latent, function, text, *, cfg=True, budget=PLENTY):
    """{label: bytes} at the peak of a real step of the host's own KSampler."""
    meter = StorageMeter()
    meter.hold("weights", [*model.model.parameters(), *model.model.buffers()])

    def attend(_, *args, **kwargs):
        with meter.labelled("attention"):
            result = function(*args, **kwargs)
        meter.hold("activations", [result])
        return result

    model = model.clone()
    model.model_options["transformer_options"] = {"optimized_attention_override": attend}
    width = traced._inputs_of(model.model.diffusion_model, "")["given"]["c_crossattn"]
    pooled = {"pooled_output": torch.zeros(1, 1280), "width": 64, "height": 64}
    sides = (latent.frames,) * (latent.frames > 1) + (latent.height, latent.width)
    with meter, free_memory(lambda: budget - meter.live + meter.labels["weights"]):
        positive, negative = ([[torch.randn(1, text, width), dict(pooled)]] for _ in range(2))
        sample(
            model, positive, torch.randn(latent.batch, latent.channels, *sides),
            steps=1, cfg=7.0 if cfg else 1.0, negative=negative,
        )  # fmt: skip
    return meter.terms


def estimate_sampling(model, latent, backend, text, *, cfg=True, budget=PLENTY):
    machine = machine_module.Machine(budget, budget, False, "")
    cfg = cfg and estimates.batches_together(model, latent, machine)
    found = traced.TracedModel(model, [], text).trace(latent, backend, machine, cfg=cfg, half_math=False)
    return found.terms


def grouped(terms):
    """weights, attention, and the rest."""
    rest = sum(size for label, size in terms.items() if label not in ("weights", "attention"))
    return {"attention": terms.get("attention", 0), "activations": rest}


def compare_sampling(cases):
    """[what, estimate, measured] for each (kind, shape, dtype, (height, width), batch, cfg, backend, budget)."""
    rows, models = [], {}
    for kind, shape, dtype, (height, width), batch, cfg, backend, budget in cases:
        key = kind, dtype
        if key not in models:
            models[key] = make_model(kind, dtype, **shape)
        model = models[key]
        latent = shapes.read_model_shape(model).latent(width * 8, height * 8, batch)
        options = {"cfg": cfg, "budget": budget}
        said = estimate_sampling(model, latent, backend, 77, **options)
        got = measure_sampling(model, latent, FUNCTIONS[backend], 77, **options)
        name = f"{kind}, {width}x{height}, batch {batch}{', CFG' if cfg else ''}, {str(dtype)[6:]}, {backend}"
        name += f", {budget // MIB} MiB free" if budget < PLENTY else ""
        rows.append([name, grouped(said), grouped(got)])
    return rows
OTHERS = {
    "SD3": dict(
        depth=2, num_patches=36864, pos_embed_max_size=192, adm_in_channels=1280, patch_size=2, input_size=None,
        context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 256, "out_features": 128}},
    ),
    "Flux": dict(
        in_channels=16, out_channels=16, vec_in_dim=1280, context_in_dim=256, hidden_size=128, mlp_ratio=4.0,
        num_heads=4, depth=2, depth_single_blocks=2, axes_dim=[8, 12, 12], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True,
    ),
    "WAN21_T2V": dict(
        dim=128, ffn_dim=256, num_heads=4, num_layers=2, in_dim=16, out_dim=16, freq_dim=64, text_dim=256,
        patch_size=(1, 2, 2), text_len=77,
    ),
}  # fmt: skip


def make_vae(dtype):
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    ddconfig = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    ddconfig |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    state = AutoencoderKL(ddconfig=ddconfig, embed_dim=4).state_dict()
    return comfy.sd.VAE(sd={key: torch.randn_like(value) * 0.02 for key, value in state.items()}, dtype=dtype)


def compare_vae(cases):
    """[what, estimate, measured] for each (dtype, side in cells, batch, attention function, budget)."""
    from comfy.ldm.modules.diffusionmodules import model as vae_module

    rows, vaes = [], {}
    for dtype, (height, width), batch, function, work, budget in cases:
        vae = vaes.setdefault(dtype, make_vae(dtype))
        for part in vae.first_stage_model.modules():  # ours: nobody else holds it
            if hasattr(part, "optimized_attention"):
                part.optimized_attention = getattr(vae_module, function)
        machine = machine_module.Machine(budget, budget, False, "")
        latent = shapes.PRESETS["SD1.5"].latent(width * 8, height * 8, batch)
        found = estimates._vae_phases(traced.TracedVAE(vae), latent, 8, machine, False, True)
        said = next(phase for phase in found if phase.name == work).trace.terms
        meter = StorageMeter()
        meter.hold("weights", vae.first_stage_model.parameters())
        with meter, free_memory(lambda meter=meter, budget=budget: budget - meter.live + meter.labels["weights"]):
            if work == "VAE decode":
                vae.decode(torch.randn(batch, 4, height, width))
            elif work == "VAE encode":
                vae.encode(torch.rand(batch, height * 8, width * 8, 3))
            elif work == "decode in tiles":
                vae.decode_tiled(torch.randn(batch, 4, height, width), tile_x=64, tile_y=64, overlap=16)
            else:
                vae.encode_tiled(torch.rand(batch, height * 8, width * 8, 3), tile_x=512, tile_y=512, overlap=64)
        name = f"{work}, {width * 8}x{height * 8}, batch {batch}, {str(dtype)[6:]}, {function}"
        name += f", {budget // MIB} MiB free" if budget < PLENTY else ""
        total = {"total": sum(said.values())}, {"total": meter.peak - meter.labels["weights"]}
        rows.append([name, *total])
    return rows
