"""dev.py and its dev/installation.py: what they decide before they install anything."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installation():
    spec = importlib.util.spec_from_file_location("ref2v_installation", ROOT / "dev" / "installation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, value",
    [
        ("PIP_INDEX_URL", "https://example.org/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://example.org/simple"),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", "/opt/wheels"),
        ("PIP_CONSTRAINT", "/etc/constraints.txt"),
        ("PIP_CERT", "/etc/ssl/certs/ca.pem"),
        ("PIP_PROXY", "http://example.org:3128"),
        ("PIP_TRUSTED_HOST", "example.org"),
        ("PIP_ONLY_BINARY", ":all:"),
        ("PIP_TIMEOUT", "60"),
    ],
)
def test_uv_is_used_only_where_pip_has_no_setting_that_it_would_ignore(installation, name, value):
    """As this very pip lists it, with no other settings than this one."""
    plain = {key: text for key, text in os.environ.items() if not key.startswith("PIP_")}
    plain |= {"PIP_CONFIG_FILE": os.devnull, name: value}
    ran = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, env=plain)
    found = installation.settings_of_pip(ran.stdout)
    assert found == ([] if name == "PIP_TIMEOUT" else [name.removeprefix("PIP_").lower().replace("_", "-")])


def test_settings_in_files_count_too(installation):
    assert installation.settings_of_pip("global.constraint='/etc/c.txt'\ninstall.timeout='60'\n") == ["constraint"]
    assert installation.settings_of_pip("") == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root is offered a browser")
@pytest.mark.parametrize("answer", ["no", ""])
def test_a_browser_is_announced_before_it_is_installed_and_can_be_left_out(tmp_path, answer):
    """A real child with an apt-get of ours as the only one, which notes that it was called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    apt = programs / "apt-get"
    apt.write_text(f"#!{shutil.which('sh')}\necho \"$@\" >> {tmp_path / 'called'}\n")
    apt.chmod(0o755)
    code = f"import runpy; runpy.run_path({str(ROOT / 'dev.py')!r})['bring_chromium']()"
    env = {**os.environ, "PATH": str(programs), "REF2V_BROWSER": answer}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    called = tmp_path / "called"
    if answer == "no":
        assert not called.exists() and "will be skipped" in ran.stdout
    else:
        assert "apt-get install chromium" in ran.stdout and "REF2V_BROWSER=no" in ran.stdout
        assert "chromium" in called.read_text()


@pytest.mark.parametrize(("host_ends", "others_end", "both_end"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 2, 2)])
def test_the_halves_of_the_tests_run_side_by_side_and_either_can_fail(host_ends, others_end, both_end, tmp_path):
    """A child in pytest's place that waits for its sibling, tells which tests it was asked for, and ends as asked."""
    child = (
        "import os, sys, time\n"
        "mine = 'others' if '--ignore=tests/host' in sys.argv else 'host'\n"
        "other = {'others': 'host', 'host': 'others'}[mine]\n"
        f"open(os.path.join({str(tmp_path)!r}, mine), 'w').close()\n"
        f"while not os.path.exists(os.path.join({str(tmp_path)!r}, other)): time.sleep(0.01)\n"
        "print(mine, 'asked for', *sys.argv[1:], 'in', os.environ['OMP_NUM_THREADS'], flush=True)\n"
        f"sys.exit({others_end} if mine == 'others' else {host_ends})\n"
    )
    code = (
        "import pathlib, runpy, sys\n"
        f"run = runpy.run_path({str(ROOT / 'dev.py')!r})['tests_side_by_side']\n"
        f"sys.exit(run([sys.executable, '-c', {child!r}], pathlib.Path('host')))\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert ran.returncode == both_end, ran.stderr
    assert "host asked for tests/host in 1\n" in ran.stdout
    assert ran.stdout.endswith("All other tests:\nothers asked for tests --ignore=tests/host in 1\n\n")
