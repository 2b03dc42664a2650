"""The embedded models: small checkpoints that need no download. One reads text, the other sees.

With them the whole system can be run, tested and measured anywhere.

``scripts/embedded`` trained the first, of Qwen3's architecture, on the tasks of
``conserve_lab.agent``: it reads tools' schemas, calls one a turn in the Hermes format, and answers
with the results. Without tools it answers with parts of what was said to it.

Its weights rule out all tokens but those that training had it say, and the tokenizer cuts any
sequence of those as it was said. So an answer sent back as text is found in the prefix cache. Its
output depends on the conversation, so a wrong or stale KV cache shows in the text.

``scripts/seeing`` trained the second, an Idefics3, on screens of ``conserve_lab.agent.screens``: it
clicks the highlighted button of the newest screenshot, until none is highlighted. It knows nothing
else. It has the first one's tokenizer and chat template.
"""

import os
import shutil
import tempfile
from pathlib import Path

VERSION = 2
VISION_VERSION = 1
MODEL_NAME = "conserve-embedded"
VISION_MODEL_NAME = "conserve-embedded-vision"

# Idefics3's tokens: a placeholder, what stands around a tile, what begins the small version of a
# whole screenshot, and each of its four tiles. (vLLM cannot serve an image of one tile.) The
# processor adds the last one by itself if it is not there.
IMAGE = "<image>"
_IMAGE_TOKENS = [
    *(IMAGE, "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"),
    *("<row_2_col_1>", "<row_2_col_2>", "<end_of_utterance>"),
]

_HERE = Path(__file__).resolve().parent
# Files of either checkpoint.
_OF_BOTH = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")


def model_path(root: Path | None = None, name: str = MODEL_NAME) -> Path:
    """Return the directory of an embedded model's checkpoint, made on first use (6 to 10 MB).

    By default it is in ``$CONSERVE_HOME``, else in ``~/.cache/conserve``. OSError if that is not
    writable.
    """
    base = root or Path(os.environ.get("CONSERVE_HOME") or Path.home() / ".cache" / "conserve")
    version = VISION_VERSION if name == VISION_MODEL_NAME else VERSION
    target = base / "models" / f"{name}-v{version}"
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each makes its own, and the first rename wins.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if name == VISION_MODEL_NAME:
            write_vision_checkpoint(staging)
        else:
            write_checkpoint(staging)
        os.chmod(staging, 0o755)
        try:
            staging.rename(target)
        except OSError:
            if not (target / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def write_checkpoint(directory: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", *_OF_BOTH):
        shutil.copyfile(_HERE / name, directory / name)


def write_vision_checkpoint(directory: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_HERE / "tokenizer.json"))
    tokenizer.add_special_tokens(_IMAGE_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    shutil.copytree(_HERE / "vision", directory, dirs_exist_ok=True)
    for name in _OF_BOTH:
        shutil.copyfile(_HERE / name, directory / name)
