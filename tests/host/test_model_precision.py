"""A dtype to compute in and one to be kept in for a MODEL, on the host's own models and sampler.

Reads the numbers of tests/host/model_precision_in_host.py, which runs in a process of its own: once as the host is, and
once under --bf16-unet, where only the host's own code works.
"""


import pytest

from tests.host.checkpoints import MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import passed, run_in_host
from tests.host.server import HostServer

SHAPES = ("SD 1.5", "SDXL")
ALONE = tuple(f"host_alone {name}" for name in SHAPES)


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("model_precision_in_host.py", host_path, tmp_path_factory.mktemp("model precision"))


@pytest.fixture(scope="module")
def flagged(host_path, tmp_path_factory):
    """The host alone, started with --bf16-unet."""
    folder = tmp_path_factory.mktemp("bf16 unet")
    return run_in_host("model_precision_in_host.py", host_path, folder, *ALONE, flags="--bf16-unet")


@pytest.fixture(params=SHAPES)
def family(results, request):
    return request.param, passed(results, request.param)


# ---------------------------------------------------------------------------------------------------------- the sampler


def test_default_samples_to_the_bit_what_the_host_does(results, family):
    name, found = family
    alone = passed(results, f"host_alone {name}")
    assert alone["dtypes"] == ["torch.float32", "torch.float32", "None"]
    assert found["plain"] == found["plain again"] == found["default after a clone"] == alone["plain"]
    assert found["default gives the source"] and found["default gives the patched one"]
    assert found["default keeps the LoRA"] and found["patched again"]


def test_lora_before_and_after_gives_what_the_host_gives_under_its_flag(flagged, family):
    """To the bit, at the same storage dtype; and so does no LoRA, and a ControlNet."""
    name, found = family
    alone = passed(flagged, f"host_alone {name}")
    assert alone["dtypes"] == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    assert found["lora before"] == found["lora after"] == found["lora after, a clone"] == alone["lora"]
    assert found["storage"] == found["storage again"] == alone["plain"] != alone["lora"]
    assert found["compute, lora before"] == found["compute, lora after"] != alone["lora"]
    assert found["lora differs"] > 1e-2
    if name == "SD 1.5":
        assert found["control storage"] == alone["control"] != alone["plain"]


def test_a_control_net_stays_what_it_is(results):
    found = passed(results, "SD 1.5")
    assert found["control plain"] == passed(results, "host_alone SD 1.5")["control"] and found["control finite"]


def test_layers_are_kept_and_compute_in_what_was_chosen(family):
    name, found = family
    assert found["compute layers"] == [["bfloat16", "float32"]]  # fed, kept
    assert found["storage layers"] == [["float32", "bfloat16"]]
    assert all(found["finite"].values()), found["finite"]
    errors = found["error"]
    print(f"\n{name}, random weights, 2 steps, relative error of the latent: {errors}")
    fp16, bf16, e4m3, e5m2 = (
        errors[key]
        for key in (
            "fp16 compute, default storage",
            "bf16 compute",
            "bf16 compute, fp8_e4m3fn storage",
            "default compute, fp8_e5m2 storage",
        )
    )
    assert 1e-4 < fp16 < bf16 < e4m3 < e5m2 < 0.5


def test_the_model_that_came_in_is_not_touched(family):
    """Weights, dtypes, hooks, the host's memory bookkeeping."""
    assert family[1]["source unchanged"]
    assert "Storage: bf16\nHeld beside the weights of the MODEL that came in:" in family[1]["report"]


# ------------------------------------------------------------------------------------------------------- kept in FP32


def in_float32(layers):
    return {name for name, (fed, _) in layers.items() if fed == "float32"}


@pytest.mark.parametrize("check_name", ["kept", "kept_of_sdxl"])
def test_kept_modules_see_float32_and_the_others_do_not(results, check_name):
    for what, layers in passed(results, check_name)["layers"].items():
        assert {fed for fed, _ in layers.values()} == {"float32", "bfloat16"}, what
        every = what in ("all three", "on a copy")
        wanted = set()
        for name in layers:
            last = name.rsplit(".", 1)[-1]
            is_norm = last in ("norm", "norm1", "norm2", "norm3") or name.endswith(("in_layers.0", "out_layers.0"))
            is_norm = is_norm or name == "out.0"
            is_embedding = name.startswith(("time_embed.", "label_emb."))
            is_end = name.startswith(("input_blocks.0.", "out."))
            is_named = ".attn2." in name or name.startswith("output_blocks.0.")
            if (
                (is_norm and (every or what == "norms"))
                or (is_embedding and (every or what == "embeddings"))
                or (is_end and (every or what == "in_out"))
                or (is_named and what == "layers")
            ):
                wanted.add(name)
        assert in_float32(layers) == wanted, what
        if what == "on a copy":  # what is kept in FP32 keeps its weights in it too
            assert {tuple(pair) for pair in layers.values()} == {("float32", "float32"), ("bfloat16", "bfloat16")}


def test_kept(check):
    assert all(check["finite"].values()), check["finite"]
    assert check["clone"] and check["copy is clean"] and check["source again"]
    assert check["hooks"] == [True, 0]  # on while the model is loaded; off when its patcher dies
    assert "Kept in fp32 (norms): input_blocks.1.0.in_layers.0, " in check["report"]["norms"]
    assert "Kept in fp32 (embeddings): time_embed" in check["report"]["embeddings"]
    assert "Kept in fp32 (in and out): input_blocks.0.0, out" in check["report"]["in_out"]
    assert "Nothing to keep in fp32 as no_such_layer.*" in check["report"]["layers"]
    assert "Everything computes in fp32" in check["fp32 already"]


def test_attention_softmax(check):
    assert check["attention"] == "attention_sub_quad" and check["differs"] > 1e-4 and check["same"]
    assert "Attention softmax: fp32, with the scores, in attention_sub_quad." in check["report"]
    assert check["seen"] == ["torch.float32"] and check["seen restored"] == ["None"]
    assert "attention_pytorch is a fused kernel and accumulates in fp32 already; nothing changes" in check["fused"]
    assert "everything computes in fp32 already" in check["fp32"]


# ------------------------------------------------------------------------------------------------------ what else holds


def test_copies_are_shared_weakly(check):
    assert check["same"] == [True, True, False, True] and check["forgotten"] and check["source forgotten"]
    assert check["own"] == ["diffusion_model", "model_sampling"]  # nothing that two patchers would move
    assert check["fingerprints"] == 5


def test_what_other_nodes_put_on_it(check):
    assert check["plain"] == check["again"] != check["moved"] and check["sigma"] == 0.5


def test_quantized_weights_compute_in_any_dtype(check):
    assert check["fed"] == {"fp32": ["float32"], "bf16": ["bfloat16"], "fp16": ["float16"]}
    assert 0 <= check["error"]["fp32"] < check["error"]["fp16"] < check["error"]["bf16"] < 0.1
    assert check["kept"] == ["float32"]
    assert "Storage: quantized, as loaded; bf16 is passed over, because its weights are quantized" in check["storage"]
    assert check["storage computes"] and check["storage alone gives the source"]
    assert check["again"] and check["source unchanged"]


def test_packed_models_are_known_again(check):
    """Base from Model (in tests: what it asks of a MODEL) builds on them, and other numbers are another model."""
    assert check["same"] and check["other numbers"] and check["as loaded"] and check["picture"]
    assert check["parameters"][0] == check["parameters"][1]
    assert "out.2.weight is not in memory, so this model cannot be known again" in check["meta"]


def test_what_is_passed_over(check):
    assert "Storage: quantized, as loaded; bf16 is passed over, because " in check["quantized"]
    compute, storage = check["lacks"].splitlines()[1:3]
    assert compute.startswith("Compute: fp32, as loaded, because this CPU cannot compute in fp8_e4m3fn")
    assert storage.startswith("Storage: fp32, as loaded, because this version of the pack does not know")
    assert check["lacks gives"] and "(auto: " in check["auto"]


# ------------------------------------------------------------------------------------------------------------ a graph


def test_three_precisions_in_one_graph(host_path, tmp_path):
    """The straight branch is not changed by the others, and a dtype from elsewhere runs with a note."""
    make_checkpoints(host_path, tmp_path / "models" / "checkpoints", (MIN,), cache=STATE / "checkpoints")

    def select(source, compute, storage, **keep):
        kept = {"keep_norms": False, "keep_embeddings": False, "keep_in_out": False, "keep_attention_softmax": False}
        inputs = {"model": [source, 0], "compute": compute, "storage": storage, "keep_layers": "", **kept, **keep}
        return {"class_type": "Ref2VSelectModelPrecision", "inputs": inputs}

    models = {"straight": "host", "light": "light", "restored": "restored", "odd": "odd"}
    graph = {
        "host": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["host", 1], "text": "a house"}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "light": select("host", "bf16", "fp8_e4m3fn", keep_norms=True, keep_layers="*.attn2"),
        "restored": select("light", "default", "default"),
        "odd": select("host", "fp5", "fp5"),
        "said": {"class_type": "PreviewAny", "inputs": {"source": ["light", 1]}},
        "said odd": {"class_type": "PreviewAny", "inputs": {"source": ["odd", 1]}},
    }
    for name, model in models.items():
        inputs = {"model": [model, 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": ["latent", 0]}
        inputs |= {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        graph[f"latent {name}"] = {"class_type": "KSampler", "inputs": inputs}
        decode = {"samples": [f"latent {name}", 0], "vae": ["host", 2]}
        graph[f"image {name}"] = {"class_type": "VAEDecode", "inputs": decode}
        save = {"images": [f"image {name}", 0], "filename_prefix": name}
        graph[f"save {name}"] = {"class_type": "SaveImage", "inputs": save}
    with HostServer(host_path, base=tmp_path, args=("--disable-api-nodes",), env={"OMP_NUM_THREADS": "1"}) as host:
        result = host.run(graph)
        assert result.status == "success", result.error
        pictures = {name: next((tmp_path / "output").glob(f"{name}_*.png")).read_bytes() for name in models}
    # the text of a picture's metadata is the same for all: they come from one graph
    assert pictures["straight"] == pictures["restored"] == pictures["odd"] != pictures["light"]
    said = result.outputs["said"]["text"][0]
    assert "Compute: bf16" in said and "Storage: fp8_e4m3fn (norms and biases stay fp32)" in said
    assert "Kept in fp32 (norms): " in said and "Kept in fp32 (*.attn2): " in said
    assert "does not know the dtype 'fp5'" in result.outputs["said odd"]["text"][0]
