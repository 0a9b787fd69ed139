"""Every shipped workflow, through the real host's queue: what comes out are pictures, and they are the right ones.

They run as they are shipped, but for the table in tests/host/workflows.py: few pictures, short training.
"""

import json
import re

import numpy as np
import pytest

from tests.host.server import PACK_NAME
from tests.host.workflows import NAMES, NEEDS, OVERRIDES, SIDE, api, as_array, make_inputs, of_type, ui, with_overrides


@pytest.fixture(scope="module")
def inputs(host):
    make_inputs(host.base / "input")


@pytest.fixture(scope="module")
def run(host, inputs):
    """run(name): what came of a workflow, after those that it needs; each one runs once."""
    done = {}

    def run_once(name: str):
        if name not in done:
            if name in NEEDS:
                run_once(NEEDS[name])
            extra = {"extra_pnginfo": {"workflow": ui(name)}}  # as the front end sends it
            done[name] = host.run(with_overrides(name), timeout=600, extra_data=extra).expect_success()
        return done[name]

    return run_once


def said(result, node: str) -> str:
    """The text that stands on a node."""
    (text,) = result.outputs[node]["text"]
    return text


# ------------------------------------------------------------------------------------------------- what comes of them


def test_the_table_covers_every_workflow():
    assert set(OVERRIDES) == set(NAMES)
    assert set(NEEDS.values()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_of_a_workflow_is_a_picture(host, run, name):
    result, prompt = run(name), api(name)
    for node in [*of_type(prompt, "SaveImage"), *of_type(prompt, "PreviewImage")]:
        assert result.outputs[node]["images"], f"{prompt[node]['_meta']['title']} shows nothing"
    pictures = [as_array(picture) for picture in host.pictures(result)]
    assert pictures
    for picture in pictures:
        assert min(picture.shape[:2]) >= 64
        assert picture.std() > 0.02 and picture.max() > 0.1  # NaN becomes black, and black is constant


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("train")])
def test_training_leaves_a_whole_run_and_says_what_it_did(host, run, name):
    result, prompt = run(name), with_overrides(name)
    train = prompt[of_type(prompt, "Ref2VTrainRefiner")[0]]["inputs"]
    folder = host.base / "output" / "refiners" / train["run_name"]
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    report = json.loads((folder / "report.json").read_text())
    assert report["training"]["epochs"] == 2 and report["evaluation"]["on"] == "held-out pairs"
    assert {path.name for path in folder.glob("*.png")} == {"grid.png", "loss.png", "report.png"}
    (built,) = of_type(prompt, "Ref2VBuildRefinerDataset")
    (trained,) = of_type(prompt, "Ref2VTrainRefiner")
    assert "training pairs" in said(result, built) and "Measured on" in said(result, trained)


@pytest.mark.parametrize("name", ["refine", "refine_split", "refine_custom_sampler", "train_and_refine"])
def test_refined_differs_from_the_base_and_is_the_same_picture(host, run, name):
    base, refined, original = thirds(host, run(name), name)
    assert np.abs(refined - base).mean() > 1 / 255
    assert np.corrcoef(refined.ravel(), original.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("name", ["refine_split", "refine_custom_sampler"])
def test_other_ways_to_sample_give_the_picture_of_the_plain_ksampler(host, run, name):
    plain, other = (thirds(host, run(which), which)[1] for which in ("refine", name))
    assert np.abs(plain - other).max() <= 1.01 / 255


def test_refiner_behind_a_base_model_changes_its_picture(host, run):
    (node,) = of_type(api("generate_and_refine"), "PreviewImage")
    picture = as_array(host.pictures(run("generate_and_refine"), node)[0])
    base, refined = picture[:, :128], picture[:, -128:]
    assert picture.shape == (64, 260, 3)
    assert np.abs(refined - base).mean() > 1 / 255


def test_split_vae_shows_one_picture_in_two_precisions(host, run):
    result = run("vae_split_precision")
    (node,) = of_type(api("vae_split_precision"), "PreviewImage")
    picture = as_array(host.pictures(result, node)[0])
    width = (picture.shape[1] - 4) // 2
    fine, coarse = picture[:, :width], picture[:, -width:]
    assert np.abs(fine - coarse).max() > 0
    assert np.corrcoef(fine.ravel(), coarse.ravel())[0, 1] > 0.9
    first, second = of_type(api("vae_split_precision"), "Ref2VSelectVAEPrecision")
    assert "Encoder: bf16\nDecoder: fp32" in said(result, first)
    assert "Encoder: bf16\nDecoder: bf16" in said(result, second)


def test_planned_precision_paints_and_says_what_runs_in_what(host, run):
    result = run("precision_plan")
    (node,) = of_type(api("precision_plan"), "SaveImage")
    assert as_array(host.pictures(result, node)[0]).std() > 0.01
    (node,) = of_type(api("precision_plan"), "Ref2VApplyPrecisionPlan")
    table = said(result, node).splitlines()
    rows = {line.split("|")[1].strip(): line for line in table if line.startswith("|")}
    assert "bf16" in rows["MODEL"] and "fp32" in rows["VAE decoder"] and "bf16" in rows["VAE encoder"], table


def test_precision_audit_judges_all_three_models(host, run):
    result, prompt = run("precision_audit"), api("precision_audit")
    (node,) = of_type(prompt, "Ref2VAuditPrecision")
    text = said(result, node)
    for part in ("VAE encoder", "VAE decoder", "CLIP clip_l", "MODEL at sigma"):
        assert f"\n- {part}" in text and f"**{part}" in text, part
    assert "bf16 decode: " in text and " dB against FP32" in text
    (node,) = (node for node in of_type(prompt, "PreviewImage") if prompt[node]["inputs"]["images"][1] == 2)
    assert len(host.pictures(result, node)) == 4  # encoder, decoder, both, and the model's prediction


def thirds(host, result, name: str) -> list[np.ndarray]:
    """Base, refined and original from the picture that shows them side by side."""
    (node,) = of_type(api(name), "PreviewImage")
    picture = as_array(host.pictures(result, node)[0])
    assert picture.shape == (SIDE, 3 * SIDE + 2 * 4, 3)
    return [picture[:, left : left + SIDE] for left in (0, SIDE + 4, 2 * (SIDE + 4))]


SAVING = [name for name in NAMES if of_type(api(name), "SaveImage")]


def test_most_workflows_save_their_picture():
    assert set(NAMES) - set(SAVING) == {"memory_768p", "precision_audit"}  # which paint none


@pytest.mark.parametrize("name", SAVING)
def test_saved_pictures_drop_back_into_the_graph(host, run, name):
    prompt = with_overrides(name)
    for node in of_type(prompt, "SaveImage"):
        (picture,) = host.pictures(run(name), node)
        assert picture.format == "PNG"
        assert json.loads(picture.info["prompt"]).keys() == prompt.keys()
        assert json.loads(picture.info["workflow"]) == ui(name)


# -------------------------------------------------------------------------------------------- the two forms of a file


@pytest.mark.parametrize("name", NAMES)
def test_ui_file_holds_the_graph_of_the_api_file(name):
    prompt, graph = api(name), ui(name)
    nodes = {str(node["id"]): node for node in graph["nodes"] if node["type"] not in ("Note", "MarkdownNote")}
    assert {i: node["type"] for i, node in nodes.items()} == {i: node["class_type"] for i, node in prompt.items()}
    sources = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    for i, entry in prompt.items():
        linked = {slot["name"]: sources[slot["link"]] for slot in nodes[i]["inputs"] if slot.get("link") is not None}
        assert linked == {key: value for key, value in entry["inputs"].items() if isinstance(value, list)}
        values = nodes[i].get("widgets_values", [])
        assert all(value in values for value in entry["inputs"].values() if not isinstance(value, list))
        assert nodes[i].get("title", entry["_meta"]["title"]) == entry["_meta"]["title"]


@pytest.mark.parametrize("name", NAMES)
def test_ui_file_gives_the_same_pictures_each_time_it_is_queued(name):
    seeds = [value for node in ui(name)["nodes"] for value in node.get("widgets_values", [])]
    assert not {"randomize", "increment", "decrement"} & {value for value in seeds if isinstance(value, str)}


@pytest.mark.parametrize("name", NAMES)
def test_nodes_do_not_lie_on_each_other(name):
    boxes = []
    for node in ui(name)["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        collapsed = node.get("flags", {}).get("collapsed")
        boxes.append((x, y - 30, x + width, y + (0 if collapsed else height)))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_template_browser_lists_every_workflow_with_a_picture(host):
    assert sorted(host.get("/workflow_templates")[PACK_NAME]) == NAMES
    for name in NAMES:
        assert json.loads(host.request(f"/api/workflow_templates/{PACK_NAME}/{name}.json")) == ui(name)
        assert host.request(f"/api/workflow_templates/{PACK_NAME}/{name}.jpg")[:2] == b"\xff\xd8"


@pytest.mark.parametrize("name", NAMES)
def test_no_node_is_there_only_to_show_a_text(name):
    """What our nodes say stands on themselves."""
    assert not of_type(api(name), "PreviewAny") + of_type(api(name), "PreviewText")


def test_pictures_of_workflows_are_there_where_the_host_serves_json_alone(host):
    """The host's own folder lies under /api alone, so what answers here is ours; newer hosts have JSON alone there."""
    for name in NAMES:
        assert host.request(f"/workflow_templates/{PACK_NAME}/{name}.jpg")[:2] == b"\xff\xd8"
    for wrong in ("no_such_workflow.jpg", "..%2Fweb%2Ftext.jpg", "%2e%2e%2fREADME.jpg"):
        with pytest.raises(OSError, match="404"):
            host.request(f"/workflow_templates/{PACK_NAME}/{wrong}")


def test_notes_speak_of_workflows_that_exist():
    mentioned = {}
    for name in NAMES:
        notes = [node["widgets_values"][0] for node in ui(name)["nodes"] if node["type"] == "MarkdownNote"]
        mentioned[name] = re.findall(r"\*([a-z]+_[a-z_]+)\*", " ".join(notes))
        assert set(mentioned[name]) <= set(NAMES), f"{name}: {mentioned[name]}"
    # those that need what another one makes say so
    assert mentioned["refine"] == ["train_refiner"] and mentioned["generate_and_refine"] == ["train_from_model"]
