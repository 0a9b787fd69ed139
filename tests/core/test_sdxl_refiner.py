"""Fine-tuning of SDXL's own refiner: its noise, its timesteps, its names, its file, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from training.config.network import UNetConfig
from training.config.train_config import TrainConfig
from training.data.shards import RefinerDataset
from training.errors import BadInput
from training.objectives.residual.file import load_meta as load_residual_meta
from training.objectives.sdxl_refiner import diffusion
from training.objectives.sdxl_refiner.file import load_meta, read_weights
from training.objectives.sdxl_refiner.keys import PREFIX, original_names
from training.objectives.sdxl_refiner.model import SDXLRefiner
from training.objectives.sdxl_refiner.unet import SHAPE, build
from training.run.plan import make_plan
from training.run.report.journal import read as read_journal
from training.run.run_folder import RunFolder

LATENT = {"name": "SDXL", "channels": 4, "scale": 0.13025, "shift": 0.0, "downscale": 8}
TEXT = {"tokens": 2, "dim": 1280, "pooled": 1280, "fingerprint": "c0ffee"}
TINY = {  # its levels with and without attention, in small
    "block_channels": [32, 32, 32], "layers_per_block": 1, "transformer_depth": [0, 1, 0], "middle_depth": 1,
    "heads": [1, 1, 1],
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    from tests.core.conftest import write_dataset

    folder = tmp_path_factory.mktemp("sdxl") / "pairs"
    return write_dataset(folder, pairs=5, side=16, latent=LATENT, text=TEXT)


@pytest.fixture
def tune(configure, pairs):
    """tune(epochs=2, ...) -> configuration of a run of this objective on the tiny network."""

    def make(**changes):
        given = {"objective": "sdxl_refiner", "refiner__shape": TINY, "dataset": pairs, "data__batch_size": 2}
        return configure(**{**given, **changes})

    return make


@pytest.fixture
def start(tmp_path):
    """start(names, dtype) -> (file, weights under diffusers' names): a UNet of the tiny shape, its last layer too."""

    def make(kind="checkpoint", dtype=torch.float32, **more):
        torch.manual_seed(11)
        net = build(UNetConfig(**{**SHAPE, **TINY}))
        net.conv_out.weight.data.normal_(0, 0.05)
        weights = {name: t.to(dtype).contiguous() for name, t in net.state_dict().items()}
        original = original_names(weights, 1)
        names = {
            "diffusers": lambda name: name,
            "unet": lambda name: original[name],
            "checkpoint": lambda name: PREFIX + original[name],
        }[kind]
        extra = {"first_stage_model.decoder.conv_in.weight": torch.zeros(3)} if kind == "checkpoint" else {}
        path = tmp_path / f"{kind}-{str(dtype)[6:]}.safetensors"
        save_file({**{names(name): t for name, t in weights.items()}, **extra, **more}, path)
        return path, {name: t.float() for name, t in weights.items()}

    return make


# ---- network and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["diffusers", "unet", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_start_is_read_under_every_kind_of_name(start, kind, dtype):
    path, weights = start(kind, dtype)
    read = read_weights(path, {name: t.shape for name, t in weights.items()}, 1)
    assert read.keys() == weights.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, weights[name]) for name, t in read.items())


def test_a_start_of_another_kind_is_one_sentence(start, tune, watch, tmp_path):
    path, weights = start("unet")
    shapes = {name: t.shape for name, t in weights.items()}
    tensors = load_file(path)

    def refused(changed, said):
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(BadInput, match=said) as caught:
            read_weights(tmp_path / "changed.safetensors", shapes, 1)
        assert "\n" not in str(caught.value)

    key = "middle_block.1.proj_in.weight"
    refused({"a": torch.zeros(1)}, "expected the UNet of SDXL's refiner in changed.safetensors, found no UNet")
    refused({k: t for k, t in tensors.items() if k != key}, f"lacks {key}")
    refused({**tensors, key: torch.zeros(3)}, rf"{key} is \[3\] instead of \[32, 32\]")
    refused({**tensors, key: torch.full((32, 32), float("nan"))}, f"{key} .* holds NaN or infinity")
    refused({**tensors, "middle_block.3.norm.weight": torch.zeros(3)}, "has middle_block.3.norm.weight besides")
    (tmp_path / "pickle.safetensors").write_bytes(b"PK\x03\x04" + bytes(50))
    with pytest.raises(BadInput, match="a pickle, which can run code"):
        watch().train(tune(refiner__start_from=str(tmp_path / "pickle.safetensors")))
    with pytest.raises(BadInput, match="refiner.start_from: expected a file, cannot read .*none.safetensors"):
        watch().train(tune(refiner__start_from=str(tmp_path / "none.safetensors")))


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_it_learns_to_see_the_noise_and_its_report_says_what_it_is(tune, watch):
    watcher = watch()
    result = watcher.train(tune(data__repeats=40, epochs=1, optimizer__learning_rate=1e-2, validation__pictures=0))
    assert watcher.losses[0] == pytest.approx(1, abs=0.1) and sum(watcher.losses[-20:]) / 20 < 0.6
    report = result.report
    assert report["noise_scale"] == pytest.approx(0.569, abs=5e-4) and report["c_v"] == 1
    assert report["sigmas"] == diffusion.sigmas(8).tolist()
    assert set(report["evaluation"]["measures"]) == {"base", "1 step", "2 steps", "4 steps", "8 steps"}
    assert all(0 < loss < 1.2 for loss in report["evaluation"]["loss_per_sigma"].values())
    told = report["watched"]["times"]["timesteps"]
    assert list(told)[0] == "0 to 9" and list(told)[-1] == "190 to 199" and sum(told.values()) == 80 * 2
    said = " | ".join(report["choices"])
    assert "the limit of 30 % is for residual refiners and plays no part" in said
    assert "timesteps 0 to 199 of 1000; takes over from the base at sigma 0.5693" in said
    assert "starts from random weights" in said


def test_a_batch_equals_the_formula_written_by_hand(tune, watch, pairs, start, monkeypatch):
    """Noise, scaling, text, sizes and score of the first loss, with the network called in its plainest form."""
    from training.data.batches import BatchSource
    from training.data.seeds import seeded_generator

    path, weights = start()
    config = tune(
        refiner__start_from=str(path), sdxl_refiner={"aesthetic_score": 7.5, "last_timestep": 149},
        data__caption_dropout=0.5, validation__pictures=0,
    )
    watcher = watch(stop_after=1)
    watcher.train(config)

    batch = BatchSource(pairs, batch_size=2, seed=config.seed, caption_dropout=0.5)[0]
    generator = seeded_generator(config.seed, "noise", 0)
    e = torch.randn(2, 4, 16, 16, generator=generator)
    k = diffusion.draw_timesteps(2, 149, generator)
    sigma = diffusion.SIGMAS[k].reshape(2, 1, 1, 1)
    net = build(UNetConfig(**{**SHAPE, **TINY}))
    net.load_state_dict(weights)
    ids = torch.tensor([[128.0, 128.0, 0.0, 0.0, 7.5]] * 2)  # 16 latent cells; no crop
    added = {"text_embeds": batch["pooled"], "time_ids": ids}
    with torch.no_grad():
        output = net(
            (batch["z"] + sigma * e) / (1 + sigma**2).sqrt(), k, encoder_hidden_states=batch["context"],
            added_cond_kwargs=added,
        ).sample
    assert watcher.losses[0] == pytest.approx(float((output - e).square().mean()), rel=1e-6)


def test_the_text_of_both_encoders_is_that_of_clip_g_alone(tune, watch, build_pairs, tmp_path):
    """SDXL's own text is 768 columns of CLIP-L and then CLIP-G's; the file is the same but for its provenance."""
    from tests.core.conftest import write_dataset
    from training.data.shards import DatasetWriter

    both = {**TEXT, "dim": 2048}
    write_dataset(tmp_path / "both", pairs=3, side=16, latent=LATENT, text=both)
    data = RefinerDataset.open(tmp_path / "both")
    described = {"context": TEXT, "empty": None}
    with DatasetWriter(tmp_path / "alone", latent=LATENT, vae=None, base=data.info["base"], **described) as writer:
        for i, pair in enumerate(data.pairs):
            read = data.read(i)
            writer.add(
                read["z"], read["b"], source=pair.source, sha256=pair.sha256, group=pair.group, split=pair.split,
                context=read["context"][:, 768:], pooled=read["pooled"],
            )
    losses = []
    for name in ("both", "alone"):
        watcher = watch()
        result = watcher.train(
            tune(dataset=tmp_path / name, run=tmp_path / f"run-{name}", data__caption_dropout=0, epochs=2)
        )
        losses.append((watcher.losses, result.report["evaluation"]["measures"]))
    assert losses[0] == losses[1]


def test_ten_steps_and_fifteen_and_five_are_thirty(tune, watch, tmp_path, start):
    path, _ = start()
    changes = {
        "refiner__start_from": str(path), "epochs": 3, "data__repeats": 5, "data__workers": 2, "data__crop": 8,
        "validation__every": 8, "keep_best": False,
    }
    whole = watch()
    finished = whole.train(tune(run=tmp_path / "whole", **changes))
    assert finished.status == "done" and whole.steps == list(range(1, 31))
    losses = []
    for part, (first, last) in enumerate(((1, 10), (11, 25), (26, 30))):
        torch.manual_seed(part)
        watcher = watch(stop_after=last - first + 1 if last < 30 else None)
        result = watcher.train(tune(**changes))
        assert watcher.steps == list(range(first, last + 1))
        losses += watcher.losses
    assert losses == whole.losses
    assert result.refiner.read_bytes() == finished.refiner.read_bytes()
    assert result.report["watched"]["times"] == finished.report["watched"]["times"]
    histories = [read_journal(run / "metrics.jsonl") for run in (result.folder, finished.folder)]
    assert histories[0] == histories[1]
    assert [line["step"] for line in histories[0] if "validation/loss" in line] == [8, 16, 24]


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_after_two_steps_every_trainable_has_moved(tune, watch, start, precision):
    path, weights = start()
    config = tune(
        refiner__start_from=str(path), precision=precision, gradient_checkpointing=True, data__caption_dropout=0,
        optimizer__learning_rate=1e-2, optimizer__warmup_steps=0, validation__pictures=0,
    )
    assert watch(stop_after=2).train(config).status == "stopped"
    moved = load_file(config.run / ".checkpoints" / "step-00000002" / "weights.safetensors")
    assert moved.keys() == weights.keys()
    assert [name for name, t in moved.items() if torch.equal(t, weights[name].to(t.dtype))] == []


def test_its_file_has_the_averaged_weights_under_the_original_names_and_can_be_started_from(tune, watch, tmp_path):
    result = watch().train(tune(epochs=1))
    tensors = load_file(result.refiner)
    averaged = load_file(sorted((result.folder / ".checkpoints").glob("step-*"))[-1] / "ema.safetensors")
    names = original_names(averaged, 1)
    assert tensors.keys() == {PREFIX + name for name in names.values()}
    assert all(torch.equal(tensors[PREFIX + names[name]], t) for name, t in averaged.items())
    meta = load_meta(result.refiner)
    assert meta.last_timestep == 199 and meta.aesthetic_score == 6 and meta.training["steps"] == 2
    assert str(tmp_path).encode() not in result.refiner.read_bytes()

    again = watch().train(tune(epochs=1))
    assert again.status == "reused"
    further = tune(run=tmp_path / "further", refiner__start_from=str(result.refiner), validation__pictures=0)
    first = watch(stop_after=1)
    first.train(further)
    assert str(tmp_path).encode() not in json.dumps(further.identity()).encode()
    assert first.losses[0] != pytest.approx(1, abs=1e-6)  # a new network predicts nothing
    with pytest.raises(BadInput, match="got SDXL's own refiner, fine-tuned: put it into models/diffusion_models"):
        load_residual_meta(result.refiner)


def test_a_damaged_file_is_trained_again_and_an_equal_start_elsewhere_is_the_same_run(tune, watch, start, tmp_path):
    path, _ = start()
    config = tune(refiner__start_from=str(path), epochs=1, validation__pictures=0)
    result = watch().train(config)
    whole = result.refiner.read_bytes()
    moved = path.rename(tmp_path / "elsewhere.safetensors")
    assert watch().train(tune(refiner__start_from=str(moved), epochs=1, validation__pictures=0)).status == "reused"
    result.refiner.write_bytes(whole[:-10])
    assert not RunFolder(result.folder).is_finished()
    with pytest.raises(BadInput, match="expected a whole safetensors file, got a damaged one"):
        load_meta(result.refiner)
    watcher = watch()
    assert watcher.train(tune(refiner__start_from=str(moved), epochs=1, validation__pictures=0)).status == "done"
    assert watcher.steps == [1, 2] and result.refiner.read_bytes() == whole
    other, _ = start(dtype=torch.float16)
    with pytest.raises(BadInput, match=r"refiner\.start_from 'content [0-9a-f]{12}' -> 'content [0-9a-f]{12}'"):
        watch().train(tune(refiner__start_from=str(other), epochs=1, validation__pictures=0))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_lora_is_refused_in_plain_words():
    given = {"dataset": "d", "run": "r", "objective": "sdxl_refiner", "refiner": {"start_from": "f"}, "lora": {}}
    with pytest.raises(BadInput, match="lora belongs to objective residual .* got a section"):
        TrainConfig.build(given)


@pytest.mark.parametrize(
    "field, value",
    [
        ("refiner.preset", "sdxl-half"), ("refiner.base", "SDXL"), ("refiner.allow_larger", True),
        ("flow.noise_scale", 0.1), ("flow.steps", 4), ("flow.on_grid", 1.0), ("flow.min_snr_gamma", 5.0),
    ],
)  # fmt: skip
def test_settings_of_the_residual_flow_are_refused_by_name(field, value):
    section, _, name = field.partition(".")
    with pytest.raises(BadInput, match=f"{field} belongs to objective residual and would do nothing in sdxl_refiner"):
        TrainConfig.build({"dataset": "d", "run": "r", "objective": "sdxl_refiner", section: {name: value}})


@pytest.mark.parametrize("name, value", [("aesthetic_score", 5.0), ("last_timestep", 99)])
def test_its_own_settings_are_refused_by_name_where_they_do_nothing(name, value):
    with pytest.raises(BadInput, match=f"sdxl_refiner.{name} belongs to objective sdxl_refiner .* got {value}"):
        TrainConfig.build({"dataset": "d", "run": "r", "sdxl_refiner": {name: value}})


@pytest.mark.parametrize("value", [14, 200, 199.5])
def test_a_last_timestep_that_the_refiner_never_knew_is_refused(value):
    with pytest.raises(BadInput, match="sdxl_refiner.last_timestep"):
        TrainConfig.build(
            {"dataset": "d", "run": "r", "objective": "sdxl_refiner", "sdxl_refiner": {"last_timestep": value}}
        )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"latent": {**LATENT, "name": "SD15", "scale": 0.18215}}, "expects SDXL's latents .* got SD15"),
        ({"text": None}, "expects captions of CLIP-G .* got no text"),
        ({"text": {**TEXT, "dim": 768, "pooled": 0}}, "expects captions of CLIP-G .* got 768 and 0"),
    ],
)
def test_data_that_are_not_its_own_are_refused(tune, watch, build_pairs, changes, said):
    data = build_pairs("other", **{"pairs": 3, "latent": LATENT, "text": TEXT, **changes})
    with pytest.raises(BadInput, match=f"Dataset: objective sdxl_refiner {said}"):
        watch().train(tune(dataset=data, data__caption_dropout=0))


@pytest.mark.parametrize("name, value", [("latent_channels", 8), ("context_dim", 768), ("pooled_dim", 20)])
def test_a_shape_without_clip_g_or_in_other_latents_is_refused(tune, watch, name, value):
    with pytest.raises(BadInput, match=f"refiner.shape.{name}: expected SDXL's .* got {value}"):
        watch().train(tune(refiner__shape={**TINY, name: value}))


def test_the_published_shape_asks_for_the_published_weights(tune, watch, pairs):
    with pytest.raises(BadInput, match="refiner.start_from: .* expected its file, such as sd_xl_refiner_1.0.safetens"):
        make_plan(tune(refiner__shape=None), RefinerDataset.open(pairs), 4)


def test_a_model_at_work_takes_the_score_that_it_is_given(start):
    path, weights = start()
    net = build(UNetConfig(**{**SHAPE, **TINY}))
    net.load_state_dict(weights)
    x = torch.randn(1, 4, 8, 8)
    condition = {
        "context": torch.randn(1, 2, 1280), "pooled": torch.randn(1, 1280),
        "time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]]),
    }
    with torch.no_grad():
        low, high = (SDXLRefiner(net, score).output(x, torch.tensor([50]), condition) for score in (2.5, 6.0))
    assert not torch.equal(low, high)
