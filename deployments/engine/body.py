"""A request's body, read by what stands before vLLM's server, and given to it all the same."""

from starlette.types import Message, Receive

# In the scope of a request that is a turn: its `TurnKey`.
TURN = "conserve.turn"


async def read_ahead(receive: Receive) -> bytes:
    """The whole body; what there is of it, where the client leaves."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives out a body that was read already, and then goes on."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
