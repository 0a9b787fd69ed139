"""A dtype to keep and one to compute in for each text encoder of a CLIP, on the host's own objects and in a graph.

The first part reads the numbers of tests/host/clip_precision_in_host.py, which runs once in a process of its own.
"""


import pytest

from tests.host.checkpoints import MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import passed, run_in_host
from tests.host.server import HostServer

FLAG = "--fp16-text-enc"  # as on any machine: the host keeps text encoders in FP16
FAMILIES = {
    "SD 1": ["clip_l"],
    "SDXL": ["clip_l", "clip_g"],
    "SD 3": ["clip_l", "clip_g", "t5xxl"],
    "Flux": ["clip_l", "t5xxl"],
    "HunyuanVideo": ["clip_l", "llama"],
    "Lumina 2": ["gemma2_2b"],
}
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3fn": "float8_e4m3fn"}
TORCH |= {"fp8_e5m2": "float8_e5m2"}


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("clip_precision_in_host.py", host_path, tmp_path_factory.mktemp("clip precision"), flags=FLAG)


@pytest.fixture(params=FAMILIES)
def family(results, request):
    return request.param, passed(results, request.param)


# -------------------------------------------------------------------------------------------------------- the families


def test_each_encoder_is_kept_and_computes_in_what_was_chosen(family):
    name, found = family
    assert len(found["layers"]) == 9
    for key, layers in found["layers"].items():
        storage, compute = (word.split()[0] for word in key.split(", "))
        kept = f"torch.{TORCH.get(storage, 'float16')}"
        fed = f"torch.{TORCH.get(compute, 'float32')}"
        assert layers == {encoder: {"kept": [kept], "fed": [fed]} for encoder in FAMILIES[name]}, key


def test_conditioning_is_finite_and_stays_float32(family):
    name, found = family
    assert all(found["finite"].values()), found["finite"]
    assert found["out"] == ["torch.float32"]
    errors = found["table"]
    print(f"\n{name}, random weights, relative error of the context against the CLIP as loaded:")
    for key, value in errors.items():
        print(f"  {key:40} {value:.1e}")
    # the weights are exact in the first three; each coarser dtype must show, or it was not used
    assert [errors[f"{dtype} storage, default compute"] for dtype in ("fp32", "bf16", "fp16")] == [0, 0, 0]
    fp16, bf16 = (errors[f"default storage, {dtype} compute"] for dtype in ("fp16", "bf16"))
    fp8, coarsest = (errors[f"fp8_{dtype} storage, default compute"] for dtype in ("e4m3fn", "e5m2"))
    assert 1e-4 < fp16 < bf16 < fp8 < coarsest < 1


def test_storage_gives_what_the_host_gives_under_its_flag(family):
    assert family[1]["bf16 storage is the host's"] and family[1]["fp32 storage is the host's"]


def test_default_gives_back_the_clip_that_came_in(family):
    assert family[1]["default gives the source"] and family[1]["default is bit-equal"]


def test_the_clip_that_came_in_is_not_touched(family):
    """Weights, dtypes, hooks, the host's memory bookkeeping."""
    assert family[1]["source unchanged"]


def test_rounding_by_the_loader_is_said(family):
    assert "fp32 over fp16 weights, rounded by the loader" in family[1]["report"]
    assert ("known to pass it" in family[1]["report"]) == (family[0] in ("SD 3", "Flux", "Lumina 2"))


# ------------------------------------------------------------------------------------------------------ what else holds


def test_each_encoder_on_its_own(check):
    wanted = {
        "clip_l": ("float32", "bfloat16"),
        "clip_g": ("float16", "float32"),
        "t5xxl": ("float8_e4m3fn", "float32"),
    }
    assert check["layers"] == {
        name: {"kept": [f"torch.{kept}"], "fed": [f"torch.{fed}"]} for name, (kept, fed) in wanted.items()
    }
    assert "clip_g: kept in fp16, computes in fp32, as loaded" in check["report"]
    assert "t5xxl: kept in fp8_e4m3fn, computes in fp32, as selected before" in check["report"]
    assert check["memory of its own"]
    assert check["compute alone copies nothing"] and check["t5xxl back"] and check["source again"]
    assert check["differs"] > 1e-2 and check["fingerprints"] == 5
    report, same = check["lacks"]
    assert "It has no encoder 'llama', so nothing changes; it has clip_l, clip_g, t5xxl." in report and same


def test_lora_before_and_after(check):
    """On the unpatched weights, to the bit what the host gives that keeps them in BF16 itself."""
    assert check.pop("source differs") > 1e-3
    assert check.pop("layer is kept") == [-2, -2]
    assert all(check.values()), check


def test_a_lora_hook_reaches_its_own_branch_alone(check):
    assert check.pop("hook works") > 1e-2 and check.pop("hook moves along") < 0.1
    assert all(check.values()), [what for what, held in check.items() if not held]


def test_copies_are_shared_weakly(check):
    assert check == {"same": [True, True, False, True], "forgotten": True, "source forgotten": True}


def test_beyond_the_range(check):
    assert check == {"fp8_e4m3fn": [448.0, -448.0], "fp8_e5m2": [57344.0, -57344.0]}


def test_what_is_refused(check):
    assert "no text encoder" in check["empty"] and "kind that is known" in check["unknown"] and check["unknown default"]
    passed_over = "clip_l storage: quantized, as loaded; {} is passed over, because its weights are quantized"
    assert passed_over.format("fp32") in check["quantized"] and "clip_l compute: bf16\n" in check["quantized"] + "\n"
    assert 1e-4 < float(check["quantized computes"]) < 0.1
    assert passed_over.format("bf16") in check["scaled"] and check["scaled gives"]
    storage, compute = check["lacks"].splitlines()[1:3]
    assert storage.startswith("clip_l storage: fp16, as loaded, because this version of the pack does not know")
    assert compute.startswith("clip_l compute: fp32, as loaded, because this CPU cannot compute in fp8_e5m2")
    assert "clip_l compute: fp32 (auto: " in check["auto"]
    assert "activations of T5 are known to pass it" in check["t5 in fp16"]
    assert "(norms and biases stay fp16)" in check["fp8"]


# ---------------------------------------------------------------------------------------------- a graph, with real text


def test_two_precisions_in_one_graph(host_path, tmp_path):
    """And names from elsewhere run: a dtype and an encoder that this version does not know."""
    make_checkpoints(host_path, tmp_path / "models" / "checkpoints", (MIN,), cache=STATE / "checkpoints")

    def select(source, encoder, storage, compute):
        inputs = {"clip": [source, 1 if source == "host" else 0], "encoder": encoder}
        return {
            "class_type": "Ref2VSelectCLIPPrecision",
            "inputs": {**inputs, "storage": storage, "compute": compute},
        }

    def encode(source, slot=0):
        return {"class_type": "CLIPTextEncode", "inputs": {"clip": [source, slot], "text": "a (red:1.3) house"}}

    def picture(positive):
        inputs = {"model": ["host", 0], "positive": [positive, 0], "negative": ["text straight", 0], "seed": 1}
        inputs |= {"latent_image": ["latent", 0], "steps": 2, "cfg": 4.0, "sampler_name": "euler"}
        return {"class_type": "KSampler", "inputs": {**inputs, "scheduler": "simple", "denoise": 1.0}}

    def preview(source, slot):
        return {"class_type": "PreviewAny", "inputs": {"source": [source, slot]}}

    clips = {"straight": ("host", 1), "light": ("light", 0), "restored": ("restored", 0), "odd": ("odd", 0)}
    graph = {
        "host": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "light": select("host", "all", "fp8_e4m3fn", "bf16"),
        "restored": select("light", "clip_l", "default", "default"),
        "odd": select("host", "t9", "fp5", "fp5"),
        "said": preview("light", 1),
        "said odd": preview("odd", 1),
    }
    for name, (node, slot) in clips.items():
        graph[f"text {name}"] = encode(node, slot)
        graph[f"latent {name}"] = picture(f"text {name}")
        graph[f"image {name}"] = {
            "class_type": "VAEDecode",
            "inputs": {"samples": [f"latent {name}", 0], "vae": ["host", 2]},
        }
        graph[f"save {name}"] = {
            "class_type": "SaveImage",
            "inputs": {"images": [f"image {name}", 0], "filename_prefix": name},
        }
    with HostServer(host_path, base=tmp_path, args=(FLAG, "--disable-api-nodes"), env={"OMP_NUM_THREADS": "1"}) as host:
        result = host.run(graph)
        assert result.status == "success", result.error
        pictures = {name: next((tmp_path / "output").glob(f"{name}_*.png")).read_bytes() for name in clips}
    # the text of a picture's metadata is the same for all: they come from one graph
    assert pictures["straight"] == pictures["restored"] == pictures["odd"] != pictures["light"]
    assert "clip_l storage: fp8_e4m3fn (norms and biases stay fp16)" in result.outputs["said"]["text"][0]
    assert "no encoder 't9'" in result.outputs["said odd"]["text"][0]
