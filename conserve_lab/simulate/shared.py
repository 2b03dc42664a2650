"""Shared beginnings of prompts in one simulated engine's prefix cache.

vLLM hashes each whole block of a prompt with all before it, so several conversations' system
prompts and tools are there once. Turns that run hold their blocks. Without any they are idle, and
dropped like other KV: the longest unused first, of a prefix from its end on.
"""

from collections.abc import Iterator, MutableMapping, Sequence

from conserve_lab.records import SharedPrefix


class Stretch:
    """Tokens of one part that lie side by side and have the same users.

    There is KV of it up to ``computed``; beyond is room that its users have taken.
    """

    __slots__ = ("computed", "end", "key", "start", "users")

    def __init__(self, key: int, start: int, end: int, computed: int, users: int) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.computed = computed
        self.users = users


class SharedPrefixes:
    """Shared prefixes that one engine holds, each token once.

    A part is cut into stretches where some turns have more of it than others. Prefixes given to
    these methods are those that `whole_blocks` returns.

    Args:
        idle: the engine's idle KV, the longest unused first; stretches without users are among it.

    Example:
        >>> idle = {}
        >>> shared = SharedPrefixes(16, idle)
        >>> tools, prompt = SharedPrefix(1, 100), SharedPrefix(2, 150)
        >>> prefix = shared.whole_blocks((tools, prompt))
        >>> shared.take(prefix)  # Of nothing idle; room for 144 tokens.
        (0, 144)
        >>> shared.computed(prefix, 144)
        >>> shared.leave(prefix)  # All of it is kept.
        (144, 0)
        >>> shared.found(shared.whole_blocks((tools, SharedPrefix(3, 400))))
        96
    """

    def __init__(self, block_tokens: int, idle: MutableMapping["str | Stretch", int]) -> None:
        self._block_tokens = block_tokens
        self._idle = idle
        self._parts: dict[int, list[Stretch]] = {}
        self._begins: dict[str, tuple[SharedPrefix, ...]] = {}

    def whole_blocks(self, parts: Sequence[SharedPrefix]) -> tuple[SharedPrefix, ...]:
        """Cut parts to whole blocks; a block across two of them is the longer's."""
        whole: list[SharedPrefix] = []
        start = 0
        for part in parts:
            tokens = part.tokens // self._block_tokens * self._block_tokens
            if tokens > start:
                whole.append(part._replace(tokens=tokens))
                start = tokens
        return tuple(whole)

    def found(self, prefix: Sequence[SharedPrefix]) -> int:
        at = 0
        for part in prefix:
            for stretch in self._of(part):
                at = min(stretch.computed, part.tokens)
                if at < min(stretch.end, part.tokens):
                    break
            if at < part.tokens:
                break
        return at // self._block_tokens * self._block_tokens

    def take(self, prefix: Sequence[SharedPrefix]) -> tuple[int, int]:
        """Let a turn hold a prefix; returns how many of its tokens were idle, and how many need
        room.
        """
        woken = new = at = 0
        for part in prefix:
            self._cut(part)
            for stretch in self._of(part):
                if not stretch.users:
                    woken += self._idle.pop(stretch)
                stretch.users += 1
                at = stretch.end
            if at < part.tokens:
                new += part.tokens - at
                more = Stretch(part.key, at, part.tokens, at, 1)
                self._parts.setdefault(part.key, []).append(more)
            at = part.tokens
        return woken, new

    def computed(self, prefix: Sequence[SharedPrefix], tokens: int) -> None:
        """Note that a turn that holds a prefix has KV of this many of its prompt's tokens."""
        for part in prefix:
            for stretch in self._of(part):
                stretch.computed = max(stretch.computed, min(stretch.end, tokens))

    def leave(self, prefix: Sequence[SharedPrefix]) -> tuple[int, int]:
        """Release a prefix; returns how many tokens are idle with that, and how many never were
        computed.
        """
        idle = gone = 0
        for part in reversed(prefix):
            # Ends go before beginnings.
            for stretch in reversed(list(self._of(part))):
                stretch.users -= 1
                if stretch.users:
                    continue
                gone += stretch.end - stretch.computed
                stretch.end = stretch.computed
                if stretch.end > stretch.start:
                    self._idle[stretch] = stretch.end - stretch.start
                    idle += stretch.end - stretch.start
                else:
                    self._remove(stretch)
        return idle, gone

    def drop(self, stretch: Stretch, tokens: int) -> None:
        """Drop tokens of a stretch without users, from its end."""
        stretch.end -= tokens
        stretch.computed = min(stretch.computed, stretch.end)
        if stretch.end == stretch.start:
            self._remove(stretch)

    # --- Conversations between turns ----------------------------------------------------------

    def begin(self, conversation: str, prefix: tuple[SharedPrefix, ...]) -> None:
        """Note the prefix after which a conversation's kept KV comes."""
        if prefix:
            self._begins[conversation] = prefix
        else:
            self._begins.pop(conversation, None)

    def begins(self, conversation: str) -> tuple[SharedPrefix, ...]:
        return self._begins.get(conversation, ())

    def forget(self, conversation: str) -> None:
        self._begins.pop(conversation, None)

    # --- inside -------------------------------------------------------------------------------

    def _of(self, part: SharedPrefix) -> Iterator[Stretch]:
        for stretch in self._parts.get(part.key, ()):
            if stretch.start >= part.tokens:
                return
            yield stretch

    def _cut(self, part: SharedPrefix) -> None:
        """End a stretch where a prefix ends, if it goes on there."""
        stretches = self._parts.get(part.key, [])
        for index, longer in enumerate(stretches):
            if longer.start < part.tokens < longer.end:
                computed = min(longer.computed, part.tokens)
                begin = Stretch(part.key, longer.start, part.tokens, computed, longer.users)
                # What is left keeps its place among what is idle.
                longer.start = part.tokens
                longer.computed = max(longer.computed, part.tokens)
                if not longer.users:
                    self._idle[longer] -= begin.end - begin.start
                    self._idle[begin] = begin.end - begin.start
                stretches.insert(index, begin)
                return

    def _remove(self, stretch: Stretch) -> None:
        stretches = self._parts[stretch.key]
        stretches.remove(stretch)
        if not stretches:
            del self._parts[stretch.key]
