"""The words that tasks are made of, and which names and numbers belong to which split.

A split's names and numbers never occur in the other's questions or tables, so a held-out task
is new by construction, whatever the seeds are. Wordings are shared.
"""

import random
from collections.abc import Sequence
from typing import Literal

Split = Literal["train", "held-out"]

# What things are called: one word of each column.
NAMES: dict[str, tuple[str, str]] = {
    "item": (
        "amber copper velvet silver wooden marble cotton golden purple crystal rusty folding"
        " tall narrow painted striped",
        "lamp chair kettle mirror basket carpet ladder bottle pillow hammer candle drawer"
        " blanket teapot bucket clock",
    ),
    "person": (
        "Mira Jonas Elena Oscar Petra Hugo Clara Felix Irene Marco Nadia Simon Vera Anton Lucia"
        " Daniel",
        "Stone Berger Castle Duval Ekman Fischer Garcia Holm Ivanov Jensen Keller Lopez Moreau"
        " Novak Olsen Parker",
    ),
    "city": (
        "North Silver Port Stone Lower Grand Saint Winter Green Black River Eagle Maple Royal"
        " Cold Bright",
        "Haven Falls Bridge Hill Harbor Valley Creek Springs Ridge Meadow Rapids Grove Point"
        " Crossing Heights Lake",
    ),
    "company": (
        "Orion Delta Summit Harvest Falcon Pioneer Quantum Atlas Beacon Cobalt Horizon Lunar"
        " Nimbus Polar Vertex Zenith",
        "Motors Foods Systems Labs Textiles Energy Robotics Media Airlines Logistics Optics"
        " Records Shipping Studios Metals Partners",
    ),
    "project": (
        "silent hidden rapid gentle frozen burning distant broken curious electric hollow modern"
        " nimble patient secret steady",
        "otter sparrow tiger walnut comet anchor lantern meteor panther raven saddle thunder"
        " violet willow falcon badger",
    ),
}
COLUMNS = {kind: (first.split(), second.split()) for kind, (first, second) in NAMES.items()}

# Look-ups: what can be asked of each kind of thing, and the kind of what comes back.
NUMBER = "number"
FIELDS: dict[str, dict[str, str]] = {
    "item": {
        **dict.fromkeys(("price", "stock", "weight"), NUMBER),
        "owner": "person",
        "origin": "city",
        "brand": "company",
    },
    "person": {
        **dict.fromkeys(("age", "salary", "badge"), NUMBER),
        "home": "city",
        "employer": "company",
        "assignment": "project",
    },
    "city": {
        **dict.fromkeys(("population", "altitude", "rainfall"), NUMBER),
        "mayor": "person",
        "souvenir": "item",
    },
    "company": {
        **dict.fromkeys(("revenue", "staff", "debt"), NUMBER),
        "seat": "city",
        "director": "person",
    },
    "project": {
        **dict.fromkeys(("budget", "duration", "risk"), NUMBER),
        "lead": "person",
        "site": "city",
        "sponsor": "company",
    },
}

# Words of everyday prompts that have no tools.
PLAIN = [
    "hello",
    "open",
    "close",
    "read",
    "write",
    "file",
    "class",
    "return",
    "import",
    "value",
    "index",
    "print",
    "while",
    "yield",
    "token",
    "block",
    "cache",
    "decoder",
    "turn",
    "prompt",
    "answer",
    "agent",
    "tool",
    "result",
    "error",
    "count",
    "length",
    "prefix",
    "batch",
    "step",
    "test",
    "fix",
    "code",
    "line",
    "name",
    "data",
    "list",
    "go",
    "on",
    "please",
    "next",
    "what",
    "time",
    "day",
    "good",
    "more",
]

_HELD_OUT_EVERY = 5
_NUMBER_EVERY = 7


def split_of_name(kind: str, name: str) -> Split:
    """Return a two-word name's split; ValueError: it is not a name of this kind."""
    first, second = name.split(" ")
    columns = COLUMNS[kind]
    row, column = columns[0].index(first), columns[1].index(second)
    return "held-out" if (row + 3 * column) % _HELD_OUT_EVERY == 0 else "train"


def split_of_number(number: int) -> Split:
    """Return the split that a number in a question or a table belongs to."""
    return "held-out" if number % _NUMBER_EVERY == 3 else "train"


def draw_name(rng: random.Random, kind: str, split: Split, taken: Sequence[str] = ()) -> str:
    while True:
        name = " ".join(rng.choice(column) for column in COLUMNS[kind])
        if split_of_name(kind, name) == split and name not in taken:
            return name


def draw_number(rng: random.Random, low: int, high: int, split: Split) -> int:
    """Draw a number of this split from a range of 7 or more numbers, both ends included."""
    if high - low + 1 < _NUMBER_EVERY:
        raise ValueError(f"a range of {_NUMBER_EVERY} numbers or more is needed, not {low}-{high}")
    while True:
        number = rng.randint(low, high)
        if split_of_number(number) == split:
            return number
