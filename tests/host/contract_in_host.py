"""The entries of contract.py against the booted host; test_contract.py reads the results.

See in_host.py for how it is run. With NEWEST=1 in the environment the stand-ins of newest_host/ are put over the host
first: then the behaviours are theirs, and what only newer hosts have must be there.
"""

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import contract
import host_uses
from in_host import WORK, comfy, error, sample, torch, write_results  # boots the host

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
import comfy_execution.graph  # noqa: E402
import comfy_execution.utils  # noqa: E402
import folder_paths  # noqa: E402
import server  # noqa: E402
import vae_families  # noqa: E402
from clip_families import host_clip, tokens_of  # noqa: E402
from comfy_api.latest import io  # noqa: E402
from unets import conditioning, control_net, host_model, with_lora  # noqa: E402

management = comfy.model_management
WrappersMP = comfy.patcher_extension.WrappersMP


def _lookup(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _takes(target: Any, calls: set) -> list[str]:
    """Which of our calls its signature would refuse."""
    wrong = []
    signature = inspect.signature(target)
    for call in calls:
        try:
            signature.bind_partial(*[None] * call.positional, **dict.fromkeys(call.names))
        except TypeError as refused:
            ours = f"{call.positional} and {sorted(call.names)}"
            wrong.append(f"{signature} does not take our call with {ours}: {refused}")
    return wrong


def _checked(target: Callable[[], Any], how: str, calls: set) -> list[str]:
    """What is wrong with one entry; nothing where it is as contract.py says."""
    missing = object()
    try:
        found = target()
    except (AttributeError, ImportError):
        found = missing
    if how in (contract.NEWER, contract.OLDER, contract.OPTIONAL):
        return _takes(found, calls) if found is not missing and callable(found) else []
    if found is missing:
        return ["is not there"]
    if how == contract.KIND and not isinstance(found, type):
        return [f"is no class but {type(found).__name__}"]
    if how == contract.CALL:
        return _takes(found, calls) if callable(found) else ["cannot be called"]
    return []


def check_symbols():
    """{dotted name: [what is wrong]} of those that are not as the contract says, and how many there were by kind."""
    uses, wrong, counts = host_uses.symbols_used(), {}, {}
    for module, names in contract.SYMBOLS.items():
        for name, how in names.items():
            dotted = f"{module}.{name}"
            calls = uses[dotted].calls if dotted in uses else set()
            counts[how] = counts.get(how, 0) + 1
            if problems := _checked(lambda m=module, n=name: _lookup(m, n), how, calls):
                wrong[dotted] = problems
    return {"wrong": wrong, "counts": counts}


# ------------------------------------------------------------------------------------------ one of each kind of object


def _tiny_vae(name="TAESD"):
    state = vae_families.make(name, vae_families.rounded_windows())
    return comfy.sd.VAE(sd=state)


def _networks():
    from attention_in_host import networks

    return {name: network for name, _channels, network in networks() if name in ("SDXL", "SD3", "Flux", "Wan 1.3B")}


class _Watched:
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


def objects() -> dict[str, Any]:
    """{kind of contract.MEMBERS: an object of it}, several objects in a list where the members are of several."""
    model, vae, clip = host_model("SD 1.5"), _tiny_vae(), host_clip("SDXL")
    watched = _Watched(model)
    watched.run()
    config, networks = model.model.model_config, _networks()
    unet, sd3, flux, wan = (networks[name] for name in ("SDXL", "SD3", "Flux", "Wan 1.3B"))
    blocks = {type(part).__name__: part for part in unet.modules()}
    encoder = clip.cond_stage_model.clip_l
    vae_state = vae_families.make("Flux 1 and SD 3 (AutoencodingEngine)", vae_families.rounded_windows())
    vae_parts = comfy.sd.VAE(sd=vae_state).first_stage_model.modules()
    attention = next(part for part in vae_parts if type(part).__name__ == "AttnBlock")
    control = control_net()
    management.load_models_gpu([model])
    layer = next(m for m in model.model.diffusion_model.modules() if hasattr(m, "comfy_cast_weights"))
    large = model.model.diffusion_model.time_embed[0]
    combo = io.Combo.Input("a", options=["b"])
    schema = io.Schema(node_id="Ref2VTest", display_name="A test", inputs=[combo])
    prompt = comfy_execution.graph.DynamicPrompt({"1": {"class_type": "X", "inputs": {}}})
    with comfy_execution.utils.CurrentNodeContext("a prompt", "1"):
        context = comfy_execution.utils.get_executing_context()
    return {
        "patcher of a MODEL": [model, vae.patcher, clip.patcher],
        "model of a MODEL": model.model,
        "configuration of a MODEL": config,
        "latent format": model.model.latent_format,
        "model sampling": model.model.model_sampling,
        "VAE": vae,
        "CLIP": clip,
        "text encoder": encoder,
        "transformer of a text encoder": encoder.transformer,
        "layer": layer,
        "layer while loaded": large,
        "model while loaded": model.model,
        "UNet": unet,
        "residual block": blocks["ResBlock"],
        "spatial transformer": blocks["SpatialTransformer"],
        "transformer block": blocks["BasicTransformerBlock"],
        "attention": blocks["CrossAttention"],
        "attention of a VAE": attention,
        "SD3 network": sd3,
        "SD3 parts": {"mlp": sd3.y_embedder, "proj": sd3.x_embedder, "x_block": sd3.joint_blocks[0]},
        "SD3 block": sd3.joint_blocks[0].x_block,
        "Flux network": flux,
        "Flux parts": {"guidance_embed": flux.params, "in_layer": flux.vector_in, "vec_in_dim": flux.params},
        "Wan network": wan,
        "shape VAE": torch.nn.Module(),  # optional, asked for by name
        "ControlNet": control,
        "network of a ControlNet": control.control_model,
        "sampler": comfy.samplers.sampler_object("euler"),
        "guider": watched.seen["guider then"],
        "wrapper executor": watched.seen["executor"],
        "loaded model": management.current_loaded_models[0],
        "schema of a node": schema,
        "combo of a node": combo,
        "prompt while it runs": prompt,
        "context of a node": context,
        "server": server.PromptServer,
        "progress bar": comfy.utils.ProgressBar(3),
    }


def check_members():
    """As check_symbols, of {kind: {member: how}}."""
    uses, wrong, counts, have = host_uses.members_used(), {}, {}, objects()
    for kind, found in have.items():
        for member, how in contract.MEMBERS[kind].items():
            counts[how] = counts.get(how, 0) + 1
            if kind == "server" and member in ("client_id", "instance", "routes"):
                continue  # set as the server starts: check_server
            for each in found if isinstance(found, list) else [found]:
                one = each[member] if isinstance(each, dict) else each
                calls = uses[member].calls if member in uses and kind != "server" else set()
                if problems := _checked(lambda o=one, m=member: getattr(o, m), how, calls):
                    wrong[f"{kind}: {member}"] = [*problems, type(one).__name__]
    return {"wrong": wrong, "counts": counts, "without an object": sorted(contract.MEMBERS.keys() - have.keys())}


def check_server():
    """The server's own attributes, by its source: it does not start here."""
    source = inspect.getsource(server.PromptServer.__init__)
    takes = inspect.signature(server.PromptServer.send_progress_text).parameters
    return {
        "instance": "PromptServer.instance = self" in source, "client_id": "self.client_id" in source,
        "routes": "self.routes" in source, "send_progress_text": list(takes)[:4],
    }  # fmt: skip


def check_newer():
    """What contract.py calls NEWER: which of it the stand-ins have, and which is only read."""
    had, read = [], []
    for module, names in contract.SYMBOLS.items():
        for name in (name for name, how in names.items() if how == contract.NEWER):
            (had if hasattr(importlib.import_module(module), name) else read).append(f"{module}.{name}")
    if NEWEST:
        found = dynamic_objects()
        for kind, members in contract.MEMBERS.items():
            for member in (member for member, how in members.items() if how == contract.NEWER):
                (had if kind in found and hasattr(found[kind], member) else read).append(f"{kind}: {member}")
    return {"had": had, "read": read}


def dynamic_objects():
    model = host_model("SD 1.5")
    _latent(model)
    large = next(m for m in model.model.diffusion_model.modules() if hasattr(m, "_v_weight"))
    return {"patcher of a MODEL": model, "layer while loaded": large, "model while loaded": model.model,
            "latent format": model.model.latent_format}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what it does


def _latent(model):
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
    before = _latent(model)
    clone = model.clone()
    clone.set_model_compute_dtype(torch.bfloat16)
    with layers_seen() as seen:
        quick = _latent(clone)
    return seen == {"bfloat16"} and torch.equal(_latent(model), before) and 0 < error(quick, before) < 0.1


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
    _latent(clone)
    in_first = events[0] == "in" and events.count("in") - events.count("out") == 1
    _latent(model)
    return in_first and events.count("in") == events.count("out")


def a_loaded_lora_is_backed_up():
    model = host_model("SD 1.5")
    patched = with_lora(model)
    key = next(iter(patched.patches))
    before = patched.get_key_patches()[key][0][0].detach().clone()
    _latent(patched)
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
    model, other = host_model("SD 1.5"), _tiny_vae().patcher
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
    vae, calls = _tiny_vae(), []
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
    watched = _Watched(host_model("SD 1.5"))
    watched.run()
    return watched.seen["apply"] >= 1 and watched.seen["applied to"] is watched.model.model


def outer_sample_is_wrapped():
    watched = _Watched(host_model("SD 1.5"))
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
    before = _latent(model)
    management.unload_all_models()
    return not management.current_loaded_models and torch.equal(_latent(model), before)


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


if __name__ == "__main__":
    every = (check_symbols, check_members, check_server, check_newer, check_behaviours)
    write_results({check.__name__.removeprefix("check_"): check for check in every})
