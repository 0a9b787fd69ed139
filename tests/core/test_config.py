"""The configuration: errors name the field, and only what decides the weights is a run's identity."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from training.config.identity import FREE_ON_RESUME, differences
from training.config.train_config import TrainConfig
from training.errors import BadInput


def config(**changes):
    return TrainConfig.build({"dataset": "data", "run": "runs/one"} | changes)


@pytest.mark.parametrize(
    "field, value",
    [
        ("dataset", None),
        ("epochs", 0),
        ("epochs", 1.5),
        ("ema_decay", 1.0),
        ("precision", "fp8"),
        ("seed", -1),
        ("seed", 2**63),
        ("keep_checkpoints", 0),
        ("refiner.preset", "sd15-quarter"),
        ("refiner.base", "SD2"),
        ("refiner.shape", 3),
        ("flow.noise_scale", -0.1),
        ("flow.noise_scale", float("nan")),
        ("flow.noise_scale", "much"),
        ("flow.steps", 0),
        ("flow.on_grid", 1.1),
        ("flow.min_snr_gamma", 0),
        ("flow.min_snr_gamma", float("inf")),
        ("data.batch_size", 0),
        ("data.accumulation", 0),
        ("data.repeats", 0),
        ("data.crop", 4),
        ("data.caption_dropout", -0.1),
        ("data.workers", -1),
        ("optimizer.learning_rate", 0),
        ("optimizer.learning_rate", "fast"),
        ("optimizer.learning_rate", float("nan")),
        ("optimizer.betas", [0.9, 1.0]),
        ("optimizer.betas", [0.9]),
        ("optimizer.weight_decay", -1),
        ("optimizer.warmup_steps", -1),
        ("optimizer.horizon_steps", 0),
        ("optimizer.clip_norm", 0),
        ("optimizer.rounding", "nearest"),
        ("optimizer.moments", "fp8"),
        ("health.skips", 0),
        ("health.scale_floor", -1),
        ("validation.every", -1),
        ("validation.every", "step"),
        ("validation.every", 1.5),
        ("validation.every", True),
        ("checkpoint.every", -1),
        ("checkpoint.every", "minute"),
        ("checkpoint.minutes", -0.5),
        ("max_steps", 0),
        ("precision", "tf32"),
        ("optimizer.schedule", "sine"),
        ("optimizer.floor", 1.0),
        ("optimizer.floor", -0.1),
        ("optimizer.eps", 0.0),
        ("optimizer.extension", "tail"),
        ("optimizer.extended_from", [3, 2]),
        ("flow.loss", "mae"),
        ("flow.huber_delta", 0.0),
        ("validation.pictures", -1),
        ("validation.crop", 1),
        ("lerning_rate", 1),
        ("optimizer.lerning_rate", 1),
        ("optimizer", 3),
    ],
)
def test_an_error_names_its_field_and_what_came(field, value):
    section, _, name = field.rpartition(".")
    changes = {section: {name: value}} if section else {name: value}
    with pytest.raises(BadInput) as caught:
        config(**changes)
    message = str(caught.value)
    assert message.startswith("Training configuration: ") and "\n" not in message
    assert all(part in message for part in field.split(".")), message
    if not isinstance(value, list) and value == value:
        assert repr(value) in message, message


@pytest.mark.parametrize("field", ["dataset", "run"])
def test_a_missing_field_is_named(field):
    values = {"dataset": "data", "run": "runs/one"}
    del values[field]
    with pytest.raises(BadInput, match=f"Training configuration: {field}: Field required"):
        TrainConfig.build(values)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null", "not json"])
def test_text_that_is_no_configuration_is_one_sentence(text):
    with pytest.raises(BadInput) as caught:
        TrainConfig.parse(text)
    assert "\n" not in str(caught.value)


def test_a_configuration_survives_json():
    original = config(
        refiner={"shape": {"block_channels": [32], "heads": [1]}, "base": "SDXL"},
        flow={"noise_scale": 0.1, "steps": 4},
        data={"crop": 64, "mirror": True},
        optimizer={"learning_rate": 0.1 + 0.2, "horizon_steps": 7},
        precision="bf16",
        seed=2**63 - 1,
    )
    assert TrainConfig.parse(original.to_json()) == original
    assert TrainConfig.parse(original.to_json()).to_json() == original.to_json()
    assert TrainConfig.parse(config().to_json()) == config()
    json.loads(original.to_json(), parse_constant=pytest.fail)  # plain JSON, no NaN


def test_where_things_lie_and_how_often_one_looks_is_no_part_of_the_identity():
    moved = config(
        dataset="elsewhere",
        run="runs/two",
        device="cpu",
        keep_checkpoints=7,
        keep_best=False,
        data={"workers": 3, "verify": "full"},
        validation={"every": 5, "pictures": 0, "crop": None},
        checkpoint={"every": "epoch", "minutes": 5},
        gradient_checkpointing=True,
        health={"skips": 3, "scale_floor": 0.5, "leak_watch": False},
    )
    assert moved != config() and moved.identity() == config().identity()
    assert set(FREE_ON_RESUME) == {
        "dataset", "run", "device", "keep_checkpoints", "keep_best", "gradient_checkpointing", "health.skips",
        "health.scale_floor", "health.leak_watch", "data.workers", "data.verify", "validation.every",
        "validation.pictures", "validation.crop", "checkpoint.every", "checkpoint.minutes",
    }


def test_fields_that_came_later_leave_the_identity_of_earlier_runs_as_it_was():
    """A run that was begun before them goes on; what is learnt differently is another run."""
    known = config().identity()
    assert set(known["optimizer"]) == {
        "learning_rate", "betas", "weight_decay", "warmup_steps", "horizon_steps", "clip_norm",
    }
    assert set(known["flow"]) == {"noise_scale", "steps", "on_grid"}
    kept = {"refiner", "flow", "data", "optimizer", "validation", "epochs", "ema_decay", "precision", "seed"}
    assert set(known) == kept and known["validation"] == {}
    assert set(known["refiner"]) == {"preset", "shape", "base", "allow_larger"}
    for section, field, value in [
        ("flow", "min_snr_gamma", 5.0), ("optimizer", "decay_all", True),
        ("optimizer", "moments", "bf16"), ("optimizer", "compiled", True),
        ("optimizer", "schedule", "linear"), ("optimizer", "floor", 0.1), ("optimizer", "eps", 1e-6),
        ("flow", "loss", "huber"),
    ]:
        before = {"optimizer": {"rounding": "stochastic"}}  # what the default was
        changed = {**before, section: {**before.get(section, {}), field: value}}
        low, other = config(precision="pure_bf16", **before), config(precision="pure_bf16", **changed)
        assert differences(low.identity(), other.identity()) == [f"{section}.{field} None -> {value!r}"]
    assert config(precision="pure_bf16", **before).identity()["optimizer"] == known["optimizer"]


def test_the_identity_of_a_run_of_before_has_the_bytes_that_it_had():
    """The hash of what a run of before has in its config.json, taken before there were the newer settings."""
    text = json.dumps(config().identity(), sort_keys=True)
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "bc7f324169b5e58b4052325d37c1fe570e27852fbea810929910fad87e9b3961"


@pytest.mark.parametrize("name", ["tf32", "compile", "channels_last"])
def test_what_changes_the_last_bits_is_another_run(name):
    assert differences(config().identity(), config(**{name: True}).identity()) == [f"{name} None -> True"]


def test_max_steps_stands_in_the_place_of_epochs():
    plain, steps = config(epochs=3), config(epochs=3, max_steps=500)
    assert plain.total_steps(7) == 21 and steps.total_steps(7) == 500
    assert config(epochs=3, data={"accumulation": 2}).total_steps(7) == 11
    assert differences(plain.identity(), steps.identity()) == ["epochs 3 -> None", "max_steps None -> 500"]
    assert config(epochs=4, max_steps=500).identity() == steps.identity()  # epochs say nothing then


@pytest.mark.parametrize(
    "optimizer, said",
    [
        ({"schedule": "constant", "floor": 0.1}, "floor belongs to a rate that falls .* schedule constant; got 0.1"),
        ({"schedule": "constant", "horizon_steps": 9}, "horizon_steps belongs to a rate that falls .*; got 9"),
        ({"extended_from": [4]}, r"extended_from needs extension constant or stretch beside it; got \[4\]"),
        ({"extended_from": [4, 4], "extension": "stretch"}, r"extended_from must be rising numbers .* got \[4, 4\]"),
        ({"extended_from": [4], "extension": "stretch", "schedule": "constant"}, "extended_from would do nothing"),
        ({"extended_from": [4], "extension": "stretch", "horizon_steps": 8}, "extended_from would do nothing"),
    ],
)
def test_settings_of_the_rate_that_contradict_each_other_are_refused(optimizer, said):
    with pytest.raises(BadInput, match=said):
        config(optimizer=optimizer)


def test_a_delta_without_hubers_loss_is_refused():
    with pytest.raises(BadInput, match="huber_delta belongs to loss huber and would do nothing in mse; got 0.5"):
        config(flow={"huber_delta": 0.5})
    assert config(flow={"loss": "huber", "huber_delta": 0.5}).flow.huber_delta == 0.5


def test_hubers_loss_belongs_to_the_residual_objective():
    with pytest.raises(BadInput, match="flow.loss belongs to objective residual .* in sdxl_refiner; got 'huber'"):
        config(objective="sdxl_refiner", flow={"loss": "huber"})


def test_what_auto_means_is_decided_by_the_run_that_was_begun():
    auto = config(precision="auto")
    assert auto.as_begun(config(precision="bf16").identity()).precision == "bf16"
    assert auto.as_begun(config().identity()).identity() == config().identity()
    # auto never means these: such a run is another one
    assert auto.as_begun(config(precision="fp16").identity()).precision == "auto"
    assert auto.as_begun("junk").precision == "auto" and auto.as_begun({"optimizer": 3}).precision == "auto"


def test_a_run_that_was_made_longer_is_known_again_by_its_length():
    longer = config(epochs=9, optimizer={"extension": "stretch", "extended_from": [80]})
    assert config(epochs=9).as_begun(longer.identity()).identity() == longer.identity()
    assert config(epochs=10).as_begun(longer.identity()).optimizer.extended_from == ()
    # how a finished run would be made longer is no part of it before it is
    assert config(optimizer={"extension": "stretch"}).identity() == config().identity()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "auto"])
@pytest.mark.parametrize("field, value", [("rounding", "kahan"), ("moments", "bf16"), ("compiled", True)])
def test_an_option_of_pure_bf16_is_refused_where_it_would_do_nothing(precision, field, value):
    with pytest.raises(BadInput, match=f"optimizer.{field} belongs to precision pure_bf16 .* in {precision}; got"):
        config(precision=precision, optimizer={field: value})
    assert getattr(config(precision="pure_bf16", optimizer={field: value}).optimizer, field) == value


def test_gradients_that_add_up_in_bfloat16_are_few():
    assert config(precision="bf16", data={"accumulation": 65}).data.accumulation == 65
    with pytest.raises(BadInput, match="data.accumulation must be at most 64 with precision pure_bf16, .* got 65"):
        config(precision="pure_bf16", data={"accumulation": 65})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seed": 1}, "seed 0 -> 1"),
        ({"epochs": 9}, "epochs 8 -> 9"),
        ({"ema_decay": 0.5}, "ema_decay 0.999 -> 0.5"),
        ({"precision": "bf16"}, "precision 'fp32' -> 'bf16'"),
        ({"flow": {"noise_scale": 0.1}}, "flow.noise_scale 'auto' -> 0.1"),
        ({"flow": {"steps": 4}}, "flow.steps 8 -> 4"),
        ({"flow": {"on_grid": 1.0}}, "flow.on_grid 0.5 -> 1.0"),
        ({"data": {"batch_size": 2}}, "data.batch_size 4 -> 2"),
        ({"data": {"accumulation": 2}}, "data.accumulation 1 -> 2"),
        ({"data": {"repeats": 2}}, "data.repeats 1 -> 2"),
        ({"data": {"crop": 64}}, "data.crop None -> 64"),
        ({"data": {"mirror": True}}, "data.mirror False -> True"),
        ({"data": {"caption_dropout": 0.0}}, "data.caption_dropout 0.1 -> 0.0"),
        ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate 0.0001 -> 0.5"),
        ({"optimizer": {"betas": [0.9, 0.9]}}, "optimizer.betas [0.9, 0.99] -> [0.9, 0.9]"),
        ({"refiner": {"preset": "sd15-half"}}, "refiner.preset 'auto' -> 'sd15-half'"),
        ({"refiner": {"shape": {"heads": [1]}}}, "refiner.shape None -> {'heads': [1]}"),
    ],
)
def test_what_decides_the_weights_is_part_of_the_identity(changes, said):
    assert differences(config().identity(), config(**changes).identity()) == [said]


def leaves(model, prefix=""):
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_field_is_either_free_on_resume_or_a_change_of_it_is_told_by_name():
    identity, fields = config().identity(), set(leaves(config()))
    assert set(FREE_ON_RESUME) < fields
    for field in fields - set(FREE_ON_RESUME):
        other = copy.deepcopy(identity)
        section, _, name = field.rpartition(".")
        (other.setdefault(section, {}) if section else other)[name] = "something else"
        (said,) = differences(identity, other)
        assert said.startswith(f"{field} ") and said.endswith("-> 'something else'")


@pytest.mark.parametrize("language", ["", "zh/"])
def test_the_fields_that_are_free_on_resume_are_documented(language):
    text = (Path(__file__).resolve().parents[2] / "docs" / language / "refiner.md").read_text(encoding="utf-8")
    assert [field for field in FREE_ON_RESUME if f"`{field}`" not in text] == []


def test_differences_name_every_leaf_also_new_and_lost_ones():
    old, new = {"a": {"b": 1, "c": 2}, "gone": 3, "same": 0}, {"a": {"b": 1, "c": 5}, "come": 4, "same": 0}
    assert differences(old, new) == ["a.c 2 -> 5", "come None -> 4", "gone 3 -> None"]
    assert differences(old, old) == []


def test_a_configuration_cannot_be_changed_afterwards():
    with pytest.raises(ValueError):
        config().epochs = 3


def test_a_word_for_the_noise_scale_is_told_both_that_it_may_be():
    with pytest.raises(BadInput, match=r"noise_scale: must be 'auto' or a number from 0 up to 100 \(got 'much'\)"):
        TrainConfig.build({"dataset": "d", "run": "r", "flow": {"noise_scale": "much"}})


@pytest.mark.parametrize("field", ["dataset", "run", "refiner.start_from"])
def test_a_path_with_a_zero_byte_is_told_by_its_field(field):
    section, _, name = field.rpartition(".")
    with pytest.raises(BadInput, match=f"^Training configuration: {field}: must be a path, and no path holds a zero"):
        config(**({section: {name: "a\0b"}} if section else {name: "a\0b"}))


def test_a_key_that_stands_twice_is_told_by_name_and_not_decided_by_the_later_one():
    text = '{"dataset": "d", "run": "r", "optimizer": {"learning_rate": 1}, "optimizer": {"warmup_steps": 3}}'
    with pytest.raises(BadInput, match="^Training configuration: 'optimizer' stands twice"):
        TrainConfig.parse(text)


def test_a_byte_order_mark_is_no_part_of_a_configuration():
    assert TrainConfig.parse("\ufeff" + config().to_json()) == config()
