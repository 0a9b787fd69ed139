"""The entries of contract.py against the booted host; test_contract.py reads the results.

See in_host.py for how it is run. With NEWEST=1 in the environment the stand-ins of newest_host/ are put over the host
first: then the behaviours are theirs, and what only newer hosts have must be there.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import contract
import host_uses
from contract_behaviours import (
    NEWEST,
    Watched,
    check_behaviours,
    management,
    sampled,
    tiny_vae,
)
from in_host import comfy, torch, write_results

# isort: split
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.sampler_helpers  # noqa: E402
import comfy.sd  # noqa: E402
import comfy_execution.graph  # noqa: E402
import comfy_execution.utils  # noqa: E402
import server  # noqa: E402
import vae_families  # noqa: E402
from clip_families import host_clip  # noqa: E402
from comfy_api.latest import io  # noqa: E402
from unets import control_net, host_model  # noqa: E402


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


def _networks():
    from attention_in_host import networks

    return {name: network for name, _channels, network in networks() if name in ("SDXL", "SD3", "Flux", "Wan 1.3B")}


def objects() -> dict[str, Any]:
    """{kind of contract.MEMBERS: an object of it}, several objects in a list where the members are of several."""
    model, vae, clip = host_model("SD 1.5"), tiny_vae(), host_clip("SDXL")
    watched = Watched(model)
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
    sampled(model)
    large = next(m for m in model.model.diffusion_model.modules() if hasattr(m, "_v_weight"))
    return {"patcher of a MODEL": model, "layer while loaded": large, "model while loaded": model.model,
            "latent format": model.model.latent_format}  # fmt: skip


if __name__ == "__main__":
    every = (check_symbols, check_members, check_server, check_newer, check_behaviours)
    write_results({check.__name__.removeprefix("check_"): check for check in every})
