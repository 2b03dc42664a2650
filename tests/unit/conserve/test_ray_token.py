"""The file of Ray's token is made once, and is for its owner alone."""

from pathlib import Path

import pytest

from conserve.ray_token import keep_token


def test_the_token_is_kept_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "a"}.items():
        with monkeypatch.context() as set_by_user:
            set_by_user.setenv(name, value)
            keep_token()
    assert not file.exists()
    keep_token()
    token = file.read_text()
    assert len(token) == 64
    assert (file.stat().st_mode & 0o777, caplog.text) == (0o600, "")
    # As Ray writes it.
    file.chmod(0o644)
    keep_token()
    assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)
    assert f"{file} was open to other users" in caplog.text
    assert token not in caplog.text
