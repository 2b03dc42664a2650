"""The key file: its content, what is refused, and that it changes in one step."""

import json
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from conserve.tenants import Key, KeyFile, KeyFileError, Limits, Tenant, keyfile

DAY = "2026-01-31"


def a_file(path: Path) -> tuple[KeyFile, str]:
    content, key = KeyFile.new().with_key("acme", DAY)
    keyfile.write(path, content)
    return content, key


def test_it_is_read_as_it_was_written_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    content, key = KeyFile.new().with_key("acme", DAY, admin=True)
    limits = Limits(turns=3, held_tokens=0, new_per_minute=7)
    content = content.with_tenant("acme", Tenant(limits, shares_cache=True))
    old = os.umask(0)
    try:
        keyfile.write(path, content)
    finally:
        os.umask(old)
    assert keyfile.read(path) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (kept,) = content.keys
    assert kept == Key(kept.id, "acme", keyfile.digest(key).hex(), DAY, True)
    # The key is nowhere in it, nor is its secret part.
    assert key.rpartition("-")[2] not in path.read_text()


def test_a_key_names_itself_and_has_256_random_bits() -> None:
    made = [keyfile.new_key() for _ in range(50)]
    assert len({key for _, key in made}) == 50
    for key_id, key in made:
        prefix, named, secret = key.split("-")
        assert (prefix, named) == ("csk", key_id)
        assert len(bytes.fromhex(secret)) == 32


def test_revoking_takes_one_key_and_leaves_its_tenant() -> None:
    content, first = KeyFile.new().with_key("acme", DAY)
    content, _ = content.with_key("acme", DAY)
    kept = content.keys[1]
    assert content.without_key(content.keys[0].id).keys == [kept]
    # The whole key works, too.
    assert content.without_key(first).keys == [kept]
    assert "acme" in content.without_key(kept.id).without_key(first).tenants
    with pytest.raises(KeyFileError, match="no key has the id") as refused:
        content.without_key(kept.id).without_key("csk-" + "0" * 12 + "-" + "5" * 64)
    assert "5555" not in str(refused.value)


def test_salts_differ_by_tenant_and_deployment_but_for_those_that_share() -> None:
    content = KeyFile.new()
    for name in ("a", "b", "c", "d"):
        content, _ = content.with_key(name, DAY)
    for name in ("c", "d"):
        content = content.with_tenant(name, Tenant(shares_cache=True))
    salts = {name: content.cache_salt(name) for name in content.tenants}
    assert salts["c"] == salts["d"]
    assert len(set(salts.values())) == 3
    other = msgspec.structs.replace(content, secret=KeyFile.new().secret)
    assert not {other.cache_salt(name) for name in salts} & set(salts.values())
    # LMCache takes no more than that, and neither @ nor slashes.
    assert all(len(salt) <= 128 and salt.isalnum() for salt in salts.values())


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "a\tb", "other", "-a", "a" * 64, "ä", ":"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(name: str) -> None:
    with pytest.raises(KeyFileError, match="is no name for a tenant"):
        KeyFile.new().with_key(name, DAY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version"),
        ({"tenants": {"A": {}}}, "is no name for a tenant"),
        ({"tenants": {}}, "has no tenant 'acme'"),
        ({"tenants": {"acme": {"limits": {"turn": 1}}}}, "unknown field `turn`"),
    ],
)
def test_a_file_that_is_not_usable_is_refused(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    path = tmp_path / "keys.json"
    content, _ = a_file(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(KeyFileError) as refused:
        keyfile.read(path)
    assert str(path) in str(refused.value)
    assert says in str(refused.value)
    assert content.secret not in str(refused.value)


def test_two_keys_with_one_id_are_refused_and_a_missing_file_says_how_to_make_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(KeyFileError, match="conserve keys add TENANT --file"):
        keyfile.read(path)
    content, _ = a_file(path)
    keyfile.write(path, msgspec.structs.replace(content, keys=content.keys * 2))
    with pytest.raises(KeyFileError, match="two keys with the id"):
        keyfile.read(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    content, _ = a_file(path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space left"):
        keyfile.write(path, KeyFile.new())
    assert keyfile.read(path) == content
    assert list(tmp_path.iterdir()) == [path]


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keyfile.write(path, KeyFile.new())

    def add() -> None:
        with keyfile.locked(path) as real:
            keyfile.write(real, keyfile.read(real).with_key("acme", DAY)[0])

    threads = [threading.Thread(target=add) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keyfile.read(path).keys) == 16
