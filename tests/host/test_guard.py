"""NaN Guard: on the host's objects, and in graphs of a running host.

The first part reads the numbers of tests/host/guard_in_host.py, which runs once in a process of its own.
"""


import numpy as np
import pytest
import torch

from tests.host.checkpoints import MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import passed, run_in_host
from tests.host.test_boot import text_to_picture

FAMILIES = ["TAESD", "AutoencoderKL", "Wan 2.1 and Qwen Image (WanVAE)"]
LIMIT = "the result passed fp16's limit, 65504"


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    make_checkpoints(host_path, folder, (MIN,), cache=STATE / "checkpoints")
    return run_in_host("guard_in_host.py", host_path, folder, str(folder))


# ---------------------------------------------------------------------------------------------------------------- MODEL

CONV = "input_blocks.1.0.in_layers.2"
OVERFLOW = f"The UNet gave NaN in fp16 at sigma 14.61 (step 1 of 2), first in layer {CONV} (Conv2d, fp16): {LIMIT}; "
ATTENTION = "output_blocks.0.1.transformer_blocks.0.attn2.to_v"
POISONED = (
    f"The UNet gave NaN in fp32 at sigma 14.61 (step 1 of 2), first in layer {ATTENTION} (Linear, fp32): its weight "
    f"{ATTENTION}.weight holds NaN, so the file is damaged or lacks it, or a LoRA has spoilt it"
)


def test_model_stops_at_a_poisoned_weight(check):
    assert check == f"{POISONED}."


def test_model_overflow(check):
    """Each step is tried in FP16 and run again in FP32, which gives the host's own FP32 result to the bit."""
    assert not check["raw is finite"] and check["stop"].startswith(OVERFLOW)
    assert check["stop"].endswith("; select bf16 or fp32 for it.")
    assert len(check["log"]) == 2 and all("run again in FP32, and the work goes on" in line for line in check["log"])
    assert check["log"][0].startswith(OVERFLOW) and "at sigma 1.613 (step 2 of 2)" in check["log"][1]
    held = ("mended", "lora before", "lora after", "lora differs", "source unchanged", "copy freed")
    assert all(check[name] for name in held), check


def test_model_reports_only(check):
    """Once for a run: in the next step the latent is NaN already."""
    assert check == {"lines": [f"{POISONED}."], "as it is": True}


def test_model_input_is_not_blamed_on_a_layer(check):
    said = (
        "The UNet was given NaN or infinity at sigma 14.61 (step 1 of 2): the {} that came in held it already, so look "
        "at the nodes before."
    )
    assert check == {name: said.format(name) for name in ("latent", "conditioning")}


def test_model_that_fp32_cannot_help(check):
    assert check["both"].startswith(OVERFLOW) and check["both"].endswith("; in FP32 it gives NaN as well.")
    assert check["fp32 already"] == f"{POISONED}; it runs in FP32 already, so to run it again cannot help."


def test_model_between_two_steps(check):
    assert [line.split(", first")[0].split(" at ")[1] for line in check["log"]] == [
        "sigma 14.61 (step 1 of 2)", "sigma 1.613 (step 2 of 2)", "sigma 1.613 (step 2 of 2)"
    ]  # fmt: skip
    assert check["control"] == [2, 2]


# ------------------------------------------------------------------------------------------------------------------ VAE


@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vae_half_and_layer_are_named_and_fp32_gives_the_fp32_picture(results, family, half):
    found = passed(results, family)[half]
    layer = found["layer"]
    kind = "CausalConv3d" if "Wan" in family else "Conv2d"
    assert found["poisoned"] == (
        f"The VAE {half} gave NaN in fp32, first in layer {layer} ({kind}, fp32): its weight {layer}.weight holds NaN, "
        f"so the file is damaged or lacks it, or a LoRA has spoilt it."
    )
    said = f"The VAE {half} gave NaN in fp16, first in layer {layer} ({kind}, fp16): {LIMIT}; "
    assert found["overflow"].startswith(said)
    assert found["tiled False"] and found["tiled True"] and found["report is raw"]
    assert found["normal False"] and found["normal True"]  # bit-equal, no layer more, no hook
    assert found["source unchanged"]


def test_vae_composes_with_select(check):
    assert check.pop("dtype") == ["float16", "float16", "bfloat16", "bfloat16"]
    assert check.pop("memory") == [True, True]
    assert all(check.values()), check


def test_two_guards_are_the_last_one(check):
    assert check == {"vae": True, "one subclass": True, "model": [True], "clip": True}


def test_objects_go_when_nobody_uses_them(check):
    assert all(check.values()), check


def test_an_fp32_half_goes_with_its_prompt(check):
    assert check == {ends: [True, True] for ends in ("well", "fails", "cancelled")}


def test_one_sentence_for_many_tiles(check):
    assert check["report only"] == check["re-run in FP32"] == [1, 1]  # once for each prompt
    assert check["report only hooked"] and check["re-run in FP32 hooked"]


def test_vae_that_cannot_be_run_again(check):
    assert "; it could not be run again in FP32: The VAE (TAESD) is patched by another node" in check


def test_newer_hosts_write_into_a_buffer(check):
    assert check.pop("none")
    for equal, said in check.values():
        assert equal and said.startswith("The VAE decoder gave NaN in fp16, first in layer taesd_decoder.1 (Conv2d, ")


# ----------------------------------------------------------------------------------------------------------------- CLIP


def test_clip_poisoned(check):
    for name in ("clip_l", "clip_g"):
        layer = f"{name}.transformer.text_model.encoder.layers.1.mlp.fc1"
        said = f"The CLIP ({name}) gave NaN in fp32, first in layer {layer} (Linear, fp32): its weight {layer}.weight "
        assert check[name].startswith(said + "holds NaN, so the file is damaged or lacks it")
    assert check["in fp32 already"].endswith("; it runs in FP32 already, so to run it again cannot help.")
    assert check["report"] == [[check["clip_g"]], True]


def test_clip_that_the_file_lacks(check):
    assert check.startswith("The CLIP (clip_g) gave NaN in fp32, first in layer clip_g.transformer.text_model.")
    assert "token_embedding.weight holds NaN, so the file is damaged or lacks it" in check


def test_clip_overflow(check):
    layer = "clip_g.transformer.text_model.encoder.layers.0.mlp.fc1"
    said = f"The CLIP (clip_g) gave NaN in fp16, first in layer {layer} (Linear, fp16): {LIMIT}; "
    assert not check["raw is finite"] and check["stop"].startswith(said)
    assert [line.startswith(said) and "run again in FP32" in line for line in check["log"]] == [True]
    assert check["mended"] == check["lora after"] == [True, True] and check["lora differs"]
    assert check["source unchanged"]


def test_clip_input_is_not_blamed_on_a_layer(check):
    embeddings, weights = check
    assert "was given NaN or infinity: the embeddings that came in held it already" in embeddings
    assert "was given NaN or infinity: the prompt's weights that came in held it already" in weights


# ----------------------------------------------------------------------------------------------------------------- cost


def test_nothing_is_hooked_while_all_is_finite(check):
    assert check == {"model": [True, True, 0], "clip": [True, True, 0]}


# ------------------------------------------------------------------------------------------------------ a running host

BROKEN = {  # what is at fault: a weight of it, and the node in which it shows
    "UNet": ("model.diffusion_model.out.2.weight", "KSampler"),
    "CLIP (clip_l)": ("cond_stage_model.transformer.text_model.encoder.layers.3.mlp.fc2.bias", "CLIPTextEncode"),
    "VAE decoder": ("first_stage_model.taesd_decoder.3.conv.0.weight", "VAEDecode"),
    "VAE encoder": ("first_stage_model.taesd_encoder.3.conv.0.weight", "VAEEncode"),
}
OUTPUTS = {"model": ("checkpoint", 0, 0), "clip": ("checkpoint", 1, 1), "vae": ("checkpoint", 2, 2)}


@pytest.fixture(scope="module")
def checkpoint(host, tmp_path_factory):
    """Name of a checkpoint whose weight `key` is NaN, or is `factor` times as large."""
    folder = host.base / "models" / "checkpoints"
    whole = torch.load(folder / MIN, weights_only=True)

    def make(key, factor=float("nan")):
        name = f"spoilt {key}.ckpt"
        state = {k: v * factor if k == key else v for k, v in whole["state_dict"].items()}
        assert key in state
        torch.save({"state_dict": state}, folder / name)
        return name

    return make


def graph(name, prefix, on_nan=None, **more):
    """Text to picture, through a guard if `on_nan` is given."""
    nodes = text_to_picture(name, steps=2)
    nodes["save"]["inputs"]["filename_prefix"] = prefix
    nodes |= more
    if on_nan is None:
        return nodes
    for node in nodes.values():
        for key, value in node["inputs"].items():
            link = {(source, index): out for source, index, out in OUTPUTS.values()}
            if isinstance(value, list) and tuple(value) in link:
                node["inputs"][key] = ["guard", link[tuple(value)]]
    inputs = {"on_nan": on_nan, **{key: [source, index] for key, (source, index, _) in OUTPUTS.items()}}
    return nodes | {"guard": {"class_type": "Ref2VGuardNaN", "inputs": inputs}}


def is_black(host, result):
    return [int(np.asarray(picture.convert("RGB")).max()) == 0 for picture in host.pictures(result, "save")]


@pytest.mark.parametrize("part", [part for part in BROKEN if part != "VAE encoder"])
def test_a_black_picture_becomes_a_sentence(host, checkpoint, part):
    key, node = BROKEN[part]
    name, prefix = checkpoint(key), f"guard {part[:4]}"
    alone = host.run(graph(name, f"{prefix} alone")).expect_success()
    assert is_black(host, alone) == [True]
    result = host.run(graph(name, f"{prefix} stop", "stop"))
    assert result.status == "error" and result.error.node_type == node
    layer = key.rsplit(".", 1)[0].split(".", 1)[1].removeprefix("diffusion_model.")
    layer = f"clip_l.{layer}" if "CLIP" in part else layer
    assert result.error.message.startswith(f"The {part} gave NaN in fp32") and result.error.message.count("\n") == 0
    assert f"first in layer {layer} (" in result.error.message and "holds NaN" in result.error.message
    assert not list((host.base / "output").glob(f"{prefix} stop*"))
    again = host.run(graph(name, f"{prefix} stop", "stop"))  # nothing of it stayed in the host's cache
    assert again.error.message == result.error.message


def test_the_encoder_is_named_too(host, checkpoint):
    key, node = BROKEN["VAE encoder"]
    nodes = graph(checkpoint(key), "guard encoder", "stop")
    nodes["picture"] = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 9}}
    nodes["latent"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["picture", 0], "vae": ["guard", 2]}}
    result = host.run(nodes)
    assert result.status == "error" and result.error.node_type == node
    assert result.error.message.startswith("The VAE encoder gave NaN in fp32, first in layer taesd_encoder.3.conv.0 (")


def test_report_only_saves_the_picture_and_says_why_it_is_black(host, checkpoint):
    key, _ = BROKEN["UNet"]
    before = len(host.log)
    result = host.run(graph(checkpoint(key), "guard report", "report only")).expect_success()
    assert is_black(host, result) == [True]
    said = [text for node, text in result.texts if node == "guard"]
    assert said and said[0].startswith("The UNet gave NaN in fp32 at sigma 14.61 (step 1 of 2), first in layer out.2 (")
    assert said[-1].startswith(f"{said[0]}\nThe VAE decoder was given NaN or infinity: the latent that came in held it")
    assert said[0] in host.log[before:]
    assert result.outputs["guard"]["text"] == ["Guarded: model, clip, vae. On NaN: report only."]


def test_fp32_gives_the_picture_that_fp16_lost(host, checkpoint):
    """And a black picture that the host has in its cache stays until something before it changes."""
    name = checkpoint("first_stage_model.taesd_decoder.1.weight", 2.0**16)
    select = {"class_type": "Ref2VSelectVAEPrecision", "inputs": {"vae": ["checkpoint", 2], "encoder": "default"}}
    select["inputs"]["decoder"] = "fp16"

    def selected(prefix, on_nan=None):
        nodes = graph(name, prefix, on_nan, select=select)
        nodes["decode"]["inputs"]["vae"] = ["select", 0]
        return nodes

    lost = host.run(selected("guard lost")).expect_success()
    assert is_black(host, lost) == [True]
    assert {"decode", "save"} <= set(host.run(selected("guard lost")).expect_success().cached)
    mended = host.run(selected("guard mended", "re-run in FP32")).expect_success()
    (wanted,) = host.pictures(host.run(graph(name, "guard wanted")).expect_success(), "save")
    (picture,) = host.pictures(mended, "save")
    assert np.array_equal(np.asarray(picture), np.asarray(wanted)) and np.asarray(wanted).std() > 2
    (said,) = [text for node, text in mended.texts if node == "guard"]
    assert said.startswith(f"The VAE decoder gave NaN in fp16, first in layer taesd_decoder.1 (Conv2d, fp16): {LIMIT}")
    assert said.endswith("It was run again in FP32, and the work goes on with that.")


def test_what_came_not_in_is_said_where_it_is_used(host):
    nodes = graph(MIN, "guard absent", "stop")
    del nodes["guard"]["inputs"]["clip"]
    events = host.run(nodes).events
    said = [data["exception_message"] for kind, data in events if kind == "execution_error"]
    wanted = "The NaN Guard got no clip, so it has none to give: connect one to its input clip."
    assert said and all(wanted in line for line in said)
    assert not list((host.base / "output").glob("guard absent*"))
    nodes["guard"]["inputs"] = {"on_nan": "stop"}
    result = host.run(nodes)
    assert result.error.message == "The NaN Guard has nothing to guard: connect a model, a clip or a vae."


def test_a_healthy_graph_gives_the_same_picture(host):
    (alone,) = host.pictures(host.run(graph(MIN, "guard none")).expect_success(), "save")
    (guarded,) = host.pictures(host.run(graph(MIN, "guard all", "stop")).expect_success(), "save")
    assert np.array_equal(np.asarray(alone), np.asarray(guarded)) and np.asarray(alone).std() > 2
