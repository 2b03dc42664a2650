"""One GPU that serves requests with an image each in three stages: encode, prefill, decode (Nova).

`StageServer` asks `conserve.engine_scheduling.Stages`, the class that the product runs. The other
two are Nova's baselines, which run one pass at a time. Every pass keeps the SMs with which it began
(section III-D: borders move between passes only), so its time is known as it begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.stage_costs import VisionCosts
from conserve.engine_scheduling import Stage, Stages

# What a step prefills beside decodes, as in `conversations.py`: longer prompts use the lane.
_INLINE_TOKENS = 128


@dataclass(eq=False, slots=True)
class Request(Call):
    """A call whose prompt has an image.

    Attributes:
        encode, prefill: from when to when each ran.
    """

    encode: tuple[float, float] = (0.0, 0.0)
    prefill: tuple[float, float] = (0.0, 0.0)

    @property
    def queued_s(self) -> float:
        return self.encode[0] - self.came_s

    @property
    def service_s(self) -> float:
        """Return T of equation 6: encode and prefill."""
        return self.encode[1] - self.encode[0] + self.prefill[1] - self.prefill[0]


class Server(ABC):
    """Serves requests on one GPU. A prefill gives a request's first token, each step one more.

    Attributes:
        decoding: requests that have their prefill.
        ended: requests in the order of their ends.
        batches: how many requests each step decoded.
    """

    def __init__(self, loop: Loop, costs: VisionCosts) -> None:
        self.loop = loop
        self.costs = costs
        self.decoding: list[Request] = []
        self.ended: list[Request] = []
        self.batches: list[int] = []

    def serve(self, requests: Iterable[Request]) -> None:
        """Serve requests, which come at their ``came_s``, to their ends."""
        for request in requests:
            self.loop.at(request.came_s, self.submit, request)
        self.loop.run()

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take a request that has come."""

    def _prefilled(self, request: Request, since_s: float) -> None:
        now_s = self.loop.now_s
        request.prefill = (since_s, now_s)
        request.made_tokens, request.first_token_s, request.last_token_s = 1, now_s, now_s
        goes_on = request.made_tokens < request.output_tokens
        (self.decoding if goes_on else self.ended).append(request)

    def _decoded(self, batch: Sequence[Request]) -> None:
        now_s = self.loop.now_s
        if batch:
            self.batches.append(len(batch))
        for request in batch:
            request.made_tokens += 1
            request.gaps_s.append(now_s - request.last_token_s)
            request.last_token_s = now_s
            if request.made_tokens >= request.output_tokens:
                self.decoding.remove(request)
                self.ended.append(request)


class StageServer(Server):
    """Runs encodes and prefills in a lane beside decodes, as `Stages` decides.

    While nothing decodes the lane has all SMs, and while the lane is empty decodes have. A prompt
    that needs no lane is prefilled in a step with all SMs, and encodes wait for that one.

    Args:
        stages: without shares nothing divides the SMs (Nova's multi-stream baseline).
    """

    def __init__(self, loop: Loop, costs: VisionCosts, stages: Stages) -> None:
        super().__init__(loop, costs)
        self.stages = stages
        self._images: dict[str, Request] = {}
        self._prompts: list[Request] = []
        self._inline: Request | None = None
        self._steps = False

    def submit(self, request: Request) -> None:
        self._images[request.key] = request
        self.stages.wants(request.key)
        self._advance()

    def _advance(self) -> None:
        self._route_prompts()
        name = None if self._inline else self.stages.next_encode()
        if name is not None:
            self.stages.encodes(name)
            self._begin("encode", self._images.pop(name), self._encoded)
        if not self._steps:
            self._step()

    # --- the lane ----------------------------------------------------------------------------

    def _route_prompts(self) -> None:
        decodes, now_s = bool(self.decoding), self.loop.now_s
        for one in list(self._prompts):
            route = self.stages.route(one.key, one.prompt_tokens, _INLINE_TOKENS, decodes, now_s)
            if route == "lane":
                self.stages.takes(one.key, one.prompt_tokens)
                self._begin("prefill", one, self._left_the_lane)
            elif route == "inline" and self._inline is None and self.stages.current is None:
                self._inline = one
            else:
                continue
            self._prompts.remove(one)

    def _begin(
        self, stage: Stage, request: Request, done: Callable[[Request, float], None]
    ) -> None:
        now_s = self.loop.now_s
        took_s = self.costs.pass_s(stage, self.stages.decode_sms() if self.decoding else 0)
        self.loop.at(now_s + took_s, done, request, now_s)

    def _encoded(self, request: Request, since_s: float) -> None:
        request.encode = (since_s, self.loop.now_s)
        self.stages.encoded()
        self.stages.forget(request.key)
        self._prompts.append(request)
        self._advance()

    def _left_the_lane(self, request: Request, since_s: float) -> None:
        self.stages.prefills.ends(request.key, "done")
        self._prefilled(request, since_s)
        self._advance()

    # --- steps -------------------------------------------------------------------------------

    def _step(self) -> None:
        batch, prompt, beside = tuple(self.decoding), self._inline, self.stages.current
        self._steps = bool(batch or prompt)
        if not self._steps:
            return
        took_s = 0.0 if prompt is None else self.costs.prefill_s
        if batch:
            took_s += self.costs.step_s(len(batch), beside, self.stages.decode_sms())
        self.loop.at(self.loop.now_s + took_s, self._stepped, batch, prompt, self.loop.now_s)

    def _stepped(self, batch: Sequence[Request], prompt: Request | None, since_s: float) -> None:
        self._steps = False
        self._decoded(batch)
        if prompt is not None:
            self._inline = None
            self._prefilled(prompt, since_s)
        self._advance()


class _Serial(Server):
    """Runs one pass at a time, with all SMs."""

    def __init__(self, loop: Loop, costs: VisionCosts) -> None:
        super().__init__(loop, costs)
        self._images: list[Request] = []
        self._prompts: list[Request] = []
        self._runs = False

    def submit(self, request: Request) -> None:
        self._images.append(request)
        if not self._runs:
            self._go_on()

    def _go_on(self) -> None:
        work = self._next()
        self._runs = work is not None
        if work is not None:
            took_s, done = work
            self.loop.at(self.loop.now_s + took_s, self._done, done)

    def _done(self, done: Callable[[], None]) -> None:
        done()
        self._go_on()

    @abstractmethod
    def _next(self) -> tuple[float, Callable[[], None]] | None:
        """Return the time of the next pass, and what happens at its end; None: nothing to do."""


class PrefillFirst(_Serial):
    """Encodes and prefills first; decodes if more than a threshold of requests wait for it, or
    nothing else does (PF-Limit, section V-A)."""

    def __init__(self, loop: Loop, costs: VisionCosts, threshold: int = 5) -> None:
        super().__init__(loop, costs)
        self._threshold = threshold

    def _next(self) -> tuple[float, Callable[[], None]] | None:
        waits = bool(self._images or self._prompts)
        if len(self.decoding) > self._threshold or (self.decoding and not waits):
            batch = tuple(self.decoding)
            return self.costs.step_s(len(batch)), partial(self._decoded, batch)
        now_s = self.loop.now_s
        if self._prompts:
            return self.costs.prefill_s, partial(self._prefilled, self._prompts.pop(0), now_s)
        if self._images:
            request = self._images.pop(0)
            request.encode = (now_s, now_s + self.costs.encode_s)
            return self.costs.encode_s, partial(self._prompts.append, request)
        return None


class ChunkedPrefill(_Serial):
    """Cuts prompts into chunks that steps compute with their decodes (Sarathi-Serve's Chunk).

    A step has a budget of tokens. The step with which a prompt begins encodes its image first, as
    vLLM's steps do, and its decodes wait for that.

    Args:
        hidden: see `VisionCosts.hybrid_s`.
    """

    def __init__(
        self, loop: Loop, costs: VisionCosts, hidden: float = 1.0, budget_tokens: int = 128
    ) -> None:
        super().__init__(loop, costs)
        self._hidden = hidden
        self._budget_tokens = budget_tokens
        self._since_s = 0.0

    def _next(self) -> tuple[float, Callable[[], None]] | None:
        now_s, encodes_s = self.loop.now_s, 0.0
        if not self._prompts and self._images:
            request = self._images.pop(0)
            encodes_s, self._since_s = self.costs.encode_s, now_s + self.costs.encode_s
            request.encode = (now_s, self._since_s)
            self._prompts.append(request)
        batch = tuple(self.decoding)
        if not (batch or self._prompts):
            return None
        tokens = 0
        if self._prompts:
            tokens = min(self._prompts[0].missing_tokens, self._budget_tokens - len(batch))
        took_s = self.costs.hybrid_s(len(batch), tokens, self._hidden)
        return encodes_s + took_s, partial(self._computed, batch, tokens)

    def _computed(self, batch: Sequence[Request], tokens: int) -> None:
        self._decoded(batch)
        if tokens:
            prompt = self._prompts[0]
            prompt.computed_tokens += tokens
            if not prompt.missing_tokens:
                self._prefilled(self._prompts.pop(0), self._since_s)
