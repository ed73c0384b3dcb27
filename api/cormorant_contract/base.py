"""The base of every model: frozen values, camelCase in manifests, strict types, rules over fields."""

import math
import re
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from cormorant_contract.rule import Rule, broken_by

_camel = cache(to_camel)
INT32_MAX = 2**31 - 1
COUNT_MAX = 2**53 - 1
"""The largest integer that every JSON reader parses exactly. The API server compares bounds as floating point: a
maximum of 2**63 - 1 overflows there, and refuses every number."""

_BOUNDS = {"ge": "minimum", "le": "maximum"}


def _add_rules(schema: dict[str, Any], model: type[BaseModel]) -> None:
    assert issubclass(model, Contract)
    entries = [rule.document() for rule in model.rules if rule.cel]
    if entries:
        schema["x-kubernetes-validations"] = entries


def in_json_schema_words(node: Any) -> Any:
    """Convert a pydantic schema to `minimum` and `maximum`: pydantic writes `ge` and `le` behind a validator."""
    if isinstance(node, dict):
        return {_BOUNDS.get(key, key): in_json_schema_words(value) for key, value in node.items()}
    return [in_json_schema_words(item) for item in node] if isinstance(node, list) else node


class Contract(BaseModel):
    """A frozen value that crosses processes: `num_envs` in Python, `numEnvs` in manifests and JSON. A field that holds
    another Contract is described by that model's docstring, unless it has one of its own.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
        json_schema_extra=_add_rules,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """The rules over several fields of this model."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if not self.rules:
            return self
        document = self.to_document()
        if broken := broken_by(self, document, self.rules):
            violations = [(rule.path, rule.explain(self, document)) for rule in broken]
            text = "; ".join(sentence for _, sentence in violations)
            raise PydanticCustomError("rules", "{text}", {"text": text, "violations": violations})
        return self

    def to_document(self) -> dict[str, Any]:
        """The model as a document of a manifest: camelCase keys, plain JSON values, without unset optional fields."""
        # By hand, since pydantic's exclude_none would reach into kwargs and templates, where null is the user's own.
        fields = ((_camel(name), getattr(self, name)) for name in type(self).model_fields)
        document = {key: _plain(value) for key, value in fields if value is not None}
        return document | (self.model_extra or {})


def keyed_by(key: str) -> dict[str, JsonValue]:
    """Schema of a list whose items are merged by one field, which the API server keeps unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _plain(value: object) -> Any:
    if isinstance(value, Contract):
        return value.to_document()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return deepcopy(value)


def _whole(value: object) -> object:
    # YAML and JSON know one kind of number: 64.0 and 1e3 are whole, and the API server takes them for integers.
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _refuse_lossy(value: JsonValue) -> JsonValue:
    # What would not reach a worker as it was written: JSON has no NaN, and the API server keeps 64-bit integers.
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("lossy", "{value} is not a finite number", {"value": str(value)})
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PydanticCustomError("lossy", "contains an integer that does not fit 64 bits; write it as a string")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_lossy(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_lossy(item)
    return value


def _count_or_percent(value: object) -> object:
    whole = _whole(value)
    is_count = isinstance(whole, int) and not isinstance(whole, bool) and 1 <= whole <= INT32_MAX
    if is_count or (isinstance(value, str) and re.fullmatch(PERCENT_PATTERN, value)):
        return whole
    raise PydanticCustomError("count_or_percent", "write a whole number from 1, or a percentage from 1% to 100%")


Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
"""An integer; quoted numbers and booleans are refused. Fields add their bounds."""

Count32 = Annotated[Whole, Field(ge=0, le=INT32_MAX)]
Count64 = Annotated[Whole, Field(ge=0, le=COUNT_MAX)]
PERCENT_PATTERN = "^([1-9][0-9]?|100)%$"
CountOrPercent = Annotated[
    int | str,
    BeforeValidator(_count_or_percent),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 1,
            "maximum": INT32_MAX,
            "pattern": PERCENT_PATTERN,
        }
    ),
]
"""A number from 1, or a percentage of the field's total."""
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=1024)]
Time = AwareDatetime

# Patterns are read by three engines (Rust's for pydantic, Go's for the API server, Python's in tests): no \\w, whose
# meaning differs, and no look-around. PATTERN_WORDS says each in words, for messages.
LABEL_PATTERN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_DOTTED = "[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*"
ENTRYPOINT_PATTERN = f"^{_DOTTED}:{_DOTTED}$"
SERVICE_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
OPTIONAL_LABEL_PATTERN = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
OPTIONAL_NAME_PATTERN = "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
REASON_PATTERN = "^[A-Za-z][A-Za-z0-9_]*$"
IDENTIFIER_PATTERN = "^[A-Za-z_][A-Za-z0-9_]*$"
INFO_KEY_PATTERN = "^[A-Za-z_][-A-Za-z0-9_.]*$"
IMAGE_PATTERN = "^[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$"
URL_PATTERN = "^https?://"
CONTROLLER_PATTERN = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9._~/-]+$"

PATTERN_WORDS = {
    URL_PATTERN: "an address such as http://127.0.0.1:8000",
    CONTROLLER_PATTERN: "a domain, a slash and a name, such as example.com/controller",
    IMAGE_PATTERN: "the name of a container image, such as registry.example/team/code:1",
    LABEL_PATTERN: "lower-case letters, digits and dashes, beginning and ending with a letter or digit",
    OPTIONAL_LABEL_PATTERN: "lower-case letters, digits and dashes, beginning and ending with a letter or digit",
    OPTIONAL_NAME_PATTERN: "lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit",
    SERVICE_NAME_PATTERN: "lower-case letters, digits and dashes, beginning with a letter and not ending with a dash",
    ENTRYPOINT_PATTERN: "package.module:attribute",
    REASON_PATTERN: "one CamelCase word",
    IDENTIFIER_PATTERN: "letters, digits and underscores, beginning with no digit",
    INFO_KEY_PATTERN: "letters, digits, underscores, dashes and dots, beginning with a letter or an underscore",
}

Label = Annotated[str, Field(strict=True, max_length=63, pattern=LABEL_PATTERN)]
"""A DNS-1123 label, which Kubernetes requires of parts of names."""

Entrypoint = Annotated[str, Field(strict=True, max_length=253, pattern=ENTRYPOINT_PATTERN)]
"""Where to import something from: `package.module:attribute`."""

JsonObject = Annotated[
    dict[str, JsonValue],
    AfterValidator(_refuse_lossy),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""An object whose fields this contract does not know."""
