"""Evaluates a rule's CEL on a model, as the API server does on its document; as much of CEL as the rules use.

Fields are named as in a manifest, and one that is None is absent.
"""

import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

Term = Callable[[Mapping[str, Any]], Any]
"""An expression: from the values of its names to its own."""

_TOKEN = re.compile(r"\s*(\d+\.\d+|\w+|'[^']*'|&&|\|\||[=!<>]=|.)")
_BINDING = {
    name: binding
    for binding, names in enumerate(("||", "&&", "== != < <= > >= in", "+", "* / %"), start=1)
    for name in names.split()
}
"""How strongly each operator binds."""
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, items: item in items,
    "+": operator.add,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "has": lambda value: value is not None,
    "double": float,
    "int": int,
    "string": "{:g}".format,
    "size": len,
    "startsWith": str.startswith,
}
_MACROS: Mapping[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    # from each item and what the macro's expression is for it
    "all": lambda found: all(value for _, value in found),
    "exists": lambda found: any(value for _, value in found),
    "exists_one": lambda found: sum(value for _, value in found) == 1,
    "filter": lambda found: [item for item, value in found if value],
    "map": lambda found: [value for _, value in found],
}


@cache
def compiled(text: str) -> Term:
    """An expression of CEL as a function."""
    tokens = _TOKEN.findall(text)
    term = _expression(tokens)
    assert not tokens, f"{text}: what follows from {tokens[0]} on?"
    return term


def _expression(tokens: list[str], binding: int = 0) -> Term:
    """Take a term from the tokens, and the operators behind it that bind more strongly than this."""
    term = _term(tokens)
    while tokens and _BINDING.get(tokens[0], 0) > binding:
        name = tokens.pop(0)
        term = _combined(name, term, _expression(tokens, _BINDING[name]))
    if binding or tokens[:1] != ["?"]:
        return term
    tokens.pop(0)
    yes = _expression(tokens)
    tokens.pop(0)
    no = _expression(tokens)
    return lambda names: yes(names) if term(names) else no(names)


def _combined(name: str, first: Term, second: Term) -> Term:
    if name == "||":
        return lambda names: first(names) or second(names)
    if name == "&&":
        return lambda names: first(names) and second(names)
    return _applied(_FUNCTIONS[name], first, second)


def _applied(function: Callable[..., Any], *items: Term) -> Term:
    return lambda names: function(*[item(names) for item in items])


def _term(tokens: list[str]) -> Term:
    token = tokens.pop(0)
    if token in "!-":
        return _applied(operator.not_ if token == "!" else operator.neg, _term(tokens))
    if token == "(":
        (term,) = _items(tokens)
    elif token == "[":
        term = _applied(lambda *items: list(items), *_items(tokens))
    elif token[0] == "'" or token[0].isdigit():
        value = token[1:-1] if token[0] == "'" else float(token) if "." in token else int(token)
        term = _applied(lambda: value)
    elif tokens[:1] == ["("]:
        tokens.pop(0)
        term = _applied(_FUNCTIONS[token], *_items(tokens))
    else:
        term = operator.itemgetter(token)
    while tokens and tokens[0] in (".", "["):
        term = _member(term, tokens)
    return term


def _member(term: Term, tokens: list[str]) -> Term:
    """Take an index, a field, a method or a macro of a term."""
    if tokens.pop(0) == "[":
        return _applied(operator.getitem, term, *_items(tokens))
    name = tokens.pop(0)
    if tokens[:1] != ["("]:
        return _applied(lambda of: _read(of, name), term)
    tokens.pop(0)
    if name not in _MACROS:
        return _applied(_FUNCTIONS[name], term, *_items(tokens))
    variable, (each,), macro = tokens.pop(0), _items(tokens), _MACROS[name]
    return lambda names: macro([(item, each({**names, variable: item})) for item in term(names)])


def _read(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, _fields(of.__class__)[name])


@cache
def _fields(model: Any) -> Mapping[str, str]:
    """Names of a model's fields, by those of the manifest."""
    return {info.alias: name for name, info in model.model_fields.items()}


def _items(tokens: list[str]) -> list[Term]:
    """Take the expressions up to the closing bracket, and the bracket."""
    items = []
    while (token := tokens[0]) not in ")]":
        if token == ",":
            tokens.pop(0)
        items.append(_expression(tokens))
    tokens.pop(0)
    return items
