"""SDXL's refiner, fine-tuned by the core, in the host's own loaders: the numbers that test_sdxl_refiner.py looks at.

The network is as small as the host still takes for SDXL's refiner: 4 levels of 384 channels, 261 M parameters.
See in_host.py for how it is run.
"""

from pathlib import Path

from in_host import WORK, comfy, error, pack, torch, write_results  # boots the host

import comfy.conds  # isort: skip
import comfy.model_base  # isort: skip
import comfy.sdxl_clip  # isort: skip
import comfy.supported_models  # isort: skip
import comfy.supported_models_base  # isort: skip
from clip_families import file_of, host_clip, tokens_of  # isort: skip
from comfy.model_sampling import ModelSamplingDiscrete  # isort: skip

diffusion = pack("training.objectives.sdxl_refiner.diffusion")
file_module = pack("training.objectives.sdxl_refiner.file")
SDXLRefiner = pack("training.objectives.sdxl_refiner.model").SDXLRefiner
unet_module = pack("training.objectives.sdxl_refiner.unet")

SHAPE = {"block_channels": [384] * 4, "heads": [6] * 4, "middle_depth": 1}
LATENT = {"name": "SDXL", "channels": 4, "scale": 0.13025, "shift": 0.0, "downscale": 8}
TEXT = {"tokens": 77, "dim": 1280, "pooled": 1280, "fingerprint": "c0ffee"}
SCORE = 6.0


def write_pairs(folder):
    writer = pack("training.data.shards").DatasetWriter
    empty = {"context": torch.randn(77, 1280), "pooled": torch.randn(1280)}
    base = {"kind": "model", "name": "SDXL"}
    with torch.inference_mode(False), writer(
        folder, latent=LATENT, vae=None, base=base, context=TEXT, empty=empty
    ) as data:
        for i in range(3):
            z = torch.randn(4, 8, 8)
            data.add(
                z, z + 0.1 * torch.randn(4, 8, 8), source=f"{i}.png", sha256=f"{i:064x}", group=f"{i}",
                split="train" if i else "held_out", context=torch.randn(77, 1280), pooled=torch.randn(1280),
            )
    return folder


class UntilTheFile(pack("training.run.train").Silent):
    """Ends a run when its file is written: the measures that come then are tested elsewhere, and take half a minute."""

    trained = False

    def on_message(self, text):
        self.trained |= text.startswith("Trained.")


def trained():
    """The file of two steps of fine-tuning. In pure bfloat16, to fit where tests run."""
    folder = Path(WORK.name)
    config = pack("training.config.train_config").TrainConfig.build({
        "dataset": str(write_pairs(folder / "pairs")), "run": str(folder / "run"), "objective": "sdxl_refiner",
        "refiner": {"shape": SHAPE}, "data": {"batch_size": 1}, "epochs": 1, "precision": "pure_bf16",
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0, "moments": "bf16"}, "device": "cpu",
        "validation": {"pictures": 0}, "keep_best": False, "ema_decay": 0.5,
    })  # fmt: skip
    with torch.inference_mode(False), torch.enable_grad():
        observer = UntilTheFile()
        result = pack("training.run.train").train(config, observer, lambda: observer.trained)
    return result.refiner


def core_network(path):
    """The core's own network with the file's weights, and its metadata."""
    meta = file_module.load_meta(path)
    with torch.device("meta"):
        net = unet_module.build(meta.unet)
    shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}
    net.load_state_dict(file_module.read_weights(path, shapes, meta.unet.layers_per_block), assign=True)
    return net.requires_grad_(False).eval(), meta


def check_schedule():
    host = ModelSamplingDiscrete(comfy.supported_models.SDXLRefiner({}))
    k, steps = torch.arange(200), diffusion.sigmas(8)[:-1]
    return {
        "hand-over": float(host.sigma(torch.tensor(199.0))),
        "difference": float((host.sigmas - diffusion.SIGMAS).abs().max()),
        "step 20 of 25": [
            float(comfy.samplers.calculate_sigmas(host, name, 25)[20]) for name in ("simple", "normal")
        ],
        "timesteps": bool((host.timestep(diffusion.SIGMAS[:200]) == k).all()),
        "steps": [host.timestep(steps).tolist(), diffusion.timestep_of(steps).tolist()],
    }


def check_text():
    """CLIP-G's columns in the text of SDXL's two encoders, against the refiner's encoder with the same weights."""
    both = host_clip("SDXL").cond_stage_model
    tokens = tokens_of("SDXL")
    together, pooled = both.encode_token_weights(tokens)[:2]
    state = {key: value for key, value in file_of("SDXL").items() if key.startswith("clip_g.")}
    alone = host_clip("SDXL refiner", state).cond_stage_model
    refiner, own_pooled = alone.encode_token_weights(tokens)[:2]
    width = refiner.shape[-1]
    return {
        "same class": type(alone.clip_g) is type(both.clip_g),
        "context": error(together[..., -width:], refiner),
        "pooled": error(pooled, own_pooled),
        "other columns": error(together[..., :width], refiner),
    }


def check_captions():
    """What Build Refiner Dataset keeps of a caption under the refiner's own CLIP: few layers, but its true width."""
    target = comfy.supported_models_base.ClipTarget(comfy.sdxl_clip.SDXLTokenizer, comfy.sdxl_clip.SDXLRefinerClipModel)
    small = {"num_hidden_layers": 3, "hidden_size": 1280, "num_attention_heads": 20, "intermediate_size": 64}
    clip = comfy.sd.CLIP(target, model_options={"clip_g_model_config": small})
    for parameter in clip.cond_stage_model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    encoder = pack("nodes.host.clip.host_clip").CaptionEncoder(clip)
    shape = encoder.measure(["a fox in the snow"])
    context, pooled = encoder.encode("a fox in the snow")
    ((expected, extra),) = clip.encode_from_tokens_scheduled(clip.tokenize("a fox in the snow"))
    return {
        "shape": [shape.tokens, shape.dim, shape.pooled],
        "same": torch.equal(context, expected[0].float()) and torch.equal(pooled, extra["pooled_output"][0].float()),
    }


def check_reload():
    """Trained, saved, loaded in two ways by the host; its output, its adm and its sampler against the core's."""
    path = trained()
    loaded = {
        "diffusion model": comfy.sd.load_diffusion_model(str(path)),
        "checkpoint": comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0],
    }
    net, meta = core_network(path)
    score, height, width = 7.25, 96, 64
    core = SDXLRefiner(net, score)
    found = {"steps": meta.training["steps"], "last layer": float(net.conv_out.weight.abs().max())}
    keys = set(unet_module_names(net))
    for way, model in loaded.items():
        base = model.model
        found[f"{way}: kind"] = [type(base).__name__, type(base.model_config).__name__, str(base.get_dtype())]
        found[f"{way}: latent"] = pack("nodes.host.model.base_model").latent_scaling(model)
        found[f"{way}: same names"] = set(base.diffusion_model.state_dict()) == keys
        torch.manual_seed(5)
        x, context, pooled = torch.randn(2, 4, height // 8, width // 8), torch.randn(2, 77, 1280), torch.randn(2, 1280)
        k = torch.tensor([12, 199])
        sigma = diffusion.SIGMAS[k]
        adm = base.encode_adm(
            pooled_output=pooled, height=height, width=width, aesthetic_score=score, crop_h=8, crop_w=16,
            device=torch.device("cpu"),
        )
        got = base.apply_model(x, sigma, c_crossattn=context, y=adm)
        ids = torch.tensor([[height, width, 8.0, 16.0, height, width]]).expand(2, -1)
        condition = {"context": context, "pooled": pooled, "time_ids": ids}
        noise = core.output(x, k, condition)
        found[f"{way}: output"] = error(got, x - sigma[:, None, None, None] * noise)
        found[f"{way}: noise"] = error((x - got) / sigma[:, None, None, None], noise)
        turned = {**condition, "time_ids": ids[:, [1, 0, 2, 3]]}
        found[f"{way}: turned sizes"] = error(core.output(x, k, turned), noise)
        found[f"{way}: adm"] = list(adm.shape)

        # the host's sampler from the hand-over, on a base latent as its VAE would give it
        b, e = torch.randn(1, 4, height // 8, width // 8), torch.randn(1, 4, height // 8, width // 8)
        times = diffusion.sigmas(4)
        extra = {"pooled_output": pooled[:1], "aesthetic_score": score, "height": height, "width": width}
        refined = comfy.sample.sample_custom(
            model, e, 1.0, comfy.samplers.sampler_object("euler"), times, [[context[:1], extra]],
            [[context[:1], extra]], b / 0.13025, disable_pbar=True, seed=0,
        )
        one = {"context": context[:1], "pooled": pooled[:1], "time_ids": torch.tensor([[96.0, 64.0, 0.0, 0.0]])}
        found[f"{way}: sampled"] = error(refined * 0.13025, core.refine(b, e, one, times))
    return found


def unet_module_names(net):
    names = pack("training.objectives.sdxl_refiner.keys").original_names(net.state_dict(), 2)
    return names.values()


if __name__ == "__main__":
    write_results(
        {name.removeprefix("check_"): run for name, run in list(globals().items()) if name.startswith("check_")}
    )
