"""The command line of an operator."""

from pathlib import Path

import pytest

from cormorant_operator.errors import SettingsError
from cormorant_operator.settings import read_settings


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 40 + b"\n")
    return str(path)


def test_defaults(key: str) -> None:
    settings = read_settings(["--key-file", key, "--image", "i"])
    assert (settings.key, settings.namespaces, settings.lease) == (b"k" * 40, (), None)
    assert (settings.defaults.image, settings.defaults.poll_s, settings.head_url) == ("i", 15.0, "{scheme}://{ip}:8000")
    assert "kkk" not in repr(settings)


def test_what_is_given(key: str) -> None:
    given = "--namespace a --namespace b --lease ns/op --network-policies --open-to-cidr 10.0.0.0/8 --any-user"
    more = "--architecture amd64 --architecture arm64"
    settings = read_settings(["--key-file", key, "--image", "i", *given.split(), *more.split()])
    assert (settings.namespaces, settings.lease) == (("a", "b"), ("ns", "op"))
    defaults = settings.defaults
    assert (defaults.has_network_policies, defaults.open_to_cidrs) == (True, ("10.0.0.0/8",))
    assert (defaults.architectures, defaults.has_fixed_user) == (("amd64", "arm64"), False)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--lease", "nameless"], "--lease nameless: expected NAMESPACE/NAME"),
        (["--poll-seconds", "0"], "--poll-seconds 0.0: must be greater than 0"),
        (["--open-to-cidr", "10.0.0.1/8"], "--open-to-cidr 10.0.0.1/8 is not a CIDR"),
        (["--key-file", "/nonexistent"], "cannot read --key-file /nonexistent"),
        (["--key-file", "/dev/null"], "--key-file /dev/null holds 0 bytes; a key has at least 32"),
    ],
)
def test_what_cannot_be_used_is_refused(key: str, more: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        read_settings(["--key-file", key, "--image", "i", *more])
