"""Arguments of the Python API where None means "not given", checked before anything takes them for None."""

from collections.abc import Sequence


def refuse_empty(error: type[Exception], **given: object) -> None:
    """Raise `error` for the first of these arguments that is "", 0, () or another value that is none.

    Pass only arguments to which no number below 1 and no empty sequence means anything.
    """
    for name, value in given.items():
        if isinstance(value, Sequence | int | float) and not value and value is not False:
            raise error(f"{name} is {value!r}; pass a value, or leave {name} out")
