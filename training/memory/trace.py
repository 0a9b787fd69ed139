"""A forward pass on tensors without data: everything is computed but numbers, and every byte is counted.

FakeTensorMode on the device "cpu", never on "meta" or a fake "cuda": there PyTorch's attention falls to its math
kernel, which holds all scores. Attention itself is replaced by a stand-in with the right output and, while it runs, the
bytes of the closed form (attention.py): so every backend can be traced, also those that this machine does not have, and
chunks follow the free memory of the machine that is asked about, with nothing of the host patched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .attention import attention_peak
from .attention_call import AttentionCall
from .machine import Machine
from .meter import StorageMeter
from .vae_attention import vae_attention_bytes

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "WEIGHTS",
    "AttentionStandIn",
    "Trace",
    "attention_call",
    "fake_like",
    "fake_tensors",
]

WEIGHTS, ACTIVATIONS, ATTENTION = "weights", "activations", "attention"


@dataclass(frozen=True)
class Trace:
    """What a traced pass holds at its peak beside the weights. terms: label -> bytes.

    outside: the most that lives while no attention runs. moments: (what lives when an attention call begins, the call).
    room: bytes that were free when the pass began; None: as much as one likes.
    """

    terms: dict[str, int]
    outside: int
    moments: tuple[tuple[int, AttentionCall], ...] = ()
    backend: str = "pytorch"
    room: int | None = None

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def grown(self, area: float, batch: float) -> int:
        """Bytes for pictures of `area` times the tokens and `batch` times as many. For factors of 1 and more it is
        never less than a trace would give: what does not grow with the picture (text, weights cast for one layer) is
        taken to grow too. So for factors below 1 it is never more, but for attention that is cut by what is free."""
        factor = area * batch
        most = self.outside * factor
        for held, call in self.moments:
            joint = call.k_tokens == call.q_tokens
            larger = replace(
                call,
                batch=_up(call.batch * batch),
                q_tokens=_up(call.q_tokens * area),
                k_tokens=_up(call.k_tokens * area) if joint else call.k_tokens,
                free=max(0, (call.free + held if self.room is None else self.room) - _up(held * factor)),
            )
            most = max(most, held * factor + burst(larger, self.backend))
        return _up(most)


def _up(value: float) -> int:
    return -int(-value // 1)


def burst(call: AttentionCall, backend: str) -> int:
    """What an attention call allocates beside its inputs. backend: one of BACKENDS, or "VAE " and one of a VAE's."""
    if backend.startswith("VAE "):
        return vae_attention_bytes(call, backend.removeprefix("VAE "))
    return attention_peak(call, backend).total - call.inputs


@dataclass
class AttentionStandIn:
    """Takes the place of an attention function in a trace.

    half_math: see AttentionCall. Raises BadInput for a backend of another name, when it is called.
    """

    meter: StorageMeter
    backend: str
    machine: Machine
    half_math: bool = True
    moments: dict[AttentionCall, int] = field(default_factory=dict)

    def __call__(self, call: AttentionCall) -> None:
        """Count one call; its inputs are alive, its output is not yet made."""
        held = self.meter.live - self.meter.labels[WEIGHTS]
        # what the activations hold is not free when the call is made, whatever the host does with the weights
        free = max(0, self.machine.believed - held)
        call = replace(call, gpu=self.machine.gpu, half_math=self.half_math, free=free)
        self.meter.burst(ATTENTION, burst(call, self.backend))
        alike = replace(call, free=0)
        if held >= self.moments.get(alike, -1):
            self.moments[alike] = held

    def trace(self) -> Trace:
        """What was counted so far."""
        terms = {label: size for label, size in self.meter.terms.items() if label != WEIGHTS}
        moments = tuple(
            (held, replace(call, free=max(0, self.machine.believed - held))) for call, held in self.moments.items()
        )
        outside = self.meter.peak_without_burst - self.meter.labels[WEIGHTS]
        return Trace(terms, outside, moments, self.backend, self.machine.believed)


def attention_call(
    q: torch.Tensor, k: torch.Tensor, heads: int, *, split_heads: bool = False, upcast: bool = False
) -> AttentionCall:
    """q, k: [b, N, h d], or [b, h, N, d] with split_heads."""
    size = q.element_size()
    if split_heads:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    else:
        shape = (q.shape[0], heads, q.shape[1], k.shape[1], q.shape[2] // heads)
    return AttentionCall(*shape, size, upcast=upcast and size == 2, split_heads=split_heads)


def fake_tensors(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """id of every parameter and buffer -> its like without data: what copy.deepcopy takes as its memo.

    Call it in FakeTensorMode, and not in inference mode, whose tensors cannot be parameters. The module is only read.
    """
    return {id(tensor): fake_like(tensor, tensor.dtype) for tensor in [*module.parameters(), *module.buffers()]}


def fake_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype` without data; as for `fake_tensors`."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return torch.nn.Parameter(fake, False) if isinstance(tensor, torch.nn.Parameter) else fake
