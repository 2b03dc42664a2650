"""Counts what decoders hold and tenants have of live histories, and how many are at work."""

from conserve.activity import Activity
from conserve.conversations.engines import Engines
from conserve.conversations.live import LiveHistories
from conserve.direct.notices import Notices
from conserve.history import History
from conserve.pausing import RunningTools
from conserve.tenants.usage import TenantUsage, UsageBook


class Ledger:
    """Counts what histories hold, where they are bound, and which of their turns run.

    Whatever changes one of these changes it here, so that they always agree.

    Args:
        engines: their decoders' occupancy is kept.

    Attributes:
        live: the histories.
        reasoning: of how many a turn runs.
        usage: what each tenant has.
        tools: which run, as clients report it.
        notices: what decoders are told that begin turns by themselves.
    """

    def __init__(self, engines: Engines) -> None:
        self._decoders = engines.decoders
        self._engines = engines
        self._activity = Activity()
        self.live = LiveHistories(self._charge)
        self._sharing = self.live.kinship.sharing
        self.reasoning = 0
        self.usage = UsageBook()
        self.tools = RunningTools()
        self.notices = Notices()

    # --- histories ---------------------------------------------------------------------------

    def add(self, history: History, usage: TenantUsage) -> None:
        """A history lives from now on, and the turns run that it comes with.

        What it holds is not counted yet.

        Args:
            usage: its tenant's.
        """
        usage.conversations += self.live.add(history)
        usage.histories += 1
        if history.running:
            usage.turns += len(history.running)
            self.reasoning += 1

    def take_out(self, history_id: str) -> History | None:
        """A history counts nowhere any more; None if it is unknown."""
        history = self.live.by_id.get(history_id)
        if history is None:
            return None
        self.tools.forget(history_id)
        self._engines.leave_queue(history)
        self._engines.left(history)
        if history.decoder_id is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.decoder_id].conversations -= 1
        usage = self.usage.of(history_id)
        usage.conversations -= self.live.remove(history)
        usage.histories -= 1
        usage.turns -= len(history.running)
        if history.running:
            self.reasoning -= 1
        self._activity.not_idle(history.id)
        return history

    # --- where they are bound, and what they hold --------------------------------------------

    def bind(self, history: History, decoder_id: str, tokens: int) -> None:
        """A history that was bound nowhere is bound to this decoder, and holds so much there."""
        history.decoder_id = decoder_id
        self._decoders[decoder_id].conversations += 1
        self._sharing.hold(history, tokens)

    def hold(self, history: History, tokens: int) -> None:
        """A history holds so much now, if it is bound."""
        if history.decoder_id is not None:
            self._sharing.hold(history, tokens)

    def unbind(self, history: History) -> None:
        """A history is bound nowhere, and its decoder is told so."""
        self._engines.left(history)
        if history.decoder_id is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.decoder_id].conversations -= 1
            self.give_up(history)
        history.decoder_id = None
        history.promised = False
        self._activity.not_idle(history.id)

    def give_up(self, history: History, *, ended: bool = False) -> None:
        """Tell a history's decoder that it has it no more, or that it has ended."""
        if history.decoder_id is not None:
            self.notices.give_up(history.decoder_id, history.id, history.incarnation, ended=ended)

    def lose(self, history: History) -> None:
        """A history's decoder is lost, and with it all its turns."""
        self._sharing.hold(history, 0)
        self.usage.of(history.id).turns -= len(history.running)
        history.decoder_id = None
        self._activity.not_idle(history.id)
        if history.running:
            history.finished = max(history.finished, *history.running)
            history.running = ()
            self.reasoning -= 1

    # --- turns -------------------------------------------------------------------------------

    def turn_starts(self, history: History, usage: TenantUsage, turn_id: int) -> None:
        """A turn of a history runs.

        Args:
            usage: its tenant's.
        """
        usage.turns += 1
        self.tools.forget(history.id)
        if not history.running:
            self.reasoning += 1
            self._activity.not_idle(history.id)
        history.running += (turn_id,)

    def turn_ends(self, history: History, turn_id: int, now_s: float) -> None:
        """A turn of a history runs no more, if it did."""
        running = history.running
        if turn_id in running:
            at = running.index(turn_id)
            # Its own number is kept, not the caller's equal one, as with the id.
            turn_id = running[at]
            self.usage.of(history.id).turns -= 1
            history.running = running[:at] + running[at + 1 :]
            if not history.running:
                self.reasoning -= 1
                self._activity.idle(history.id, now_s)
        history.finished = max(history.finished, turn_id)

    def active(self, now_s: float) -> int:
        """See `ConversationTable.active`."""
        return self.reasoning + self._activity.acting(now_s)

    def _charge(self, history: History, tokens: int) -> None:
        assert history.decoder_id is not None
        self._decoders[history.decoder_id].held_tokens += tokens
        self.usage.of(history.id).held_tokens += tokens
