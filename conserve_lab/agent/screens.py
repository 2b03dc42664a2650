"""Screens to look at: an agent clicks the highlighted button, and is shown the next screen.

The embedded model that sees is trained on these screens and tested with them. A screen of another
split or seed has other places, sizes, colours and labels.
"""

import base64
import io
import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw, ImageFont

from conserve_lab.agent.tasks import Message
from conserve_lab.agent.tools import Call, Schema, ToolError
from conserve_lab.agent.words import Split

SIDE_PX = 256
# Clicks go to the centres of squares of this side.
CELL_PX = 32
CLICK: Schema = {
    "type": "function",
    "function": {
        "name": "click",
        "description": "Click at a point of the screen and get the next screenshot. The upper left "
        "corner is at 0, 0.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "description": "pixels from the left"},
                "y": {"type": "integer", "description": "pixels from the top"},
            },
            "required": ["x", "y"],
        },
    },
}
# What agents are told; every second conversation about the same screens gets other words.
SYSTEMS = (
    "You work with a program by its screen, which is 256 by 256 pixels. Click on one button at a "
    "time, and look at what has changed.",
    "You see screenshots of 256 by 256 pixels. Answer with one click at a time, and with a text "
    "when there is nothing left to click on.",
    "You test the buttons of a program. Look at the newest screenshot, and do not click on a "
    "button twice.",
    "You are an agent with a mouse and a small screen. Say which screen you are at before each "
    "click.",
)
QUESTIONS = (
    "Click the highlighted button until none is highlighted.",
    "On each screen, click the highlighted button. Tell me when you are done.",
    "Please click the highlighted button, then the next one, up to the last.",
    "Work through these screens: the button to click is highlighted.",
)

_RING = (255, 120, 0)
_RING_PX = 5
_GAP_PX = 10
_LABELS = ["OK", "Save", "Open", "Send", "Next", "Back", "Help", "Close",
           "Print", "Edit", "Copy", "Find", "Apply", "Retry", "Share", "Undo"]  # fmt: skip
_GROUNDS = [(240, 240, 240), (255, 255, 255), (225, 230, 240), (200, 205, 210),
            (40, 44, 52), (25, 30, 60), (60, 60, 60), (245, 240, 225)]  # fmt: skip
_FILLS = [(70, 120, 200), (60, 150, 90), (150, 90, 170), (60, 160, 170), (190, 60, 70),
          (220, 200, 80), (120, 120, 120), (210, 210, 215), (30, 60, 110), (160, 190, 230),
          (220, 150, 180), (110, 80, 60)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Button:
    """A rectangle in pixels, right and bottom included."""

    left: int
    top: int
    right: int
    bottom: int
    fill: tuple[int, int, int]
    label: str

    def holds(self, x: int, y: int) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom


@dataclass(frozen=True, slots=True)
class Screen:
    """Buttons, of which ``highlighted`` is the place of one; None: there is nothing left to do."""

    ground: tuple[int, int, int]
    buttons: tuple[Button, ...]
    highlighted: int | None

    @classmethod
    def draw(cls, rng: random.Random, *, done: bool = False) -> "Screen":
        buttons: list[Button] = []
        wanted = rng.randint(3, 7)
        for _ in range(60):
            width, height = rng.randint(48, 100), rng.randint(40, 60)
            left = rng.randint(_GAP_PX, SIDE_PX - _GAP_PX - width)
            top = rng.randint(_GAP_PX, SIDE_PX - _GAP_PX - height)
            right, bottom = left + width - 1, top + height - 1
            look = rng.choice(_FILLS), rng.choice(_LABELS)
            button = Button(left, top, right, bottom, *look)
            if not any(_near(button, other) for other in buttons):
                buttons.append(button)
            if len(buttons) == wanted:
                break
        highlighted = None if done else rng.randrange(len(buttons))
        return cls(rng.choice(_GROUNDS), tuple(buttons), highlighted)

    @property
    def cell(self) -> tuple[int, int] | None:
        """The column and the row of the square that has the highlighted button's centre."""
        if self.highlighted is None:
            return None
        button = self.buttons[self.highlighted]
        x, y = (button.left + button.right) // 2, (button.top + button.bottom) // 2
        return x // CELL_PX, y // CELL_PX

    def target(self) -> Call | None:
        """Return the click that the model is trained to make; None: there is none to make."""
        if self.cell is None:
            return None
        x, y = (place * CELL_PX + CELL_PX // 2 for place in self.cell)
        return Call("click", {"x": x, "y": y})

    def hit(self, call: Call | None) -> bool:
        """Return whether a click is on the highlighted button."""
        if self.highlighted is None or call is None or call.name != "click":
            return False
        x, y = call.arguments.get("x"), call.arguments.get("y")
        button = self.buttons[self.highlighted]
        return isinstance(x, int) and isinstance(y, int) and button.holds(x, y)

    def picture(self) -> Image.Image:
        picture = Image.new("RGB", (SIDE_PX, SIDE_PX), self.ground)
        pen = ImageDraw.Draw(picture)
        font = ImageFont.load_default(12)
        for place, button in enumerate(self.buttons):
            box = (button.left, button.top, button.right, button.bottom)
            if place == self.highlighted:
                pen.rounded_rectangle(box, 8, button.fill, _RING, _RING_PX)
            else:
                pen.rounded_rectangle(box, 8, button.fill, (90, 90, 90), 1)
            middle = ((button.left + button.right) // 2, (button.top + button.bottom) // 2)
            ink = (0, 0, 0) if sum(button.fill) > 380 else (255, 255, 255)
            pen.text(middle, button.label, ink, font, anchor="mm")
        return picture

    def part(self) -> Message:
        """Return the screenshot as a part of a chat's message."""
        written = io.BytesIO()
        self.picture().save(written, "PNG")
        url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url}}


def _near(one: Button, other: Button) -> bool:
    return (
        one.left - _GAP_PX <= other.right
        and other.left - _GAP_PX <= one.right
        and one.top - _GAP_PX <= other.bottom
        and other.top - _GAP_PX <= one.bottom
    )


@dataclass(slots=True)
class Walk:
    """Screens one after another, as a tool shows them: the last has nothing highlighted.

    A click leads to the next screen, wherever it is made, so each screen is clicked once.
    """

    screens: tuple[Screen, ...]
    system: str
    question: str
    at: int = 0
    hits: list[bool] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: str | int, split: Split, clicks: int, wording: int = 0) -> "Walk":
        """Return the screens of a seed; ``wording`` changes the words around them alone."""
        rng = random.Random(f"screens/{split}/{seed}")
        screens = tuple(Screen.draw(rng, done=number == clicks) for number in range(clicks + 1))
        words = random.Random(f"words/{split}/{seed}").sample(
            [(system, question) for system in SYSTEMS for question in QUESTIONS], 16
        )
        return cls(screens, *words[wording % 16])

    @property
    def answer(self) -> str:
        """The text that the model is trained to say when nothing is highlighted."""
        return f"Done after {len(self.screens) - 1} screens."

    def remark(self, number: int) -> str:
        """Return what the model is trained to say before a click, counted from 0."""
        return f"Screen {number + 1}."

    def messages(self) -> list[Message]:
        """Return what a conversation begins with."""
        asked = [{"type": "text", "text": self.question}, self.screens[0].part()]
        return [{"role": "system", "content": self.system}, {"role": "user", "content": asked}]

    def run(self, call: Call) -> list[Message]:
        """Carry out a click, and return the next screenshot."""
        if call.name != "click" or set(call.arguments) != {"x", "y"}:
            raise ToolError("there is only click, which takes x and y")
        if self.at + 1 >= len(self.screens):
            raise ToolError("no button is highlighted")
        self.hits.append(self.screens[self.at].hit(call))
        self.at += 1
        return [self.screens[self.at].part()]
