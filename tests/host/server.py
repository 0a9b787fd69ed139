"""A real ComfyUI host as a child process: what the tests, the demo and the benchmarks drive.

    with HostServer(host_path) as host:
        result = host.run(json.loads(Path("workflows/api/refine.json").read_text())).expect_success()
        picture, = host.pictures(result)

Nothing here imports the host. `python -m tests.host.server --host PATH --base PATH` boots one for a person.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.host.client import HostClient, HostDied

PACK = Path(__file__).resolve().parent.parent.parent
PACK_NAME = "ComfyUI-Ref2V"  # no "." and no "@": the host cuts the name there when it looks for a node's documentation


def link_pack(custom_nodes: Path, pack: Path = PACK) -> Path:
    """Make `pack` visible as `custom_nodes`/ComfyUI-Ref2V: a link, a junction on Windows, else a copy."""
    custom_nodes.mkdir(parents=True, exist_ok=True)
    link = custom_nodes / PACK_NAME
    if link.exists() and link.resolve() == pack.resolve():
        return link
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        shutil.rmtree(link)
    try:
        link.symlink_to(pack, target_is_directory=True)
    except OSError:  # Windows without developer mode
        made = subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(pack)], capture_output=True)
        if made.returncode:
            shutil.copytree(pack, link, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return link


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class HostServer(HostClient):
    """One host process with this pack in it, on a port and a base directory of its own, and the client for it.

    host: folder of the host's main.py. base: kept when given, else temporary and removed by `stop`.
    pack: the pack to link in, or None for a host without it. args: more of the host's command line options.
    """

    def __init__(
        self,
        host: Path,
        *,
        base: Path | None = None,
        pack: Path | None = PACK,
        cpu: bool = True,
        port: int | None = None,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ):
        self.host, self.pack, self.cpu, self.args, self.env = Path(host), pack, cpu, tuple(args), dict(env or {})
        self.temporary = base is None
        self.base = Path(base or tempfile.mkdtemp(prefix="ref2v-host-")).resolve()
        self.port = port or free_port()
        self.log_path = self.base / "host.log"
        self.process: subprocess.Popen | None = None
        self.boot_seconds = float("nan")
        super().__init__(f"http://127.0.0.1:{self.port}", self._log_tail)

    def __enter__(self) -> "HostServer":
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def start(self, timeout: float = 120) -> "HostServer":
        """Boot and wait until the host answers. HostDied, with the end of its log, when it does not."""
        for name in ("input", "output", "models", "custom_nodes"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        if self.pack is not None:
            link_pack(self.base / "custom_nodes", self.pack)
        command = [sys.executable, "main.py", "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:", "--disable-auto-launch"]
        command += ["--cpu"] * self.cpu + list(self.args)
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **self.env}
        # Its own process group, so that whatever a node starts ends with it, and Ctrl-C reaches only us.
        group = {"creationflags": 0x200} if os.name == "nt" else {"start_new_session": True}
        began = time.perf_counter()
        try:
            with open(self.log_path, "wb") as log:
                self.process = subprocess.Popen(
                    command, cwd=self.host, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **group
                )
            while not self._answers():
                if self.process.poll() is not None:
                    code = self.process.returncode
                    raise HostDied(f"The host ended with code {code} while starting.\n{self._log_tail()}")
                if time.perf_counter() - began > timeout:
                    raise HostDied(f"The host did not answer within {timeout:.0f} s.\n{self._log_tail()}")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        self.boot_seconds = time.perf_counter() - began
        return self

    def _answers(self) -> bool:
        try:
            self.get("/system_stats", timeout=5)
        except OSError:  # refused, reset, timed out, and every URLError
            return False
        return True

    def stop(self):
        """End the host and everything it started. Safe to call twice."""
        self.close()
        if self.process is not None:
            self._signal_group(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                pass
            self._signal_group(getattr(signal, "SIGKILL", signal.SIGTERM))  # and children that outlived it
            self.process.wait(10)
            self.process = None
        if self.temporary:
            shutil.rmtree(self.base, ignore_errors=True)

    def _signal_group(self, number: int):
        if os.name != "nt":
            try:
                os.killpg(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass
        elif self.process.poll() is None:
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(self.process.pid)], capture_output=True)

    @property
    def log(self) -> str:
        """Everything that the host has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def _log_tail(self) -> str:
        return "\n".join(["The end of its log:", *self.log.splitlines()[-40:]])


# ------------------------------------------------------------------------------------------------------- for a person


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()


def main():
    parser = argparse.ArgumentParser(description="Boot the host with this pack until Ctrl-C.")
    parser.add_argument("--host", type=Path, required=True, help="folder of the host's main.py")
    parser.add_argument("--base", type=Path, required=True, help="base directory: input, output, models, custom_nodes")
    parser.add_argument("--port", type=int, default=8188)
    parser.add_argument("args", nargs="*", help="more options for the host, after --")
    asked = parser.parse_args()
    args = tuple(asked.args)
    try:
        with HostServer(asked.host, base=asked.base, port=asked.port, cpu=not has_gpu(), args=args) as server:
            with open(server.log_path, encoding="utf-8", errors="replace") as log:
                print(log.read(), end="")
                print(
                    f"\nComfyUI with Ref2V: {server.url}  (Ctrl-C ends it; its files are in {server.base})", flush=True
                )
                while server.process.poll() is None:
                    print(log.read(), end="", flush=True)
                    time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    except HostDied as died:
        sys.exit(str(died))


if __name__ == "__main__":
    main()
