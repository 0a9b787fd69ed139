"""Model Memory and Attention Memory behind Select Precision and NaN Guard: the bytes of what was selected."""

import pytest

from tests.host.host_process import all_passed, run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected memory")
    return all_passed(run_in_host("selected_memory_in_host.py", host_path, folder))


def test_a_selected_model_is_estimated_as_it_computes_whatever_is_loaded(results):
    assert len(results["models"]) == 8
    for name, found in results["models"].items():
        for who in ("selected", "source"):
            fresh, *later = found[who]
            assert later == [fresh, fresh], (name, who)
        dtype, weights, working, _ = found["selected"][0]
        assert {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype] == found["computes"], name
        assert weights == found["weights"], name
        assert found["source"][0][0] == "fp32", name


def test_a_selected_model_never_needs_more_than_was_said(results):
    ratios = {name: found["selected"][0][2] / found["measured"] for name, found in results["models"].items()}
    assert {name: ratio for name, ratio in ratios.items() if not 1 <= ratio <= 1.15} == {}


def test_our_own_softmax_is_seen_through_and_its_scores_are_counted(results):
    found = results["softmax"]
    assert found["auto"].endswith(" (auto)") and found["dtype"] == "bf16"
    kept, plain = found["bytes"]
    assert 1.5 * plain <= kept  # most of it are scores, and those of 4 bytes take the place of those of 2
    kept, plain = found["attention"]
    assert 1.5 * plain <= kept


def test_the_attention_of_another_node_is_seen_behind_ours(results):
    found = results["softmax"]
    assert all("another node has replaced this model's attention" in said for said in found["foreign"])
    assert found["chosen"] == "PASSED"


def test_a_selected_or_guarded_vae_never_needs_more_than_was_said(results):
    assert len(results["vaes"]) == 6
    for name, found in results["vaes"].items():
        before, after = found["said"]
        assert before == after, name
        weights, *peaks = found["measured"]
        assert before[0] == weights, name
        for said, got in zip(before[1:], peaks, strict=True):
            assert got <= said <= 1.15 * got, (name, said / got)


def test_a_selected_clip_is_counted_as_it_is_kept(results):
    assert len(results["clips"]) == 4
    for name, found in results["clips"].items():
        assert len(set(found)) == 1, (name, found)
    assert len({found[0] for found in results["clips"].values()}) == 3  # to compute in another dtype copies nothing


def test_every_family_of_vae_is_estimated_or_gets_one_true_sentence(results):
    found = results["families"]
    assert len(found) >= 12
    for name, by_model in found.items():
        for kind, said in by_model.items():
            if isinstance(said, str):
                assert said.startswith("vae: ") and ". " not in said and "cannot be traced" not in said, (name, said)
            else:
                assert "VAE decode" in said, (name, kind)
    sound = "vae: expected one of pictures or video, got AudioOobleckVAE, which gives sound or shapes."
    assert set(found["Stable Audio (Oobleck)"].values()) == {sound}
    assert "which gives sound or shapes" in found["Hunyuan3D (ShapeVAE)"]["SD15"]
    assert "VAE encode" in found["SD and SDXL (AutoencoderKL)"]["SD15"]
    assert "has latents of 4 channels, Flux takes 16" in found["SD and SDXL (AutoencoderKL)"]["Flux"]
    assert "VAE encode" in found["Wan 2.1 and Qwen Image (WanVAE)"]["WAN21_T2V"]
    of_pictures = found["Flux 1 and SD 3 (AutoencodingEngine)"]["WAN21_T2V"]
    assert "makes clips and AutoencodingEngine knows pictures only" in of_pictures
    light = found["TAEHV of Wan 2.2"]["WAN22_T2V"]
    assert "VAE decode" in light and "VAE encode" not in light
    assert "The VAE has no encoder, so nothing is said of it." in light


def test_a_cancel_during_an_estimate_cancels_and_blames_no_network(results):
    assert results["cancel"] == ["cancelled", "cancelled", "PASSED"]
