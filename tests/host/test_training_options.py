"""Training Options linked into Train Refiner, in the graph of the real host."""

import json

import pytest

from tests.host.test_train_refiner import SHAPE, graph, text, write_dataset

# What it takes to train in a second, in a way that both nodes can say it.
MORE = {"refiner": {"shape": SHAPE}, "validation": {"crop": 16}}


@pytest.fixture(scope="module")
def dataset(host):
    return write_dataset(host.base / "output" / "refiner_datasets" / "test_options")


@pytest.fixture(scope="module")
def defaults(host) -> dict:
    """The inputs of Training Options as the node itself gives them to the front end."""
    said = host.object_info()["Ref2VSetTrainingOptions"]["input"]
    found = {}
    for kind in ("required", "optional"):
        for name, (typed, how) in said[kind].items():
            assert "default" in how and how["tooltip"], name
            choices = typed if isinstance(typed, list) else how.get("options")
            assert choices is None or typed == "BOOLEAN" or how["default"] in choices
            found[name] = how["default"]
    return found


def linked(dataset, run_name, options):
    prompt = graph(dataset, run_name)
    prompt["options"] = {"class_type": "Ref2VSetTrainingOptions", "inputs": options}
    prompt["train"]["inputs"]["options"] = ["options", 0]
    prompt["json"] = {"class_type": "PreviewAny", "inputs": {"source": ["options", 0]}}
    return prompt


def test_the_options_take_effect(host, dataset, defaults):
    chosen = {
        "repeats": 3, "accumulation": 2, "ema_decay": 0.9, "steps": 4, "min_snr_gamma": 5.0, "validation_every": 3,
        "validation_pictures": 1, "keep_checkpoints": 1, "gradient_checkpointing": True, "more": json.dumps(MORE),
    }  # fmt: skip
    result = host.run(linked(dataset, "test_options a", {**defaults, **chosen})).expect_success()
    folder = host.base / "output" / "refiners" / "test_options a"
    config = json.loads((folder / "config.json").read_text())["config"]
    assert (config["data"]["repeats"], config["data"]["accumulation"]) == (3, 2)
    assert (config["ema_decay"], config["gradient_checkpointing"], config["keep_checkpoints"]) == (0.9, True, 1)
    assert (config["flow"]["steps"], config["flow"]["min_snr_gamma"]) == (4, 5.0)
    assert config["refiner"]["shape"] == SHAPE and config["validation"]["crop"] == 16
    report = json.loads((folder / "report.json").read_text())
    assert report["sigmas"] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert report["training"]["steps"] == 11  # 2 epochs of 7 pairs x 3, in batches of 2, two to a step
    assert any("Min-SNR weighting" in choice for choice in report["choices"])
    assert any("gradient checkpointing" in choice for choice in report["choices"])
    assert sorted(path.name for path in (folder / "validation").iterdir()) == [
        f"step-{step:08d}.png" for step in (3, 6, 9)
    ]
    assert "Trained 11 steps" in text(result, "report")


def test_at_its_defaults_the_finished_run_without_it_is_reused(host, dataset, defaults):
    host.run(graph(dataset, "test_options b", options={"refiner": {"shape": SHAPE}})).expect_success()
    refiner = host.base / "output" / "refiners" / "test_options b" / "refiner.safetensors"
    stamp = refiner.stat().st_mtime_ns
    more = {"more": json.dumps({"refiner": {"shape": SHAPE}})}
    again = host.run(linked(dataset, "test_options b", {**defaults, **more})).expect_success()
    assert "reused" in text(again, "report") and refiner.stat().st_mtime_ns == stamp
    assert json.loads(text(again, "json")) == {"refiner": {"shape": SHAPE}}
    whole = linked(dataset, "test_options b", defaults)
    assert text(host.run({name: whole[name] for name in ("options", "json")}), "json") == "{}"


@pytest.mark.parametrize(
    "inputs, said",
    [
        ({"more": "{"}, "more: expected a JSON object such as"),
        ({"more": '{"data": {"repeat": 3}}'}, "data.repeat"),
        ({"noise_scale": "much"}, "noise_scale: expected auto or a number"),
        ({"more": '{"epochs": 3}'}, "options: epochs has an input of its own on the node (epochs)"),
        ({"rounding": "kahan"}, "optimizer.rounding belongs to precision pure_bf16"),
    ],
)
def test_bad_options_are_one_sentence(host, dataset, defaults, inputs, said):
    result = host.run(linked(dataset, "test_options bad", {**defaults, **inputs}))
    assert result.status == "error" and said in result.error.message and "\n" not in result.error.message


def test_a_start_that_was_replaced_is_seen_though_the_options_are_linked(host, dataset, defaults):
    """The host's own key of a linked input holds the refiner's name, not what is in the file."""
    host.run(graph(dataset, "test_options start")).expect_success()
    host.run(graph(dataset, "test_options other", seed=9)).expect_success()
    folder = host.base / "output" / "refiners"
    more = '{"validation": {"crop": 16}}'
    options = {**defaults, "start_from": "test_options start/refiner.safetensors", "more": more}
    prompt = linked(dataset, "test_options on", options)
    host.run(prompt).expect_success()
    start, other = (folder / f"test_options {name}" / "refiner.safetensors" for name in ("start", "other"))
    start.write_bytes(other.read_bytes())
    refused = host.run(prompt)  # not answered from the cache
    assert "refiner.start_from" in refused.error.message and "another configuration" in refused.error.message
