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

from ...training.errors import BadInput
from .api import io
from .wording import word_errors

__all__ = ["check_choice", "declare", "describe", "node_schema"]


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
    kept = {name: value for name, value in kwargs.items() if value is not None and (known is None or name in known)}
    return factory(*args, **kept)


def check_choice(name: str, value: Any, options: list[str]) -> None:
    """BadInput when a combo input got something else: older hosts compare with the lists of old-style nodes only."""
    if value not in options:
        raise BadInput(f"{name} must be one of {', '.join(map(str, options))}; got {value!r}.")


def _check_choices(node: type) -> None:
    """Have `node` compare what its combos were given with their lists before it works: older hosts do not do it, and
    none does for what comes through a link.

    A combo that the node's own `validate_inputs` names is left to the node, as the host leaves it.
    """
    inner = node.execute.__func__
    if hasattr(inner, "ref2v_checks_choices"):  # the host asks for a schema more than once
        return
    left = set(inspect.signature(node.validate_inputs).parameters) if "validate_inputs" in node.__dict__ else set()

    def check(cls: type, given: dict[str, Any]) -> None:
        schema = cls.define_schema()  # lists of files grow meanwhile
        for each in schema.inputs:
            if not isinstance(each, io.Combo.Input) or each.id in left or given.get(each.id) is None:
                continue
            value = given[each.id]
            several = isinstance(value, (list, tuple)) and (
                schema.is_input_list or isinstance(each, io.MultiCombo.Input)
            )
            for one in value if several else [value]:
                check_choice(each.id, one, each.options or [])

    if inspect.iscoroutinefunction(inner):

        @wraps(inner)
        async def execute(cls: type, *args: Any, **inputs: Any) -> Any:
            check(cls, inputs)
            return await inner(cls, *args, **inputs)
    else:

        @wraps(inner)
        def execute(cls: type, *args: Any, **inputs: Any) -> Any:
            check(cls, inputs)
            return inner(cls, *args, **inputs)

    execute.ref2v_checks_choices = True
    node.execute = classmethod(execute)


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

    Every node comes by here, so from here on `node.execute` refuses what is in no list of its combos
    (`_check_choices`), and its sentences for people lose the server's folders (wording.py).
    """
    _check_choices(node)
    word_errors(node)
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
