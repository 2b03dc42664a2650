"""Measures a running application from outside, by one request or one batch.

Each engine is asked at its own address, so that nothing else is measured; whole turns go to the
application's. Prompts are random token ids, and no two share a beginning.
"""

import asyncio
import base64
import contextlib
import io
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from conserve import wire
from conserve.apis import CHAT
from conserve.turn import TurnStats
from conserve_inside.border import BORDER_PATH, HoldBorder
from conserve_lab.capacity import fit
from conserve_lab.client import Client, Endpoint
from conserve_lab.records import TurnRecord, TurnRequest
from conserve_lab.workloads.tokens import COMPLETIONS, completion

_JSON = {"Content-Type": "application/json"}
_TIMEOUT_S = 600.0
# Length of the outputs that run beside an append, and how long they run before it.
_BESIDE_TOKENS = 160
_UNDER_WAY_S = 0.3
# Time for an engine to report a turn to the conversation table.
_REPORT_TIMEOUT_S = 10.0
_CHECKED_PIXELS = 64
# Longer than any encode; if this process ends meanwhile, the border is held no longer.
_HOLD_S = 120.0
# Answers that decode beside a stage, and their contexts.
_BESIDE_ANSWERS = 4
_BESIDE_CONTEXT_TOKENS = 128


class MeasureError(RuntimeError):
    """The application cannot be measured; the message says why, and what to do."""


@contextlib.contextmanager
def reaching(problem: str) -> Iterator[None]:
    """Raise `MeasureError` with this problem if the block's requests fail."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise MeasureError(f"{problem}: {str(error) or type(error).__name__}") from None


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """An engine as ``GET /v1/engines`` describes it."""

    id: str
    role: str
    url: str
    capacity_tokens: int
    batched_tokens: int | None = None  # Most tokens of one step, if known.


@dataclass(frozen=True, slots=True)
class Application:
    """A running application, and one engine of each role."""

    url: str
    model: str
    prefiller: MeasuredEngine
    decoder: MeasuredEngine


async def find_application(url: str) -> Application:
    """Ask an application for its model and engines; raises `MeasureError`."""
    base = url.rstrip("/").removesuffix("/v1")
    with reaching(f"nothing answers at {base}"):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
            found = []
            for path in ("/v1/models", "/v1/engines"):
                async with session.get(base + path) as response:
                    if response.status != 200:
                        raise MeasureError(
                            f"{base}{path} answered {response.status}; give the address of a "
                            "ConServe application: conserve serve"
                        )
                    found.append((await response.json())["data"])
    models, engines = found
    by_role = {
        one["role"]: MeasuredEngine(
            one["id"],
            one["role"],
            one["url"],
            one["capacity_tokens"],
            # It is left out, or 0, if it is not known.
            one.get("max_batched_tokens") or None,
        )
        for one in engines
    }
    for role in ("prefiller", "decoder"):
        if role not in by_role:
            raise MeasureError(f"the application at {base} has no {role}; wait until it is ready")
    if any(one.get("hosts") for one in engines if one["role"] == "prefiller"):
        raise MeasureError(
            f"the prefillers of the application at {base} host conversations, and hand over no "
            "prompt that is sooner computed where it stays; start it with placement=conversation "
            "to measure it (the profile is good for any placement)"
        )
    return Application(base, models[0]["id"], by_role["prefiller"], by_role["decoder"])


class Probe:
    """Makes one measurement after the other, as an asynchronous context manager.

    Prompts are made of the ids in ``vocabulary``, which has none of the model's special ones.
    """

    def __init__(self, application: Application, vocabulary: range, seed: int) -> None:
        self._draws = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        # The salt hides other runs' KV.
        salt = f"profile-{random.SystemRandom().getrandbits(48):x}"
        self._common = {"model": application.model, "cache_salt": salt}
        self._prefiller, self._decoder = application.prefiller.url, application.decoder.url
        endpoint = Endpoint("decoder", self._decoder, application.model, conversation_headers=())
        self._streams = Client(endpoint, time.perf_counter, _TIMEOUT_S, salt, "")
        router = Endpoint("application", application.url, application.model)
        self._turns = Client(router, time.perf_counter, _TIMEOUT_S, salt, f"{salt}-")
        self._application = application.url
        self._salt = salt
        self._conversations = count()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as opened:
            self._session = await opened.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            await opened.enter_async_context(self._streams)
            await opened.enter_async_context(self._turns)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._opened.aclose()

    async def cold_prefill(self, new_tokens: int) -> fit.PrefillPoint:
        """Prefill a prompt that the prefiller has never seen."""
        seen = await self._prefill(self._prefiller, self._prompt(new_tokens))
        return fit.PrefillPoint(new_tokens, 0, seen.seconds)

    async def append(self, new_tokens: int, cached_tokens: int) -> fit.PrefillPoint:
        """Prefill a prompt whose beginning is in the decoder's prefix cache."""
        history = self._prompt(cached_tokens)
        await self._prefill(self._decoder, history)
        prompt = history + self._prompt(new_tokens)
        seen = await self._prefill(self._decoder, prompt, prompt_tokens=cached_tokens)
        # Caches keep whole blocks, so fewer tokens may be found.
        if not seen.cached_tokens:
            raise MeasureError(
                f"the decoder found none of {cached_tokens} tokens in its prefix cache; "
                "it may be full, or in use by others"
            )
        new = cached_tokens + new_tokens - seen.cached_tokens
        return fit.PrefillPoint(new, seen.cached_tokens, seen.seconds)

    async def decode(
        self, sequences: int, context_tokens: int, output_tokens: int
    ) -> fit.DecodePoint:
        """Time iterations in which ``sequences`` decode together, each after such a context."""
        contexts = await self._contexts(sequences, context_tokens)
        records = await self._together(contexts, output_tokens)
        starts = max(record.token_times_s[0] for record in records)
        ends = min(record.token_times_s[-1] for record in records)
        gaps = [gap for record in records for gap in _gaps(record, starts, ends)]
        if not gaps:
            raise MeasureError(
                f"{sequences} sequences of {output_tokens} tokens never decoded together; "
                "have them put out more tokens"
            )
        held = sequences * (context_tokens + output_tokens // 2)
        return fit.DecodePoint(sequences, held, statistics.median(gaps))

    async def append_beside(
        self, sequences: int, context_tokens: int, new_tokens: int, cached_tokens: int
    ) -> fit.MixedPoint:
        """Time the iteration in which an append is prefilled while others decode."""
        history = self._prompt(cached_tokens)
        await self._prefill(self._decoder, history)
        contexts = await self._contexts(sequences, context_tokens)
        running = asyncio.create_task(self._together(contexts, _BESIDE_TOKENS))
        # All of them decode by then, as their contexts are cached.
        await asyncio.sleep(_UNDER_WAY_S)
        prompt = history + self._prompt(new_tokens)
        seen = await self._prefill(self._decoder, prompt, prompt_tokens=cached_tokens)
        records = await running
        longest = [max(_gaps(one, seen.sent_s, seen.ended_s), default=0.0) for one in records]
        if not any(longest):
            raise MeasureError(
                f"{sequences} sequences had ended before the append came; the engine is too fast "
                "for this measurement"
            )
        held = sequences * (context_tokens + _BESIDE_TOKENS // 2)
        new = cached_tokens + new_tokens - seen.cached_tokens
        return fit.MixedPoint(sequences, held, new, seen.cached_tokens, statistics.median(longest))

    async def handoff(
        self, tokens: int, prefill_s: Callable[[float, float], float]
    ) -> fit.HandoffPoint:
        """Time the handoff of a prompt's KV, less what the decoder recomputes.

        ``prefill_s`` is the fitted time of a prefill of new tokens after cached ones.
        """
        prompt = self._prompt(tokens)
        await self._stored(COMPLETIONS, self._completion(prompt))
        seen = await self._prefill(self._decoder, prompt)
        found = seen.handed_off_tokens
        if not found:
            raise MeasureError(
                f"the decoder found nothing of {tokens} tokens that the prefiller had computed; "
                "see whether the LMCache server runs"
            )
        seconds = seen.seconds - prefill_s(tokens - found, found)
        return fit.HandoffPoint(found, max(seconds, 1e-6))

    async def sees(self) -> bool:
        """Return whether the model reads images."""
        with reaching(f"{self._prefiller} does not answer"):
            body = self._image_turn(_CHECKED_PIXELS)
            async with self._session.post(
                self._prefiller + wire.CHECK_PREFIX + CHAT, json=body
            ) as answer:
                return answer.status == 200

    async def encode(self, pixels: int) -> fit.EncodingPoint:
        """Time the prefill of a prompt with an image, of this width and height, and little else."""
        done, seconds = await self._stored(CHAT, self._image_turn(pixels))
        if not done.encoded_tokens:
            raise MeasureError("the prefiller encoded no image; see whether others use it")
        return fit.EncodingPoint(done.encoded_tokens, done.prefilled_tokens, seconds)

    def _image_turn(self, pixels: int) -> dict[str, Any]:
        """Return a turn whose image is like no other."""
        from PIL import Image

        written = io.BytesIO()
        noise = self._draws.bytes(pixels * pixels * 3)
        Image.frombytes("RGB", (pixels, pixels), noise).save(written, "PNG", compress_level=0)
        url = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return {**self._common, "messages": [{"role": "user", "content": content}]}

    async def border(self, decode_sms: int = 0, for_s: float = 0.0) -> list[int] | None:
        """Hold the decoder's border, or no longer; returns `BORDER_PATH`'s answer.

        None also where the decoder runs without the add-on, and does not have that path.
        """
        url, asked = self._decoder + BORDER_PATH, HoldBorder(decode_sms, for_s)
        what, answer = "holding the border", list[int] | None
        sizes_sms: list[int] | None = await self._asked(what, url, asked, answer, may_lack=True)
        return sizes_sms

    async def stage(
        self, decode_sms: int, longest_tokens: int, tokens: int = 0, pixels: int = 0
    ) -> fit.StagePoint:
        """Time a prefill of ``tokens`` in the decoder's lane, or an encode, beside decodes.

        The engine says how long it took. Answers have at most ``longest_tokens``.
        """
        await self.border(decode_sms, _HOLD_S)
        contexts = await self._contexts(_BESIDE_ANSWERS, _BESIDE_CONTEXT_TOKENS)
        most = longest_tokens - _BESIDE_CONTEXT_TOKENS
        turns = [_turn(self._streams, one, most) for one in contexts]
        running = [asyncio.create_task(sending) for _, sending in turns]
        try:
            await asyncio.sleep(_UNDER_WAY_S)
            known = wire.transfer_params(0) | wire.scheduled_turn("profile", None, last=True)
            body = self._image_turn(pixels) if pixels else {"prompt": self._prompt(tokens)}
            body |= self._common | {"max_tokens": 1, "kv_transfer_params": known}
            url = self._decoder + (CHAT if pixels else COMPLETIONS)
            answer = await self._asked("an encode" if pixels else "a prefill", url, body, dict)
            ended_s = time.perf_counter()
            # A last token of each, behind the end.
            await asyncio.sleep(_UNDER_WAY_S)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        took = wire.engine_told(answer.get("kv_transfer_params")).stages
        if pixels:
            # The prompt around the image was prefilled after it.
            ended_s -= took.prefill_s
        seconds = took.encode_s if pixels else took.prefill_s
        times = [record.token_times_s for record, _ in turns]
        return fit.stage_point(decode_sms, seconds, ended_s, times)

    async def turn(self, first_tokens: int, new_tokens: int) -> fit.TurnPoint:
        """Time a conversation's first turn, or its second, for a client and for the engines alone.

        ``new_tokens`` are the second turn's; with 0 the first turn is measured.
        """
        if new_tokens:
            engines_s = (await self.append(new_tokens, first_tokens)).seconds
        else:
            prompt = self._prompt(first_tokens)
            _, engines_s = await self._stored(COMPLETIONS, self._completion(prompt))
            engines_s += (await self._prefill(self._decoder, prompt)).seconds
        name = str(next(self._conversations))
        prompt = self._prompt(first_tokens)
        try:
            record = await _decode(self._turns, prompt, 2, name)
            if new_tokens:
                prompt += self._prompt(new_tokens)
                record = await _decode(self._turns, prompt, 2, name)
            reported = await self._last_turn(name, len(prompt))
        finally:
            await self._turns.release(name)
        assert record.first_token_s is not None
        seconds = record.first_token_s - record.sent_s
        handed_off, cached = reported["lmcache_tokens"], reported["decoder_cached_tokens"]
        if bool(new_tokens) != bool(cached) or bool(new_tokens) == bool(handed_off):
            raise MeasureError(
                f"of a {'second' if new_tokens else 'first'} turn's {len(prompt)} tokens "
                f"{handed_off} were handed off and {cached} found in the decoder's cache; have "
                "the application use placement=conversation, and nothing else use it"
            )
        return fit.TurnPoint(len(prompt), handed_off, cached, engines_s, seconds)

    async def _last_turn(self, name: str, prompt_tokens: int) -> dict[str, int]:
        """Return the engine's report of a conversation's last turn, which had this prompt."""
        url = f"{self._application}/v1/conversations/{self._salt}-{name}"
        deadline_s = time.perf_counter() + _REPORT_TIMEOUT_S
        while True:
            with reaching(f"{url} does not answer"):
                async with self._session.get(url) as answer:
                    said = await answer.json()
            reported: dict[str, int] | None = said.get("last_turn")
            if reported is not None and reported["prompt_tokens"] == prompt_tokens:
                return reported
            if time.perf_counter() >= deadline_s:
                raise MeasureError(f"{url} says nothing of the turn that has just ended: {said}")
            await asyncio.sleep(0.02)

    async def _contexts(self, sequences: int, tokens: int) -> list[list[int]]:
        """Return prompts that were just sent to the decoder, so that it has cached them."""
        prompts = [self._prompt(tokens) for _ in range(sequences)]
        for prompt in prompts:
            await self._prefill(self._decoder, prompt)
        return prompts

    async def _stored(self, path: str, body: dict[str, Any]) -> tuple[TurnStats, float]:
        """Have the prefiller compute a prompt and store its KV, as for a first turn, and time it.

        An answer on an engine's other paths may come before its prompt is stored.
        """
        url = self._prefiller + wire.PREFILL_PREFIX + path
        sent_s = time.perf_counter()
        done = await self._asked("a prefill", url, body, TurnStats)
        return done, time.perf_counter() - sent_s

    async def _asked(
        self, what: str, url: str, body: Any, type: Any, *, may_lack: bool = False
    ) -> Any:
        """Return an engine's answer; None if it ``may_lack`` the path, and does."""
        data = msgspec.json.encode(body)
        with reaching(f"{what} failed"):
            async with self._session.post(url, data=data, headers=_JSON) as answer:
                text = await answer.text()
        if answer.status == 404 and may_lack:
            return None
        if answer.status != 200:
            raise MeasureError(f"{what} was refused: {text[:300]}")
        return msgspec.json.decode(text, type=type)

    def _completion(self, prompt: list[int]) -> dict[str, Any]:
        return {**self._common, "prompt": prompt, "max_tokens": 1, "temperature": 0}

    async def _prefill(
        self, url: str, prompt: list[int], prompt_tokens: int | None = None
    ) -> "_Prefill":
        """Send a prompt, and wait for the one token that comes with its prefill.

        For a later turn, ``prompt_tokens`` of the first are sent as live turns send them, so that
        LMCache is not asked in vain.
        """
        told = {"kv_transfer_params": wire.transfer_params(prompt_tokens)}
        body = self._completion(prompt) | told
        sent_s = time.perf_counter()
        what = f"a prompt of {len(prompt)} tokens"
        answer = await self._asked(what, url + COMPLETIONS, body, dict[str, Any])
        ended_s = time.perf_counter()
        found = wire.cached_tokens(answer.get("kv_transfer_params"))
        return _Prefill(sent_s, ended_s, found.own_tokens or 0, found.lmcache_tokens or 0)

    async def _together(self, prompts: Sequence[list[int]], output_tokens: int) -> list[TurnRecord]:
        return await asyncio.gather(
            *(_decode(self._streams, prompt, output_tokens) for prompt in prompts)
        )

    def _prompt(self, tokens: int) -> list[int]:
        low, high = self._vocabulary.start, self._vocabulary.stop
        prompt: list[int] = self._draws.integers(low, high, tokens).tolist()
        return prompt


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prefilled prompt, and its tokens found in the prefix cache, then in LMCache."""

    sent_s: float
    ended_s: float
    cached_tokens: int
    handed_off_tokens: int

    @property
    def seconds(self) -> float:
        return self.ended_s - self.sent_s


async def _decode(
    client: Client, prompt: list[int], output_tokens: int, conversation: str = ""
) -> TurnRecord:
    record, turn = _turn(client, prompt, output_tokens, conversation)
    await turn
    if record.outcome != "completed" or not record.token_times_s:
        raise MeasureError(
            f"a prompt of {len(prompt)} tokens failed: {record.error or 'no token came'}"
        )
    return record


def _turn(
    client: Client, prompt: list[int], output_tokens: int, conversation: str = ""
) -> tuple[TurnRecord, Coroutine[Any, Any, object]]:
    """Return a turn's record, and what sends the turn and writes the record, to its end or not."""
    request = TurnRequest(0, COMPLETIONS, partial(completion, np.array(prompt), output_tokens))
    record = TurnRecord("profile", conversation, 1, 0.0, 0.0, 0.0, "unfinished")
    return record, client.turn(request, client.encode(request), record)


def _gaps(record: TurnRecord, from_s: float, to_s: float) -> list[float]:
    """Return the gaps between tokens that end within a time."""
    times = record.token_times_s
    return [after - before for before, after in pairwise(times) if from_s < after <= to_s]
