"""What the checks of the NaN Guard share. Boots the host (in_host.py).

The folder of checkpoints is the third argument of guard_in_host.py.
"""

import logging
import sys
from pathlib import Path

CHECKPOINT = Path(sys.argv.pop(3)) / "sd15_min_strided.ckpt"

from in_host import pack, torch  # noqa: E402  (boots the host)
from precision_nodes import LOADED_STATE, guards  # noqa: E402

guard_of = pack("nodes.host.patching.provenance").guard_of
STOP, RERUN, REPORT = guards.STOP, guards.RERUN, guards.REPORT
NAN = float("nan")
LARGE = 2.0**16  # a power of two: the weights stay exact in FP16
TAESD, KL, WAN = "TAESD", "AutoencoderKL", "Wan 2.1 and Qwen Image (WanVAE)"


class Logged(logging.Handler):
    """Within the block, the warnings of the pack."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("ref2v").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("ref2v").removeHandler(self)

    def emit(self, record):
        if record.levelno == logging.WARNING:
            self.lines.append(record.getMessage())


class Counted:
    """Within the block, how often layers ran, and how many hooks they then had."""

    def __enter__(self):
        self.calls = self.hooks = 0
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_):
        self._handle.remove()

    def _count(self, layer, _args):
        self.calls += 1
        self.hooks += len(layer._forward_hooks) + len(layer._forward_pre_hooks)


def snapshot(thing, module, patcher):
    """Everything about a MODEL, VAE or CLIP that a guard must leave alone."""
    layers = [
        (name, id(layer), sorted(layer.__dict__), len(layer._forward_hooks), len(layer._forward_pre_hooks))
        for name, layer in module.named_modules()
    ]
    weights = [
        (name, id(weight), weight.dtype, str(weight.device), str(weight.double().sum().item()), weight.data_ptr())
        for name, weight in [*module.named_parameters(), *module.named_buffers()]
    ]
    booked = [(name, str(module.__dict__[name])) for name in LOADED_STATE if name in module.__dict__]
    options = [(name, str(value)) for name, value in sorted(patcher.__dict__.items())]
    return repr((layers, weights, booked, options, [(k, id(v)) for k, v in sorted(vars(thing).items())]))


def same(a, b):
    return bool(torch.equal(a, b) and a.dtype == b.dtype and torch.isfinite(a).all() and a.std() > 0)


def spoil(network, key, factor):
    network.get_parameter(key).mul_(factor)


def poison(network, key):
    network.get_parameter(key).view(-1)[3] = NAN
