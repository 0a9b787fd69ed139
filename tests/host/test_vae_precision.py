"""A dtype for each half of a VAE: on the host's objects of many families, and in graphs of a running host.

The first part reads the numbers of tests/host/vae_precision_in_host.py, which runs once in a process of its own.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.host.checkpoints import MIN, make_checkpoints
from tests.host.conftest import STATE
from tests.host.host_process import passed, run_in_host
from tests.host.server import HostServer

SPY = Path(__file__).with_name("vae_spy.py")
# the host's own `encode` stops in them
ENCODES_NOT = {"TAEHV of Wan 2.2", "TAEHV of HunyuanVideo 1.5", "Hunyuan3D (ShapeVAE)"}
# family -> what torch says to it on a CPU
NO_BF16_ENCODER = {"Cosmos": "avg_pool3d_out_frame", "MMAudio (AudioAutoencoder)": "BFloat16"}
NOT_TILED = {"Hunyuan3D (ShapeVAE)", "ACE-Step (MusicDCAE)", "MMAudio (AudioAutoencoder)"}  # why: vae_families.py
BUILT = [
    "SD and SDXL (AutoencoderKL)",
    "Flux 2 (AutoencoderKL, bn)",
    "HunyuanVideo (AutoencoderKL, 3-D)",
    "Flux 1 and SD 3 (AutoencodingEngine)",
    "SVD (VideoDecoder)",
    "HunyuanImage 2.1",
    "TAESD",
    "TAEHV",
    "TAEHV of Wan 2.2",
    "TAEHV of HunyuanVideo 1.5",
    "Wan 2.1 and Qwen Image (WanVAE)",
    "LTXV (VideoVAE)",
    "Mochi (VideoVAE)",
    "Cosmos",
    "Stable Cascade A (StageA)",
    "Stable Cascade C (StageC_coder)",
    "Stable Audio (Oobleck)",
    "Hunyuan3D (ShapeVAE)",
    "ACE-Step (MusicDCAE)",
    "MMAudio (AudioAutoencoder)",
]
LARGE = ["Wan 2.2 (WanVAE)", "HunyuanVideo 1.5 (vae_refiner)"]  # gigabytes, minutes: with `dev.py test --full` only
NEEDS = {"ACE-Step (MusicDCAE)": "torchaudio", "MMAudio (AudioAutoencoder)": "torchaudio"}
# What else the host can hold, and why it is not built here.
NOT_BUILT = {
    "PixelspaceConversionVAE": "has no layers; refused, see test_what_is_refused",
    "HunyuanImage 3": "AutoencodingEngine: the layers of HunyuanVideo 1.5 with another norm, and as large",
    "SD x4 upscaler": "AutoencoderKL: SD's with a level less",
    "CogVideoX, MageVAE, Trellis2, SeedVR2, MiniMax H3, Stable Audio 3": "only in newer hosts: one group, and said so",
}


@pytest.fixture(scope="module")
def run_script(host_path, tmp_path_factory):
    def run(*names):
        folder = tmp_path_factory.mktemp("vae precision")
        return run_in_host("vae_precision_in_host.py", host_path, folder, *names)

    return run


@pytest.fixture(scope="module")
def results(run_script):
    return run_script()


# -------------------------------------------------------------------------------------------------------- the families


@pytest.fixture(scope="module", params=[*BUILT, *(pytest.param(name, marks=pytest.mark.full) for name in LARGE)])
def family(run_script, request):
    name = request.param
    if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"the host cannot run {name} without {package}")
    results = run_script(name) if name in LARGE else request.getfixturevalue("results")
    return name, passed(results, name)


def test_each_half_runs_in_its_own_dtype_and_gives_what_the_host_gives_there(family):
    """Whole and tiled, in one, two and three dimensions, to the bit."""
    name, found = family
    assert found["tiled"] == (name not in NOT_TILED)
    told = {key: value for key, value in found.items() if key.endswith("the host's")}
    assert told and all(told.values()), told
    layers = {"encoder": ["torch.bfloat16"], "decoder": ["torch.float32"]}
    if name in ENCODES_NOT:
        layers = {"encoder": [], "decoder": ["torch.bfloat16"]}
        assert "has no encoder" in found["encoder refused"]
    elif name in NO_BF16_ENCODER:
        layers = {"encoder": ["torch.float32"], "decoder": ["torch.bfloat16"]}
        assert NO_BF16_ENCODER[name] in found["host's bf16 encoder"]  # else this CPU can, and shall
    assert found["layers"] == layers


def test_the_vae_that_came_in_is_not_touched(family):
    """Weights, dtypes, hooks, the host's memory bookkeeping; and "default" gives back that very object."""
    assert family[1]["source unchanged"] and family[1]["default gives the source"]


def test_memory_follows_the_dtype_of_the_half(family):
    assert family[1]["memory"] == [2.0, 1.0]  # decoder FP32 against BF16, encoder as loaded
    assert family[1]["held"] < 1.01  # of the decoder's FP32 weights: no half is copied that stays as it is
    assert family[1]["saved whole"] and {"torch.bfloat16", "torch.float32"} <= set(family[1]["saved dtypes"])


def test_every_class_of_the_host_is_built_or_listed(results):
    classes = passed(results, "classes")
    assert len(classes["host"]) > 10 and set(classes["host"]) <= set(classes["known"]) | NOT_BUILT.keys()
    here = [name for name in BUILT if name in results]
    assert {*BUILT} - {*here} <= NEEDS.keys()
    missing = {"MusicDCAE", "AudioAutoencoder"} if len(here) < len(BUILT) else set()
    assert {passed(results, name)["class"] for name in here} == set(classes["known"]) - missing


# ------------------------------------------------------------------------------------------------------ what else holds


def test_objects_are_shared_weakly(check):
    assert check == {"same": [True, False], "forgotten": True, "source forgotten": True}


def test_any_order_gives_the_same(check):
    assert check.pop("differs") > 1e-3
    assert all(check.values()), check


def test_encoder_input_is_rescaled_in_float32(check):
    assert 5e-4 < check["after"] < 8e-4 < 1.3e-3 < check["before"]


def test_a_layer_of_another_dtype(check):
    """Case 5 of the public reports: it runs, or one sentence names the layer."""
    assert all("should be the same" in told for told in check.pop("the host's"))
    first, second = check.pop("said")
    for said, dtype in ((first, "bf16"), (second, "fp16")):
        assert said.startswith(f"The encoder of the VAE (TAESD) cannot run in {dtype}, as its layer taesd_encoder.1.")
        assert said.endswith("choose fp32 for the encoder.") and said.count(". ") == 0
    assert all(check.values()), check


def test_as_the_dataset_builder_meets_it(check):
    assert check.pop("dtype") == ["bfloat16", "bfloat16"]
    assert all(check.values()), check


def test_files_of_one_half(check):
    assert "can only encode: it has no decoder" in check["effnet"]
    assert all("can only decode: it has no encoder" in check[name] for name in ("previewer", "taesd"))
    assert check["effnet's encoder"] == "Encoder: bf16"
    assert check["previewer's decoder"] == check["taesd's decoder"] == "Decoder: bf16"
    assert check["mochi"] == ["encoder", "decoder"] and check["mochi whole"] == ""


def test_what_other_packs_put_on_a_vae(check):
    assert check["stays"] == ["before", "between"] * 2 and check["works"] == [0, 0]
    assert check["nobody else has it"] == [False] * 3
    assert check["restored runs on the source's weights"] and check["nothing put, nothing copied"]


def test_a_file_is_read_once(check):
    assert (check["reads"], check["reads after"]) == (1, 2)
    assert check["differs"] and check["fingerprints"] == 4 and check["seen"]


def test_damaged_files_are_named(check):
    assert check.pop("a path of the server") == []
    assert check.pop("other.safetensors") == "other.safetensors holds no VAE that ComfyUI knows."
    assert "weights_only" not in check["page.pt"]
    for name, line in check.items():
        assert line.startswith(f"{name}: expected a whole file of weights, got a damaged one or none ("), line


def test_matrices_are_multiplied_in_float32(check):
    assert check["seen"] == {"encoder": ["medium"], "decoder": ["highest"]}  # the encoder runs in BF16
    assert check["after"] == ["medium", "medium"] and "a layer that fails" in check["said"]


def test_what_is_refused(check):
    report, in_dtype, as_the_host = check["unknown is one"]
    assert "cannot be split: all of it runs in fp16" in report and in_dtype and as_the_host
    assert "no encoder" in check["no encoder"] and check["its decoder"] == "Decoder: bf16"
    assert "no layers" in check["pixel space"] and "patched" in check["patched"] and "no VAE" in check["empty"]
    passed_over = "TAESD: fp32, as loaded; a dtype for it is passed over: The weight taesd_decoder.1.weight is quant"
    assert check["quantized"].startswith(passed_over) and check["quantized passes through"]
    first, second = check["lacks"].splitlines()[1:3]
    assert first.startswith("Encoder: fp32, as loaded, because this CPU cannot compute in fp8_e4m3fn")
    assert second.startswith("Decoder: fp32, as loaded, because this version of the pack does not know")
    assert "Decoder: fp32 (auto: " in check["auto"]
    assert "fp32 compute over bf16 weights" in check["rounded"] and "Load VAE (Precision)" in check["rounded"]


# -------------------------------------------------------------------------------- one graph, on a host that rounds VAEs


@pytest.fixture(scope="module")
def rounding_host(host_path, tmp_path_factory):
    """A host that loads every VAE in BF16, as most GPUs make it do, and that has a node which looks on."""
    base = tmp_path_factory.mktemp("rounding host")
    make_checkpoints(host_path, base / "models" / "checkpoints", (MIN,), cache=STATE / "checkpoints")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / SPY.name).write_text(SPY.read_text())
    args = ("--bf16-vae", "--disable-api-nodes")
    with HostServer(host_path, base=base, args=args, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


LOADERS = {
    "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "host": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}},
}


def select(decoder, source=("host", 2)):
    inputs = {"vae": list(source), "encoder": "default", "decoder": decoder}
    return {"class_type": "Ref2VSelectVAEPrecision", "inputs": inputs}


def spy(vae, again=0):
    return {"class_type": "Ref2VTestSpy", "inputs": {"vae": list(vae), "latent": ["latent", 0], "again": again}}


def seen(result):
    """{name of the spy: what it saw}"""
    assert result.status == "success", result.error
    return {node: json.loads(out["text"][0]) for node, out in result.outputs.items() if node.startswith("spy")}


def test_one_vae_in_three_precisions_in_one_graph(rounding_host):
    alone = seen(rounding_host.run({**LOADERS, "spy straight": spy(("host", 2))}))["spy straight"]
    assert alone["dtypes"] == ["torch.bfloat16"]
    branches = {
        "spy straight": ("host", 2),
        "spy fine": ("fine", 0),
        "spy coarse": ("coarse", 0),
        "spy restored": ("restored", 0),
    }
    selectors = {
        "fine": select("fp32"),
        "coarse": select("fp16"),
        "between": select("fp16", ("fine", 0)),
        "restored": select("default", ("between", 0)),
    }
    rounds = []
    for turn, order in enumerate((list(branches), list(reversed(branches)), sorted(branches))):
        graph = {**LOADERS, **selectors, **{name: spy(branches[name], turn + 1) for name in order}}
        rounds.append(seen(rounding_host.run(graph)))
    for found in rounds:
        assert found["spy straight"] == found["spy restored"] == alone
        assert found["spy fine"]["dtypes"] == ["torch.float32"] and found["spy coarse"]["dtypes"] == ["torch.float16"]
    assert rounds[0] == rounds[1] == rounds[2]
    assert len({found["picture"] for found in rounds[0].values()}) == 3


def test_load_vae_reads_what_the_hosts_loader_rounds_away(rounding_host):
    load = {"class_type": "Ref2VLoadVAE", "inputs": {"file": f"checkpoints/{MIN}", "encoder": "default"}}
    load["inputs"]["decoder"] = "default"
    graph = {
        **LOADERS, "load": load, "exact": select("fp32", ("load", 0)), "rounded": select("fp32"),
        "spy host": spy(("host", 2)), "spy load": spy(("load", 0)),
        "spy exact": spy(("exact", 0)), "spy rounded": spy(("rounded", 0)),
        "said": {"class_type": "PreviewAny", "inputs": {"source": ["exact", 1]}},
        "warned": {"class_type": "PreviewAny", "inputs": {"source": ["rounded", 1]}},
    }  # fmt: skip
    result = rounding_host.run(graph)
    found = seen(result)
    assert found["spy load"] == found["spy host"]  # default: what the host's loader chooses
    assert found["spy exact"]["dtypes"] == found["spy rounded"]["dtypes"] == ["torch.float32"]
    assert found["spy exact"]["weights"] != found["spy rounded"]["weights"]
    assert "rounded" not in result.outputs["said"]["text"][0]
    assert "fp32 compute over bf16 weights" in result.outputs["warned"]["text"][0]


def test_a_workflow_with_a_dtype_from_elsewhere_runs(rounding_host):
    graph = {**LOADERS, "new": select("fp5"), "spy": spy(("new", 0))}
    graph["said"] = {"class_type": "PreviewAny", "inputs": {"source": ["new", 1]}}
    result = rounding_host.run(graph)
    assert seen(result)["spy"]["dtypes"] == ["torch.bfloat16"]
    assert "does not know the dtype 'fp5'" in result.outputs["said"]["text"][0]


def test_a_file_that_is_gone_is_named(rounding_host):
    load = {"class_type": "Ref2VLoadVAE", "inputs": {"file": "gone.safetensors", "encoder": "fp32", "decoder": "fp32"}}
    result = rounding_host.run({**LOADERS, "load": load, "spy": spy(("load", 0))})
    assert result.status == "error" and "'gone.safetensors' does not exist in models/vae" in result.error.message
