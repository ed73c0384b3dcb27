"""Rules over several fields, each written once: for pydantic (Python) and for the API server (CEL).

A model lists its rules in `rules()`; `base.Contract` checks them after its fields, `schema` prints them into the CRD.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Generic[M]):
    """A value that a rule's sentence names."""

    cel: str
    """CEL expression of type string or int over `self`."""

    get: Callable[[M], object]
    """The same value of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[M]):
    """A fact that holds between the fields of one model.

    Example: `Rule(cel="self.low <= self.high", holds=lambda m: m.low <= m.high, sentence="low {low} is above ...")`.
    """

    cel: str
    """The rule for the API server, over `self`. Empty where the schema says the same without CEL."""

    holds: Callable[[M], bool] = lambda _: True
    """The rule for pydantic, called only when every field is valid by itself. A rule over `oldSelf`, about what an
    update may not change, has none: only the API server knows what was before."""

    sentence: str
    """What is wrong and what to do, with `{name}` where a value belongs."""

    values: Mapping[str, Value[M]] = field(default_factory=dict)
    """The values of the sentence, by name."""

    path: tuple[str, ...] = ()
    """The field to blame, from the model down, in the manifest's spelling; empty for the model itself."""

    def explain(self, model: M) -> str:
        """Write the sentence with this model's values."""
        return _PLACEHOLDER.sub(lambda match: str(self.values[match[1]].get(model)), self.sentence)

    def document(self) -> dict[str, str]:
        """Write the entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel}
        if self.values:
            entry["messageExpression"] = self._message_expression()
        else:
            entry["message"] = self.sentence
        if self.path:
            entry["fieldPath"] = "".join(f".{part}" for part in self.path)
        return entry

    def _message_expression(self) -> str:
        # format() and not `+`: the API server's cost estimate takes string(int) for a string without end.
        terms = ", ".join(self.values[name].cel for name in _PLACEHOLDER.findall(self.sentence))
        return f"{_PLACEHOLDER.sub('%s', self.sentence)!r}.format([{terms}])"
