"""``conserve keys``: what it prints where, and what it leaves in the file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conserve.tenants import Limits, Tenant, keyfile
from conserve_cli.main import cli


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def call(path: Path, *arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "120", "CONSERVE_KEYS_FILE": str(path)})
    return runner.invoke(cli, ["keys", *arguments])


def test_a_key_is_printed_once_alone_on_the_standard_output(path: Path) -> None:
    made = call(path, "add", "acme", "--admin")
    assert made.exit_code == 0
    key = made.stdout.removesuffix("\n")
    (kept,) = keyfile.read(path).keys
    assert kept.sha256 == keyfile.digest(key).hex()
    assert (kept.tenant, kept.admin) == ("acme", True)
    assert key not in made.stderr
    shown = call(path, "list").stdout
    assert kept.id in shown
    assert key.rpartition("-")[2] not in shown
    assert keyfile.read(path).secret not in shown


def test_keys_are_added_listed_and_revoked(path: Path) -> None:
    for tenant in ("acme", "acme", "umbrella"):
        assert call(path, "add", tenant).exit_code == 0
    first, second, third = keyfile.read(path).keys
    assert call(path, "revoke", second.id).exit_code == 0
    assert keyfile.read(path).keys == [first, third]
    again = call(path, "revoke", second.id)
    assert again.exit_code == 1
    assert "no key has the id" in again.stderr


def test_limits_change_by_name_and_the_others_stay(path: Path) -> None:
    call(path, "add", "acme")
    call(path, "limits", "acme", "--turns", "8", "--held-tokens", "200000", "--share-cache")
    shown = call(path, "limits", "acme", "--turns", "none", "--new-per-minute", "5")
    assert shown.exit_code == 0
    tenant = keyfile.read(path).tenants["acme"]
    assert tenant.limits == Limits(held_tokens=200_000, new_per_minute=5)
    assert tenant.shares_cache
    assert "200,000" in shown.stdout
    before = path.stat().st_ino
    assert "shared" in call(path, "limits", "acme").stdout
    assert path.stat().st_ino == before
    shown = call(path, "limits", "acme", "--own-cache", "--weight", "3", "--background")
    assert "background" in shown.stdout
    tenant = keyfile.read(path).tenants["acme"]
    assert (tenant.shares_cache, tenant.weight, tenant.background) == (False, 3, True)
    assert call(path, "limits", "acme", "--weight", "0").exit_code == 2
    call(path, "limits", "acme", "--interactive")
    assert keyfile.read(path).tenants["acme"] == Tenant(tenant.limits, weight=3)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["limits", "nobody"], 1, "there is no tenant 'nobody'"),
        (["limits", "acme", "--turns", "-1"], 2, "--turns takes a number, or none"),
        (["add", "acme", "--file", "/nonexistent/keys.json"], 1, "cannot make"),
    ],
)
def test_what_cannot_be_done_is_said(
    path: Path, arguments: list[str], status: int, says: str
) -> None:
    call(path, "add", "acme")
    before = path.read_bytes()
    refused = call(path, *arguments)
    assert refused.exit_code == status
    assert says in refused.stderr
    assert path.read_bytes() == before


def test_a_file_that_is_broken_is_not_replaced(path: Path) -> None:
    path.write_text("{}")
    assert call(path, "add", "acme").exit_code == 1
    assert path.read_text() == "{}"
