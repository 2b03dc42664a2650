"""Names files of KV on a node's disk, for LMCache's server that writes them, and for engines.

A chunk's folder is ``NAMESPACE/SALT/CHUNK``. When it was last used is its folder's time.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

FOLDER = "conserve-kv"
# A line of a list, of which a fault of the disk may have changed any part.
_CHUNK = re.compile("^[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]+$", re.MULTILINE)


@functools.lru_cache(4096)
def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def chunk_folder(model_name: str, salt: str, chunk: bytes) -> str:
    return f"{short(model_name)}/{short(salt)}/{chunk.hex()}"


class OwnFiles:
    """Lists the chunks of each conversation, which are removed with it; an engine has one.

    Args:
        path: the setting ``lmcache.disk.path``.
    """

    def __init__(self, path: str, model_name: str, chunk_tokens: int) -> None:
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        self._root, self._model, self._chunk_tokens = Path(path) / FOLDER, model_name, chunk_tokens
        self._hashes = TokenHasher(chunk_size=chunk_tokens).compute_chunk_hashes

    def note(self, conversation: str, prompt: Sequence[int], salt: str) -> int:
        """Note a prompt's chunks, as used now; returns how many first tokens are there."""
        if not self._root.is_dir():
            return 0
        names = [chunk_folder(self._model, salt, one) for one in self._hashes(list(prompt))]
        kept = 0
        with contextlib.suppress(FileNotFoundError):
            for kept, name in enumerate(names):  # noqa: B007
                os.utime(self._root / name)
            kept = len(names)
        listed, list_ = self._listed(conversation), self._list(conversation)
        list_.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(list_, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            # The list may have been cut within a line.
            file.writelines(f"\n{one}\n" for one in names if one not in listed)
        return kept * self._chunk_tokens

    def forget(self, conversation: str, last: bool = True) -> bool:
        """Remove a conversation's chunks, and at the last time its list; return if that is done."""
        with contextlib.suppress(OSError):
            for name in self._listed(conversation):
                shutil.rmtree(self._root / name, ignore_errors=True)
            if last:
                self._list(conversation).unlink(missing_ok=True)
            return last
        return False

    def _listed(self, conversation: str) -> set[str]:
        try:
            return set(_CHUNK.findall(self._list(conversation).read_text(errors="replace")))
        except FileNotFoundError:
            return set()

    def _list(self, conversation: str) -> Path:
        digest = hashlib.sha256(conversation.encode()).hexdigest()
        return self._root / "owners" / digest[:2] / digest[2:4] / digest
