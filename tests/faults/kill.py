"""Runs in processes that are killed: forks of one parent that has imported torch, so that each costs a second.

    with Nursery() as nursery:
        ended = nursery.train(config, Kill(event=7))

The parent is this very file as a script: one JSON line in for each child, and lines out for what it does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds that one child may take on a busy machine


@dataclass(frozen=True)
class Kill:
    """When a child gets SIGKILL; without any of these it lives.

    after: seconds after its start, by its parent's clock, wherever it is then.
    event: at the n-th thing (an open, a rename, a removal, ...) that it does inside the saving of checkpoints, from 1.
    delay: seconds that pass after that event.
    """

    after: float | None = None
    event: int | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Ended:
    code: int  # exit status; minus the signal that ended it
    saving: bool  # inside the saving of a checkpoint at its end
    events: int  # inside the saving of checkpoints, as Kill.event counts them
    seconds: float
    said: str  # its messages, and the traceback of one that failed

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Nursery:
    """The parent's other end."""

    def __enter__(self) -> Nursery:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT, text=True)
        assert self._parent.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_) -> None:
        self._parent.stdin.close()
        self._parent.wait(PATIENCE)

    def train(self, config, kill: Kill | None = None) -> Ended:
        """A run to its end, or to its kill."""
        kill = kill or Kill()
        ended = self._child({"config": config.to_json(), "kill": asdict(kill)}, kill.after)
        assert ended.killed or ended.code == 0, ended.said
        return ended

    def command_line(self, arguments: list[str], interrupt_at: int | None = None) -> Ended:
        """`python -m training` with these arguments, which gets Ctrl-C after a step."""
        return self._child({"arguments": arguments, "interrupt_at": interrupt_at})

    def _child(self, order: dict, kill_after: float | None = None) -> Ended:
        began = time.monotonic()
        print(json.dumps(order), file=self._parent.stdin, flush=True)
        said, events, saving, pid = [], 0, False, 0
        timer = None
        for line in iter(self._readline, ""):
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "born":
                pid = int(rest)
                if kill_after is not None:
                    timer = threading.Timer(kill_after, os.kill, (pid, signal.SIGKILL))
                    timer.start()
            elif word == "enter":
                saving = True
            elif word == "leave":
                saving, events = False, int(rest)
            elif word == "said":
                said.append(json.loads(rest))
            elif word == "gone":
                if timer is not None:  # the parent reaps the child only after this, so that the number is still its own
                    timer.cancel()
                    timer.join()
                print("reap", file=self._parent.stdin, flush=True)
                return Ended(int(rest), saving, events, time.monotonic() - began, "\n".join(said))
            else:
                said.append(line.rstrip("\n"))
        raise AssertionError(f"the nursery died; its last child was {pid}")

    def _readline(self) -> str:
        ready, _, _ = select.select([self._parent.stdout], [], [], PATIENCE)
        assert ready, f"nothing came from the nursery for {PATIENCE:.0f} s"
        return self._parent.stdout.readline()


# ------------------------------------------------------------------------------------------------- in the other process


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _type_in(order: dict) -> int:
    """A child: the command line."""
    from training.__main__ import main
    from training.run.report.journal import Journal

    write = Journal.write

    def interrupt(self, step, **values):
        write(self, step, **values)
        if step == order["interrupt_at"]:
            os.kill(os.getpid(), signal.SIGINT)

    Journal.write = interrupt
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the bar
    code = main(order["arguments"])
    sys.stdout.flush()
    return code


def _live(order: dict) -> int:
    """A child: one run, with lines to the pipe on entering and leaving a save."""
    from training.config.train_config import TrainConfig
    from training.run.checkpoints import checkpoint
    from training.run.train import train

    kill, inside, count = Kill(**order["kill"]), threading.local(), [0]
    save = checkpoint.save

    def told(*given, **named):
        _say("enter")
        inside.now = True
        try:
            return save(*given, **named)
        finally:
            inside.now = False
            _say(f"leave {count[0]}")

    def watch(event: str, _) -> None:
        if getattr(inside, "now", False) and (event == "open" or event.startswith(("os.", "shutil."))):
            count[0] += 1
            if count[0] == kill.event:
                if kill.delay:
                    threading.Timer(kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = told
    sys.addaudithook(watch)

    class Teller:
        pictures = False

        def on_step(self, step, total, loss, eta): ...
        def on_picture(self, picture): ...
        def on_measure(self, done, total): ...
        def on_message(self, text):
            _say(f"said {json.dumps(text)}")

    train(TrainConfig.parse(order["config"]), Teller())
    return 0


def _main() -> None:
    sys.path.append(str(ROOT))
    # all that a run imports on its way, so that a fork has it
    import diffusers.models.unets.unet_2d_condition  # noqa: F401
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch.utils.tensorboard

    import training.__main__
    import training.run.train  # noqa: F401

    torch.set_num_threads(1)
    _say("ready")
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _say(f"born {os.getpid()}")
                order = json.loads(line)
                code = _type_in(order) if "arguments" in order else _live(order)
            except BaseException:
                import traceback

                _say(f"said {json.dumps(traceback.format_exc())}")
            finally:
                os._exit(code)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _say(f"gone {status}")
        sys.stdin.readline()
        os.waitpid(child, 0)
    os._exit(0)  # Python's own way out takes torch apart first


if __name__ == "__main__":
    _main()
