"""What somebody probably meant who named a setting that does not exist."""

from __future__ import annotations

from difflib import get_close_matches
from inspect import isclass
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError

from . import first_error

__all__ = ["complaint"]


def complaint(error: ValidationError, model: type[BaseModel]) -> str:
    """`first_error`, and for an unknown field the known one that is nearest to it: of that very name, in its section,
    then anywhere."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return first_error(error)
    *section, name = (str(part) for part in first["loc"])
    known = _fields(model)
    here = [field for field in known if field.split(".")[:-1] == section]
    # sections count as names too: "optimiser" is no field of its own
    here += [field for field in {".".join(each.split(".")[:-1]) for each in known} if field and not section]
    last = {field.rpartition(".")[2]: field for field in [*known, *here]}  # here wins where a name is there twice
    near = [name] if name in last else get_close_matches(name, [field.rpartition(".")[2] for field in here], 1)
    near = near or get_close_matches(name, last, 1)
    meant = f"; perhaps {last[near[0]]} is meant" if near else ""
    value = first.get("input")
    got = "" if isinstance(value, dict) else f" (got {value!r})"
    return f"{'.'.join([*section, name])}: there is no such setting{got}{meant}"


def _fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all leaves."""
    names = []
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)  # a section may be none
        classes = [kind for kind in kinds if isclass(kind) and not get_origin(kind)]  # dict[...] is one on Python 3.10
        sections = [kind for kind in classes if issubclass(kind, BaseModel)]
        if sections:
            names += _fields(sections[0], f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
