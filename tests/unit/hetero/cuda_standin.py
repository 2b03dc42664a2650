"""A stand-in for NVIDIA's driver behind cuda-bindings, as far as green contexts go.

It answers as ``cuda.bindings.driver`` does: an error, then what was asked for. It knows which SMs
each stream keeps to, which no real one tells, and refuses what the real one's documentation says it
refuses: resources of different splits or alignments in one context, and streams that would wait for
the default stream.
"""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915


class CUdevResourceType(enum.IntEnum):
    CU_DEV_RESOURCE_TYPE_INVALID = 0
    CU_DEV_RESOURCE_TYPE_SM = 1


class CUgreenCtxCreate_flags(enum.IntEnum):  # As cuda-bindings has it.
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class CUstream_flags(enum.IntEnum):
    CU_STREAM_NON_BLOCKING = 1


@dataclass
class Sms:
    smCount: int
    minSmPartitionSize: int
    smCoscheduledAlignment: int


@dataclass
class Resource:
    type: CUdevResourceType
    sm: Sms
    which: frozenset[int] = frozenset()
    of: int = 0


@dataclass
class Driver:
    """A device of so many SMs, split into groups of a multiple of `unit`.

    Attributes:
        rest_alignment: of what a split leaves over; that of its groups unless it is told.
        hidden: of the groups that it could make, those that it does not.
        fails: what each of these functions answers.
        streams: the SMs of each stream, by its handle.
    """

    sms: int = 132
    unit: int = 8
    version: int = 13_000
    rest_alignment: int | None = None
    hidden: int = 0
    devices: int = 1
    fails: dict[str, CUresult] = field(default_factory=dict)
    streams: dict[int, frozenset[int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    CUresult = CUresult
    CUdevResourceType = CUdevResourceType
    CUgreenCtxCreate_flags = CUgreenCtxCreate_flags
    CUstream_flags = CUstream_flags

    def __post_init__(self) -> None:
        self._splits = itertools.count(1)
        self._handles = itertools.count(0x1000, 0x10)

    def _answer(self, name: str, *found: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        if name in self.fails:
            return (self.fails[name], *(None for _ in found))
        return (CUresult.CUDA_SUCCESS, *found)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cuDriverGetVersion", self.version)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._answer("cuInit")

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetCount", self.devices)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGet", ordinal)

    def cuDeviceGetDevResource(self, device: int, kind: CUdevResourceType) -> tuple[Any, ...]:
        everything = self._resource(range(self.sms), 0)
        return self._answer("cuDeviceGetDevResource", everything)

    def cuDevSmResourceSplitByCount(
        self, groups: int, whole: Resource, flags: int, least: int
    ) -> tuple[Any, ...]:
        split = next(self._splits)
        size = -(-least // self.unit) * self.unit
        made = min(groups, self.sms // size - self.hidden)
        units = [self._resource(range(at * size, (at + 1) * size), split) for at in range(made)]
        left = range(made * size, self.sms)
        rest = self._resource(left, split, self.rest_alignment)
        if not left:
            rest.type = CUdevResourceType.CU_DEV_RESOURCE_TYPE_INVALID
        return self._answer("cuDevSmResourceSplitByCount", units, made, rest)

    def cuDevResourceGenerateDesc(
        self, resources: Sequence[Resource], count: int
    ) -> tuple[Any, ...]:
        assert count == len(resources)
        alike = {(one.of, one.sm.smCoscheduledAlignment) for one in resources}
        if len(alike) > 1:
            return CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None
        return self._answer("cuDevResourceGenerateDesc", list(resources))

    def cuGreenCtxCreate(
        self, description: list[Resource], device: int, flags: int
    ) -> tuple[Any, ...]:
        if flags != CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return self._answer("cuGreenCtxCreate", description)

    def cuGreenCtxStreamCreate(
        self, context: list[Resource], flags: int, priority: int
    ) -> tuple[Any, ...]:
        if flags != CUstream_flags.CU_STREAM_NON_BLOCKING:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        handle = next(self._handles)
        self.streams[handle] = frozenset().union(*(one.which for one in context))
        return self._answer("cuGreenCtxStreamCreate", handle)

    def _resource(self, which: range, split: int, alignment: int | None = None) -> Resource:
        sms = Sms(len(which), self.unit, self.unit if alignment is None else alignment)
        kind = CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return Resource(kind, sms, frozenset(which), split)
