"""Has encoders encode what a turn brings, before its prompt is computed elsewhere on their node."""

import asyncio
import functools
import logging
import time
from dataclasses import dataclass

from conserve.encoders import Encoder, Encoders, node_of
from conserve.errors import ApiError
from conserve.wire import NOTHING_ENCODED, Encoded
from deployments.router.request import ClientRequest
from deployments.router.upstream import EngineUnreachable, Upstream

logger = logging.getLogger("ray.serve")

# After that the engine that computes the prompt encodes by itself, as it does without encoders.
LONGEST_S = 10.0


@dataclass(eq=False)
class Encoding:
    """Sends each new medium to an encoder of its own choice, all of a turn's at a time."""

    upstream: Upstream
    encoders: Encoders

    async def encode(
        self, request: ClientRequest, url: str
    ) -> tuple[Encoded, list[tuple[Encoder, EngineUnreachable]]]:
        """Return once media are in the memory of the node of the engine at ``url``, or will not be.

        It raises nothing, and empties `ClientRequest.to_encode`. Returns what encoders did, and
        those whose connection broke.
        """
        node = node_of(url)
        jobs = [self._one(node, request.path, *one) for one in request.to_encode.items()]
        # The turn may last for long, and images are large.
        request.to_encode.clear()
        done = await asyncio.gather(*jobs)
        encoded = [one for one in done if isinstance(one, Encoded)]
        broken = [one for one in done if not isinstance(one, Encoded)]
        return functools.reduce(Encoded.plus, encoded, NOTHING_ENCODED), broken

    async def _one(
        self, node: str, path: str, name: str, raw: bytes
    ) -> Encoded | tuple[Encoder, EngineUnreachable]:
        encoder = self.encoders.begin(node, name, time.monotonic())
        if encoder is None:
            return NOTHING_ENCODED
        try:
            async with asyncio.timeout(LONGEST_S):
                done = await self.upstream.prefill(encoder.url, path, raw)
        except asyncio.CancelledError:
            self.encoders.give_up(encoder, name)
            raise
        except (EngineUnreachable, ApiError, TimeoutError) as error:
            why = str(error) or f"not encoded after {LONGEST_S:g} s"
            logger.warning("encoding on %s: %s", encoder.id, why)
            if not isinstance(error, ApiError) or error.status >= 500:
                self.encoders.failed(encoder, time.monotonic())
            self.encoders.end(encoder, name)
            return (encoder, error) if isinstance(error, EngineUnreachable) else NOTHING_ENCODED
        self.encoders.end(encoder, name)
        return done.encoded
