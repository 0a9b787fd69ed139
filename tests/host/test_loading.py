"""The pack loads family by family: what a host has renamed costs the nodes that need it, and no others."""

import os

import pytest

from tests.host.host_process import passed, run_in_host

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="each host that lacks something is a fork of one")

ALL = 20
KINDS = {  # of nodes that may be lost together, by a part of their ids
    "refiner": ("Refiner", "TrainingOptions", "Base"),
    "precision": ("Precision", "LoadVAE", "GuardNaN"),
    "memory": ("Memory",),
}


@pytest.fixture(scope="module")
def loaded(host_path, tmp_path_factory):
    return run_in_host("loading_in_host.py", host_path, tmp_path_factory.mktemp("loading"))


def kinds_of(nodes) -> set[str]:
    return {next(kind for kind, parts in KINDS.items() if any(part in node for part in parts)) for node in nodes}


def test_whatever_name_of_the_host_is_gone_one_kind_of_nodes_is_lost_at_most(loaded):
    cases = passed(loaded, "without_each_name")
    everything = set().union(*(case["nodes"] for case in cases.values()))
    assert len(everything) == ALL and len(cases) > 10
    for name, case in cases.items():
        left_out = everything - set(case["nodes"])
        assert len(kinds_of(left_out | set(case["cannot run"]))) <= 1, f"without {name}: {case}"
        assert len(case["log"]) == (1 if left_out else 0), f"without {name}: {case['log']}"
    assert any(case["cannot run"] for case in cases.values())


def test_a_node_whose_schema_the_host_cannot_hold_is_left_out_with_one_line(loaded):
    case = passed(loaded, "without_a_schema_class")
    assert len(case["nodes"]) == ALL - 1 and "Ref2VGetRefinerSigmas" not in case["nodes"]
    (line,) = case["log"]
    assert "Ref2VGetRefinerSigmas" in line and "no attribute 'Sigmas'" in line


def test_a_family_that_cannot_be_imported_is_left_out_with_one_line(loaded):
    case = passed(loaded, "with_a_broken_family")
    assert len(case["nodes"]) == ALL - 1 and "Ref2VEstimateModelMemory" not in case["nodes"]
    (line,) = case["log"]
    assert "memory.model" in line


def test_a_node_that_lacks_something_says_what_in_one_sentence(loaded):
    case = passed(loaded, "a_node_that_cannot_run")
    assert case["kind"] == "BadInput"
    assert case["said"].startswith("Model Memory does not work in this ComfyUI (0.3.")
    assert "cannot import name 'Flux' from 'comfy.ldm.flux.model'." in case["said"]
    assert "/" not in case["said"]


@pytest.mark.parametrize("case", ["only_latest", "latest_changed"])
def test_either_version_of_the_schema_api_is_enough(loaded, case):
    assert passed(loaded, case) == {"nodes": ALL, "log": []}


def test_a_host_that_knew_only_the_documented_folder_of_workflows_finds_ours(loaded):
    """The list is a stand-in, as newer hosts have it in a module; 0.3.75 has it inside a function and knows ours."""
    both = ["example_workflows", "workflows"]
    assert set(map(tuple, passed(loaded, "folder_names").values())) == {tuple(both)}


def test_a_host_that_is_too_old_hears_so_in_one_line(loaded):
    lines = passed(loaded, "of_versions")
    (line,) = lines.pop("0.3.64")
    assert "made for ComfyUI 0.3.75 or newer" in line and "0.3.64" in line
    assert set(map(tuple, lines.values())) == {()}
