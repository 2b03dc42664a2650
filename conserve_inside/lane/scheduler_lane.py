"""The scheduler's half of the lane: which requests go there, and what becomes of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from conserve.wire import StageTimes
from conserve_inside.lane.images import Encode, EncodeEnd, Found, LaneImages
from conserve_inside.policy import DecodeReserve, DecodeShare, PrefillLane, Route, Stages

# Most tokens of a chunk on a GPU. Its activations take memory beside those of a step.
_GPU_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """A prefill of the positions from ``start`` to ``end``, with all blocks of the prompt.

    ``images`` are vLLM's ``MultiModalFeatureSpec`` of the prompt.
    """

    request_id: str
    tokens: Sequence[int]
    block_ids: Sequence[int]
    start: int
    end: int
    images: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class LaneNotes:
    """Tells the worker with each step what the scheduler decided.

    Attributes:
        chunk_tokens: most tokens of a chunk from now on.
        decode_sms: how many SMs the step has; the lane has the others. None: no border can be
            moved.
        encode: an image to encode next.
        loads: images to load now.
    """

    jobs: tuple[Job, ...]
    chunk_tokens: int
    decode_sms: int | None = None
    encode: Encode | None = None
    loads: tuple[Found, ...] = ()


@dataclass(slots=True)
class LaneReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Tells the scheduler what the worker's lane has done since the last step.

    Attributes:
        computed: tokens, by request.
        failed: requests whose prompts were not computed to their end.
        sizes_sms: `SlotPairs.sizes_sms`, reported once.
        encode: the end of the encode that was in the lane.
        prefills: whether the lane can compute the model's prompts, reported once.
    """

    computed: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    sizes_sms: tuple[int, ...] = ()
    encode: EncodeEnd | None = None
    prefills: bool | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LaneReport":
        """Refuse: vLLM calls this for several workers, which `require_fit` rules out."""
        raise RuntimeError("the lane has one worker: set tensor_parallel_size=1")


class SchedulerLane:
    """The scheduler's half of one engine's lane, whose policies say what goes there.

    Its ``reserve`` decides nothing before the worker has reported how many SMs decodes can have,
    and nothing where ``stages`` has `DecodeShare` by stage, with the ``sms`` that they are parts
    of.
    """

    def __init__(
        self, scheduler: Any, policy: PrefillLane, stages: Mapping[str, Any] | None = None
    ) -> None:
        self._scheduler = scheduler
        self.policy = policy
        given = dict(stages or {})
        self._shares_sms = int(given.pop("sms", 0))
        shares = {stage: DecodeShare(*share) for stage, share in given.items()}
        self.stages = Stages(policy, shares)  # type: ignore[arg-type]  # It checks the names.
        self.images: LaneImages | None = None
        if scheduler.vllm_config.model_config.is_multimodal_model:
            self.images = LaneImages(scheduler, self.stages)
        # Whether the lane can compute this model's prompts: unknown until the worker says so.
        self._prefills = False
        self._prefill_s: dict[str, float] = {}
        self._alternates = scheduler.vllm_config.device_config.device_type == "cpu"
        self._new: list[Job] = []
        # The first token that is the lane's, by request, until the request's next step.
        self._starts: dict[str, int] = {}
        self._failed: set[str] = set()
        self.reserve = DecodeReserve(())
        self.decode_sms = 0
        self._held_sms, self._held_until_s = 0, 0.0
        self._current_since_s = 0.0

    # --- the connector asks -------------------------------------------------------------------

    def route(self, request: Any, found_tokens: int) -> Route:
        name = request.request_id
        lacks_images = self.images is not None and bool(self.images.missing(request, found_tokens))
        if name in self._failed or lacks_images or not self._prefills or not _fits(request):
            # vLLM asks again only if none of the failed prefill's KV is right.
            self._starts.pop(name, None)
            return "inline"
        scheduler = self._scheduler
        if scheduler.is_held(request):
            return "wait"
        route = self.stages.route(
            name,
            request.num_tokens - found_tokens,
            scheduler.block_size if self._is_held else scheduler.chunks.allowed_tokens(),
            scheduler.decoding,
            scheduler.clock(),
        )
        if route != "inline":
            # Otherwise the budget would have cut it.
            scheduler.chunks.was_cut()
        return route

    def has_images_of(self, request: Any, found_tokens: int) -> bool:
        """Return whether a request's images are encoded; otherwise it is asked about again."""
        if self.images is None or not request.mm_features or _encodes_in_steps(request):
            return True
        return self.images.are_ready(request, found_tokens)

    def takes(self, request: Any, found_tokens: int, tokens: int, block_ids: list[int]) -> None:
        name = request.request_id
        self.stages.takes(name, tokens)
        if self.images is not None:
            self.images.refer(request, found_tokens, found_tokens + tokens)
            self.images.runs(name)
        self._current_since_s = self._scheduler.clock()
        self._starts[name] = found_tokens
        end = found_tokens + tokens
        ids = list(request.all_token_ids[:end])
        images = tuple(request.mm_features or ())
        self._new.append(Job(name, ids, list(block_ids), found_tokens, end, images))
        if request.prefill_stats is not None:
            # This engine computes it, so it counts as no cache's hit.
            request.prefill_stats.set(request.num_prompt_tokens, found_tokens, 0)
        self._scheduler.passed_over_tokens += tokens

    def notes(self, computes: bool, freed: Collection[str] = ()) -> LaneNotes:
        """Return the notes for the worker's next step; ``freed`` are images that it drops."""
        scheduler = self._scheduler
        jobs, self._new = tuple(self._new), []
        most = int(scheduler.max_num_scheduled_tokens)
        chunk = scheduler.left_tokens() if self._alternates else _GPU_CHUNK_TOKENS
        encode: Encode | None = None
        loads: tuple[Found, ...] = ()
        if self.images is not None:
            self.images.were_freed(freed)
            loads, encode = self.images.loads(), self.images.next()
        if encode is not None:
            self._current_since_s = scheduler.clock()
        return LaneNotes(jobs, min(most, chunk), self._decide(computes), encode, loads)

    def _decide(self, computes: bool) -> int | None:
        sizes_sms = self.reserve.sizes_sms
        if not sizes_sms:
            return None
        now_s = self._scheduler.clock()
        waited_s = None if self.stages.current is None else now_s - self._current_since_s
        self.decode_sms = self.reserve.decide(decodes=computes, waited_s=waited_s, now_s=now_s)
        share_sms = self.stages.decode_sms()
        if computes and share_sms is not None:
            wanted_sms = share_sms * sizes_sms[-1] / (self._shares_sms or sizes_sms[-1])
            self.decode_sms = next((one for one in sizes_sms if one >= wanted_sms), sizes_sms[-1])
        if self._is_held:
            self.decode_sms = self._held_sms
        return self.decode_sms

    def hold(self, decode_sms: int, for_s: float) -> list[int]:
        """Keep decodes on the next larger size for a while; return all sizes of their SMs.

        Meanwhile the lane takes every prompt of more than a block.
        """
        sizes_sms = list(self.reserve.sizes_sms)
        most_sms = max(sizes_sms, default=0)
        self._held_sms = next((one for one in sizes_sms if one >= decode_sms), most_sms)
        self._held_until_s = self._scheduler.clock() + for_s
        return sizes_sms

    @property
    def _is_held(self) -> bool:
        return bool(self._scheduler.clock() < self._held_until_s)

    @property
    def slows_steps(self) -> bool:
        """Whether the lane's encode, which no budget limits, takes turns with steps."""
        return self._alternates and self.stages.encoding is not None

    def stepped(self, lasted_s: float, decode_sms: int, now_s: float) -> None:
        if not self._is_held and self.reserve.sizes_sms and decode_sms < self.reserve.sizes_sms[-1]:
            # The other bound follows steps that few SMs have slowed down.
            self.reserve.late_s = self._scheduler.chunks.alone_late_s
            self.reserve.step(lasted_s, decode_sms, now_s)

    def hears(self, report: LaneReport | None, received: set[str]) -> None:
        """Note what the worker has done, and requests whose blocks are free of the lane."""
        if report is not None:
            if report.sizes_sms:
                self.reserve = DecodeReserve(report.sizes_sms)
            if report.prefills is not None:
                self._prefills = report.prefills
            if report.encode is not None and self.images is not None:
                embeds = self.images.hears(report.encode)
                if embeds:
                    self._scheduler.connector.lane_encoded(report.encode.lasted_s, embeds)
            self._failed |= report.failed
            for name, tokens in report.computed.items():
                self.policy.computed(name, tokens)
                self._scheduler.lane_served(name, tokens)
        current = self.policy.current
        if current is not None and current in received:
            request = self._scheduler.requests[current]
            cut = request.is_finished()
            if self.images is not None:
                # Running requests may need their room, and leave the prompt no place until then.
                self._scheduler.encoder_cache_manager.free(request)
            failed = current in self._failed
            self.policy.ends(current, "failed" if failed else "cut" if cut else "done")
            self._prefill_s[current] = self._scheduler.clock() - self._current_since_s
            if cut:
                self._forget(current)

    def spent_tokens(self, model_runner_output: Any) -> int:
        """Return how many of the lane's tokens a step's time includes; none on a GPU."""
        told = model_runner_output.kv_connector_output
        report = None if told is None else told.kv_connector_worker_meta
        if not self._alternates or not isinstance(report, LaneReport):
            return 0
        return sum(report.computed.values())

    def start_of(self, name: str) -> int | None:
        """Return the first token of a request that was the lane's; None once it runs."""
        return self._starts.get(name)

    def has_failed(self, name: str) -> bool:
        return name in self._failed

    # --- the scheduler tells ------------------------------------------------------------------

    def runs(self, name: str) -> None:
        self.policy.forget(name)
        if self.images is not None:
            self.images.runs(name)
        self._starts.pop(name, None)
        self._failed.discard(name)

    def over(self, name: str) -> StageTimes:
        """Forget a request that has ended; its chunk in the lane goes on to its end."""
        self.policy.forget(name)
        waited_s, encode_s = (0.0, 0.0) if self.images is None else self.images.over(name)
        times = StageTimes(waited_s, encode_s, self._prefill_s.get(name, 0.0))
        if name != self.policy.current:
            self._forget(name)
        return times

    def observed(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "lane_waiting": policy.waiting,
            "lane_running": int(policy.current is not None),
            "lane_tokens": policy.current_tokens,
            "lane_prefills": {"done": policy.done, "failed": policy.failed},
            "lane_computed_tokens": policy.computed_tokens,
            "decode_sms": self.decode_sms if self.reserve.sizes_sms else None,
        }

    def _forget(self, name: str) -> None:
        self._starts.pop(name, None)
        self._failed.discard(name)
        self._prefill_s.pop(name, None)


def _fits(request: Any) -> bool:
    """Return whether the lane can compute a request's prompt; otherwise it is prefilled inline."""
    return not (
        _encodes_in_steps(request)
        or request.lora_request is not None
        # Its whole prompt has to pass the sampler, for its log-probabilities.
        or request.skip_reading_prefix_cache
    )


def _encodes_in_steps(request: Any) -> bool:
    return bool(
        # Its output so far may still be in flight, and it may refer to images in the cache.
        request.num_preemptions
        or request.prompt_embeds is not None
        or request.pooling_params is not None
        or request.resumable
    )
