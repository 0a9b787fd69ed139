"""What the precision nodes call, of the pack that in_host.py has loaded. Import it after what changes the host."""

from in_host import pack, torch

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "LOADED_STATE",
    "Keep",
    "guard_clip",
    "guard_model",
    "guard_vae",
    "guards",
    "load_vae_precisely",
    "model_dtypes",
    "model_fingerprint",
    "select_clip",
    "select_model",
    "select_vae",
]

_model, _patching = pack("nodes.host.model.select"), "nodes.host.patching"
select_model, model_dtypes, Keep = _model.select_model_precision, _model.model_dtypes, _model.Keep
model_fingerprint = pack("nodes.host.model.base_model").model_fingerprint
select_clip = pack("nodes.host.clip.select").select_clip_precision
select_vae = pack("nodes.host.vae.select").select_vae_precision
load_vae_precisely = pack("nodes.host.vae.file").load_vae_precisely
guards, LOADED_STATE = pack(f"{_patching}.guard"), pack(f"{_patching}.private_copy").LOADED_STATE
guard_model, guard_vae, guard_clip = (
    getattr(pack(f"nodes.host.{kind}.guard"), f"guard_{kind}") for kind in ("model", "vae", "clip")
)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class LayerWatch:
    """Within the block, `_look(layer, args)` is called before each layer of the process runs."""

    def __enter__(self):
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._look)
        return self

    def __exit__(self, *_):
        self._hook.remove()
