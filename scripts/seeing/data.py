"""Makes training examples: conversations about screens, as engines get them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conserve.embedded import IMAGE
from conserve_lab.agent.screens import CELL_PX, CLICK, SIDE_PX, Screen, Walk
from conserve_lab.agent.tasks import Message, call_message
from conserve_lab.agent.tools import Schema
from scripts.embedded.data import Example, Renderer

# A screenshot is cut into 2 x 2 tiles, and the whole becomes a fifth; 2 x 2 patches of 16 pixels
# become a token.
TILE_PX, TILES, TILE_TOKENS = 128, 5, 16
_EDGE = "<fake_token_around_image>"
_TILE = IMAGE * TILE_TOKENS
_ROWS = ["".join(f"{_EDGE}<row_{row}_col_{column}>{_TILE}" for column in (1, 2)) for row in (1, 2)]
# What a screenshot is in a prompt.
_SHOWN = "\n".join([*_ROWS, "", f"{_EDGE}<global-img>{_TILE}{_EDGE}"])


class Maker(Renderer):
    """Makes examples with the tokenizer and template of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.image: int = self.tokenizer.token_to_id(IMAGE)

    def text(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, answering: bool = False
    ) -> str:
        return super().text(messages, tools, answering=answering).replace(IMAGE, _SHOWN)

    def walked(self, walk: Walk) -> Example:
        """Return a conversation in which every click is right."""
        asked = [{"type": "text", "text": walk.question}, {"type": "image"}]
        messages: list[Message] = [
            {"role": "system", "content": walk.system},
            {"role": "user", "content": asked},
        ]
        for number, screen in enumerate(walk.screens):
            click = screen.target()
            if click is None:
                messages.append({"role": "assistant", "content": walk.answer})
                break
            name = f"call-{number}"
            messages.append(call_message(click, walk.remark(number), name))
            shown = [{"type": "image"}]
            messages.append({"role": "tool", "tool_call_id": name, "content": shown})
        return self.example(messages, [CLICK])

    def padded(self, walks: Sequence[Walk]) -> tuple[Tensor, Tensor]:
        """Return conversations as inputs, and as the tokens to learn: -1 where there is none."""
        examples = [self.walked(walk) for walk in walks]
        width = -(-max(len(example.ids) for example in examples) // 64) * 64
        ids = np.zeros((len(walks), width), np.int64)
        targets = np.full((len(walks), width), -1, np.int64)
        for row, example in enumerate(examples):
            length = len(example.ids) - 1
            ids[row, :length] = example.ids[:-1]
            targets[row, :length] = np.where(example.said[1:], example.ids[1:], -1)
        return torch.from_numpy(ids), torch.from_numpy(targets)


def pixels(screens: Sequence[Screen]) -> Tensor:
    """Return screens as the image processor gives them to the model: five tiles of each."""
    drawn = []
    for screen in screens:
        picture = screen.picture()
        whole = picture.resize((TILE_PX, TILE_PX), Image.Resampling.LANCZOS)
        tops = range(0, SIDE_PX, TILE_PX)
        boxes = [(left, top, left + TILE_PX, top + TILE_PX) for top in tops for left in tops]
        drawn += [np.asarray(tile) for tile in [*map(picture.crop, boxes), whole]]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).float() / 127.5 - 1


def cells(screens: Sequence[Screen]) -> Tensor:
    """Return for each screen the square with the highlighted button's centre; 64: none."""
    side = SIDE_PX // CELL_PX
    places = [screen.cell for screen in screens]
    return torch.tensor([side**2 if p is None else p[1] * side + p[0] for p in places])
