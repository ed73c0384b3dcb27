"""Rules over several fields, each written once: for pydantic (Python) and for the API server (CEL).

A model lists its rules in `rules()`; `base.Contract` checks them after its fields, `schema` prints them into the CRD.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from pydantic.alias_generators import to_snake

M = TypeVar("M")
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Generic[M]):
    """A value that a rule's message contains."""

    cel: str = ""
    """CEL expression of type string or int over `self`; empty in a rule without CEL."""

    get: Callable[[M], object]
    """Returns the same value from the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[M]):
    """A fact that holds between the fields of one model.

    Example: `Rule(cel="self.low <= self.high", holds=lambda m: m.low <= m.high, sentence="low {low} is above ...")`.
    """

    cel: str
    """The rule for the API server, over `self`. Empty where the schema says the same without CEL."""

    holds: Callable[[M], bool] = lambda _: True
    """The rule for pydantic, called only when every field is valid by itself. A rule over `oldSelf`, about what an
    update may not change, has none: only the API server knows the previous value."""

    sentence: str
    """What is wrong and what to do, with `{self.someField}` where the value of a field belongs, and `{name}` for one of
    `values`."""

    values: Mapping[str, Value[M]] = field(default_factory=dict)
    """The values of the sentence that are not fields, by name."""

    path: tuple[str, ...] = ()
    """The field to blame, from the model down, in the manifest's spelling; empty for the model itself."""

    def explain(self, model: M) -> str:
        """Write the sentence with this model's values."""
        return _PLACEHOLDER.sub(lambda match: str(self._value(match[1]).get(model)), self.sentence)

    def document(self) -> dict[str, str]:
        """Write the entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel}
        if names := _PLACEHOLDER.findall(self.sentence):
            # format() and not `+`: the API server's cost estimate takes string(int) for a string without end.
            terms = ", ".join(self._value(name).cel for name in names)
            entry["messageExpression"] = f"{_PLACEHOLDER.sub('%s', self.sentence)!r}.format([{terms}])"
        else:
            entry["message"] = self.sentence
        if self.path:
            entry["fieldPath"] = "".join(f".{part}" for part in self.path)
        return entry

    def _value(self, name: str) -> Value[M]:
        if name.startswith("self."):
            return Value(cel=name, get=attrgetter(to_snake(name.removeprefix("self."))))
        return self.values[name]


def each_once(path: str, sentence: str, *, key: str = "") -> Rule[Any]:
    """A rule without CEL: no two items of a list are equal, in the field `key` or as a whole. The API server enforces
    this itself, because the list is keyed or a set.

    `{twice}` in the sentence is the first item that is repeated.
    """

    def twice(model: Any) -> str:
        seen = set()
        for item in getattr(model, to_snake(path)) or ():
            name = getattr(item, key) if key else item
            if name in seen:
                return str(name)
            seen.add(name)
        return ""

    return Rule(
        cel="",
        holds=lambda model: not twice(model),
        sentence=sentence,
        values={"twice": Value(get=twice)},
        path=(path,),
    )


def one_of(*names: str, remedy: str) -> Rule[Any]:
    """The rule that one of several optional fields is set; the message has the number of those that are."""
    count = f"[{', '.join(f'has(self.{name})' for name in names)}].filter(x, x).size()"

    def found(model: Any) -> int:
        return sum(getattr(model, to_snake(name)) is not None for name in names)

    return Rule(
        cel=f"{count} == 1",
        holds=lambda model: found(model) == 1,
        sentence=f"exactly one of {', '.join(names[:-1])} and {names[-1]} is required, found {{found}}; {remedy}",
        values={"found": Value(cel=count, get=found)},
    )


def exactly_one(first: str, second: str, remedy: str, *, are_strings: bool = False) -> Rule[Any]:
    """The rule that one of two optional fields is set. `are_strings`: the message shows both fields' values where both
    are set.
    """

    def of(model: Any, name: str) -> Any:
        return getattr(model, to_snake(name))

    def has(model: Any, name: str) -> bool:
        return of(model, name) is not None

    found: Value[Any] = Value(
        cel=f"has(self.{first}) ? 'both' : 'neither'", get=lambda model: "both" if has(model, first) else "neither"
    )
    if are_strings:
        found = Value(
            cel=f"has(self.{first}) ? '{first} ' + self.{first} + ' and {second} ' + self.{second} : 'neither'",
            get=lambda model: (
                f"{first} {of(model, first)} and {second} {of(model, second)}" if has(model, first) else "neither"
            ),
        )
    return Rule(
        cel=f"has(self.{first}) != has(self.{second})",
        holds=lambda model: has(model, first) != has(model, second),
        sentence=f"exactly one of {first} and {second} is required, found {{found}}; {remedy}",
        values={"found": found},
    )
