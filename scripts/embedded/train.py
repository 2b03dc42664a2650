"""Train the embedded model: ``python -m scripts.embedded.train DIRECTORY``.

Run again with the same directory, it goes on from the last checkpoint there. While a file given
by ``--pause-file`` exists, it waits.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from conserve_lab.agent import make_session, plain_conversation, transcript
from conserve_lab.agent.words import PLAIN
from scripts.embedded.data import Renderer, Stage, batches, examples
from scripts.embedded.model import Model, muon_matrices

SEED = 2026
BATCH_TOKENS = 8192
POOL = 192
# Learning rates: of the layers' matrices (Muon), and of all else (AdamW).
MATRIX_RATE, OTHER_RATE = 0.006, 0.004
WARM_UP_TOKENS = 300_000
# The last part of the tokens, in which the rates go down to a fiftieth.
COOL_DOWN = 0.5
SAVE_EVERY_S = 120.0
STAGES = (
    Stage(0.15, tasks=(1, 1), steps=(2, 4), schema_tokens=(60, 200)),
    Stage(0.30, tasks=(1, 2), steps=(2, 6), schema_tokens=(60, 400)),
    Stage(0.55, tasks=(1, 2), steps=(2, 6), schema_tokens=(100, 1000)),
    Stage(1.00, tasks=(1, 3), steps=(2, 6), schema_tokens=(100, 2100)),
)


def said_tokens(renderer: Renderer) -> list[int]:
    """Return the tokens that the model ever generates, in order."""
    said: set[int] = set()
    rng = random.Random(0)
    for number in range(1500):
        session = make_session(number, "train", tasks=2, schema_tokens=(50, 60))
        plain = plain_conversation(rng)
        for example in (
            renderer.example(transcript(session), session.schemas),
            renderer.example(plain),
        ):
            said |= {token for token, mark in zip(example.ids, example.said, strict=True) if mark}
    said |= {token for word in PLAIN for token in renderer.ids(f" {word}")}
    return sorted(said)


class Run:
    """A training run in a directory."""

    def __init__(self, directory: Path, tokens: float) -> None:
        self.directory = directory
        self.tokens = tokens
        self.seen = 0
        self.part = 0
        self.renderer = Renderer()
        self.said = self._said()
        vocab_size = self.renderer.tokenizer.get_vocab_size()
        self.row_of = torch.full((vocab_size,), -1)
        self.row_of[self.said] = torch.arange(len(self.said))
        torch.manual_seed(SEED)
        self.model = Model(vocab_size, self.said)
        matrices = muon_matrices(self.model)
        chosen = set(map(id, matrices))
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=MATRIX_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def _said(self) -> Tensor:
        file = self.directory / "checkpoint.pt"
        fresh = said_tokens(self.renderer)
        if not file.exists():
            return torch.tensor(fresh)
        saved: Tensor = torch.load(file, weights_only=True)["said"]
        if not set(fresh) <= set(saved.tolist()):
            raise SystemExit(f"{file} is of another tokenizer or task family: remove it")
        return saved

    @property
    def done(self) -> float:
        return self.seen / self.tokens

    def rate(self) -> float:
        """Return the factor of the learning rates."""
        warm = min(1.0, (self.seen + BATCH_TOKENS) / WARM_UP_TOKENS)
        return warm * min(1.0, max(0.02, (1 - self.done) / COOL_DOWN))

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        """Train on one batch; return the loss, and the share of tokens that were right."""
        ids, wanted = torch.from_numpy(inputs), torch.from_numpy(targets)
        where = wanted >= 0
        goal = self.row_of[wanted[where]]
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(ids, where)
        loss = F.cross_entropy(logits.float(), goal)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self.rate()
            optimizer.step()
            optimizer.zero_grad()
        self.model.hold()
        self.seen += ids.numel()
        return loss.item(), (logits.argmax(1) == goal).float().mean().item()

    def save(self) -> None:
        """Write the checkpoint; the old one stays until it is whole."""
        state: dict[str, Any] = {
            "seen": self.seen,
            "part": self.part,
            "said": self.said,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        staged = self.directory / "checkpoint.tmp"
        torch.save(state, staged)
        staged.rename(self.directory / "checkpoint.pt")

    def resume(self) -> None:
        """Continue from the directory's checkpoint, if there is one."""
        file = self.directory / "checkpoint.pt"
        if not file.exists():
            return
        state = torch.load(file, weights_only=True)
        # Another part draws other examples than before.
        self.seen, self.part = state["seen"], state["part"] + 1
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def batches(self, stage: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        seed = f"{SEED}/{self.part}/{stage}"
        source = examples(self.renderer, STAGES[stage], "train", seed)
        return batches(source, BATCH_TOKENS, POOL, random.Random(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where checkpoints and the log go")
    parser.add_argument("--tokens", type=float, default=18e6, help="tokens to train on")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    run = Run(arguments.directory, arguments.tokens)
    run.resume()
    saved = time.monotonic()
    losses: list[tuple[float, float]] = []
    spent = 0.0
    since = run.seen
    with (arguments.directory / "log.jsonl").open("a") as log, Progress() as bar:
        shown = bar.add_task("training", total=run.tokens, completed=run.seen)
        for index, stage in enumerate(STAGES):
            if run.done >= stage.until:
                continue
            for number, (inputs, targets) in enumerate(run.batches(index)):
                while arguments.pause_file and arguments.pause_file.exists():
                    time.sleep(1)
                began = time.monotonic()
                losses.append(run.step(inputs, targets))
                spent += time.monotonic() - began
                bar.update(shown, completed=run.seen)
                if number % 20 == 0:
                    loss, right = np.mean(losses, axis=0)
                    line = {
                        "tokens": run.seen,
                        "stage": index,
                        "loss": round(float(loss), 4),
                        "right": round(float(right), 4),
                        "tokens_per_s": round((run.seen - since) / spent),
                    }
                    print(json.dumps(line), file=log, flush=True)
                    losses.clear()
                    spent, since = 0.0, run.seen
                if time.monotonic() - saved > SAVE_EVERY_S:
                    run.save()
                    saved = time.monotonic()
                if run.done >= stage.until:
                    break
    run.save()


if __name__ == "__main__":
    main()
