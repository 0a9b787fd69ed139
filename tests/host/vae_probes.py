"""What the checks of VAEs share: VAEs of the host, and what may not change about them. Boots the host (in_host.py)."""

import functools
import importlib.util
import zlib

from in_host import comfy, pack, torch  # boots the host
from precision_nodes import LOADED_STATE, LayerWatch

# isort: split
import comfy.sd  # noqa: E402
from vae_families import FAMILIES, make, rounded_windows  # noqa: E402

select = pack("nodes.host.vae.select").select_vae_precision
class_name = pack("nodes.host.vae.host_vae").class_name
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WINDOWS = rounded_windows()


def host_vae(state, dtype=FP32, metadata=None):
    """What the host's loader makes of a file, under the flag for that dtype."""
    return comfy.sd.VAE(sd=dict(state), dtype=dtype, metadata=metadata)


def inputs(family):
    torch.manual_seed(1)
    return torch.rand(family.pixels), torch.randn(family.latent)


def encoded(vae, family):
    """[whole, tiled] latents."""
    pixels, _ = inputs(family)
    tiles = {key: size * family.scale for key, size in (family.tiles or {}).items()}
    return [vae.encode(pixels), *([vae.encode_tiled(pixels, **tiles)] if tiles else [])]


def decoded(vae, family):
    """[whole, tiled] pixels."""
    _, latent = inputs(family)
    return [vae.decode(latent, family.options), *([vae.decode_tiled(latent, **family.tiles)] if family.tiles else [])]


def equal(ones, others):
    same = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ones, others, strict=True))
    return same and all(torch.isfinite(a).all() and a.std() > 0 for a in ones)


def snapshot(vae):
    """Everything about a VAE that a selector must leave alone."""
    module = vae.first_stage_model
    layers = [
        (name, id(layer), sorted(layer.__dict__), len(layer._forward_hooks), len(layer._forward_pre_hooks))
        for name, layer in module.named_modules()
    ]
    weights = [
        (name, id(weight), weight.dtype, str(weight.device), checksum(weight), weight.data_ptr())
        for name, weight in [*module.named_parameters(), *module.named_buffers()]
    ]
    booked = [(name, str(module.__dict__[name])) for name in LOADED_STATE if name in module.__dict__]
    patcher = [(name, str(value)) for name, value in sorted(vae.patcher.__dict__.items())]
    return repr((layers, weights, booked, patcher, [(k, id(v)) for k, v in sorted(vae.__dict__.items())]))


def part(vae, path):
    """A part of the VAE's module; a shared one is an attribute, not a child."""
    return functools.reduce(getattr, path.split("."), vae.first_stage_model)


def checksum(weight):
    """Of every 61st byte: some families have more than a thousand million values."""
    return zlib.adler32(weight.detach().reshape(-1).view(torch.uint8)[::61].numpy().tobytes())


class Layers(LayerWatch):
    """Within the block, `seen` gathers the dtypes of inputs and weights of every layer that runs, by half."""

    def __init__(self, vae, family):
        self.seen = {"encoder": set(), "decoder": set()}
        self._half = {}
        for half, names in zip(self.seen, family.halves, strict=True):
            for layer in [layer for name in names.split() for layer in part(vae, name).modules()]:
                if torch.is_tensor(weight := getattr(layer, "weight", None)) and weight.ndim > 1:
                    self._half[layer] = half

    def _look(self, layer, args):
        if layer in self._half:
            self.seen[self._half[layer]] |= {str(args[0].dtype), str(layer.weight.dtype)}

    def dtypes(self):
        return {half: sorted(found) for half, found in self.seen.items()}


def failure(action):
    """What the host itself says to something that it cannot do."""
    try:
        action()
    except RuntimeError as said:
        return str(said)
    return ""


def taesd(dtype=FP32):
    return host_vae(make("TAESD", WINDOWS), dtype)
LARGE = {name for name, kind in FAMILIES.items() if kind.large}
HAS = {package: importlib.util.find_spec(package) is not None for package in ("torchaudio",)}
