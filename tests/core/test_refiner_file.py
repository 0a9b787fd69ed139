"""refiner.safetensors: the same bytes for the same refiner, and one sentence for every file that is none."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from training.config.network import UNetConfig
from training.errors import BadInput
from training.objectives.residual.file import RefinerMeta, load_meta, load_refiner, save_refiner
from training.objectives.residual.model import Refiner
from training.objectives.residual.unet import build_unet

UNET = UNetConfig(
    latent_channels=3, block_channels=(32,), layers_per_block=1, transformer_depth=(0,), middle_depth=0, heads=(1,),
    context_dim=8,
)


def meta(**changes):
    values = dict(
        unet=UNET,
        latent={"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1},
        noise_scale=0.25,
        residual_rms=0.25,
        c_v=0.353553,
        sigmas=[1.0, 0.5, 0.0],
        training={"seed": 1, "dataset": "c0ffee"},
    )
    return RefinerMeta(**values | changes)


def weights(seed=0):
    torch.manual_seed(seed)
    net = build_unet(UNET)
    torch.nn.init.normal_(net.conv_out.weight)
    return net.state_dict()


EMPTY = {"context": torch.arange(16.0).reshape(2, 8)}


@pytest.fixture
def refiner(tmp_path):
    path = tmp_path / "refiner.safetensors"
    save_refiner(path, weights(), EMPTY, meta())
    return path


def refused(path, *words):
    """Both ways to open the file refuse it, in one sentence that names it."""
    for load in (load_meta, load_refiner):
        with pytest.raises(BadInput) as caught:
            load(path)
        message = str(caught.value)
        assert path.name in message and "\n" not in message
        assert all(word in message for word in words), message


def test_a_refiner_comes_back_as_it_was_saved(refiner):
    loaded, empty, read = load_refiner(refiner)
    assert read == meta() == load_meta(refiner)
    original = weights()
    assert loaded.keys() == original.keys() and all(torch.equal(loaded[k], original[k]) for k in loaded)
    assert empty.keys() == {"context"} and torch.equal(empty["context"], EMPTY["context"])


def test_a_loaded_refiner_answers_like_the_network_that_was_saved(refiner):
    loaded, empty, read = Refiner.from_file(refiner)
    assert (loaded.s, loaded.c_v) == (read.noise_scale, read.c_v)
    net = build_unet(UNET).eval()
    net.load_state_dict(weights())
    x, t = torch.randn(1, 3, 16, 16), torch.tensor([0.5])
    condition = {"context": empty["context"][None]}
    with torch.no_grad():
        assert torch.equal(loaded.output(x, x, t, condition), Refiner(net, 1.0, 1.0).output(x, x, t, condition))


def test_pooled_text_travels_along(tmp_path):
    path = tmp_path / "refiner.safetensors"
    save_refiner(path, weights(), EMPTY | {"pooled": torch.ones(5)}, meta())
    assert torch.equal(load_refiner(path)[1]["pooled"], torch.ones(5))


def test_the_same_refiner_gives_the_same_bytes_whatever_the_order(tmp_path, refiner):
    again = tmp_path / "again.safetensors"
    backwards = dict(reversed(weights().items()))
    strided = {k: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for k, t in backwards.items()}
    reordered = meta(training={"dataset": "c0ffee", "seed": 1})
    save_refiner(again, strided, EMPTY, reordered)
    assert again.read_bytes() == refiner.read_bytes()


def test_nothing_in_the_file_says_where_or_when_it_was_made(tmp_path, refiner):
    elsewhere = tmp_path / "another folder" / "other name.safetensors"
    elsewhere.parent.mkdir()
    save_refiner(elsewhere, weights(), EMPTY, meta())
    assert elsewhere.read_bytes() == refiner.read_bytes()
    assert str(tmp_path).encode() not in refiner.read_bytes()


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.3, 0.9, -1])
def test_a_truncated_file_is_refused(refiner, keep):
    data = refiner.read_bytes()
    keep = int(keep * len(data)) if isinstance(keep, float) else keep
    refiner.write_bytes(data[:keep])
    refused(refiner, "damaged")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_and_not_run(tmp_path, protocol, zipped):
    path, trap = tmp_path / "model.pt", tmp_path / "it ran"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(trap),)

    content = {"weights": torch.ones(3), "trap": Trap()}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    refused(path, "pickle")
    path.write_bytes(pickle.dumps(content, protocol))
    refused(path, "pickle")
    assert not trap.exists()


def test_another_model_is_refused(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    refused(path, "another model")
    save_file({"weight": torch.ones(3)}, path, {"format": "pt", "modelspec.title": "something"})
    refused(path, "another model")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    refused(tmp_path / "none.safetensors", "found none")
    (tmp_path / "folder.safetensors").mkdir()
    refused(tmp_path / "folder.safetensors", "found none")


@pytest.mark.parametrize(
    "change, field",
    [({"version": 2}, "version"), ({"format": "else"}, "format"), ({"c_v": None}, "c_v"), ({"new": 1}, "new")],
)
def test_metadata_of_another_version_names_the_field(tmp_path, change, field):
    path = tmp_path / "refiner.safetensors"
    values = json.loads(meta().model_dump_json()) | change
    save_file({"unet.x": torch.ones(1), "empty.context": torch.ones(1, 8)}, path, {"ref2v": json.dumps(values)})
    refused(path, "does not fit this version", field)
    save_file({"unet.x": torch.ones(1)}, path, {"ref2v": "{"})
    refused(path, "does not fit this version")


def test_a_file_without_its_empty_conditioning_is_refused(tmp_path):
    path = tmp_path / "refiner.safetensors"
    save_refiner(path, weights(), {}, meta())
    with pytest.raises(BadInput, match="refiner.safetensors: expected the run's empty conditioning"):
        load_refiner(path)


@pytest.mark.parametrize("header", [0x10280, 0x0480, 0x4B50])
def test_a_header_length_that_looks_like_a_pickle_is_no_pickle(tmp_path, header):
    """A safetensors file begins with its header's length: some lengths spell the first bytes of pickles."""
    path = tmp_path / "refiner.safetensors"
    content = {"ref2v": json.dumps(json.loads(meta().model_dump_json()))}
    text = {"__metadata__": content, "empty.context": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}
    encoded = json.dumps(text).encode()
    path.write_bytes(struct.pack("<Q", header) + encoded.ljust(header) + bytes(4))
    refused(path, "its weights are not those of the network")  # its metadata was read, and it holds no weight


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_the_file_can_be_read_by_those_whom_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        save_refiner(tmp_path / "refiner.safetensors", weights(), EMPTY, meta())
    finally:
        os.umask(before)
    assert (tmp_path / "refiner.safetensors").stat().st_mode & 0o777 == 0o644


# ---- a write that fails ---------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_under_the_final_name(small_disk):
    folder = small_disk("64k")
    path = folder / "refiner.safetensors"
    with pytest.raises(BadInput, match=r"refiner.safetensors: expected room for [\d,]+ bytes, but writing failed"):
        save_refiner(path, weights(), EMPTY, meta())
    assert list(folder.iterdir()) == []


def test_a_failed_write_leaves_the_older_file_as_it_was(tmp_path, refiner, monkeypatch):
    before = refiner.read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(BadInput, match="No space left on device"):
        save_refiner(refiner, weights(seed=1), EMPTY, meta())
    assert refiner.read_bytes() == before and list(tmp_path.iterdir()) == [refiner]


def test_a_reader_never_meets_half_a_file(refiner, monkeypatch):
    """At the moment of the rename the new file is whole, and the old one still whole under the name."""
    before, seen, replace = refiner.read_bytes(), [], os.replace

    def look(source, target):
        seen.append((load_meta(source).noise_scale, refiner.read_bytes() == before))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    save_refiner(refiner, weights(), EMPTY, meta(noise_scale=0.5))
    assert seen == [(0.5, True)] and load_meta(refiner).noise_scale == 0.5


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(BadInput, match="writing failed"):
        save_refiner(tmp_path / "missing" / "refiner.safetensors", weights(), EMPTY, meta())


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"latent": {}}, "lacks 'name'"),
        ({"latent": {"name": "x", "channels": 3, "scale": [1.0, 2.0], "shift": 0.0, "downscale": 1}}, "scale"),
        ({"latent": {"name": "x", "channels": 3, "scale": 0.0, "shift": 0.0, "downscale": 1}}, "scale"),
        ({"latent": {"name": "x", "channels": 4, "scale": 1.0, "shift": 0.0, "downscale": 1}}, "4 channels and unet 3"),
        ({"noise_scale": float("nan")}, "noise_scale"),
        ({"noise_scale": -1}, "noise_scale"),
        ({"c_v": 0.0}, "c_v"),
        ({"sigmas": []}, "sigmas"),
        ({"sigmas": [1.0, 1.0, 0.0]}, "sigmas"),
        ({"sigmas": [1.0, 0.5]}, "sigmas"),
        ({"sigmas": [14.6, 0.0]}, "sigmas"),
        ({"sigmas": [float("nan"), 0.0]}, "sigmas"),
    ],
)
def test_metadata_that_cannot_be_sampled_with_is_refused(tmp_path, changes, word):
    path = tmp_path / "refiner.safetensors"
    values = meta().model_dump(mode="json") | changes
    save_file({"unet.x": torch.zeros(1)}, path, {"ref2v": json.dumps(values)})
    refused(path, word)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value):
    """Case 4 of the public reports: the picture would be black, and nobody could tell why."""
    path = tmp_path / "refiner.safetensors"
    spoilt = weights()
    spoilt["conv_in.bias"][0] = value
    save_refiner(path, spoilt, EMPTY, meta())
    with pytest.raises(BadInput, match=r"refiner\.safetensors: its weight unet\.conv_in\.bias holds NaN or infinity"):
        load_refiner(path)


@pytest.mark.parametrize("shape", [(8,), (2, 9), (1, 2, 8)])
def test_an_empty_conditioning_of_another_shape_is_refused(tmp_path, shape):
    path = tmp_path / "refiner.safetensors"
    save_refiner(path, weights(), {"context": torch.zeros(shape)}, meta())
    with pytest.raises(BadInput, match=r"'empty.context' to be \[tokens, 8\].*got \["):
        load_refiner(path)
