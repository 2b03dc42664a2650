"""Trains the embedded model that sees: ``python -m scripts.seeing.train DIRECTORY``.

First the tower learns to find the highlighted button, by a head on its tokens that is not shipped.
Then the text model learns to say where it is, from tokens of screens that the tower has looked at
before. Run again with the same directory, it goes on from the last checkpoint there.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, Idefics3ForConditionalGeneration

from conserve.embedded import write_vision_checkpoint
from conserve_lab.agent.screens import QUESTIONS, SYSTEMS, Screen, Walk
from scripts.embedded.data import EMBEDDED
from scripts.seeing.data import TILE_TOKENS, TILES, Maker, cells, pixels

SEED = 2026
MATRIX_RATE, OTHER_RATE = 0.004, 0.003
WARM_UP_STEPS = 40
# The last part of a stage, in which its rates go down.
COOL_DOWN = 0.5
# Of a step: screens that the tower looks at, and those that conversations are about.
LOOKED_AT, TALKED_ABOUT = 64, 36
MOST_CLICKS = 7
# Screens that conversations are drawn from, and how many of them have nothing highlighted.
POOL, POOL_DONE = 4000, 600
SAVE_EVERY_S = 120.0


class Seeing(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """The model, and a head that tells of each token of a whole screen what it shows.

    The head gives for each of the token's 2 x 2 squares whether the highlighted button's centre is
    there, and the token's row and column.
    """

    def __init__(self, directory: Path, image: int) -> None:
        super().__init__()
        self.model = Idefics3ForConditionalGeneration(AutoConfig.from_pretrained(directory)).float()
        self.image = image
        self.side = round(TILE_TOKENS**0.5)
        self.head = nn.Linear(self.model.config.text_config.hidden_size, 4 + 2 * self.side)
        self._prepare()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _prepare(self) -> None:
        """Begin with matrices of even size, and with places that are told apart."""
        for name, weight in self.model.named_parameters():
            if name.endswith("position_embedding.weight"):
                weight.copy_(_places(round(weight.shape[0] ** 0.5), weight.shape[1]))
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=1.0)
            elif weight.dim() > 1 and "lm_head" not in name:
                nn.init.normal_(weight, std=weight[0].numel() ** -0.5)

    def features(self, pixels: Tensor) -> Tensor:
        """Return each tile's tokens."""
        (found,) = self.model.model.get_image_features(pixels[None]).pooler_output
        return found.view(len(pixels), TILE_TOKENS, -1)

    def found(self, wholes: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's loss, and the share of screens that it is right about."""
        told = self.head(wholes.float())
        there = told[..., :4].view(-1, self.side, self.side, 2, 2).transpose(2, 3).flatten(1)
        there = torch.cat([there, torch.zeros(len(there), 1)], 1)
        loss = F.cross_entropy(there, cells)
        places = torch.arange(TILE_TOKENS).expand(len(there), -1)
        for part, wanted in (
            (told[..., 4 : 4 + self.side], places // self.side),
            (told[..., 4 + self.side :], places % self.side),
        ):
            loss = loss + 0.1 * F.cross_entropy(part.flatten(0, 1), wanted.flatten())
        return loss, (there.argmax(1) == cells).float().mean()

    def said(self, ids: Tensor, targets: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answers' loss, and the share of their tokens that are right."""
        embedded = self.model.get_input_embeddings()(ids)
        where = (ids == self.image)[..., None]
        embedded = embedded.masked_scatter(where, features.to(embedded.dtype))
        hidden = self.model.model.text_model(inputs_embeds=embedded, use_cache=False)
        learnt = targets >= 0
        logits = self.model.lm_head(hidden.last_hidden_state[learnt]).float()
        goal = targets[learnt]
        return F.cross_entropy(logits, goal), (logits.argmax(1) == goal).float().mean()


def _places(side: int, width: int) -> Tensor:
    """Return sines and cosines of each place's row and column."""
    axis = torch.arange(side)[:, None] * math.pi * 2 ** torch.linspace(-4, 0, width // 4)
    waves = torch.cat([axis.sin(), axis.cos()], 1)
    rows, columns = (waves.repeat_interleave(side, 0), waves.repeat(side, 1))
    return torch.cat([rows, columns], 1)


class Run:
    """A training run in a directory."""

    def __init__(self, directory: Path, stages: tuple[int, int]) -> None:
        self.directory = directory
        self.stages = stages
        self.done = 0
        self.pool: list[Screen] = []
        self.features = torch.empty(0)
        write_vision_checkpoint(directory)
        self.maker = Maker(directory)
        torch.manual_seed(SEED)
        self.seeing = Seeing(directory, self.maker.image)
        named = list(self.seeing.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and ".layers." in name]
        chosen = set(map(id, matrices))
        others = [p for _, p in named if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=MATRIX_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._resume()

    def step(self) -> dict[str, float]:
        """Train on one batch; return what was seen of it."""
        first, second = self.stages
        looking = self.done < first
        rng = random.Random(f"{SEED}/{self.done}")
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = self._looked(rng) if looking else self._talked(rng)
        loss.backward()
        nn.utils.clip_grad_norm_(self.seeing.parameters(), 1.0)
        at, length = (self.done, first) if looking else (self.done - first, second)
        factor = min(1.0, (at + 1) / WARM_UP_STEPS)
        factor *= min(1.0, max(0.02, (1 - at / length) / COOL_DOWN))
        for optimizer, rate in zip(self.optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        return {"looking": looking, "loss": loss.item(), "right": right.item()}

    def _looked(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        screens = [Screen.draw(rng, done=rng.random() < 0.15) for _ in range(LOOKED_AT)]
        wholes = self.seeing.features(pixels(screens)[TILES - 1 :: TILES])
        return self.seeing.found(wholes, cells(screens))

    def _talked(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        if not self.pool:
            self._look_at_pool()
        clicks = rng.randint(1, MOST_CLICKS)
        walks, shown = [], []
        for _ in range(TALKED_ABOUT // (clicks + 1)):
            at = [*rng.sample(range(POOL_DONE, POOL), clicks), rng.randrange(POOL_DONE)]
            words = rng.choice(SYSTEMS), rng.choice(QUESTIONS)
            walks.append(Walk(tuple(self.pool[number] for number in at), *words))
            shown += at
        return self.seeing.said(*self.maker.padded(walks), self.features[shown].flatten(0, 1))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _look_at_pool(self) -> None:
        rng = random.Random(f"{SEED}/pool")
        self.pool = [Screen.draw(rng, done=number < POOL_DONE) for number in range(POOL)]
        parts = [self.pool[at : at + 50] for at in range(0, POOL, 50)]
        looked = [self.seeing.features(pixels(part)) for part in parts]
        self.features = torch.cat(looked).bfloat16().view(POOL, TILES, TILE_TOKENS, -1)

    def save(self) -> None:
        """Write the checkpoint; the old one stays until it is whole."""
        state = {
            "done": self.done,
            "seeing": self.seeing.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        staged = self.directory / "checkpoint.tmp"
        torch.save(state, staged)
        staged.rename(self.directory / "checkpoint.pt")

    def _resume(self) -> None:
        file = self.directory / "checkpoint.pt"
        if not file.exists():
            return
        state = torch.load(file, weights_only=True)
        self.done = state["done"]
        self.seeing.load_state_dict(state["seeing"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def export(self, file: Path) -> None:
        """Write the weights as vLLM and transformers load them."""
        weights = {
            name: value.detach().to(torch.bfloat16).contiguous()
            for name, value in self.seeing.model.state_dict().items()
        }
        save_file(weights, file, metadata={"format": "pt"})
        count = sum(value.numel() for value in weights.values())
        print(f"{file}: {count:,} parameters, {file.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where checkpoints and the log go")
    parser.add_argument("--looking", type=int, default=350, help="steps of the tower")
    parser.add_argument("--talking", type=int, default=400, help="steps of the text model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--to", type=Path, default=EMBEDDED / "vision" / "model.safetensors")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    run = Run(arguments.directory, (arguments.looking, arguments.talking))
    began_s = saved_s = time.monotonic()
    with (arguments.directory / "log.jsonl").open("a") as log:
        while run.done < sum(run.stages):
            seen = run.step()
            if run.done % 10 == 0:
                told = {"step": run.done, "took_s": round(time.monotonic() - began_s)}
                told |= {name: round(value, 4) for name, value in seen.items()}
                print(json.dumps(told), file=log, flush=True)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                run.save()
                saved_s = time.monotonic()
    run.save()
    run.export(arguments.to)


if __name__ == "__main__":
    main()
