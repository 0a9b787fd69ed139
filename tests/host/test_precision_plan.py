"""A precision plan: every part gets its dtype, the table tells the truth, and nothing that came in is changed.

Reads the numbers of tests/host/plan_in_host.py, which runs once in a process of its own.
"""


import pytest

from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("plan_in_host.py", host_path, tmp_path_factory.mktemp("precision plan"))


FP32, BF16, FP16, FP8 = "torch.float32", "torch.bfloat16", "torch.float16", "torch.float8_e4m3fn"
HOST_CLIP = [FP16, FP32]  # the host keeps text encoders in FP16 and computes in FP32


def test_presets(check):
    runs = {name: found["runs in"] for name, found in check.items() if name != "sources"}
    assert check["sources"]
    assert (runs["recommended"]["model"][1], runs["recommended"]["vae"]) == (BF16, [BF16, FP32])
    assert runs["recommended"]["t5xxl"] == runs["auto"]["t5xxl"]  # as loaded
    assert (runs["article"]["model"], runs["article"]["vae"]) == ([BF16, BF16], [BF16, FP32])
    assert runs["article"]["clip_g"] == runs["article"]["t5xxl"] == [BF16, BF16]
    assert (runs["quality"]["model"][1], runs["quality"]["vae"]) == (FP32, [FP32, FP32])
    assert runs["low memory"]["model"][0] == FP8 and runs["low memory"]["t5xxl"][0] == FP8
    assert runs["low memory"]["clip_l"] == runs["recommended"]["clip_l"]
    assert runs["auto"]["vae"][1] == FP32


def rows(table):
    """{part: (MiB before, MiB after)} of the table's rows, and the line of the whole."""
    _, _, *lines = table.split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: (float(line[-2]), float(line[-1])) for line in cells}


def test_the_table_adds_up(results):
    table = results["presets"]["article"]["table"]
    found = rows(table)
    parts = {name: sizes for name, sizes in found.items() if name != "all"}
    assert parts.keys() == {
        "MODEL", "CLIP clip_l", "CLIP clip_g", "CLIP t5xxl", "VAE encoder", "VAE decoder"
    }  # fmt: skip
    for side in (0, 1):
        assert found["all"][side] == pytest.approx(sum(sizes[side] for sizes in parts.values()), abs=0.3)
    before, after = found["MODEL"]
    assert after == pytest.approx(before / 2, abs=0.1)  # FP32 on a CPU, then BF16
    assert found["VAE decoder"][0] == found["VAE decoder"][1]
    assert "the decoder gives the picture itself" in table


def test_an_empty_plan_restores_what_was_loaded(check):
    assert check["very objects"] == [True, True, True]
    replaced = check["replaced"]
    assert replaced["vae"] == [FP32, BF16] and replaced["model"][1] == FP32 and replaced["t5xxl"] == HOST_CLIP


def test_a_named_encoder_has_the_last_word(check):
    assert check["t5xxl"][0] == BF16 and check["clip_l"][0] == check["clip_g"][0] == FP16


def test_what_is_absent_stays_absent(check):
    assert check["absent"] == [None, None] and "MODEL" not in check["table"] and check["device"] == "cpu"


def test_a_part_that_cannot_be_changed_passes_through(check):
    """The others are changed all the same; its row says why, and the report below in a sentence."""
    model, clip, vae = check["model"], check["clip"], check["vae"]
    assert model["others changed"] == ["clip", "vae"] and not model["passes through"]  # it computes in another dtype
    assert model["computes in"] == BF16 and "quantized" in model["row"] and "bf16 passed over" in model["row"]
    assert "passed over, because its weights are quantized" in model["table"]
    assert clip["others changed"] == ["model", "vae"] and clip["passes through"]
    assert "as it came" in clip["row"] and "no text encoder of a kind that is known" in clip["row"]
    assert vae["others changed"] == ["model", "clip"] and vae["passes through"]
    assert "as it came" in vae["row"] and "patched by another node" in vae["row"]
