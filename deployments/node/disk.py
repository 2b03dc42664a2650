"""Keeps KV in files below a node's host memory, as an adapter of LMCache's server (``plugin``).

A chunk is written as it comes to host memory, so the death of a server loses little. A digest of
key, layout and content in each file's header tells a whole one. Look-ups are answered from an index
in memory, and LMCache's threads never wait for the disk.
"""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.mp_observability.otel_init import register_gauge
from lmcache.v1.platform import create_event_notifier

from deployments.node.kv_files import FOLDER, chunk_folder

logger = logging.getLogger("lmcache.conserve.disk")

_HEADER, _MAGIC, _HEADER_BYTES = struct.Struct("<8sQ32s"), b"CNSRVKV1", 4096
# What is not read by then is computed. A disk that fails is left alone for a while.
LOAD_S, REST_S = 10.0, 60.0
_LOADERS, _READERS = 8, 4
# Most bytes that wait to be written, which host memory keeps: at most this share of it, too.
_BACKLOG_BYTES, _BACKLOG_SHARE = 2**30, 8
# This share of a day's bytes may be written at once; the others are granted over the day.
_BURST, _DAY_S = 0.25, 86400.0
_STORES, _LOOKUPS, _LOADS = range(3)
_COUNTS = ("written_bytes", "read_bytes", "damaged_files", "refused_chunks", "errors")


class DiskTier(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no types.
    """Files within a budget, of which the least recently used are removed; one thread writes them.

    Args:
        given: ``path``; ``bytes``; ``bytes_a_day``, 0: any number.
    """

    def __init__(self, given: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._root, self._budget = Path(given["path"]) / FOLDER, given["bytes"]
        self._bytes_a_day = given["bytes_a_day"]
        host_bytes = l1_memory_desc.size if l1_memory_desc else _BACKLOG_BYTES
        self._most_backlog = min(_BACKLOG_BYTES, host_bytes // _BACKLOG_SHARE)
        # Sizes and times of use by name, the earliest first; the lock is free while a disk works.
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lock = threading.RLock()
        self._used = self._backlog = self._task = 0
        # The file of what the day grants, locked; -1: the folder is not this process's yet.
        self._granted = -1
        self._reads_from_s = self._writes_from_s = 0.0
        self._said = ""
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        self._done: list[dict[int, Any]] = [{}, {}, {}]
        self._events = [create_event_notifier() for _ in range(3)]
        self._pools = [ThreadPoolExecutor(threads) for threads in (1, _LOADERS, _READERS)]
        self._writer, self._loaders, self._readers = self._pools
        with contextlib.suppress(TimeoutError):
            self._writer.submit(self._guarded, self._open).result(LOAD_S)
        for name in ("bytes", *_COUNTS):
            told = functools.partial(lambda one: self.report_status()[one], name)
            register_gauge("conserve", f"conserve_disk_{name}", "Of the node's disk.", told)

    def _guarded(self, work: Callable[..., int], *given: Any) -> int:
        """Run the writer's work; after an error the disk gets no more for a while."""
        try:
            return work(*given)
        except OSError as error:
            self._failed(error)
            return 0

    def _failed(self, error: OSError, reads: bool = False) -> None:
        self._counts["errors"] += 1
        self._writes_from_s = time.monotonic() + REST_S
        if reads:
            self._reads_from_s = self._writes_from_s
        if (fault := error.strerror or str(error)) != self._said:
            self._said = fault
            logger.warning("lmcache.disk rests for %g s at a time: %s", REST_S, error)

    # --- files ------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Take the folder for this process, and find what is there."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.chmod(0o700)
        fd = os.open(self._root / "granted", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen = [(_used_ns(file), file) for file in self._root.glob("*/*/*/*")]
            found = [(str(one), (one.lstat().st_size, at_ns)) for at_ns, one in sorted(seen)]
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise OSError(errno.EBUSY, f"another LMCache server uses {self._root}") from None
            raise
        with self._lock:
            self._files = OrderedDict((os.path.relpath(n, self._root), one) for n, one in found)
            self._used, self._granted = sum(size for size, _ in self._files.values()), fd
        self._make_room(0)
        return 0

    def _make_room(self, size: int) -> None:
        """Remove what was used least lately; engines note use by the times of folders."""
        while self._used + size > self._budget:
            if not self._files:
                raise OSError(errno.EDQUOT, "size_gb has no room for a chunk")
            name, (length, at_ns) = next(iter(self._files.items()))
            now_ns = _used_ns(self._root / name)
            if now_ns > at_ns:
                self._note(name, length, now_ns)
            else:
                self._remove(name)

    def _note(self, name: str, size: int, at_ns: int) -> None:
        with self._lock:
            self._used += size - self._files.pop(name, (0, 0))[0]
            self._files[name] = size, at_ns

    def _remove(self, name: str) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        with self._lock:
            self._used -= self._files.pop(name, (0, 0))[0]
        # Of its folders, those that are empty.
        with contextlib.suppress(OSError):
            os.removedirs(path.parent)

    def _put(self, name: str, *parts: bytes | memoryview) -> int:
        """Write a file within both budgets; under its name there is never a part of it."""
        path, size = self._root / name, sum(map(len, parts))
        self._grant(size)
        self._remove(name)
        self._make_room(size)
        # What is left there by an error or a kill is overwritten.
        new = self._root / "new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        # Folders between have other modes, but only this user may enter the first.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.rename(path)
        self._note(name, size, _used_ns(path))
        self._counts["written_bytes"] += size
        return size

    def _grant(self, size: int) -> None:
        """Take bytes from those of the day, of which a file keeps account over restarts."""
        most, now_s = self._bytes_a_day * _BURST, time.time()
        try:
            left, at_s = map(float, os.pread(self._granted, 80, 0).split())
        except ValueError:
            left, at_s = most, now_s
        left += self._bytes_a_day * (1 - _BURST) * max(0.0, now_s - at_s) / _DAY_S
        left = min(most, left) - size
        if self._bytes_a_day and left < 0:
            raise OSError(errno.EDQUOT, "written_gb_per_day is spent")
        os.pwrite(self._granted, f"{left:39.0f} {now_s:39.3f}".encode(), 0)

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        size = sum(memoryview(one.byte_array).nbytes for one in objects)
        with self._lock:
            rests = time.monotonic() < self._writes_from_s
            if rests or self._backlog + size > self._most_backlog:
                self._counts["refused_chunks"] += len(keys)
                return self._begin(_STORES, L2StoreResult(True, 0))
            self._backlog += size
            task = self._begin(_STORES)
        self._writer.submit(self._store, task, keys, objects, size)
        return task

    def _store(self, task: int, keys: Sequence[Any], objects: Sequence[Any], size: int) -> None:
        written = 0
        try:
            if self._granted < 0:
                self._guarded(self._open)
            for key, one in zip(keys, objects, strict=True):
                if time.monotonic() < self._writes_from_s:
                    self._counts["refused_chunks"] += 1
                elif (name := _name(key)) not in self._files:
                    data = memoryview(one.byte_array).cast("B")
                    written += self._guarded(self._put, name, _header(key, one, data), data)
        finally:
            with self._lock:
                self._backlog -= size
            # LMCache would log a failure with all keys, and not try again.
            self._end(_STORES, task, L2StoreResult(True, written))

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        found = Bitmap(len(keys))
        if time.monotonic() >= self._reads_from_s:
            for place, key in enumerate(keys):
                if _name(key) in self._files:
                    found.set(place)
        return self._begin(_LOOKUPS, found)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Do nothing: what is removed before its load is computed."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        task = self._begin(_LOADS)
        self._loaders.submit(self._load, task, keys, objects, time.monotonic() + LOAD_S)
        return task

    def _load(self, task: int, keys: Sequence[Any], objects: Sequence[Any], until_s: float) -> None:
        """Copy what is read in time: once the load is over, others have the memory."""
        loaded = Bitmap(len(keys))
        try:
            for start in range(0, len(keys), _READERS):
                places = range(start, min(start + _READERS, len(keys)))
                reads = [self._readers.submit(self._read, keys[at], objects[at]) for at in places]
                for place, reading in zip(places, reads, strict=True):
                    data = reading.result(until_s - time.monotonic())
                    if data is not None:
                        memoryview(objects[place].byte_array).cast("B")[:] = data
                        loaded.set(place)
        except TimeoutError:
            if not loaded.popcount():
                self._failed(TimeoutError(f"nothing was read in {LOAD_S:g} s"), reads=True)
        finally:
            self._end(_LOADS, task, loaded)

    def _read(self, key: Any, one: Any) -> memoryview | None:
        """Return a chunk in memory of its own; None: it is not there, or not whole."""
        if time.monotonic() < self._reads_from_s:
            return None
        name, size = _name(key), memoryview(one.byte_array).nbytes
        whole = memoryview(bytearray(_HEADER_BYTES + size + 1))
        try:
            with open(self._root / name, "rb", buffering=0) as file:
                length = file.readinto(whole)
            data = whole[_HEADER_BYTES:-1]
            if length == len(whole) - 1 and whole[:_HEADER_BYTES] == _header(key, one, data):
                self._counts["read_bytes"] += size
                os.utime((self._root / name).parent)
                return data
            self._counts["damaged_files"] += 1
            logger.warning("lmcache.disk: %s is damaged and removed; its KV is computed", name)
            self._remove(name)
        except FileNotFoundError:
            self._remove(name)
        except OSError as error:
            self._failed(error, reads=True)
        return None

    # --- what else LMCache asks -------------------------------------------------------------------

    def _begin(self, kind: int, done: Any = None) -> int:
        with self._lock:
            self._task += 1
            task = self._task
        if done is not None:
            self._end(kind, task, done)
        return task

    def _end(self, kind: int, task: int, done: Any) -> None:
        with self._lock:
            self._done[kind][task] = done
        self._events[kind].notify()

    def _fd(self, kind: int) -> int:
        return int(self._events[kind].fileno())

    def _take(self, kind: int, task: int) -> Any:
        return self._done[kind].pop(task, None)

    get_store_event_fd = functools.partialmethod(_fd, _STORES)
    get_lookup_and_lock_event_fd = functools.partialmethod(_fd, _LOOKUPS)
    get_load_event_fd = functools.partialmethod(_fd, _LOADS)
    query_lookup_and_lock_result = functools.partialmethod(_take, _LOOKUPS)
    query_load_result = functools.partialmethod(_take, _LOADS)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done[_STORES] = self._done[_STORES], {}
            return done

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=pool is not self._writer)
        if self._granted >= 0:
            os.close(self._granted)
        for event in self._events:
            event.close()

    def report_status(self) -> dict[str, Any]:
        rests = time.monotonic() < max(self._reads_from_s, self._writes_from_s)
        return {"is_healthy": True, "rests": rests, "bytes": self._used, **self._counts}


def _name(key: Any) -> str:
    folder = chunk_folder(key.model_name, key.cache_salt, key.chunk_hash)
    return f"{folder}/{key.kv_rank:x}-{key.object_group_id}"


def _used_ns(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.parent.stat().st_mtime_ns
    return 0


def _header(key: Any, one: Any, data: memoryview) -> bytes:
    layout = (one.get_shapes(), one.get_dtypes(), one.get_memory_format())
    digest = blake3(f"{key}{layout}".encode()).update(data).digest()
    return _HEADER.pack(_MAGIC, len(data), digest).ljust(_HEADER_BYTES, b"\0")
