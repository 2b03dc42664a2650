"""Keeps account of who holds which environment, how far each is, and what may be had.

Event-sourced: each change is an entry, recorded before it counts, and a ledger that is made from
the entries of another is the same. Nothing is read from a clock.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from conserve import identity
from conserve.environments.journal import Entry
from conserve.environments.spec import Spec

MOST_OF_CONVERSATION = 8

State = Literal["declared", "preparing", "ready", "failed", "removing"]


class Conflict(ValueError):
    """The name is taken by an environment that is another one; the message says how it differs."""


class QuotaExceeded(RuntimeError):
    """There are as many environments as there may be.

    Attributes:
        setting: the setting that says so; None: it is not one.
    """

    def __init__(self, message: str, setting: str | None) -> None:
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class Quotas:
    """How many environments there may be.

    Args:
        most: at a time.
        most_of_tenant: of one tenant, where there are any.
        unclaimed_s: how long one is kept for a conversation that has not begun.
    """

    most: int
    most_of_tenant: int
    unclaimed_s: float


class Standing(NamedTuple):
    """How a conversation stands with the table.

    Attributes:
        state: ``unknown``: it has none such; ``waiting``: in the line; ``live``: known, or being
            placed.
        place: in the line, from 0.
    """

    state: Literal["unknown", "waiting", "live"]
    place: int = 0


UNKNOWN = Standing("unknown")


@dataclass(slots=True)
class Holder:
    """A conversation that has an environment.

    Attributes:
        since_s: when it asked for it, or was last at work in it.
        seen_by: the life of the table that has known it last; None: none has, yet.
        standing: as it was seen last.
    """

    since_s: float
    seen_by: int | None = None
    standing: Standing = UNKNOWN


@dataclass(slots=True)
class Environment:
    """One environment.

    Attributes:
        number: never given twice.
        slot: which of the places for environments it has: its ports, and its user id.
        tenant: whose it is.
        ports: those that it has, once it is prepared.
        error: why it could not be prepared.
        wanted: whether somebody waits for it.
        last_holder: the conversation that has let go of it last; empty if that is not known.
    """

    number: int
    slot: int
    tenant: str | None
    spec: Spec
    state: State = "declared"
    holders: dict[str, Holder] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    error: str | None = None
    wanted: bool = False
    last_holder: str = ""


class Ledger:
    """All environments, and what is to be done about them.

    Args:
        record: is given each entry before it counts; what it raises, the caller of the change gets,
            and nothing has changed.

    Example:
        >>> ledger = Ledger(Quotas(10, 10, unclaimed_s=60.0))
        >>> made = ledger.declare("fix-42", Spec(), now_s=0.0)
        >>> ledger.observe(1, {"fix-42": Standing("live")}, now_s=1.0)
        >>> [one.number for one in ledger.to_prepare(near=4, most=2)]
        [1]
        >>> ledger.observe(1, {}, now_s=2.0)  # It has ended.
        >>> [one.number for one in ledger.to_remove()]
        [1]
    """

    def __init__(self, quotas: Quotas, record: Callable[[Entry], None] = lambda entry: None):
        self._quotas = quotas
        self._record = record
        self._next = 1
        self._all: dict[int, Environment] = {}
        # Numbers of those that a conversation holds, by name.
        self._held: dict[str, dict[str, int]] = {}
        self._shared: dict[tuple[str | None, str], int] = {}

    # --- what there is -----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Environment]:
        return iter(self._all.values())

    def get(self, number: int) -> Environment | None:
        """An environment by its number; None once it is gone."""
        return self._all.get(number)

    def of(self, conversation_id: str) -> list[Environment]:
        """Return the environments that a conversation holds."""
        return [self._all[number] for number in self._held.get(conversation_id, {}).values()]

    def find(self, conversation_id: str, name: str) -> Environment | None:
        """The one that a conversation holds by this name."""
        number = self._held.get(conversation_id, {}).get(name)
        return None if number is None else self._all[number]

    def conversations(self) -> Collection[str]:
        """Return the conversations that hold any."""
        return self._held.keys()

    # --- what clients do ---------------------------------------------------------------------

    def declare(self, conversation_id: str, spec: Spec, now_s: float) -> Environment:
        """Have a conversation hold an environment; asked for twice, it is the same.

        Raises:
            Conflict: it holds another one of that name.
            QuotaExceeded: there are too many.
        """
        tenant = identity.tenant_of(conversation_id)
        found = self.find(conversation_id, spec.name)
        if found is None and spec.shared:
            number = self._shared.get((tenant, spec.name))
            found = None if number is None else self._all[number]
        if found is not None:
            if found.spec != spec:
                differs = [
                    name for name in _FIELDS if getattr(found.spec, name) != getattr(spec, name)
                ]
                raise Conflict(
                    f"there is an environment {spec.name!r} already, with another "
                    f"{', '.join(differs)}; choose another name, or remove that one"
                )
            if conversation_id in found.holders:
                return found
        if len(self._held.get(conversation_id, ())) >= MOST_OF_CONVERSATION:
            raise QuotaExceeded(
                f"the conversation has {MOST_OF_CONVERSATION} environments, and no more may be",
                None,
            )
        if found is None:
            self._require_room(tenant)
            number, slot = self._next, self._free_slot()
            self._do(
                {"op": "declare", "number": number, "slot": slot, "tenant": tenant,
                 "spec": spec.model_dump()}
            )  # fmt: skip
            found = self._all[number]
        self._do(
            {"op": "hold", "number": found.number, "conversation": conversation_id, "at_s": now_s}
        )
        return found

    def _require_room(self, tenant: str | None) -> None:
        quotas = self._quotas
        if len(self._all) >= quotas.most:
            raise QuotaExceeded(f"there are {quotas.most} environments already", "most")
        of_tenant = sum(one.tenant == tenant for one in self._all.values())
        if tenant is not None and of_tenant >= quotas.most_of_tenant:
            raise QuotaExceeded(
                f"the tenant has {quotas.most_of_tenant} environments already", "most"
            )

    def _free_slot(self) -> int:
        taken = {one.slot for one in self._all.values()}
        return next(slot for slot in range(self._quotas.most) if slot not in taken)

    def let_go(self, conversation_id: str, name: str) -> bool:
        """Have a conversation hold an environment no more; False if it does not."""
        found = self.find(conversation_id, name)
        if found is None:
            return False
        self._let_go(found, conversation_id)
        return True

    def used(self, conversation_id: str, name: str, now_s: float) -> None:
        """Note that a conversation is at work in an environment, which it therefore wants."""
        found = self.find(conversation_id, name)
        if found is not None:
            found.holders[conversation_id].since_s = now_s
            found.wanted = True

    # --- what is seen of conversations ------------------------------------------------------

    def observe(
        self,
        table: int,
        standings: Mapping[str, Standing],
        now_s: float,
        asked: Collection[str] | None = None,
    ) -> None:
        """Take in how conversations stand; those that have ended hold nothing any more.

        One that this table has known, and knows no more, has ended. One that only a table before
        it has known may have been lost with that, and its client may come back; as one that has
        not begun, it has some time.

        Args:
            table: tells the table's lives apart.
            standings: who is not in it is unknown.
            asked: of whom the table was asked; None: of all in `conversations`.
        """
        for conversation_id in list(self._held if asked is None else asked):
            standing = standings.get(conversation_id, UNKNOWN)
            for one in self.of(conversation_id):
                holder = one.holders[conversation_id]
                holder.standing = standing
                if standing.state != "unknown":
                    holder.since_s = now_s
                    if holder.seen_by != table:
                        self._do(
                            {"op": "seen", "number": one.number, "conversation": conversation_id,
                             "table": table}
                        )  # fmt: skip
                elif holder.seen_by == table or now_s - holder.since_s > self._quotas.unclaimed_s:
                    self._let_go(one, conversation_id)

    # --- what is to be done -----------------------------------------------------------------

    def to_prepare(self, near: int, most: int) -> list[Environment]:
        """Declared environments whose turn it is: somebody waits for it, or will soon.

        (ThunderAgent, section 4.4: when a program comes near the head of the line.)

        Args:
            near: who has one of the first so many places in the line will need it soon, and so does
                who is bound.
            most: so many may be under preparation, those that are so already included.
        """
        ranked = [
            (not one.wanted, place, one.number)
            for one in self._all.values()
            if one.state == "declared" and (place := _place(one, near)) is not None
        ]
        preparing = sum(one.state == "preparing" for one in self._all.values())
        free = max(0, most - preparing)
        return [self._all[number] for *_, number in sorted(ranked)[:free]]

    def to_remove(self) -> list[Environment]:
        """Environments that nobody holds; one under preparation is let be until that is over."""
        return [one for one in self._all.values() if not one.holders and one.state != "preparing"]

    def preparing(self, number: int) -> None:
        """An environment is being prepared from now on."""
        self._do({"op": "state", "number": number, "state": "preparing"})

    def ready(self, number: int, ports: Collection[int] = ()) -> None:
        """An environment is prepared."""
        self._do({"op": "state", "number": number, "state": "ready", "ports": [*ports]})

    def failed(self, number: int, error: str) -> None:
        """An environment could not be prepared."""
        self._do({"op": "state", "number": number, "state": "failed", "error": error})

    def removing(self, number: int) -> None:
        """An environment is being removed from now on."""
        self._do({"op": "state", "number": number, "state": "removing"})

    def removed(self, number: int) -> None:
        """Nothing is left of an environment."""
        self._do({"op": "removed", "number": number})

    # --- from one life to the next ----------------------------------------------------------

    def recover(self, entries: Iterable[Entry], now_s: float) -> None:
        """Go on from a predecessor's entries, in a ledger that is new.

        What it was preparing is prepared again. Conversations that no table has known have as long
        to begin as if they had asked now.
        """
        for entry in entries:
            self._apply(entry)
        for one in self._all.values():
            if one.state == "preparing":
                one.state = "declared"
            for holder in one.holders.values():
                holder.since_s = now_s

    def snapshot(self) -> list[Entry]:
        """Entries from which the same ledger is made."""
        entries: list[Entry] = [{"op": "next", "number": self._next}]
        for one in self._all.values():
            entries.append(
                {"op": "declare", "number": one.number, "slot": one.slot, "tenant": one.tenant,
                 "spec": one.spec.model_dump()}
            )  # fmt: skip
            entries.append(
                {"op": "state", "number": one.number, "state": one.state, "ports": [*one.ports],
                 "error": one.error}
            )  # fmt: skip
            for conversation_id, holder in one.holders.items():
                named = {"number": one.number, "conversation": conversation_id}
                entries.append({"op": "hold", **named, "at_s": holder.since_s})
                if holder.seen_by is not None:
                    entries.append({"op": "seen", **named, "table": holder.seen_by})
        return entries

    # --- inside ------------------------------------------------------------------------------

    def _let_go(self, one: Environment, conversation_id: str) -> None:
        self._do({"op": "let_go", "number": one.number, "conversation": conversation_id})

    def _do(self, entry: Entry) -> None:
        self._record(entry)
        self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        op, number = entry["op"], entry["number"]
        if op == "next":
            self._next = max(self._next, number)
            return
        if op == "declare":
            spec = Spec.model_validate(entry["spec"])
            self._all[number] = Environment(number, entry["slot"], entry["tenant"], spec)
            self._next = max(self._next, number + 1)
            return
        one = self._all[number]
        if op == "hold":
            one.holders[entry["conversation"]] = Holder(entry["at_s"])
            self._held.setdefault(entry["conversation"], {})[one.spec.name] = number
            if one.spec.shared:
                self._shared[one.tenant, one.spec.name] = number
        elif op == "seen":
            one.holders[entry["conversation"]].seen_by = entry["table"]
        elif op == "let_go":
            self._forget_holder(one, entry["conversation"])
        elif op == "state":
            one.state = entry["state"]
            one.ports = tuple(entry.get("ports") or ())
            one.error = entry.get("error")
        else:
            assert op == "removed", op
            for conversation_id in list(one.holders):
                self._forget_holder(one, conversation_id)
            self._unshare(one)
            del self._all[number]

    def _forget_holder(self, one: Environment, conversation_id: str) -> None:
        del one.holders[conversation_id]
        one.last_holder = conversation_id
        names = self._held[conversation_id]
        del names[one.spec.name]
        if not names:
            del self._held[conversation_id]
        if not one.holders:
            # It is removed from now on; whoever asks for its name gets another.
            self._unshare(one)

    def _unshare(self, one: Environment) -> None:
        if self._shared.get((one.tenant, one.spec.name)) == one.number:
            del self._shared[one.tenant, one.spec.name]


_FIELDS = tuple(Spec.model_fields)


def _place(one: Environment, near: int) -> int | None:
    """The best place of a holder's; None: it is not near."""
    if one.wanted and one.holders:
        return -1
    places = [
        0 if holder.standing.state == "live" else holder.standing.place
        for holder in one.holders.values()
        if holder.standing.state == "live"
        or (holder.standing.state == "waiting" and holder.standing.place < near)
    ]
    return min(places, default=None)
