"""Screens, and how an agent is led through them."""

import base64
import io
import random
from dataclasses import replace

import pytest
from PIL import Image, ImageChops

from conserve_lab.agent import Call, Message, Reply, ToolError, run_agent
from conserve_lab.agent.screens import CLICK, SIDE_PX, Screen, Walk
from conserve_lab.agent.tasks import call_message


def test_one_button_is_ringed_and_the_click_that_is_trained_hits_it() -> None:
    rng = random.Random(1)
    for _ in range(100):
        screen = Screen.draw(rng)
        click = screen.target()
        assert click is not None
        assert screen.hit(click)
        assert screen.highlighted is not None
        button = screen.buttons[screen.highlighted]
        assert not screen.hit(Call("click", {"x": button.left - 1, "y": button.top}))
        assert not any(
            replace(screen, highlighted=other).hit(click)
            for other in range(len(screen.buttons))
            if other != screen.highlighted
        )
        # The ring is all that tells them apart.
        plain = replace(screen, highlighted=None)
        changed = ImageChops.difference(screen.picture(), plain.picture()).getbbox()
        assert changed == (button.left, button.top, button.right + 1, button.bottom + 1)
        assert plain.target() is None
        assert not plain.hit(click)


def test_a_seed_and_a_split_choose_the_screens_and_a_wording_the_words() -> None:
    one = Walk.draw(1, "held-out", 3)
    assert Walk.draw(1, "held-out", 3) == one
    assert Walk.draw(1, "train", 3).screens != one.screens
    assert Walk.draw(2, "held-out", 3).screens != one.screens
    other = Walk.draw(1, "held-out", 3, wording=1)
    assert other.screens == one.screens
    assert (other.system, other.question) != (one.system, one.question)


def _shown(content: list[Message]) -> bytes:
    (url,) = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))
    assert picture.size == (SIDE_PX, SIDE_PX)
    return picture.tobytes()


async def test_each_click_leads_on_and_is_counted() -> None:
    walk = Walk.draw(5, "held-out", 2)
    right = walk.screens[0].target()
    assert right is not None
    said = [
        call_message(right, "", "c0"),
        call_message(Call("click", {"x": 0, "y": 0}), "", "c1"),
        call_message(right, "", "c2"),
        {"role": "assistant", "content": walk.answer},
    ]

    async def complete(messages: object, schemas: object) -> Reply:
        return Reply(said.pop(0))

    done = await run_agent(complete, walk.messages(), [CLICK], walk.run)
    assert walk.hits == [True, False]
    told = [message["content"] for message in done.messages if message["role"] == "tool"]
    shown = [_shown(done.messages[1]["content"]), *map(_shown, told[:2])]
    assert shown == [screen.picture().tobytes() for screen in walk.screens]
    assert "no button is highlighted" in told[2]
    assert done.answer == walk.answer
    with pytest.raises(ToolError):
        walk.run(Call("click", {"x": 1}))
