"""A disk below host memory, by LMCache's own storage manager, without a model."""

import argparse
import json
import os
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from conserve.settings import Settings
from deployments.node import disk
from deployments.node.disk import DiskTier
from deployments.node.kv_files import FOLDER, OwnFiles
from deployments.node.lmcache_server import Address, LMCacheServer

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 32, 32])], [torch.bfloat16])
FILE = 2 * 4 * 32 * 32 * 2 + 4096
HASHER = TokenHasher(chunk_size=128)


def prompt(chunks: int, seed: int = 1, salt: str = "", model: str = "org/model") -> list[ObjectKey]:
    hashes = HASHER.compute_chunk_hashes([seed] * (128 * chunks))
    return [ObjectKey(one, model, 0x01000100, 0, salt) for one in hashes]


class Server:
    """A storage manager, as LMCache's server makes it of its command line."""

    def __init__(self, path: Path, chunks: int = 12, layout: Any = LAYOUT, **given: Any) -> None:
        settings = Settings(lmcache={"disk": {"path": str(path)}})
        made = {**(settings.lmcache.disk.adapter or {}), "bytes": chunks * FILE, **given}
        command = LMCacheServer(0.01, 128, Address("h", 1, 2), gpu=False, disk=made).command()
        parser = add_storage_manager_args(argparse.ArgumentParser())
        self.manager = StorageManager(parse_args_to_config(parser.parse_known_args(command)[0]))
        self.layout = layout

    @property
    def disk(self) -> DiskTier:
        found = self.manager.l2_adapters()[0][1]
        assert isinstance(found, DiskTier)
        return found

    def says(self, what: str) -> int:
        return int(self.disk.report_status()[what])

    def store(self, keys: list[ObjectKey]) -> None:
        objects = self.manager.reserve_write(keys, self.layout)
        for place, key in enumerate(keys):
            if key in objects:
                objects[key].tensor.fill_(1.0 + place)
        self.manager.finish_write(list(objects))
        self.settle()

    def settle(self) -> None:
        """Wait until the disk has all that it takes."""
        deadline_s = time.monotonic() + 20
        quiet = 0
        while quiet < 3:
            assert time.monotonic() < deadline_s
            status = self.manager._store_controller.report_status()
            busy = status["pending_keys_count"] or status["in_flight_task_count"]
            quiet = 0 if busy else quiet + 1
            time.sleep(0.03)
        self.disk._writer.submit(int).result(20)

    def load(self, keys: list[ObjectKey]) -> tuple[int, int]:
        """Return how many first chunks are found, and how many of them are right."""
        row = GroupedObjectKeys(keys, 0, self.layout)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        assert self.manager.wait_prefetch_status(handle, 20)
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        found = [key for place, key in enumerate(keys) if result.hit_cells[0].test(place)]
        right = 0
        if found:
            with self.manager.read_prefetched_results(found) as objects:
                for key, one in zip(found, objects, strict=True):
                    right += bool((one.tensor == 1.0 + keys.index(key)).all())
            self.manager.finish_read_prefetched(found)
        return len(found), right

    def forget_memory(self, keys: list[ObjectKey]) -> None:
        self.manager.delete_l1_keys(keys, force=True)


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server; the one before ends first."""
    running: list[Server] = []

    def start(**given: Any) -> Server:
        while running:
            running.pop().manager.close()
        running.append(Server(tmp_path, **given))
        return running[0]

    yield start
    while running:
        running.pop().manager.close()


def files(path: Path) -> dict[str, Path]:
    return {one.parent.name: one for one in (path / FOLDER).glob("*/*/*/*-0")}


def file_of(path: Path, key: ObjectKey) -> Path:
    return path / FOLDER / disk._name(key)


def test_kv_is_found_after_a_restart_and_stays_in_host_memory(start: Start, tmp_path: Path) -> None:
    keys = prompt(6)
    start().store(keys)
    server = start()
    assert server.says("bytes") == 6 * FILE
    assert server.load(keys) == (6, 6)
    assert server.says("read_bytes") == 6 * (FILE - 4096)
    # The second time it is in host memory.
    assert server.load(keys) == (6, 6)
    assert server.says("read_bytes") == 6 * (FILE - 4096)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in files(tmp_path).values()} == {0o600}


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "longer", "changed", "swapped", "missing"]
)
def test_a_damaged_file_is_a_miss_once(
    start: Start, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = prompt(6)
    start().store(keys)
    broken, other = file_of(tmp_path, keys[3]), file_of(tmp_path, keys[4])
    content = broken.read_bytes()
    if damage == "missing":
        broken.unlink()
    elif damage == "swapped":
        shutil.copy(other, broken)
    else:
        changed = content[:9000] + b"\1\2" + content[9002:]
        new = {
            "truncated": content[:9000],
            "empty": b"",
            "longer": content + b"x",
            "changed": changed,
        }
        broken.write_bytes(new[damage])
    server = start()
    assert server.load(keys) == (3, 3)
    assert server.says("damaged_files") == (damage != "missing")
    assert not broken.exists()
    assert server.load(keys) == (3, 3)
    assert caplog.text.count("is damaged") == (damage != "missing")
    # What was computed again is stored again.
    server.store(keys)
    server.forget_memory(keys)
    assert server.load(keys) == (6, 6)


def test_files_stay_within_their_budget(start: Start, tmp_path: Path) -> None:
    server = start()
    most = 0
    for seed in range(1, 9):
        server.store(prompt(4, seed))
        most = max(most, sum(one.stat().st_size for one in files(tmp_path).values()))
    assert most == 12 * FILE
    server.forget_memory(prompt(4, 6))
    # What is used stays longest, also over a restart.
    assert server.load(prompt(4, 6)) == (4, 4)
    server = start(chunks=5)
    assert server.says("bytes") <= 5 * FILE
    assert server.load(prompt(4, 6)) == (4, 4)
    assert server.load(prompt(4, 7)) == (0, 0)


def test_what_is_larger_than_the_budget_is_not_written(start: Start, tmp_path: Path) -> None:
    server = start(chunks=0.5)
    server.store(prompt(2))
    assert (files(tmp_path), server.says("errors")) == ({}, 1)
    assert server.load(prompt(2)) == (2, 2)


def test_bytes_of_a_day_are_limited_over_restarts(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter at once, and the others over the day."""
    monkeypatch.setattr(disk, "REST_S", 0.0)
    now_s = time.time()
    monkeypatch.setattr(disk.time, "time", lambda: now_s)
    start(bytes_a_day=8 * FILE).store(prompt(4))
    assert len(files(tmp_path)) == 2
    server = start(bytes_a_day=8 * FILE)
    server.store(prompt(4, 2))
    assert len(files(tmp_path)) == 2
    now_s += 12 * 3600
    server.store(prompt(4, 3))
    assert len(files(tmp_path)) == 4
    start(bytes_a_day=0).store(prompt(6, 4))
    assert len(files(tmp_path)) == 10


def test_another_namespace_salt_or_layout_finds_nothing(start: Start, tmp_path: Path) -> None:
    keys = prompt(3, salt="a")
    start().store(keys)
    server = start()
    assert server.load(prompt(3, salt="b")) == server.load(prompt(3, model="other")) == (0, 0)
    # LMCache's keys lack the type.
    server = start(layout=MemoryLayoutDesc([torch.Size([2, 4, 32, 32])], [torch.float16]))
    assert server.load(keys) == (0, 0)
    assert server.says("damaged_files") == 3


def test_names_may_be_long(start: Start) -> None:
    keys = prompt(1, salt="a" * 64, model="/models/" + "x" * 220)
    start().store(keys)
    assert start().load(keys) == (1, 1)


@pytest.fixture
def full() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_left_alone_for_a_while(
    start: Start, tmp_path: Path, full: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server = start()
    server.store(prompt(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE // 2, resource.RLIM_INFINITY))
    for seed in (2, 3):
        server.store(prompt(2, seed))
        assert server.load(prompt(2, seed)) == (2, 2)
    assert (server.says("errors"), server.says("refused_chunks")) == (1, 3)
    assert caplog.text.count("lmcache.disk rests") == 1
    assert len(files(tmp_path)) == 2
    server.forget_memory(prompt(2))
    assert server.load(prompt(2)) == (2, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(server.disk, "_writes_from_s", 0.0)
    server.store(prompt(2, 4))
    assert len(files(tmp_path)) == 4


def test_a_folder_that_cannot_be_used_is_no_error(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a read-only file system answers."""
    keys = prompt(2)
    start().store(keys)
    opens = os.open

    def refuses(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return opens(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "open", refuses)
        server = start()
        server.store(prompt(2, 2))
        assert server.load(prompt(2, 2)) == (2, 2)
        assert server.load(keys) == (0, 0)
        assert server.says("errors") == 1
    monkeypatch.setattr(server.disk, "_writes_from_s", 0.0)
    server.store(prompt(2, 3))
    assert server.load(keys) == (2, 2)


def test_one_process_alone_has_the_folder(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    server.store(prompt(2))
    given = {"path": str(tmp_path), "bytes": FILE, "bytes_a_day": 0}
    other = DiskTier(given)
    assert (other.report_status()["errors"], len(files(tmp_path))) == (1, 2)
    assert "another LMCache server uses" in caplog.text
    other.close()


def test_a_disk_that_hangs_costs_one_load_its_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = prompt(6)
    start().store(keys)
    monkeypatch.setattr(disk, "LOAD_S", 0.3)
    server = start()
    goes_on = threading.Event()
    reads = server.disk._read

    def hangs(key: Any, one: Any) -> Any:
        goes_on.wait(20)
        return reads(key, one)

    monkeypatch.setattr(server.disk, "_read", hangs)
    began_s = time.monotonic()
    assert server.load(keys) == (0, 0)
    assert 0.3 <= time.monotonic() - began_s < 5
    # Until it is tried again, look-ups do not wait.
    assert server.load(keys) == (0, 0)
    assert server.says("errors") == 1
    goes_on.set()
    monkeypatch.setattr(server.disk, "_reads_from_s", 0.0)
    assert server.load(keys) == (6, 6)


def test_a_slow_disk_gives_what_it_has_in_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = prompt(6)
    start().store(keys)
    monkeypatch.setattr(disk, "LOAD_S", 1.0)
    server = start()
    reads = server.disk._read

    def slow(key: Any, one: Any) -> Any:
        if key in keys[4:]:
            time.sleep(3)
        return reads(key, one)

    monkeypatch.setattr(server.disk, "_read", slow)
    assert server.load(keys) == (4, 4)
    assert server.says("errors") == 0


def test_slow_writes_keep_little_of_host_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(chunks=1000)
    goes_on = threading.Event()
    puts = server.disk._put

    def slow(*given: Any) -> int:
        goes_on.wait(20)
        return puts(*given)

    monkeypatch.setattr(server.disk, "_put", slow)
    for seed in range(1, 40):
        objects = server.manager.reserve_write(prompt(8, seed), LAYOUT)
        server.manager.finish_write(list(objects))
        time.sleep(0.02)
    assert server.disk._backlog <= server.disk._most_backlog < 2**21
    assert server.says("refused_chunks") > 0
    goes_on.set()
    server.settle()
    assert server.disk._backlog == 0


def test_a_conversations_files_are_removed_with_it(start: Start, tmp_path: Path) -> None:
    own = OwnFiles(str(tmp_path), "org/model", 128)
    assert own.note("one", [1] * 600, "tenant") == 0
    server = start(chunks=30)
    for chunks, seed, salt in ((4, 1, "tenant"), (3, 2, "tenant"), (4, 1, "other")):
        server.store(prompt(chunks, seed, salt))
    assert own.note("one", [1] * 600, "tenant") == 4 * 128
    assert own.note("two", [2] * 700, "tenant") == 3 * 128
    # Later turns have more. What is to be written is listed, too.
    server.store(prompt(6, 1, "tenant"))
    assert own.note("one", [1] * 900, "tenant") == 6 * 128
    server.store(prompt(7, 1, "tenant"))
    mode = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / FOLDER).glob("owners/*/*/*")}
    assert mode == {0o600}
    server = start(chunks=30)
    own.forget("unknown")
    own.forget("one", last=False)
    assert server.load(prompt(7, 1, "tenant")) == (0, 0)
    assert server.load(prompt(4, 1, "other")) == (4, 4)
    server.store(prompt(7, 1, "tenant"))
    # Of a list that is damaged, what was lost is noted again.
    for list_ in (tmp_path / FOLDER).glob("owners/*/*/*"):
        list_.write_bytes(b"\0\xf5\n../../..\n" + list_.read_bytes()[:-9])
    assert own.note("one", [1] * 900, "tenant") == 7 * 128
    assert own.forget("one")
    assert server.load(prompt(3, 2, "tenant")) == (3, 3)
    assert len(files(tmp_path)) == 7
    assert own.note("three", [1] * 900, "tenant") == 0


def test_what_engines_use_is_kept_longest(start: Start, tmp_path: Path) -> None:
    own = OwnFiles(str(tmp_path), "org/model", 128)
    server = start()
    for seed in range(1, 4):
        server.store(prompt(4, seed))
    assert own.note("one", [1] * 512, "") == 512
    for seed in range(4, 6):
        server.store(prompt(4, seed))
    server.forget_memory(prompt(4, 1))
    assert server.load(prompt(4, 1)) == (4, 4)
    assert [own.note("x", [seed] * 512, "") for seed in range(2, 6)] == [0, 0, 512, 512]


def test_a_kill_in_mid_write_leaves_no_file_that_is_found(start: Start, tmp_path: Path) -> None:
    keys = prompt(3)
    start().store(keys)
    half = file_of(tmp_path, keys[1])
    content = half.read_bytes()
    half.unlink()
    (tmp_path / FOLDER / "new").write_bytes(content[:5000])
    server = start()
    assert server.load(keys) == (1, 1)
    assert server.says("damaged_files") == 0


def test_the_server_is_told_of_a_disk_only_where_there_is_one() -> None:
    plain = LMCacheServer(1.0, 256, Address("h", 1, 2)).command()
    assert not [one for one in plain if one.startswith("--l2")]
    given = Settings(lmcache={"disk": {"path": "/kv", "size_gb": 2}}).lmcache.disk.adapter
    assert given == {"path": "/kv", "bytes": 2**31, "bytes_a_day": 2**31}
    command = LMCacheServer(1.0, 256, Address("h", 1, 2), disk=given).command()
    told = json.loads(command[command.index("--l2-adapter") + 1])
    assert told["adapter_params"] == given
