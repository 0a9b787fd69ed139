"""The behaviours that contract.py lists: a function each, which says whether the host behaves so. Boots the host.

contract_in_host.py runs them. With NEWEST=1 in the environment they are those of the stand-ins of newest_host/.
"""

import contextlib
import os
from types import SimpleNamespace

import contract
from in_host import WORK, comfy, error, sample, torch  # boots the host

NEWEST = os.environ.get("NEWEST") == "1"
if NEWEST:
    from newest_host.install import install

    install()

# isort: split
import utils.install_util  # noqa: E402, F401  (before the host's nodes.py puts its comfy/utils.py in the way)

# isort: split
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.sampler_helpers  # noqa: E402
import comfy.sd  # noqa: E402
import folder_paths  # noqa: E402
import vae_families  # noqa: E402
from clip_families import host_clip, tokens_of  # noqa: E402
from unets import conditioning, host_model, with_lora  # noqa: E402

management = comfy.model_management
WrappersMP = comfy.patcher_extension.WrappersMP


def tiny_vae(name="TAESD"):
    state = vae_families.make(name, vae_families.rounded_windows())
    return comfy.sd.VAE(sd=state)


class Watched:
    """What of the host only exists while it samples: the guider and the wrapper executor."""

    def __init__(self, model):
        self.seen = {}
        self.model = model.clone()
        self.model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "ref2v_test", self._outer)
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "ref2v_test", self._apply)

    def run(self):
        return sample(self.model, conditioning("SD 1.5"), torch.zeros(1, 4, 8, 8), steps=1)

    def _outer(self, executor, *args, **kwargs):
        self.seen |= {"executor": executor, "guider": executor.class_obj, "outer": 1 + self.seen.get("outer", 0)}
        return executor(*args, **kwargs)

    def _apply(self, executor, *args, **kwargs):
        guider = self.seen["guider"]  # it has some of its members only during a run
        self.seen["guider then"] = SimpleNamespace(**vars(guider))
        self.seen |= {"apply": 1 + self.seen.get("apply", 0), "applied to": executor.class_obj}
        return executor(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------ what it does


def sampled(model):
    return sample(model, conditioning("SD 1.5"), torch.zeros(1, 4, 8, 8), steps=1)


@contextlib.contextmanager
def layers_seen(*kinds):
    """The dtypes of the inputs of the host's casting layers, by "dtype"."""
    seen = set()

    def look(layer, args):
        if hasattr(layer, "comfy_cast_weights") and args and torch.is_tensor(args[0]) and args[0].is_floating_point():
            seen.add(str(args[0].dtype).removeprefix("torch."))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def clones_share_the_model():
    model = with_lora(host_model("SD 1.5"))
    clone = model.clone()
    shared = [clone.model is model.model, clone.backup is model.backup]
    shared.append(clone.object_patches_backup is model.object_patches_backup and clone.pinned is model.pinned)
    own = [clone.patches is not model.patches, clone.injections is not model.injections]
    return all([*shared, *own]) and clone.patches.keys() == model.patches.keys() and clone.is_clone(model)


def clones_keep_attachments():
    model = host_model("SD 1.5")
    told = SimpleNamespace(on_model_patcher_clone=lambda: "told")
    model.set_attachments("plain", 5)
    model.set_attachments("told", told)
    clone = model.clone()
    return clone.get_attachment("plain") == 5 and clone.get_attachment("told") == "told"


class _Refuses:
    def __deepcopy__(self, _memo):
        return self


def clones_copy_options_but_not_what_refuses():
    model, thing = host_model("SD 1.5"), _Refuses()
    model.model_options["transformer_options"]["ref2v_test"] = thing
    clone = model.clone()
    options = clone.model_options["transformer_options"]
    return options is not model.model_options["transformer_options"] and options["ref2v_test"] is thing


def compute_dtype_is_followed():
    model = host_model("SD 1.5")
    before = sampled(model)
    clone = model.clone()
    clone.set_model_compute_dtype(torch.bfloat16)
    with layers_seen() as seen:
        quick = sampled(clone)
    return seen == {"bfloat16"} and torch.equal(sampled(model), before) and 0 < error(quick, before) < 0.1


def layers_follow_their_input():
    layer = comfy.ops.manual_cast.Linear(4, 4, dtype=torch.float16)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    made = [layer(torch.ones(1, 4, dtype=dtype)).dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    return made == [torch.float32, torch.bfloat16, torch.float16] and layer.weight.dtype == torch.float16


def injections_come_and_go():
    model, events = host_model("SD 1.5"), []
    clone = model.clone()
    injection = comfy.patcher_extension.PatcherInjection(
        inject=lambda _patcher: events.append("in"), eject=lambda _patcher: events.append("out")
    )
    clone.set_injections("ref2v_test", [injection])
    sampled(clone)
    in_first = events[0] == "in" and events.count("in") - events.count("out") == 1
    sampled(model)
    return in_first and events.count("in") == events.count("out")


def a_loaded_lora_is_backed_up():
    model = host_model("SD 1.5")
    patched = with_lora(model)
    key = next(iter(patched.patches))
    before = patched.get_key_patches()[key][0][0].detach().clone()
    sampled(patched)
    return torch.equal(patched.get_key_patches()[key][0][0].detach().to(before), before)


class _Along:
    def __init__(self, patcher):
        self.patcher = patcher

    def models(self):
        return [self.patcher]

    def to(self, *_args):
        return self

    def __deepcopy__(self, _memo):
        return self


def extra_models_are_loaded_along():
    model, other = host_model("SD 1.5"), tiny_vae().patcher
    model = model.clone()
    model.set_model_patch(_Along(other), "ref2v_test")
    management.unload_all_models()
    management.load_models_gpu([model])
    return any(loaded.model is other for loaded in management.current_loaded_models)


def text_encoders_are_given_embeds():
    clip, given = host_clip("SDXL"), []
    hook = clip.cond_stage_model.clip_l.transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: given.append((len(args), kwargs)), with_kwargs=True
    )
    out = clip.encode_from_tokens(tokens_of("SDXL"))
    hook.remove()
    positional, named = given[0]
    return named["embeds"].dtype == named["dtype"] == out.dtype == torch.float32


def the_vae_calls_its_module():
    vae, calls = tiny_vae(), []
    module = vae.first_stage_model
    for name in ("encode", "decode"):
        inner = getattr(module, name)
        call = lambda x, *a, _inner=inner, _name=name, **k: (calls.append((_name, x.dtype)), _inner(x, *a, **k))[1]  # noqa: E731
        module.__dict__[name] = call
    latent = vae.encode(torch.rand(1, 64, 64, 3))
    picture = vae.decode(latent)
    fed = [("encode", vae.vae_dtype), ("decode", vae.vae_dtype)]
    return calls == fed and picture.dtype == latent.dtype == torch.float32


def apply_model_is_wrapped():
    watched = Watched(host_model("SD 1.5"))
    watched.run()
    return watched.seen["apply"] >= 1 and watched.seen["applied to"] is watched.model.model


def outer_sample_is_wrapped():
    watched = Watched(host_model("SD 1.5"))
    watched.run()
    return watched.seen["outer"] == 1 and watched.seen["guider"].model_patcher.model is watched.model.model


def interruption_is_taken_by_who_throws():
    management.interrupt_current_processing(True)
    looked = management.processing_interrupted() and management.processing_interrupted()
    try:
        management.throw_exception_if_processing_interrupted()
    except management.InterruptProcessingException:
        return looked and not management.processing_interrupted()
    finally:
        management.interrupt_current_processing(False)
    return False


def unloading_forgets():
    model = host_model("SD 1.5")
    before = sampled(model)
    management.unload_all_models()
    return not management.current_loaded_models and torch.equal(sampled(model), before)


def model_folders_can_be_added():
    folder_paths.add_model_folder_path("ref2v_test", WORK.name)
    paths, endings = folder_paths.folder_names_and_paths["ref2v_test"]
    return paths == [WORK.name] and isinstance(endings, set) and folder_paths.get_folder_paths("ref2v_test") == paths


def check_behaviours():
    """{name: True, or what came}"""
    found = {}
    for name in contract.BEHAVIOURS:
        try:
            found[name] = globals()[name]()
        except Exception as failure:
            found[name] = f"{type(failure).__name__}: {failure}"
    return found
