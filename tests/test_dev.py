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
