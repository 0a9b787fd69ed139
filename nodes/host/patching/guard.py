"""What is done about a model whose output is not finite: say where it comes from, and stop, go on in FP32, or go on.

While all is finite, the output alone is looked at. Only after a NaN is the same call run once more, with hooks that
find the layer. MODEL, VAE and CLIP each have a file beside this one that puts the guard around them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context

from ....training.errors import BadInput
from ....training.memory.machine import container
from ....training.precision.dtypes import dtype_name
from ....training.precision.guard import BadLayer, FirstBadLayer, is_finite, tensors
from ..progress import NOT_A_FAILURE, show_text
from ..wording import first_line
from .exact_float32 import exact_float32
from .patcher import patcher_of_copy

__all__ = ["ON_NAN", "REPORT", "RERUN", "STOP", "Call", "Guard", "GuardedModule", "at_work", "float32_patcher"]

STOP, RERUN, REPORT = "stop", "re-run in FP32", "report only"
ON_NAN = (STOP, RERUN, REPORT)
_LOG = logging.getLogger("ref2v")


@dataclass(frozen=True)
class Call:
    """One call of a module, and how to do it again.

    part: what a person calls the module, given the name of a layer in it ("" where none is known). given: what came in,
    by the names that a person has for it. again: the same call once more; in_float32: the same with FP32 weights and
    compute, BadInput where that cannot be had. when: as "at sigma 14.6 (step 1 of 8)".
    """

    part: Callable[[str], str]
    module: torch.nn.Module
    dtype: torch.dtype
    given: dict[str, Any]
    again: Callable[[], Any]
    in_float32: Callable[[], Any]
    when: str = ""


class Guard:
    """The choice of one NaN Guard node, shared by the models that it guards. `node_id`: where its text is shown."""

    def __init__(self, on_nan: str, node_id: str | None = None) -> None:
        self.on_nan = on_nan
        self.node_id = node_id
        # The work in which a layer was named last, and its dtype: the next steps are alike, and not looked into again.
        self._told: tuple[Any, torch.dtype] | None = None
        self._shown: tuple[str, dict[str, str]] = ("", {})  # prompt; what was said first of each part in it

    def __deepcopy__(self, _memo: dict) -> Guard:
        return self  # the host deep-copies what hangs on a model when it clones it

    def answer(self, call: Call, result: Any) -> Any:
        """What to go on with instead of `result`, which is not finite. Raises BadInput with one sentence."""
        spoilt = [name for name, value in call.given.items() if not is_finite(value)]
        told = self._told is not None and self._told[0] == _working(call) is not None
        bad = None if spoilt or told else _locate(call)
        ran_in = self._told[1] if told else (bad and bad.dtype) or call.dtype
        self._told = (_working(call), ran_in)
        sentence = _sentence(call, result, spoilt, bad, ran_in)
        if self.on_nan == REPORT:
            if not told:
                self._tell(f"{sentence}.", call)
            return result
        if self.on_nan == STOP or spoilt:
            raise BadInput(f"{sentence}.")
        if torch.float32 == call.dtype == ran_in:
            raise BadInput(f"{sentence}; it runs in FP32 already, so to run it again cannot help.")
        fixed = self._in_float32(call, sentence)
        sentence = f"{sentence}. It was run again in FP32, and the work goes on with that."
        if told:
            _LOG.warning(sentence)
        else:
            self._tell(sentence, call)
        return fixed

    def _in_float32(self, call: Call, sentence: str) -> Any:
        try:
            with exact_float32():
                fixed = call.in_float32()
        except BadInput as refused:
            raise BadInput(f"{sentence}; it could not be run again in FP32: {refused}") from refused
        except NOT_A_FAILURE:
            raise  # the host knows what to do
        except Exception as failure:
            raise BadInput(f"{sentence}; to run it again in FP32 failed: {first_line(failure)}") from failure
        if not is_finite(fixed):
            raise BadInput(f"{sentence}; in FP32 it gives {_holds(fixed)} as well.")
        return fixed

    def _tell(self, line: str, call: Call) -> None:
        """In the log, and on the node, below what was said there of other parts."""
        _LOG.warning(line)
        working = get_executing_context()
        prompt = "" if working is None else working.prompt_id
        if self._shown[0] != prompt:
            self._shown = (prompt, {})
        self._shown[1][call.part("")] = line
        show_text(self.node_id, "\n".join(self._shown[1].values()))


def _working(call: Call) -> tuple[str, str, str] | None:
    """Which part is at work, for which node of which prompt; None outside of a graph."""
    working = get_executing_context()
    return None if working is None else (working.prompt_id, working.node_id, call.part(""))


def _locate(call: Call) -> BadLayer | None:
    with FirstBadLayer(call.module) as bad:
        call.again()
    return bad.found


def _sentence(call: Call, result: Any, spoilt: list[str], bad: BadLayer | None, dtype: torch.dtype) -> str:
    """One sentence, without its full stop."""
    part = call.part("" if bad is None else bad.name or bad.inside or "")
    when = f" {call.when}" if call.when else ""
    if spoilt:
        return (
            f"The {part} was given NaN or infinity{when}: the {' and the '.join(spoilt)} that came in held it already, "
            f"so look at the nodes before"
        )
    sentence = f"The {part} gave {_holds(result)} in {dtype_name(dtype)}{when}"
    if bad is None:
        return sentence
    sentence = f"{sentence}, first in {bad}"
    if bad.weight_holds.startswith("holds"):
        return f"{sentence}, so the file is damaged or lacks it, or a LoRA has spoilt it"
    return f"{sentence}; select bf16 or fp32 for it" if bad.overflowed and bad.dtype == torch.float16 else sentence


def _holds(result: Any) -> str:
    return "NaN" if any(torch.isnan(tensor).any() for tensor in tensors(result)) else "infinity"


class GuardedModule:
    """The guard around the module of a VAE or CLIP, as `ref2v_guard` of the proxy that the host calls instead."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __deepcopy__(self, _memo: dict) -> GuardedModule:
        return self

    def wrap(self, host_object: Any) -> Any:
        """A guarded VAE or CLIP like `host_object`."""
        raise NotImplementedError

    def unwrap(self, host_object: Any) -> Any:
        """The VAE or CLIP that `wrap` made, unguarded."""
        raise NotImplementedError


def float32_patcher(
    patcher: Any, part: str, module: torch.nn.Module, copied: Callable[[Any], torch.nn.Module], when: str = ""
) -> Any:
    """A patcher of `copied(patcher)`, a copy of `module` with weights in FP32, with compute in FP32 too and the same
    patches (LoRA). `patcher`: the one at work, None where the host does not say which that is. `part`: "MODEL".

    BadInput where it cannot be had: hooks at work that change the weights (`when`), or too little memory.
    """
    if patcher is None:
        raise BadInput(f"the host does not say which {part} is at work.")
    if patcher.current_hooks is not None:
        raise BadInput(f"hooks change its weights{when} (a LoRA on the conditioning).")
    _check_free_memory(module)
    private = copied(patcher)
    for each in private.modules():
        if isinstance(each.__dict__.get("dtype"), torch.dtype):
            each.dtype = torch.float32  # what the host asks, beside the weights
    return patcher_of_copy(patcher, private, patched=True)


def _check_free_memory(module: torch.nn.Module) -> None:
    """BadInput when an FP32 copy of `module` does not fit into the memory that is free."""
    needed = 4 * sum(weight.numel() for weight in module.parameters())
    free = comfy.model_management.get_free_memory(torch.device("cpu"))
    if (limits := container()) is not None:
        free = min(free, limits.free)
    if needed > free:
        raise BadInput(
            f"its FP32 copy takes {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free; choose a "
            f"finer dtype for it beforehand."
        )


@contextmanager
def at_work(patcher: Any, memory: float) -> Iterator[None]:
    """Within the block, the model of `patcher` is on its device, with `memory` bytes to work in; afterwards, those are
    there again that the host had in use.
    """
    in_use = [
        used for used in comfy.model_management.loaded_models(only_currently_used=True) if used is not None
    ]  # None: a patcher that has died while its model was in use
    comfy.model_management.load_models_gpu([patcher], memory_required=memory)
    try:
        yield
    finally:
        comfy.model_management.load_models_gpu(in_use, memory_required=memory)
