"""The notes between the scheduler's and the worker's halves of the lane, with each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Job:
    """A prefill for the lane.

    Attributes:
        request_id: whose it is.
        tokens: the ids of the whole prompt.
        block_ids: all blocks of the request, from its first token on.
        start, end: which of its positions are to be computed; what is before is cached.
    """

    request_id: str
    tokens: Sequence[int]
    block_ids: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LaneNotes:
    """To the worker.

    Attributes:
        jobs: that begin now.
        chunk_tokens: how long a chunk may be, from now on.
        decode_sms: how many SMs the step is to have, and the lane what is left; 0: the lane has
            all. Nothing where no border can be moved.
    """

    jobs: tuple[Job, ...]
    chunk_tokens: int
    decode_sms: int | None = None


@dataclass(slots=True)
class LaneReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker: what happened since the last step.

    Attributes:
        computed: tokens, by request.
        failed: requests of which not all could be computed.
        sizes_sms: how many SMs decodes can have (`SlotPairs.sizes_sms`); said once.
    """

    computed: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    sizes_sms: tuple[int, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LaneReport":
        """Refuse: vLLM asks this where there are several workers, and there is one (`fits`)."""
        raise RuntimeError("the lane has one worker: set tensor_parallel_size=1")
