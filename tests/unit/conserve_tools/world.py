"""A manager's actor without Ray, with real processes and a table that says what it is told."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import EnvironmentSettings, Settings
from conserve_tools import service as services
from conserve_tools.root import folders
from conserve_tools.sandbox import marked
from conserve_tools.service import EnvironmentService
from deployments.messages import HostPressure, Lifecycle, Standing
from tests.unit.deployments.stub_table import StubTable


class Table(StubTable):
    """Says of conversations what it is told to."""

    def __init__(self) -> None:
        self.life = 1
        self.live: dict[str, Standing] = {}
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.pressure = HostPressure()

    async def call(self, method: str, asked: list[str], pressure: HostPressure) -> Any:
        assert method == "lifecycle"
        self.pressure = pressure
        live = {id_: standing for id_, standing in self.live.items() if id_ in asked}
        return Lifecycle(self.life, live)

    def tell(self, method: str, *told: Any) -> None:
        assert method == "note"
        self.told.append(told)  # type: ignore[arg-type]


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder yet to be made. It is not under /tmp, where pytest's folders are one user's."""
    with tempfile.TemporaryDirectory(prefix="conserve-test-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder) / "root"


class World:
    """A service on a folder of its own."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        asked = {"enabled": True, "root": str(root), "isolation": "limits", **settings}
        self.settings = Settings(environments=EnvironmentSettings(**asked))
        self.table = Table()
        self.service = self._new()

    def _new(self) -> EnvironmentService:
        made = EnvironmentService(self.settings, "test", "1")
        made._table = self.table  # type: ignore[assignment]
        return made

    async def until(self, holds: Any) -> None:
        for _ in range(200):
            if holds():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it does not come to pass")

    def folders(self) -> list[str]:
        return [path.name for path in folders(self.root)]

    def kinds(self) -> list[tuple[str, Any]]:
        return [(kind, said.get("state")) for kind, _, said in self.table.told]


@pytest.fixture
async def world(
    root: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[World]:
    """A world whose service ends with the test, and leaves nothing behind."""
    monkeypatch.setattr(services, "BEAT_S", 0.05)
    # Ask none of this machine's daemons, which may take long to answer.
    monkeypatch.setattr("conserve_tools.backends.shutil.which", lambda name: None)
    made = World(root)
    yield made
    if made.service._housekeeping is not None:
        made.service._housekeeping.cancel()
    if made.service._manager is not None:
        await made.service._manager.close()
    assert made.folders() == []
    assert marked(f"{root}:") == []
