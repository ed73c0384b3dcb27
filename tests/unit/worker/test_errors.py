"""Errors are caught by scripts that were written for TorchRL and Tianshou."""

import inspect

import pytest

from cormorant_worker import errors

ERRORS = [found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__]
REFUSALS = {"ManifestError", "DeviceUnavailable", "UnknownEnv", "InvalidAction", "PolicyMismatch"}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_runtime_errors_and_refusals_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, RuntimeError)
    assert issubclass(error, ValueError) == (error.__name__ in REFUSALS)
