"""Training Options as JSON: the defaults are the configuration's, and only what differs from them is said."""

import json

import pytest

from training.config.options import FIELDS, build_options, default_of
from training.config.train_config import TrainConfig
from training.errors import BadInput

AT_DEFAULT = {name: default_of(name) for name in FIELDS}


def config(text: str, **more) -> TrainConfig:
    return TrainConfig.build({"dataset": "data", "run": "run", **more, **json.loads(text)})


def value_of(built: TrainConfig, field: str):
    section, _, name = field.rpartition(".")
    where = getattr(built, section) if section else built
    return getattr(where, name, None)


def test_at_the_defaults_nothing_is_said():
    assert build_options(AT_DEFAULT) == "{}"
    assert build_options(AT_DEFAULT, " \n") == "{}"
    assert AT_DEFAULT == {
        "repeats": 1, "mirror": False, "accumulation": 1, "caption_dropout": 0.1, "ema_decay": 0.999,
        "weight_decay": 0.01, "warmup_steps": 20, "clip_norm": 1.0, "gradient_checkpointing": False,
        "noise_scale": "auto", "steps": 8, "on_grid": 0.5, "min_snr_gamma": 0, "validation_every": 0,
        "validation_pictures": 4, "keep_checkpoints": 2, "rounding": "auto", "moments": "fp32", "start_from": "",
        "lora_rank": 0, "max_steps": 0, "checkpoint_every": 0, "checkpoint_minutes": 0.0, "schedule": "cosine",
        "floor": 0.0, "extension": "refuse", "loss": "mse", "huber_delta": 1.0, "tf32": False, "compile": False,
        "channels_last": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, value, kept",
    [
        ("repeats", 16, 16), ("mirror", True, True), ("accumulation", 4, 4), ("caption_dropout", 0.0, 0.0),
        ("ema_decay", 0.99, 0.99), ("weight_decay", 0.0, 0.0), ("warmup_steps", 0, 0), ("clip_norm", 0.5, 0.5),
        ("gradient_checkpointing", True, True), ("noise_scale", " 0.25 ", 0.25), ("noise_scale", "0", 0.0),
        ("steps", 4, 4), ("on_grid", 1.0, 1.0), ("min_snr_gamma", 5.0, 5.0), ("validation_every", 7, 7),
        ("validation_pictures", 0, 0), ("keep_checkpoints", 5, 5), ("rounding", "kahan", "kahan"),
        ("moments", "bf16", "bf16"), ("max_steps", 500, 500), ("checkpoint_every", 9, 9),
        ("checkpoint_minutes", 2.5, 2.5), ("schedule", "constant", "constant"), ("floor", 0.1, 0.1),
        ("extension", "stretch", "stretch"), ("loss", "huber", "huber"), ("tf32", True, True),
        ("compile", True, True), ("channels_last", True, True),
    ],
)  # fmt: skip
def test_each_input_alone_reaches_its_field_and_no_other(name, value, kept):
    text = build_options({**AT_DEFAULT, name: value})
    precision = {"precision": "pure_bf16"} if name in ("rounding", "moments") else {}
    built, plain = config(text, **precision), config("{}", **precision)
    assert value_of(built, FIELDS[name]) == kept != value_of(plain, FIELDS[name])
    for other in set(FIELDS.values()) - {FIELDS[name]}:
        assert value_of(built, other) == value_of(plain, other)
    section, _, field = FIELDS[name].rpartition(".")
    assert json.loads(text) == ({section: {field: kept}} if section else {field: kept})


def test_more_wins_and_keeps_the_rest_of_its_section():
    inputs = {**AT_DEFAULT, "repeats": 16, "mirror": True, "ema_decay": 0.99}
    more = '{"data": {"repeats": 1}, "optimizer": {"betas": [0.9, 0.95]}, "validation": {"crop": null}}'
    assert json.loads(build_options(inputs, more)) == {
        "data": {"repeats": 1, "mirror": True}, "ema_decay": 0.99, "optimizer": {"betas": [0.9, 0.95]},
        "validation": {"crop": None},
    }  # fmt: skip


@pytest.mark.parametrize("more", ["{", "[1]", "3", "[" * 5000, "repeats: 3"])
def test_more_that_is_no_json_object_is_one_sentence(more):
    with pytest.raises(BadInput, match=r"^more: expected a JSON object such as ") as caught:
        build_options(AT_DEFAULT, more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "inputs, more, said",
    [
        ({"noise_scale": "much"}, "", "noise_scale: expected auto or a number from 0 up to 100, got 'much'"),
        ({"noise_scale": "100"}, "", "noise_scale"),
        ({"noise_scale": "nan"}, "", "noise_scale"),
        ({"accumulation": 0}, "", r"data\.accumulation: .*got 0"),
        ({"accumulation": 65, "rounding": "kahan"}, "", r"data\.accumulation must be at most 64"),
        ({"ema_decay": 1.0}, "", r"ema_decay: "),
        ({}, '{"data": {"repeat": 3}}', r"data\.repeat: "),
        ({}, '{"data": 3}', r"data: "),
        ({"repeats": 2}, '{"data": 3}', r"data: "),
        ({"huber_delta": 0.5}, "", r"huber_delta belongs to loss huber"),
        ({"schedule": "constant", "floor": 0.1}, "", r"floor belongs to a rate that falls"),
        ({}, '{"optimizer": 3}', r"optimizer: "),
    ],
)
def test_what_no_configuration_can_have_is_named(inputs, more, said):
    with pytest.raises(BadInput, match=said) as caught:
        build_options({**AT_DEFAULT, **inputs}, more)
    assert "\n" not in str(caught.value)


def test_a_start_and_a_rank_make_a_lora_run():
    inputs = {**AT_DEFAULT, "start_from": "my refiner/refiner.safetensors"}
    assert json.loads(build_options(inputs)) == {"refiner": {"start_from": "my refiner/refiner.safetensors"}}
    assert json.loads(build_options({**inputs, "lora_rank": 16}, '{"lora": {"targets": "attention"}}')) == {
        "refiner": {"start_from": "my refiner/refiner.safetensors"}, "lora": {"rank": 16, "targets": "attention"},
    }  # fmt: skip
    with pytest.raises(BadInput, match="lora needs refiner.start_from"):
        build_options({**AT_DEFAULT, "lora_rank": 16})


@pytest.mark.parametrize("more", ['{"data": {"repeats": 2, "repeats": 3}}', '{"seed": 1, "data": {}, "seed": 1}'])
def test_a_key_that_stands_twice_in_more_is_told_by_name(more):
    with pytest.raises(BadInput, match=r"^more: '(repeats|seed)' stands twice in one object"):
        build_options(AT_DEFAULT, more)


def test_more_may_begin_with_a_byte_order_mark():
    assert json.loads(build_options(AT_DEFAULT, '\ufeff{"data": {"repeats": 2}}')) == {"data": {"repeats": 2}}
