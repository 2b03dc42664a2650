"""This machine's own addresses."""

import pytest

from conserve.loopback import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "", "::ffff:10.0.0.1", "127.0.0.1:80"],
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
