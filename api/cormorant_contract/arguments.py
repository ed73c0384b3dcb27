"""Arguments of the Python API, checked where they are given: empty ones before anything takes them for None."""

import re
from collections.abc import Mapping, Sequence
from inspect import formatannotation
from numbers import Integral
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def refuse_empty(error: type[Exception], **given: object) -> None:
    """Raise `error` for the first of these arguments that is "", 0, () or another value that is none.

    Pass only arguments to which no number below 1 and no empty sequence means anything.
    """
    for name, value in given.items():
        if isinstance(value, Sequence | int | float) and not value and value is not False:
            raise error(f"{name} is {value!r}; pass a value, or leave {name} out")


def check_count(error: type[Exception], **given: object) -> None:
    """Raise `error` for the first of these arguments that is not a whole number from 1 on."""
    for name, value in given.items():
        if not isinstance(value, Integral) or value < 1:
            raise error(f"{name} is {value!r}; give a whole number from 1 on")


def check_types(error: type[Exception], types: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Raise `error` for the first argument that is not of its type, not a number, or a negative one."""
    for name, wanted in types.items():
        if name in given and not _fits(value := given[name], wanted):
            words = re.sub(r"(\w+\.)+", "", formatannotation(wanted))
            bound = ", 0 or more" if any(kind in (int, float) for kind in get_args(wanted) or [wanted]) else ""
            raise error(f"{name} is {value!r}; give {words}{bound}")


def _fits(value: object, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool) and value >= 0
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    return kind is Any or (isinstance(value, kind) and not (kind is Sequence and isinstance(value, str | bytes)))
