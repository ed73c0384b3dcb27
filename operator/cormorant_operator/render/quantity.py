"""Kubernetes quantities of memory: `4Gi`, `500M`, `1e9`, `128974848`."""

from decimal import Decimal, InvalidOperation

_SUFFIXES = {
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    "m": Decimal("0.001"),
}


def parse_bytes(text: object) -> int | None:
    """Bytes of a quantity; None if it is invalid, which the API server reports better."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        return None
    number, factor = str(text).strip(), Decimal(1)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if number.endswith(suffix):
            number, factor = number[: -len(suffix)], _SUFFIXES[suffix]
            break
    try:
        value = Decimal(number) * factor
    except InvalidOperation:
        return None
    return int(value) if value.is_finite() and value >= 0 else None
