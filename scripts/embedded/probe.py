"""How well a checkpoint follows held-out transcripts: ``python -m scripts.embedded.probe FILE``.

Every said token is predicted from the true text before it. Where all of a task's are right, the
greedy agent would have done that task exactly so.
"""

import argparse
from pathlib import Path

import torch

from conserve_lab.agent import make_session, transcript
from scripts.embedded.data import Renderer
from scripts.embedded.model import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a checkpoint.pt")
    parser.add_argument("--tasks", type=int, default=50, help="how many")
    parser.add_argument("--steps", type=int, nargs=2, default=(2, 6), help="steps of a task")
    parser.add_argument("--schemas", type=int, nargs=2, default=(200, 2000), help="tokens")
    parser.add_argument("--show", type=int, default=0, help="how many wrong turns to print")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    renderer = Renderer()
    state = torch.load(arguments.file, weights_only=True)
    said = state["said"]
    model = Model(renderer.tokenizer.get_vocab_size(), said)
    model.load_state_dict(state["model"])
    tokens = right_tokens = turns = right_turns = calls = right_calls = right_tasks = 0
    for number in range(arguments.tasks):
        session = make_session(
            f"probe/{number}",
            "held-out",
            steps=tuple(arguments.steps),
            schema_tokens=tuple(arguments.schemas),
        )
        example = renderer.example(transcript(session), session.schemas)
        ids, where = torch.tensor([example.ids[:-1]]), torch.tensor([example.said[1:]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            guess = said[model(ids, where).argmax(1)].tolist()
        wanted = ids.new_tensor(example.ids[1:])[where[0]].tolist()
        turn: list[tuple[int, int]] = []
        all_right = True
        for pair in zip(guess, wanted, strict=True):
            turn.append(pair)
            if pair[1] != 2:
                continue
            good = [a == b for a, b in turn]
            text = renderer.tokenizer.decode([b for _, b in turn])
            tokens += len(good)
            right_tokens += sum(good)
            turns += 1
            right_turns += all(good)
            if "<tool_call>" in text:
                calls += 1
                right_calls += all(good)
            if not all(good):
                all_right = False
                if arguments.show > 0:
                    arguments.show -= 1
                    name = renderer.tokenizer.decode
                    marked = [
                        name([b]) if a == b else f"[{name([b])}|{name([a])}]" for a, b in turn
                    ]
                    print("".join(marked))
            turn = []
        right_tasks += all_right
    print(
        f"at {state['seen'] / 1e6:.2f} M tokens: tokens {right_tokens / tokens:.4f},"
        f" turns {right_turns / turns:.4f}, turns with calls {right_calls / calls:.4f},"
        f" tasks {right_tasks / arguments.tasks:.4f}"
    )


if __name__ == "__main__":
    main()
