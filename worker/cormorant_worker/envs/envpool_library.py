"""EnvPool itself. Where JAX is installed, EnvPool imports it, for an interface that nothing here uses: that takes half
a second, and a signal meanwhile prints a traceback.
"""

import sys

_IS_HIDDEN = "envpool" not in sys.modules and "jax" not in sys.modules
if _IS_HIDDEN:
    sys.modules["jax"] = None  # type: ignore[assignment]  # an import of it fails
try:
    import envpool
finally:
    if _IS_HIDDEN:
        del sys.modules["jax"]

# EnvPool keeps the error of what it could not import, whose frames keep the variables of all callers: fleets, too.
if (_kept := getattr(sys.modules.get("envpool.procgen"), "_PROCGEN_IMPORT_ERROR", None)) is not None:
    _kept.__traceback__ = None

__all__ = ["envpool"]
