"""Orders encodes and prefills beside decodes on one engine, and divides its SMs among them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from conserve_inside.policy.calls import PrefillLane, Route

Stage = Literal["encode", "prefill"]

# Text prompts need no encode, so without a limit they could keep images waiting for ever.
_MOST_PREFILLS_IN_A_ROW = 4


class DecodeShare(NamedTuple):
    """The SMs that decodes have beside one stage (Nova, equation 5).

    Attributes:
        most_sms: with one pending request (S*, equation 3).
        least_sms: with many (S_min), which bounds the time between tokens.
        per_request_sms: fewer for each further pending request (d).
    """

    most_sms: int
    least_sms: int
    per_request_sms: int

    def decode_sms(self, pending: int) -> int:
        """Return ``max(S_min, S* - (pending - 1) d)``; without pending requests S*."""
        fewer = self.per_request_sms * max(0, pending - 1)
        return max(self.least_sms, self.most_sms - fewer)


class Stages:
    """The lane's two kinds of jobs, encodes of images and prefills (Nova, section III-D).

    Within a stage the first that came is first. A prefill goes before an encode, they never run at
    the same time, and neither is batched. `PrefillLane` decides which prefills use the lane. See
    README.md for departures.

    Args:
        shares: by stage; None: they are not known, and `decode_sms` decides nothing.

    Raises:
        ValueError: a share is out of its range.

    Attributes:
        encoding: the request whose image is in the lane; None if it has none.
    """

    def __init__(
        self, prefills: PrefillLane, shares: Mapping[Stage, DecodeShare] | None = None
    ) -> None:
        for stage, share in (shares or {}).items():
            if not 0 < share.least_sms <= share.most_sms or share.per_request_sms < 0:
                raise ValueError(
                    f"{stage}: {share.least_sms} <= {share.most_sms} SMs, fewer by "
                    f"{share.per_request_sms} a request, is not possible"
                )
        self.prefills = prefills
        self._shares = dict(shares or {})
        # Requests with images to encode, in the order of their arrival.
        self._waiting: dict[str, None] = {}
        self.encoding: str | None = None
        self._prefills_in_a_row = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Return the requests that wait for an encode, the next one first."""
        return tuple(self._waiting)

    @property
    def current(self) -> Stage | None:
        """Return the stage that the lane computes now."""
        if self.encoding is not None:
            return "encode"
        return None if self.prefills.current is None else "prefill"

    @property
    def pending(self) -> int:
        """Return how many requests are in either stage, or wait for it (n of equation 5)."""
        encodes = len(self._waiting.keys() | ({self.encoding} - {None}))
        return encodes + self.prefills.waiting + (self.prefills.current is not None)

    def route(
        self, name: str, missing_tokens: int, budget_tokens: int, decoding: bool, now_s: float
    ) -> Route:
        """Return where a call that could begin now is prefilled; see `PrefillLane.route`.

        Beside an encode, a long prompt belongs into the lane even if nothing decodes.
        """
        encodes = self.encoding is not None or bool(self._waiting)
        is_images_turn = bool(self._waiting) and self._prefills_in_a_row >= _MOST_PREFILLS_IN_A_ROW
        free = self.encoding is None and not is_images_turn
        return self.prefills.route(
            name, missing_tokens, budget_tokens, decoding or encodes, now_s, free=free
        )

    def takes(self, name: str, tokens: int) -> None:
        """Put a call's prefill into the lane; ValueError if the lane is not free."""
        if self.encoding is not None:
            raise ValueError(f"{name} cannot enter the lane: it encodes for {self.encoding}")
        self.prefills.takes(name, tokens)
        self._prefills_in_a_row += 1

    def wants(self, name: str) -> None:
        """Have a request wait for an encode, unless it does so already."""
        self._waiting.setdefault(name)

    def forget(self, name: str) -> None:
        """Remove a request that has its images, or needs them no longer."""
        self._waiting.pop(name, None)

    def next_encode(self) -> str | None:
        """Return the request of which an image is encoded next, if that may begin now.

        Ask after `route` was asked about all prefills that could begin: they go first.
        """
        if self.current is not None:
            return None
        return next(iter(self._waiting), None)

    def puts_off(self) -> None:
        """Note that the next encode has no room yet, so that prefills need not wait for it."""
        self._prefills_in_a_row = 0

    def encodes(self, name: str) -> None:
        """Put one image of a request into the lane; ValueError if the lane is not free."""
        if self.current is not None:
            raise ValueError(f"an image of {name} cannot enter the lane: it is not free")
        self.encoding = name
        self._prefills_in_a_row = 0

    def encoded(self) -> None:
        """Note that the lane's encode has ended, in any way."""
        self.encoding = None

    def decode_sms(self) -> int | None:
        """Return how many SMs decodes have beside the lane's job.

        None if the lane is empty, or no share is known for its stage.
        """
        share = None if self.current is None else self._shares.get(self.current)
        return None if share is None else share.decode_sms(self.pending)
