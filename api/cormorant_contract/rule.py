"""Rules over several fields, in CEL: the API server checks them on a manifest, and pydantic on a model.

A model lists its rules in `rules`; `base.Contract` checks them after its fields, `schema` prints them into the CRD.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.alias_generators import to_snake

_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fact that holds between the fields of one model, and is checked when every field is valid by itself.

    Example: `Rule(cel="self.low <= self.high", sentence="low {self.low} is above high {self.high}; ...")`.
    """

    cel: str = ""
    """The rule, over `self`. One over `oldSelf` says what an update may not change: only the API server checks it."""

    holds: Callable[[Any], bool] | None = None
    """In place of CEL, what the API server does not check, or checks by itself."""

    sentence: str
    """The mistake and its remedy, with `{self.someField}` where the value of a field belongs, and `{name}` for one of
    `values`."""

    values: Mapping[str, str | Callable[[Any], object]] = field(default_factory=dict)
    """The values of the sentence that are not fields, by name: a string or an integer in CEL; in a rule without CEL,
    a function of the model, too."""

    path: tuple[str, ...] = ()
    """The field to blame, from the model down, in the manifest's spelling; empty for the model itself."""

    def explain(self, model: object, document: Mapping[str, Any]) -> str:
        """Write the sentence with the values of a model, and of its document."""

        def value(match: re.Match[str]) -> str:
            value = self.values.get(match[1], match[1])
            found = _evaluate(value, document) if isinstance(value, str) else value(model)
            return json.dumps(found) if isinstance(found, list) else str(found)

        return _PLACEHOLDER.sub(value, self.sentence)

    def document(self) -> dict[str, str]:
        """Write the entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel}
        if names := _PLACEHOLDER.findall(self.sentence):
            # format() and not `+`: the API server's cost estimate takes string(int) for a string without end.
            terms = ", ".join(str(self.values.get(name, name)) for name in names)
            entry["messageExpression"] = f"{_PLACEHOLDER.sub('%s', self.sentence)!r}.format([{terms}])"
        else:
            entry["message"] = self.sentence
        if self.path:
            entry["fieldPath"] = "".join(f".{part}" for part in self.path)
        return entry


def broken_by(model: object, document: Mapping[str, Any], rules: Sequence[Rule]) -> list[Rule]:
    """The rules that do not hold. `document`: the model as its manifest has it; a field that is None is absent."""
    checked = [rule for rule in rules if rule.holds is None and "oldSelf" not in rule.cel]
    # All at once: an evaluation takes longer than its terms.
    held = _evaluate(f"[{', '.join(f'({rule.cel})' for rule in checked)}]", document)
    holds = dict(zip(map(id, checked), held, strict=True))
    return [rule for rule in rules if not (rule.holds(model) if rule.holds else holds.get(id(rule), True))]


def _evaluate(text: str, document: Mapping[str, Any]) -> Any:
    return _program(text).execute({"self": document})


@cache
def _program(text: str) -> Any:
    import cel  # brings a command line of its own: only for who checks a manifest

    return cel.compile(text)


def each_once(path: str, sentence: str, *, key: str = "") -> Rule:
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

    return Rule(holds=lambda model: not twice(model), sentence=sentence, values={"twice": twice}, path=(path,))


def one_of(*names: str, remedy: str) -> Rule:
    """The rule that one of several optional fields is set; the message has the number of those that are."""
    count = f"[{', '.join(f'has(self.{name})' for name in names)}].filter(x, x).size()"
    return Rule(
        cel=f"{count} == 1",
        sentence=f"exactly one of {', '.join(names[:-1])} and {names[-1]} is required, found {{found}}; {remedy}",
        values={"found": count},
    )
