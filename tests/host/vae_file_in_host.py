"""VAEs read from files, whole and damaged ones; vae_precision_in_host.py runs it."""

import gc
import os
import weakref
from pathlib import Path

from in_host import comfy, pack, refusal, torch  # boots the host
from vae_probes import WINDOWS, host_vae, select

# isort: split
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
from vae_families import FAMILIES, make  # noqa: E402

vae_file = pack("nodes.host.vae.file")


def files_of_one_half():
    """Files that hold an encoder or a decoder alone, by the host's loader and by ours."""
    load = vae_file.load_vae_precisely
    lacking = pack("nodes.host.vae.halves").lacking_in_file
    cascade, small = make("Stable Cascade C (StageC_coder)", WINDOWS), make("TAESD", WINDOWS)
    halves = [
        host_vae({key.removeprefix(name): value for key, value in cascade.items() if key.startswith(name)})
        for name in ("encoder.", "previewer.")
    ]
    folder = Path(folder_paths.get_folder_paths("vae")[0])
    folder.mkdir(parents=True, exist_ok=True)
    decoder = {key: value for key, value in small.items() if not key.startswith("taesd_encoder")}
    comfy.utils.save_torch_file(own_memory(decoder), str(folder / "decoder.safetensors"))
    with torch.device("meta"):
        mochi = FAMILIES["Mochi (VideoVAE)"].module()
    return {
        "effnet": refusal(lambda: select(halves[0], "default", "fp32")),
        "effnet's encoder": select(halves[0], "bf16", "default").report.splitlines()[1],
        "previewer": refusal(lambda: select(halves[1], "bf16", "default")),
        "previewer's decoder": select(halves[1], "default", "bf16").report.splitlines()[2],
        "taesd": refusal(lambda: load("decoder.safetensors", "bf16", "fp32")),
        "taesd's decoder": load("decoder.safetensors", "default", "bf16").report.splitlines()[2],
        "mochi": [lacking(keys, mochi) for keys in (["blocks.0.0.weight"], ["layers.0.weight"])],
        "mochi whole": lacking(mochi.state_dict(), mochi),
    }


def own_memory(state):
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in state.items()}


def a_file_is_read_once():
    """Two dtypes of one file are one model; a file that was replaced is another."""
    load_file, times = comfy.utils.load_torch_file, []

    def counting(path, *args, **kwargs):
        times.append(path)
        return load_file(path, *args, **kwargs)

    folder = Path(folder_paths.get_folder_paths("vae")[0])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "once.safetensors"
    state = own_memory(make("TAESD", WINDOWS))
    comfy.utils.save_torch_file(state, str(path))
    comfy.utils.load_torch_file = counting
    try:
        given = [("fp32", "fp32"), ("bf16", "fp32"), ("default", "bf16")]
        fingerprints, latent = [], torch.randn(1, 4, 8, 8)
        for encoder, decoder in given:  # as the host does: asked for, what the last prompt made is gone, made
            fingerprints.append(vae_file.fingerprint_vae_file(path.name, encoder, decoder))
            made = None
            gc.collect()
            made = vae_file.load_vae_precisely(path.name, encoder, decoder).vae
        reads, before = len(times), made.decode(latent)
        state["taesd_decoder.1.weight"] = state["taesd_decoder.1.weight"] * 2
        comfy.utils.save_torch_file(state, str(path))
        os.utime(path, ns=(1, 1))
        fingerprints.append(vae_file.fingerprint_vae_file(path.name, *given[-1]))
        replaced = vae_file.load_vae_precisely(path.name, *given[-1]).vae
        known = weakref.ref(replaced)
        del made, replaced
        gc.collect()
        return {"reads": reads, "reads after": len(times), "differs": known() is None,
                "fingerprints": len({*fingerprints}), "seen": bool(before.std() > 0)}  # fmt: skip
    finally:
        comfy.utils.load_torch_file = load_file


def damaged_files_are_named():
    folder = Path(folder_paths.get_folder_paths("vae")[0])
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.safetensors"
    comfy.utils.save_torch_file(own_memory(make("TAESD", WINDOWS)), str(whole))
    files = {
        "empty.safetensors": b"", "page.safetensors": b"<!DOCTYPE html><html>not found</html>",
        "page.pt": b"<!DOCTYPE html>", "cut.safetensors": whole.read_bytes()[:100_000], "empty.ckpt": b"",
    }  # fmt: skip
    said = {}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        said[name] = refusal(lambda name=name: vae_file.load_vae_precisely(name, "fp32", "fp32"))
    comfy.utils.save_torch_file({"some.weight": torch.zeros(2)}, str(folder / "other.safetensors"))
    said["other.safetensors"] = refusal(lambda: vae_file.load_vae_precisely("other.safetensors", "fp32", "fp32"))
    said["a path of the server"] = [name for name, line in said.items() if str(folder) in line]
    return said
