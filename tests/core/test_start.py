"""Going on from a trained refiner: what of it is kept, which dataset fits, and what makes it another run."""

import shutil

import pytest
import torch
from pydantic import ValidationError

from tests.core.starts import TEXT, write_start
from training.config.identity import differences
from training.config.start_file import start_file_hash
from training.config.train_config import TrainConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.errors import BadInput
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.start import open_start
from training.run.plan import make_plan


@pytest.fixture
def start(tmp_path):
    return write_start(tmp_path / "earlier" / "refiner.safetensors")


@pytest.fixture
def go_on(configure, start):
    """go_on(start_from=..., **changes) -> a configuration that goes on from it, without a shape of its own."""

    def build(start_from=start, **changes):
        return configure(refiner={"start_from": str(start_from)}, **changes)

    return build


def plan_of(config):
    source = BatchSource(config.dataset, batch_size=2, seed=0)
    return make_plan(config, source.data, source.per_epoch)


def test_training_begins_at_the_weights_of_the_file(go_on, watch, start):
    result = watch().train(go_on(optimizer__learning_rate=1e-12, epochs=1))
    before, _, _ = load_refiner(start)
    after, _, _ = load_refiner(result.refiner)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-7)


def test_noise_scale_and_c_v_stay_and_the_report_says_what_a_loss_of_one_is_now(go_on, watch, start, dataset):
    result = watch().train(go_on(epochs=1))
    made, given, rms = load_meta(result.refiner), load_meta(start), RefinerDataset.open(dataset).residual_rms
    assert (made.noise_scale, made.c_v, made.unet) == (given.noise_scale, given.c_v, given.unet)
    assert made.residual_rms == rms != given.residual_rms
    said = " ".join(result.report["choices"])
    assert "goes on from earlier/refiner.safetensors" in said and "s = 0.3 and its c_v = 0.42426 are kept" in said
    assert f"a loss of {(rms**2 + 0.3**2) / 0.18:.3g}, not 1, means that nothing is predicted" in said
    assert "flow.steps 8, where earlier/refiner.safetensors was trained for 2" in said
    assert len(made.sigmas) == 9
    assert made.training["start"] == {"sha256": start_file_hash(start), "training": {"dataset": "d" * 64}}
    assert str(start) not in made.model_dump_json()  # no path in a refiner


def test_nothing_is_said_of_the_loss_where_its_unit_is_right(go_on, dataset, tmp_path):
    rms = RefinerDataset.open(dataset).residual_rms
    plan = plan_of(go_on(write_start(tmp_path / "b" / "refiner.safetensors", s=rms, rms=rms), flow__steps=2))
    assert not any("means that nothing" in said or "flow.steps" in said for said in plan.choices)


def test_the_loss_of_a_network_that_predicts_nothing_is_as_told(start, dataset):
    """Against the objective itself: the mean of ||v / c_v||^2 over all pairs."""
    data = RefinerDataset.open(dataset)
    opened, generator = open_start(start, data), torch.Generator().manual_seed(0)
    c_v, losses = opened.meta.c_v, []
    for index in data.train:
        pair = data.read(index)
        e = torch.randn(pair["z"].shape, generator=generator)
        losses.append(((pair["b"] + opened.meta.noise_scale * e - pair["z"]) / c_v).square().mean())
    assert float(torch.stack(losses).mean()) == pytest.approx(opened.velocity_loss(data.residual_rms), rel=0.05)


def test_another_noise_scale_is_refused_and_its_own_is_not(go_on):
    with pytest.raises(BadInput, match="flow.noise_scale: expected auto, or the 0.3 that .* got 0.2: its network"):
        plan_of(go_on(flow__noise_scale=0.2))
    assert plan_of(go_on(flow__noise_scale=0.3)).objective.s == 0.3


def test_a_one_shot_refiner_stays_one(go_on, tmp_path):
    plan = plan_of(go_on(write_start(tmp_path / "b" / "refiner.safetensors", s=0.0)))
    assert plan.objective.s == 0 and plan.objective.sigmas == [1.0, 0.0]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"latent": {"name": "pixels", "channels": 3, "scale": 2.0, "shift": 0.0, "downscale": 1}},
         r"latent space of refiner.safetensors \(scale 2.0\), got one with scale 1.0"),
        ({"latent": {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 8}},
         r"\(downscale 8\), got one with downscale 1"),
        ({"text": TEXT}, r"trained on \(with text 8 wide\), got one without text"),
    ],
)  # fmt: skip
def test_a_dataset_that_does_not_fit_is_one_sentence(go_on, tmp_path, watch, changes, said):
    config = go_on(write_start(tmp_path / "b" / "refiner.safetensors", **changes))
    with pytest.raises(BadInput, match=f"refiner.start_from: .*{said}") as caught:
        watch().train(config)
    assert "\n" not in str(caught.value) and not config.run.exists()


@pytest.mark.parametrize(
    "text, said", [({**TEXT, "dim": 16}, "with text 16 wide"), ({**TEXT, "pooled": 4}, "and a pooled vector 4 wide")]
)
def test_another_text_encoder_is_one_sentence(go_on, build_pairs, tmp_path, text, said):
    start = write_start(tmp_path / "b" / "refiner.safetensors", text=TEXT)
    with pytest.raises(BadInput, match=rf"\(with text 8 wide\), got one .*{said}"):
        plan_of(go_on(start, dataset=build_pairs(text=text)))


def test_a_latent_space_of_another_name_is_the_same_space(go_on, tmp_path):
    latent = {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
    plan = plan_of(go_on(write_start(tmp_path / "b" / "refiner.safetensors", latent=latent)))
    assert plan.objective.start is not None


def test_what_is_in_the_file_is_the_identity_and_not_where_it_lies(go_on, start, tmp_path):
    moved = shutil.copy(start, tmp_path / "moved.safetensors")
    assert go_on(moved).identity() == go_on(start).identity()
    assert go_on(start).identity()["refiner"]["start_from"] == start_file_hash(start)
    other = write_start(tmp_path / "other.safetensors", s=0.4)
    (told,) = differences(go_on(start).identity(), go_on(other).identity())
    before, after = (start_file_hash(path)[:12] for path in (start, other))
    assert told == f"refiner.start_from 'content {before}' -> 'content {after}'"


def test_a_file_that_changes_is_looked_at_again(start, tmp_path):
    before = start_file_hash(start)
    write_start(start, s=0.4)
    assert start_file_hash(start) != before


def test_a_finished_run_is_reused_with_the_start_elsewhere_and_refused_with_another(go_on, watch, start, tmp_path):
    assert watch().train(go_on(epochs=1)).status == "done"
    moved = shutil.move(start, tmp_path / "moved.safetensors")
    assert watch().train(go_on(moved, epochs=1)).status == "reused"
    with pytest.raises(BadInput, match="another configuration .*refiner.start_from"):
        watch().train(go_on(write_start(start, s=0.4), epochs=1))


@pytest.mark.parametrize("content", [None, b"", b"\x80\x02pickle", b"no safetensors at all"])
def test_what_is_no_refiner_is_one_sentence(go_on, tmp_path, watch, content):
    path = tmp_path / "x" / "refiner.safetensors"
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.raises(BadInput, match="refiner") as caught:
        watch().train(go_on(path))
    assert "\n" not in str(caught.value) and not go_on(path).run.exists()


def test_weights_of_another_network_than_the_metadata_says_are_one_sentence(go_on, watch, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = write_start(tmp_path / "x" / "refiner.safetensors")
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del tensors["unet.conv_in.bias"]
    save_file(tensors, path, metadata)
    with pytest.raises(BadInput, match="its weights are not those of the network") as caught:
        watch().train(go_on(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"refiner": {"start_from": "a", "preset": "pixel-small"}}, "expected preset auto and no shape .* pixel-small"),
        ({"refiner": {"start_from": "a", "shape": {"heads": [1]}}}, "expected preset auto .* got a shape"),
        ({"refiner": {"start_from": "runs/one/refiner.safetensors"}}, "must not lie in the folder of the new run"),
        ({"refiner": {"start_from": "x/../runs/one/refiner.safetensors"}}, "must not lie in the folder of the new run"),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(values, said):
    with pytest.raises(BadInput, match=said) as caught:
        TrainConfig.build({"dataset": "data", "run": "runs/one", **values})
    assert not isinstance(caught.value, ValidationError) and "\n" not in str(caught.value)
    near = {"dataset": "data", "run": "runs/one", "refiner": {"start_from": "runs/one two/refiner.safetensors"}}
    assert TrainConfig.build(near).refiner.start_from
