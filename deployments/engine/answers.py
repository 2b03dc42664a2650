"""An answer inside an engine's server, as its reader gets it; it can do without one for a while.

A router that dies cannot say so: its connections break. One whose client has left, or that goes on
elsewhere, says so (`wire.LEAVE_PATH`). So an answer whose connection breaks without a word is
*alone*: it is made all the same, and kept, for the client may send its turn again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Send

from conserve.wire import ALONE_S, Reader


@dataclass(eq=False)
class Answer:
    """One turn's answer, from its first message on.

    Attributes:
        reader: who reads it, or did last.
        is_alone: called when it has lost its reader.
        messages: what was sent, in the form of ASGI.
        left: set once no reader is waited for: then it ends as if its client had left.
        done: whether its last message was sent, or none will be.
    """

    reader: Reader
    is_alone: Callable[[], None]
    messages: list[Message] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    alone: bool = False
    done: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watching: asyncio.Task[None] | None = None

    def receives(self, receive: Receive) -> Receive:
        """Return a ``receive`` whose client leaves when the answer is given up, and not before."""

        async def received() -> Message:
            if self._watching is not None:
                await self.left.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                self._watching = asyncio.create_task(self._watch(receive, self.reader))
            return message

        return received

    def sends(self, send: Send) -> Send:
        """Return a ``send`` that keeps what is sent; the server drops it if its client is gone."""

        async def sent(message: Message) -> None:
            self.messages.append(message)
            # The server then says that the client has left.
            self.done = message["type"] == "http.response.body" and not message.get("more_body")
            self._change()
            await send(message)

        return sent

    def end(self) -> None:
        self.done = True
        self._change()
        if self._watching is not None:
            self._watching.cancel()

    def leave(self) -> None:
        self.left.set()
        self._change()

    async def is_read(self) -> bool:
        """Wait until it has a reader; False if it is given up before that."""
        while self.alone and not self.left.is_set():
            await self._changed.wait()
        return not self.left.is_set()

    async def follow(self, reader: Reader, receive: Receive, send: Send) -> None:
        """Send it to a new reader, from its first message to its end."""
        self.reader, self.alone = reader, False
        self._change()
        watching = asyncio.create_task(self._watch(receive, reader))
        sent = 0
        try:
            while self.reader == reader and not self.alone:
                while sent < len(self.messages):
                    await send(self.messages[sent])
                    sent += 1
                if self.done:
                    break
                await self._changed.wait()
        finally:
            watching.cancel()

    async def _watch(self, receive: Receive, reader: Reader) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.done and not self.alone and self.reader == reader:
            self.alone = True
            self.is_alone()
            asyncio.get_running_loop().call_later(ALONE_S, self._give_up, reader)

    def _give_up(self, reader: Reader) -> None:
        if self.alone and self.reader == reader:
            self.leave()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
