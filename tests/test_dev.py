"""dev.py and its dev/installation.py: what they decide before they install anything."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
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


@pytest.fixture(scope="module")
def suite():
    sys.path.append(str(ROOT / "dev"))  # as dev.py does
    return importlib.import_module("suite")


@pytest.mark.parametrize("full", [False, True])
def test_every_test_is_in_one_part_of_the_suite(suite, full):
    others, server, *beside, types = suite.parts(full).values()
    assert types[1:] == ["-m", "mypy"]
    assert [others[-2:], server[-1]] == [["tests", "--ignore=tests/host"], "tests/host"]
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "host").glob("test_*.py"))
    assert sorted(file for part in beside for file in part[3:]) == files and all(part[3:] for part in beside)
    marked = "" if full else "not full and "
    assert [part[2] for part in (server, *beside)] == [f"{marked}server", f"{marked}not server", f"{marked}not server"]
    assert others[1:3] == ["-m", "" if full else "not full"]


@pytest.mark.parametrize(("ends", "code"), [((0, 0, 0), 0), ((0, 0, 3), 3), ((1, 0, 2), 1)])
def test_parts_run_two_at_a_time_and_any_can_fail(suite, capfd, tmp_path, ends, code):
    """Children in pytest's place: the first two wait for each other, and all say something and end as asked."""
    child = (
        "import pathlib, sys, time\n"
        f"folder, mine, end = pathlib.Path({str(tmp_path)!r}), sys.argv[1], int(sys.argv[2])\n"
        "(folder / mine).touch()\n"
        "while mine != '2' and not (folder / str(1 - int(mine))).exists(): time.sleep(0.01)\n"
        "print('part', mine, 'is through')\n"
        "sys.exit(end)\n"
    )
    wanted = {f"no. {k}": [sys.executable, "-c", child, str(k), str(end)] for k, end in enumerate(ends)}
    assert suite.run_parts(wanted, dict(os.environ)) == code
    said = capfd.readouterr().out
    for k, end in enumerate(ends):
        assert f"exit code {end}\npart {k} is through\n" in said
    failed = [f"no. {k}" for k, end in enumerate(ends) if end]
    assert ("Failed, see above" in said) == bool(failed) and ", ".join(failed) in said


@pytest.mark.skipif(os.name == "nt", reason="a process group of its own gets Ctrl-C otherwise there")
def test_after_ctrl_c_no_further_part_begins(suite, tmp_path):
    child = f"import pathlib, sys, time; pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch(); time.sleep(60)"
    code = (
        f"import sys; sys.path.append({str(ROOT / 'dev')!r}); import suite\n"
        f"parts = {{name: [sys.executable, '-c', {child!r}, name] for name in ('a', 'b', 'c')}}\n"
        "sys.exit(suite.run_parts(parts, {}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        while not all((tmp_path / name).exists() for name in ("a", "b")):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    assert not (tmp_path / "c").exists()
