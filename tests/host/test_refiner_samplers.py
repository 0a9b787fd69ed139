"""Which of the host's samplers fit residual flow: the table in docs/samplers.md, measured again in part.

The numbers come from tests/host/samplers_in_host.py: distance of the sampled residuals from their true distribution.
"""

from pathlib import Path

import pytest

from tests.host.host_process import all_passed, run_in_host

DOC = Path(__file__).resolve().parents[2] / "docs" / "samplers.md"
EULER_8 = 0.112  # what the plain choice leaves; nothing that fits does clearly worse


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    checks = ["few_samplers", "refused", "options", "schedulers"]
    folder = tmp_path_factory.mktemp("samplers")
    return all_passed(run_in_host("samplers_in_host.py", host_path, folder, *checks))


def test_every_fitting_sampler_is_about_as_good_as_euler(results):
    fitting = {name: run["distance"] for name, run in results["refused"].items() if "refused" not in run}
    assert len(fitting) >= 20
    assert fitting["euler"] == pytest.approx(EULER_8, abs=0.01)
    assert {name: d for name, d in fitting.items() if not d <= 1.1 * EULER_8} == {}


def test_refused_samplers_really_do_not_fit(results):
    measured = {name: run for name, run in results["few_samplers"].items() if run["refusal"] != "PASSED"}
    assert set(measured) == {"euler_ancestral", "dpmpp_2m_sde", "lcm"}
    for run in measured.values():
        assert run["16"]["distance"] > 8 * EULER_8  # and more steps do not help


def test_second_order_samplers_need_fewer_steps(results):
    for name in ("heun", "dpmpp_2m", "deis", "uni_pc"):
        assert results["few_samplers"][name]["8"]["distance"] < 0.5 * EULER_8


def test_a_refusal_is_one_sentence_with_a_way_out(results):
    said = {name: run["refused"] for name, run in results["refused"].items() if "refused" in run}
    assert len(said) >= 20
    for name, sentence in said.items():
        assert sentence.startswith(f"The sampler {name} does not fit a refiner: ") and "use euler" in sentence
    assert results["few_samplers"]["lcm"]["refusal"] == said["lcm"]


def test_noise_options_decide(results):
    for name, run in results["options"].items():
        if name.endswith(": 0}") and "2s_ancestral_cfg_pp" not in name:
            assert run["distance"] <= 1.1 * EULER_8, name
        else:
            assert "refused" in run, name


def test_schedulers_converge_except_the_one_that_starts_late(results):
    for name, runs in results["schedulers"].items():
        if name == "ddim_uniform":
            assert "another scheduler than ddim_uniform" in runs["8"]["refused"]
        else:
            assert runs["16"]["distance"] < 0.6 * runs["8"]["distance"], name


def test_the_doc_lists_every_sampler_and_scheduler_of_the_host(results):
    listed = DOC.read_text(encoding="utf-8")
    missing = [name for name in (*results["refused"], *results["schedulers"]) if f"`{name}`" not in listed]
    assert missing == []
