"""Node schemas that load on every host version from 0.3.75 on.

The host's schema classes gained keywords over time (`advanced`, `search_aliases`, ...), and an unknown keyword is a
TypeError that takes the whole pack out of the menu. So a node states everything that it means, through the two
functions below, and what the host at hand does not know is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from ...training.errors import BadInput, TrainingFailed
from .api import io
from .wording import for_people

__all__ = ["Node", "declare", "describe", "node_schema", "seed_input"]


@cache
def _known_keywords(factory: Callable[..., Any]) -> frozenset[str] | None:
    """Parameter names of `factory`, or None where it takes any (`**kwargs`)."""
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def declare(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a schema class of the host, without the keywords that it does not have.

    `declare(io.Int.Input, "epochs", default=8, min=1, advanced=True)` gives the input on old hosts too, where
    `advanced` is unknown. Positional arguments are passed as they are (use them for the id only: the order of the
    others differs between versions). Keywords that are None are dropped as well.
    """
    known = _known_keywords(factory)
    used = {name: value for name, value in kwargs.items() if value is not None and (known is None or name in known)}
    return factory(*args, **used)


def _check_choice(name: str, value: Any, options: list[str]) -> None:
    """BadInput when a combo input got something else: older hosts compare with the lists of old-style nodes only."""
    if value not in options:
        raise BadInput(f"{name} must be one of {', '.join(map(str, options))}; got {value!r}.")


class Node(io.ComfyNode):
    """What all our nodes do around their `execute`: before it, refuse what is in no list of a combo; after it, take the
    server's folders out of a sentence for people.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        execute = vars(cls).get("execute")
        if execute is not None and not hasattr(execute.__func__, "__wrapped__"):  # the host clones classes as they are
            cls.execute = classmethod(_around(execute.__func__))


def _around(execute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute)
    def checked(cls: type[Node], *args: Any, **inputs: Any) -> Any:
        try:
            _check_choices(cls, inputs)
            return execute(cls, *args, **inputs)
        except (BadInput, TrainingFailed) as error:
            error.args = (for_people(str(error)),)
            raise

    return checked


def _check_choices(node: type[Node], inputs: dict[str, Any]) -> None:
    """BadInput for what is in no list of the node's combos: older hosts do not look, and none does at what comes by a
    link. A combo that the node's own `validate_inputs` names is left to the node, as the host leaves it.
    """
    left = inspect.signature(node.validate_inputs).parameters
    schema = node.define_schema()  # lists of files grow meanwhile
    for each in schema.inputs:
        if not isinstance(each, io.Combo.Input) or each.id in left or inputs.get(each.id) is None:
            continue
        value = inputs[each.id]
        several = isinstance(value, (list, tuple)) and (schema.is_input_list or isinstance(each, io.MultiCombo.Input))
        for one in value if several else [value]:
            _check_choice(each.id, one, each.options or [])


def seed_input(tooltip: str, most: int = 2**53 - 1, **more: Any) -> Any:
    """An input `seed`, 0 to `most`. The front end does not draw it anew after each run, as it would without being told:
    two runs could not be compared, and nothing that was made with it would be used again.
    """
    inputs = {"default": 0, "min": 0, "max": most, "control_after_generate": False, "tooltip": tooltip}
    return declare(io.Int.Input, "seed", **inputs, **more)


def describe(node: type) -> str:
    """The node's description: its class docstring, one line a paragraph (the front end wraps the lines itself)."""
    paragraphs = inspect.cleandoc(node.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def node_schema(
    node: type,
    *,
    node_id: str,
    display_name: str,
    category: str,
    inputs: list[Any],
    outputs: list[Any],
    **more: Any,
) -> io.Schema:
    """Schema of the node class `node`; its docstring becomes the description.

    `more` may hold any keyword of any host version (`hidden`, `is_output_node`, `search_aliases`, ...); what this
    host does not know is dropped. An id must not name both an input and an output: old hosts refuse that.
    """
    return declare(
        io.Schema,
        node_id=node_id,
        display_name=display_name,
        category=category,
        description=describe(node),
        inputs=inputs,
        outputs=outputs,
        **more,
    )
