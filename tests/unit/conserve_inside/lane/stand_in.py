"""vLLM's real schedulers with a lane, and a stand-in for the model, with steps in flight.

The lane's thread is real. What it computes is nothing; but which blocks it would write to, and
which positions, is looked at.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from conserve_inside.lane.scheduler_lane import Job
from conserve_inside.lane.thread import Turns
from tests.unit.conserve_inside.lane.engine import LaneAlone, require_empty
from tests.unit.conserve_inside.scheduler.stand_in import StandIn


@dataclass
class LaneStandIn(StandIn):
    """One engine with a lane, without a model.

    Args:
        fails: the share of chunks that fail.
    """

    prefills = True
    fails: float = 0.0
    seed: int = 0
    # (where, what) was wrong in the lane.
    spoiled: list[str] = field(default_factory=list)
    # Of each step: whether it computed anything, whether the lane had a job, and the SMs that it
    # was to have.
    borders: list[tuple[bool, bool, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chance = random.Random(self.seed)
        self._until: dict[str, int] = {}
        self._turns = Turns(alternate=True)
        kv = self.scheduler.kv_cache_config
        self._worker = LaneAlone(self.config, KVConnectorRole.WORKER, kv)
        self._worker.start_lane(self, self._turns)
        lane = self.scheduler.lane
        notes = lane.notes

        def noted(computes: bool, freed: Any) -> Any:
            made = notes(computes, freed)
            self.borders.append((computes, lane.policy.current is not None, made.decode_sms))
            return made

        lane.notes = noted

    def _configure(self, config: Any) -> None:
        super()._configure(config)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="LaneAlone",
            kv_connector_module_path="tests.unit.conserve_inside.lane.engine",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )

    def _connector_output(self, output: Any) -> Any:
        worker = self._worker
        with self._turns.step():
            worker.bind_connector_metadata(output.kv_connector_metadata)
            worker.start_load_kv(None)
            sent, received = worker.get_finished(output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
        return told

    def end(self) -> None:
        """The engine ends."""
        self._worker.shutdown()

    def require_no_leak(self) -> None:
        """Also none of the lane's."""
        # Whose client has left has its blocks until its chunk ends; they are free with a step then.
        for number in range(1_000):
            if not self.scheduler.requests:
                break
            time.sleep(0.001)
            self.add(f"next{number}", [1, 2, 3], 2)
            self.drain()
        super().require_no_leak()
        require_empty(self.scheduler.lane)
        assert not self.spoiled, self.spoiled

    # --- what computes chunks ---------------------------------------------------------------------

    def mark(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def follow(self, mark: Any) -> None:
        pass

    def compute(self, job: Job, start: int, end: int) -> Callable[[], None]:
        """Look whether the blocks are the request's, and every position comes once, in order."""
        name = job.request_id
        if self._until.pop(name, job.start) != start:
            self.spoiled.append(f"{name} goes on at {start}")
        if end < job.end:
            self._until[name] = end
        for block in job.block_ids[start // 32 : -(-end // 32)]:
            if self.pool.blocks[block].ref_cnt < 1:
                self.spoiled.append(f"block {block} is nobody's, and {name} writes to it")
        if self._chance.random() < self.fails:
            self._until.pop(name, None)
            raise RuntimeError("this chunk fails")
        return lambda: None
