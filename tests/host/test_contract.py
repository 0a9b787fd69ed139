"""What the pack relies on of the host is what contract.py says, and it is so in 0.3.75 and in the newest stand-ins."""

import pytest

from tests.host import contract, host_uses
from tests.host.host_process import all_passed, run_in_host


@pytest.fixture(scope="module")
def hosts(host_path, tmp_path_factory):
    """What contract_in_host.py found in 0.3.75, and in the stand-ins of the newest host over it."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    return {
        "0.3.75": all_passed(run_in_host("contract_in_host.py", host_path, old)),
        "newest": all_passed(run_in_host("contract_in_host.py", host_path, new, "newer", "behaviours", NEWEST="1")),
    }


def test_every_symbol_of_the_host_that_the_pack_uses_is_in_the_contract():
    listed = {f"{module}.{name}" for module, names in contract.SYMBOLS.items() for name in names}
    used = host_uses.symbols_used()
    missing = {symbol: sorted(used[symbol].where) for symbol in used.keys() - listed}
    assert missing == {}, "add these to SYMBOLS in tests/host/contract.py"


def test_every_member_of_a_host_object_that_the_pack_uses_is_in_the_contract():
    listed = {member for members in contract.MEMBERS.values() for member in members}
    used = host_uses.members_used()
    missing = {member: sorted(used[member].where) for member in used.keys() - listed}
    assert missing == {}, "add these to MEMBERS in tests/host/contract.py"


def test_a_use_that_the_contract_does_not_have_is_found(tmp_path, monkeypatch):
    room = tmp_path / "nodes" / "host"
    room.mkdir(parents=True)
    (tmp_path / "training").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (room / "x.py").write_text(
        "import comfy.model_management\nfrom comfy.sd import Thing as T\nimport comfy.utils as u\n"
        "from ..api import io\n_NAMES = ('strange_one', 'strange_two')\n"
        "def f(patcher, vae):\n"
        "    management, other = comfy.model_management, 1\n"
        "    management.frobnicate(1, flag=2)\n    getattr(management, 'sometimes', None)\n    T(3)\n    u.far.away\n"
        "    vae.unheard_of(x=1)\n    patcher.f\n    io.Gadget.Input\n"
        "    for name in _NAMES:\n        setattr(vae, name, None)\n"
    )
    monkeypatch.setattr(host_uses, "PACK", tmp_path)
    symbols, members = host_uses.symbols_used(), host_uses.members_used()
    assert symbols.keys() == {
        "comfy.model_management.frobnicate", "comfy.model_management.sometimes", "comfy.sd.Thing", "comfy.utils.far",
        "comfy_api.latest.io", "comfy_api.latest.io.Gadget", "comfy_api.latest.io.Gadget.Input",
    }  # fmt: skip
    assert symbols["comfy.model_management.frobnicate"].calls == {host_uses.Call(1, frozenset({"flag"}))}
    assert members.keys() == {"away", "unheard_of", "f", "strange_one", "strange_two"}
    assert members["unheard_of"].calls == {host_uses.Call(0, frozenset({"x"}))}


def test_the_host_has_every_symbol_and_takes_our_calls(hosts, record_property):
    found = hosts["0.3.75"]["symbols"]
    record_property("symbols checked", found["counts"])
    assert found["wrong"] == {}


def test_the_hosts_objects_have_every_member_and_take_our_calls(hosts, record_property):
    found = hosts["0.3.75"]["members"]
    record_property("members checked", found["counts"])
    assert found["wrong"] == {}
    assert found["without an object"] == []
    assert hosts["0.3.75"]["server"] == {
        "instance": True, "client_id": True, "routes": True, "send_progress_text": ["self", "text", "node_id", "sid"],
    }  # fmt: skip


@pytest.mark.parametrize("host", ["0.3.75", "newest"])
@pytest.mark.parametrize("behaviour", contract.BEHAVIOURS)
def test_the_host_behaves_as_the_contract_says(hosts, host, behaviour):
    assert hosts[host]["behaviours"][behaviour] is True, contract.BEHAVIOURS[behaviour]


def test_what_only_newer_hosts_have_is_not_in_0_3_75_and_the_stand_ins_have_what_they_stand_for(hosts):
    old, new = hosts["0.3.75"]["newer"], hosts["newest"]["newer"]
    assert old["had"] == []  # else the contract calls newer what is not
    assert set(new["read"]) == {
        # read in the public text and looked for by the pack, but of no part of the host that stands in here
        "comfy.model_management.in_training", "latent format: spacial_downscale_ratio",
        "layer while loaded: _comfy_graph", "layer while loaded: _pins", "layer while loaded: _prefetch",
        "layer while loaded: _v_block", "layer while loaded: comfy_force_cast_weights",
    }  # fmt: skip
