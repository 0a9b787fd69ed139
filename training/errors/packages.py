"""Packages of others: what is said where one is missing, or installed and broken."""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import BadInput

HOW = "with the Python that runs this"
# They import others on their way, so where an error passed through them it is seldom theirs.
_CARRIERS = {"diffusers", "transformers", "peft", "accelerate", "huggingface_hub", "torch", "numpy"}


@contextmanager
def needed(package: str, by: str) -> Iterator[None]:
    """Around an import of `package`, and what it imports late: where that fails, BadInput names the package at fault.

    diffusers and peft import xformers, bitsandbytes and others wherever they are installed, also for networks that
    use nothing of them: one that does not fit the installed torch then raises through us.

    by: what needs the package, as the sentence begins.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(_reason(package, by, error)) from error


def require(package: str, by: str) -> None:
    """BadInput where a package is not installed; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise BadInput(_missing(package, by))


def _missing(package: str, by: str) -> str:
    return f"{by} needs the package {package}, which is not installed: `python -m pip install {package}`, {HOW}."


def _reason(package: str, by: str, error: Exception) -> str:
    chain: list[BaseException] = [error]  # diffusers and torch wrap what they meet
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    first = chain[-1]
    if isinstance(first, ModuleNotFoundError) and first.name == package:
        return _missing(package, by)
    culprit = _at_fault(chain) or package
    words = (str(first).splitlines() or [""])[0]
    message = f"{type(first).__name__}: {words}"[:300].rstrip(".")
    way = "" if culprit == package else f"which imports {culprit}, and "
    return (
        f"{by} needs the package {package}, {way}{culprit} is broken or does not fit the installed torch ({message}): "
        f"install {culprit} anew{'' if culprit == package else ', or remove it'}, {HOW}."
    )


def _at_fault(chain: list[BaseException]) -> str | None:
    """The installed package in which an error arose: the last one on its way that does not merely carry others.

    chain: the error that came and its causes, the first one last.
    """
    if isinstance(chain[-1], ModuleNotFoundError) and chain[-1].name:
        return chain[-1].name.partition(".")[0]
    roots = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    own, packages = Path(__file__).resolve().parents[1], []
    for frame in (frame for error in chain for frame, _ in traceback.walk_tb(error.__traceback__)):
        file, name = Path(frame.f_code.co_filename), frame.f_globals.get("__name__") or ""
        if not file.is_file():
            continue  # <frozen importlib>
        inside = file.resolve().parents
        if own in inside or (standard in inside and not any(root in inside for root in roots)):
            continue
        packages.append(name.partition(".")[0])
    others = [name for name in packages if name and name not in _CARRIERS and name != "__main__"]
    return others[-1] if others else None
