"""Valid requests for environments, and what refusals say."""

from typing import Any

import pytest

from conserve.settings import EnvironmentSettings
from conserve_tools.spec import Limits, Run, Spec, SpecError

MOST = Limits(wall_s=60, processes=32)


def test_what_is_not_said_is_the_applications() -> None:
    spec = Spec.asked({}, MOST)
    assert (spec.name, spec.kind, spec.ports, spec.limits) == ("main", "process", 0, MOST)
    assert Spec.asked({"limits": {"wall_s": 5}}, MOST).limits == Limits(wall_s=5, processes=32)
    assert Spec.asked({"limits": None}, MOST).limits == MOST


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "../x"}, "name"),
        ({"ports": 9}, "ports"),
        ({"kind": "container"}, None),
        ({"image": "python"}, None),
        ({"kind": "container", "image": "--privileged"}, "image"),
        ({"limits": {"wall_s": 61}}, "limits.wall_s"),
        ({"nmae": "x"}, "nmae"),
    ],
)
def test_what_cannot_be_had(body: Any, field: str | None) -> None:
    with pytest.raises(SpecError) as error:
        Spec.asked(body, MOST)
    assert error.value.field == field
    assert str(error.value)


def test_a_command_of_a_shell_or_a_program() -> None:
    assert Run.asked({"command": "ls | wc"}).arguments == ["/bin/sh", "-c", "ls | wc"]
    assert Run.asked({"command": ["ls", "-l"]}).arguments == ["ls", "-l"]


@pytest.mark.parametrize(
    "body", [{"command": ""}, {"command": [""]}, {"command": "a\0b"}, {"command": ["x"] * 257}]
)
def test_what_cannot_be_run(body: Any) -> None:
    with pytest.raises(SpecError):
        Run.asked(body)


def test_what_is_more_than_settings_allow_says_which() -> None:
    most = Limits.of(EnvironmentSettings(limits={"wall_s": 7}))  # type: ignore[arg-type]
    assert (most.cpu_s, most.wall_s) == (4, 7)
    assert Limits.of(EnvironmentSettings()) == Limits()
    for name, setting in (("cpu_s", "wall_s"), ("wall_s", "wall_s"), ("file_bytes", "disk_bytes")):
        with pytest.raises(SpecError, match=rf"by the setting environments\.limits\.{setting}$"):
            Spec.asked({"limits": {name: 2**40}}, most)
    with pytest.raises(SpecError, match=r"open_files: at most 256 here$"):
        Spec.asked({"limits": {"open_files": 257}}, most)
