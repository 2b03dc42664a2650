"""Valid keys, while their file changes, breaks and is removed."""

import logging
import os
from pathlib import Path

import pytest

from conserve.tenants import Caller, KeyFile, KeyFileError, KeyRing, Limits, Tenant, keyfile

DAY = "2026-01-31"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def put(path: Path, tenants: tuple[str, ...] = ("acme",)) -> tuple[KeyFile, list[str]]:
    content, keys = KeyFile.new(), []
    for tenant in tenants:
        content, key = content.with_key(tenant, DAY)
        keys.append(key)
    keyfile.write(path, content)
    return content, keys


def test_a_key_finds_its_tenant_with_limits_and_salt(path: Path) -> None:
    content, _ = KeyFile.new().with_key("acme", DAY)
    content, key = content.with_key("ops", DAY, admin=True)
    content = content.with_tenant("ops", Tenant(Limits(turns=3)))
    keyfile.write(path, content)
    ring = KeyRing(path, 0.0)
    salt = content.cache_salt("ops")
    assert ring.find(key, 0.0) == Caller("ops", True, Limits(turns=3), salt)


def test_a_key_finds_its_tenants_weight_and_whether_its_turns_are_in_the_background(
    path: Path,
) -> None:
    content, quick = KeyFile.new().with_key("acme", DAY)
    content, slow = content.with_key("acme", DAY, background=True)
    content, nightly = content.with_key("nightly", DAY)
    content = content.with_tenant("acme", Tenant(weight=3))
    content = content.with_tenant("nightly", Tenant(background=True))
    keyfile.write(path, content)
    callers = [KeyRing(path, 0.0).find(key, 0.0) for key in (quick, slow, nightly)]
    assert [caller and (caller.weight, caller.background) for caller in callers] == [
        (3, False), (3, True), (1, True),
    ]  # fmt: skip


def test_what_is_no_key_finds_nobody(path: Path) -> None:
    _, (key,) = put(path)
    ring = KeyRing(path, 0.0)
    for wrong in ("", key[:-1], key + "0", key.upper(), key[4:], "\ud800", "x" * 100_000):
        assert ring.find(wrong, 0.0) is None


def test_a_change_is_seen_within_a_second_and_not_looked_for_sooner(path: Path) -> None:
    content, (key,) = put(path)
    ring = KeyRing(path, 100.0)
    keyfile.write(path, content.without_key(key))
    assert ring.find(key, 100.9) is not None
    assert ring.find(key, 101.0) is None
    keyfile.write(path, content)
    assert ring.find(key, 101.9) is None
    assert ring.find(key, 102.0) is not None


def test_a_file_of_the_same_size_and_time_in_its_place_is_seen(path: Path) -> None:
    _, (key,) = put(path)
    ring = KeyRing(path, 0.0)
    found = path.stat()
    _, (new,) = put(path)
    assert path.stat().st_size == found.st_size
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert ring.find(new, 1.0) is not None
    assert ring.find(key, 1.0) is None


def test_a_file_that_breaks_leaves_the_last_good_keys_and_is_complained_of_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, (key,) = put(path)
    # As editors on Windows write it.
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    ring = KeyRing(path, 0.0)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        path.write_text("{")
        assert ring.find(key, 1.0) is not None
        assert ring.find(key, 2.0) is not None
        assert [record.message.endswith("stays good") for record in caplog.records] == [True]
        path.unlink()
        assert ring.find(key, 3.0) is not None
        assert ring.find(key, 4.0) is not None
    assert len(caplog.records) == 2
    assert key not in caplog.text
    keyfile.write(path, content.without_key(key))
    assert ring.find(key, 5.0) is None


def test_without_a_usable_file_there_is_no_ring(path: Path) -> None:
    with pytest.raises(KeyFileError, match="there is no key file"):
        KeyRing(path, 0.0)
    path.write_text("[]")
    with pytest.raises(KeyFileError, match="is not usable"):
        KeyRing(path, 0.0)


def test_a_file_that_is_open_to_others_is_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(path)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        KeyRing(path, 0.0)
        assert not caplog.records
        path.chmod(0o644)
        KeyRing(path, 0.0)
    assert "chmod 600" in caplog.text
