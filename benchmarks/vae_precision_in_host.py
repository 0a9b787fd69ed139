"""The part of vae_precision.py that runs beside the real host, in a process of its own.

python benchmarks/vae_precision_in_host.py HOST_FOLDER RESULT.json PAIRS SIDE THREADS
"""

import gc
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "host"))

from in_host import RESULT, WANTED, comfy, pack, torch  # noqa: E402 (boots the host)

# isort: split
import comfy.sd  # noqa: E402
from vae_families import FAMILIES, make, rounded_windows  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
NAME = "SD and SDXL (AutoencoderKL)"
select = pack("nodes.host.vae.select").select_vae_precision


def clock(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turns(ours, theirs, latent, pairs: int) -> list[list[float]]:
    """[[our seconds, the host's], ...] of one decode each; neither is always the second."""
    assert torch.equal(ours.decode(latent), theirs.decode(latent))  # also warms up
    taken = []
    for number in range(pairs):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        seconds = {id(vae): clock(lambda vae=vae: vae.decode(latent)) for vae in order}
        taken.append([seconds[id(ours)], seconds[id(theirs)]])
    return taken


def storages(module) -> dict[int, int]:
    """Address -> bytes of what the weights lie in, those of shared parts too."""
    parts = [module, *(value for value in module.__dict__.values() if isinstance(value, torch.nn.Module))]
    held = {}
    for tensor in [weight for part in parts for weight in [*part.parameters(), *part.buffers()]]:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return held


def main() -> None:
    pairs, side, threads = map(int, WANTED)
    if threads:
        torch.set_num_threads(threads)
    state = make(NAME, rounded_windows())
    fine, coarse = (comfy.sd.VAE(sd=dict(state), dtype=dtype) for dtype in (FP32, BF16))
    latent = torch.randn(1, *FAMILIES[NAME].latent[1:2], side // 8, side // 8)
    # what is cast, over which VAE, against which of the host's
    cases = {
        "fp32 decoder, shared with an fp32 VAE (its encoder cast to bf16)": (fine, "bf16", "default", fine),
        "fp32 decoder of its own, over a bf16 VAE": (coarse, "default", "fp32", fine),
        "bf16 decoder of its own, over an fp32 VAE": (fine, "default", "bf16", coarse),
    }
    found = {"threads": torch.get_num_threads(), "seconds": {}, "bytes": {}}
    for name, (source, encoder, decoder, rival) in cases.items():
        known = storages(source.first_stage_model)
        chosen = select(source, encoder, decoder).vae
        added = storages(chosen.first_stage_model).items() - known.items()
        cast, dtype = ("decoder", decoder) if encoder == "default" else ("encoder", encoder)
        parts = {"encoder": ("encoder", "quant_conv"), "decoder": ("decoder", "post_quant_conv")}[cast]
        width = {"fp32": 4, "bf16": 2}[dtype]
        half = sum(w.numel() * width for part in parts for w in getattr(source.first_stage_model, part).parameters())
        found["bytes"][f"{dtype} {cast}, over {'fp32' if source is fine else 'bf16'}"] = {
            "half": half,
            "added": sum(size for _, size in added),
        }
        found["seconds"][name] = in_turns(chosen, rival, latent, pairs)
        del chosen
        gc.collect()
    Path(RESULT).write_text(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        torch.manual_seed(0)
        main()
