"""AdamW for bfloat16 weights that does what AdamW does for float32 ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ...config.choices import Moments, Rounding
from ...errors import BadInput
from .adamw import step_coefficients, update_
from .noise import Block, block_index, stream_key, wrapped
from .rounding import join_float32, split_float32

__all__ = ["BF16AdamW"]

# Elements updated at once. Eager on a CPU, where each operation is a pass of its own: few enough to stay in its cache.
# Else a large parameter by itself, and small ones joined, since each call costs more than their arithmetic.
CPU_CHUNK, CHUNK, LARGE = 2**16, 2**22, 2**16
_REST = {"kahan": "compensation", "master": "master"}


@dataclass
class _Piece:
    """A run of elements of one parameter as flat views; `start` is the first one's index in the parameter."""

    parameter: nn.Parameter
    start: int
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.tensors["weights"])


class BF16AdamW(torch.optim.Optimizer):
    """The whole update, decay and step, in float32, rounded once. Parameters are bfloat16 or float32.

    What keeps an update that is smaller than the gap between two bfloat16 numbers:

    "stochastic"  rounds up or down at random, right on average (10 bytes a parameter with float32 moments)
    "kahan"       keeps what rounding dropped, all 16 bits of it, beside the weight (12 bytes); the weights are then
                  those of "master", to the bit
    "master"      keeps the weights in float32 as well (14 bytes)

    Whoever averages, saves or measures the weights asks `exact` for them: the bfloat16 parameter of a kahan or master
    run stands still where steps are smaller than its gap.

    `moments` "bf16" keeps both moments in bfloat16, stochastically rounded: 4 bytes less. Rounded to nearest, the
    second moment could not fall: (1 - beta2) of it is less than half of the gap to the next number.

    The noise is a function of `seed`, the step, the parameter's name in `names` and the element's index, so that a
    resumed run and every way to split a tensor round alike. `blocks` gives, by name, where the local piece of a split
    parameter lies. `compiled` fuses the update into one kernel (needs what torch.compile needs; a minute at the first
    step); its results differ in float32's last places.

    Raises ValueError for a parameter of another dtype or without a name; at its first step BadInput where torch.compile
    does not work.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rounding: Rounding = "stochastic",
        moments: Moments = "fp32",
        seed: int = 0,
        blocks: Mapping[str, Block] | None = None,
        compiled: bool = False,
    ):
        if rounding not in get_args(Rounding) or moments not in get_args(Moments):
            raise ValueError(f"expected rounding and moments of {Rounding} and {Moments}, got {rounding}, {moments}")
        self.names, self.seed, self.blocks = names, seed, dict(blocks or {})
        self.rounding, self.moments = rounding, moments
        self._compiled = torch.compile(update_, dynamic=True) if compiled else None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter not in names:
                raise ValueError(f"expected a name for every parameter, found none for one of {tuple(parameter.shape)}")
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"expected bfloat16 or float32, got {names[parameter]} in {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient; the rest stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    state = self._state_of(parameter)
                    state["step"] += 1
                    alike.setdefault((int(state["step"]), parameter.dtype, parameter.device), []).append(parameter)
            for (step, dtype, _), parameters in alike.items():
                coefficients = step_coefficients(step, group["lr"], group["betas"], group["eps"], group["weight_decay"])
                rounding = self.rounding if dtype == torch.bfloat16 else None
                for pieces in self._chunks(parameters):
                    self._update(pieces, coefficients, step, rounding)
        return loss

    @torch.no_grad()
    def begin_from(self, exact: Mapping[nn.Parameter, Tensor]) -> None:
        """Begin at these float32 weights, of which the parameters hold the nearest bfloat16 numbers, before any step.

        What `rounding` keeps beside a weight keeps the difference; "stochastic" keeps none.
        """
        for parameter, value in exact.items():
            if parameter.dtype != torch.bfloat16 or self.rounding == "stochastic":
                continue
            state = self._state_of(parameter)
            if self.rounding == "master":
                state["master"].copy_(value)
                continue
            nearest, rest = split_float32(value.float())
            parameter.copy_(nearest)
            state["compensation"].copy_(rest)

    @torch.no_grad()
    def exact(self, parameter: nn.Parameter) -> Tensor:
        """The weight as the optimizer has it, in float32: with what `rounding` keeps beside the bfloat16 number."""
        state = self.state.get(parameter, {})
        if "master" in state:
            return state["master"]
        if "compensation" in state:
            return join_float32(parameter.detach(), state["compensation"])
        return parameter.detach().float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which however casts the state to the parameter's dtype: float32 moments would lose their use."""
        super().load_state_dict(state_dict)
        ours = [p for group in self.param_groups for p in group["params"]]
        theirs = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(ours, theirs, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {
                    key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                    for key, value in state_dict["state"][number].items()
                }

    # ---- the parts of it --------------------------------------------------------------------------------------------

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            shape, device = parameter.shape, parameter.device
            moments = torch.bfloat16 if self.moments == "bf16" else torch.float32
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["exp_avg"] = torch.zeros(shape, dtype=moments, device=device)
            state["exp_avg_sq"] = torch.zeros(shape, dtype=moments, device=device)
            if parameter.dtype == torch.bfloat16 and self.rounding == "kahan":
                state["compensation"] = torch.zeros(shape, dtype=torch.int16, device=device)
            if parameter.dtype == torch.bfloat16 and self.rounding == "master":
                state["master"] = parameter.detach().float().contiguous()
        return state

    def _chunks(self, parameters: list[nn.Parameter]) -> Iterator[list[_Piece]]:
        """All elements, as lists of pieces. A list is updated before the next one is asked for."""
        in_cache = self._in_cache(parameters[0].device)
        room = most = CPU_CHUNK if in_cache else CHUNK
        chunk: list[_Piece] = []

        def alone(parameter: nn.Parameter) -> bool:
            # the indices of a piece of a split parameter take a computation of their own
            large = parameter.numel() >= LARGE and not in_cache
            return large or self.names[parameter] in self.blocks or not parameter.is_contiguous()

        for parameter in sorted(parameters, key=alone):  # those that are joined come first, and so stay together
            whole = alone(parameter)
            if chunk and whole:
                yield chunk
                room, chunk = most, []
            tensors = {k: t.view(-1) for k, t in self.state[parameter].items() if k != "step"}
            tensors["weights"] = parameter.detach().contiguous().view(-1)
            tensors["gradient"] = _gradient_of(parameter).contiguous().view(-1)
            start, count = 0, parameter.numel()
            while start < count:
                if not room:
                    yield chunk
                    room, chunk = most, []
                stop = count if whole else min(start + room, count)
                chunk.append(_Piece(parameter, start, {k: t[start:stop] for k, t in tensors.items()}))
                room, start = max(room - (stop - start), 0), stop
            if whole:
                yield chunk
                room, chunk = most, []
            if not parameter.is_contiguous():  # the flat weights were a copy
                parameter.copy_(tensors["weights"].view(parameter.shape))
        if chunk:
            yield chunk

    def _in_cache(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._compiled is None

    def _update(
        self, pieces: list[_Piece], coefficients: tuple[float | Tensor, ...], step: int, rounding: Rounding | None
    ) -> None:
        """AdamW on one chunk: joined where it has several pieces, updated in place, laid back."""
        joined = {name: _join([piece.tensors[name] for piece in pieces]) for name in pieces[0].tensors}
        first, second, index = self._key(pieces, step)
        update = update_
        if self._compiled is not None:  # a number would be compiled in, and each step would compile anew
            update, device = self._compiled, joined["weights"].device
            coefficients = torch.tensor(coefficients, device=device).unbind()
            first, second = (torch.as_tensor(half, dtype=torch.int32, device=device) for half in (first, second))
        try:
            update(
                joined["weights"], joined.get(_REST.get(rounding or "", "")), joined["gradient"],
                joined["exp_avg"], joined["exp_avg_sq"], coefficients, first, second, index, rounding,
            )
        except torch._dynamo.exc.TorchDynamoException as error:
            first_line = str(error).strip().partition("\n")[0][:200]
            raise BadInput(
                f"optimizer.compiled: expected a machine on which torch.compile works, but it failed ({first_line}); "
                "false trains without it."
            ) from error
        if len(pieces) > 1:
            lengths = [len(piece) for piece in pieces]
            for name in joined.keys() - {"gradient"}:
                torch._foreach_copy_([piece.tensors[name] for piece in pieces], list(joined[name].split(lengths)))

    def _key(self, pieces: list[_Piece], step: int) -> tuple[Tensor | int, Tensor | int, Tensor | None]:
        """The two halves of the key and the index of each element, for the noise.

        Where a piece starts goes into its key, so that one running index serves all of them.
        """
        keys = [stream_key(self.seed, step, self.names[piece.parameter]) for piece in pieces]
        device = pieces[0].parameter.device
        if len(pieces) == 1:
            piece, (first, second) = pieces[0], keys[0]
            block = self.blocks.get(self.names[piece.parameter])
            index = None if block is None else block_index(tuple(piece.parameter.shape), block, device)
            return wrapped(first + piece.start), second, index
        firsts, before = [], 0
        for piece, (first, _) in zip(pieces, keys, strict=True):
            firsts.append(wrapped(first + piece.start - before))
            before += len(piece)
        table = torch.tensor([firsts, [second for _, second in keys]], dtype=torch.int32, device=device)
        lengths = torch.tensor([len(piece) for piece in pieces], device=device)
        piece_of = torch.repeat_interleave(lengths, output_size=before)
        return table[0][piece_of], table[1][piece_of], None


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None  # only those that have one are updated
    return parameter.grad


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
