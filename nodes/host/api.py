"""The host's schema API, imported in this one place, and what is said where a host lacks something that we need.

`comfy_api.latest` changes from one host to the next; `comfy_api.v0_0_2` is the newest fixed one that every host from
0.3.75 on has. A host that has dropped it gives its latest instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...training.errors import BadInput

try:
    from comfy_api.v0_0_2 import ComfyExtension, io, ui
except ImportError:
    from comfy_api.latest import ComfyExtension, io, ui

__all__ = ["OLDEST_HOST", "ComfyExtension", "host_version", "io", "is_too_old", "lacking", "loading", "ui"]

OLDEST_HOST = "0.3.75"


def host_version() -> str:
    """Such as "0.3.75"; "of unknown version" where the host does not say."""
    try:
        from comfyui_version import __version__
    except ImportError:
        return "of unknown version"
    return str(__version__)


def is_too_old(version: str) -> bool:
    """Whether a host of this version is older than OLDEST_HOST; of one that does not say, nobody knows."""
    numbers = version.split(".")
    if len(numbers) < 3 or not all(number.isdecimal() for number in numbers[:3]):
        return False
    return [int(number) for number in numbers[:3]] < [int(number) for number in OLDEST_HOST.split(".")]


def lacking(problem: Exception) -> str:
    """What an import failed at, as "cannot import name 'Flux' from 'comfy.ldm.flux.model'": without the file's path."""
    return str(problem).split(" (")[0].strip() or type(problem).__name__


@contextmanager
def loading(node: type) -> Iterator[None]:
    """Around the imports of what `node` does: a host's boot does without them, and where this host lacks something of
    them, that is one sentence (BadInput), and a matter of this node alone.
    """
    try:
        yield
    except (ImportError, AttributeError) as problem:
        name = node.define_schema().display_name
        raise BadInput(
            f"{name} does not work in this ComfyUI ({host_version()}): {lacking(problem)}. The other nodes of Ref2V "
            f"are not touched by that; look for a newer Ref2V."
        ) from problem
