"""Other users of a machine can neither enter Ray's directory nor read its token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.ray_cluster import OwnRay, protect_token, ray_cluster, ray_directory


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / f"ray-{os.getuid()}"


def test_it_is_made_for_this_user_alone(place: Path) -> None:
    # covers: C13
    assert ray_directory() == place / "r"
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    ray_directory()
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_link_or_file_that_somebody_put_there_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match="found another's: remove it, or name another place by RAY_TMPDIR"):
        ray_directory()
    place.unlink()
    place.write_text("")
    with pytest.raises(ConfigurationError, match="RAY_TMPDIR"):
        ray_directory()


def test_another_users_directory_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.with_name("ray-12345").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match="found another's"):
        ray_directory()


def test_the_token_is_for_this_user_alone(tmp_path: Path) -> None:
    protect_token()  # there is none
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    protect_token()
    assert token.stat().st_mode & 0o777 == 0o600


async def test_a_run_starts_ray_there_and_closes_its_token(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C13
    token = tmp_path / ".ray" / "auth_token"

    def init(**options: object) -> None:
        assert options["_temp_dir"] == str(place / "r")
        token.parent.mkdir()
        token.write_text("secret")
        token.chmod(0o644)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    async with ray_cluster(None, {}, OwnRay()):
        assert token.stat().st_mode & 0o777 == 0o600
