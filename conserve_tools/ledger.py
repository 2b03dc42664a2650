"""Keeps which conversation has which environment, and decides what is prepared and removed.

Event-sourced: each change is an entry that is recorded before it counts, and a ledger made from
another's entries equals it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from conserve import identity
from conserve_tools.journal import Entry
from conserve_tools.spec import Spec
from deployments.messages import Standing

MOST_OF_CONVERSATION = 8

State = Literal["declared", "preparing", "ready", "failed", "removing"]


class Conflict(ValueError):
    """The name is taken by another environment; the message says how it differs."""


class QuotaExceeded(RuntimeError):
    """A quota is used up; ``setting`` is its name, or None for a constant."""

    def __init__(self, message: str, setting: str | None) -> None:
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of how many environments there may be.

    ``unclaimed_s`` is how long one is kept for a conversation that has not begun.
    """

    most: int
    most_of_tenant: int
    unclaimed_s: float


UNKNOWN = Standing("unknown")


@dataclass(slots=True)
class Holder:
    """A conversation that has an environment; ``seen_by`` numbers the last table that knew it."""

    since_s: float
    seen_by: int | None = None
    standing: Standing = UNKNOWN


@dataclass(slots=True)
class Environment:
    """An environment; a command waits for it if it is ``wanted``."""

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
    """All environments, and what has to be done about them.

    ``record`` is called with each entry before it counts; if it raises, nothing has changed.
    """

    def __init__(self, quotas: Quotas, record: Callable[[Entry], None] = lambda entry: None):
        self._quotas = quotas
        self._record = record
        self._next = 1
        self._all: dict[int, Environment] = {}
        # By conversation, the numbers of its environments by name.
        self._held: dict[str, dict[str, int]] = {}
        self._shared: dict[tuple[str | None, str], int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Environment]:
        return iter(self._all.values())

    def of(self, conversation_id: str) -> list[Environment]:
        return [self._all[number] for number in self._held.get(conversation_id, {}).values()]

    def find(self, conversation_id: str, name: str) -> Environment | None:
        number = self._held.get(conversation_id, {}).get(name)
        return None if number is None else self._all[number]

    def conversations(self) -> Collection[str]:
        return self._held.keys()

    def declare(self, conversation_id: str, spec: Spec, now_s: float) -> Environment:
        """Give a conversation an environment; the same one if it asks again.

        Raises:
            Conflict: it has another one of that name.
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
                f"the conversation has {MOST_OF_CONVERSATION} environments, which is the most; "
                "remove one",
                None,
            )
        if found is None:
            self._require_room(tenant)
            number, taken = self._next, {one.slot for one in self._all.values()}
            slot = next(slot for slot in range(self._quotas.most) if slot not in taken)
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

    def let_go(self, conversation_id: str, name: str) -> bool:
        """Take an environment from a conversation; False if it does not have it."""
        found = self.find(conversation_id, name)
        if found is None:
            return False
        self._let_go(found, conversation_id)
        return True

    def used(self, conversation_id: str, name: str, now_s: float) -> None:
        found = self.find(conversation_id, name)
        if found is not None:
            found.holders[conversation_id].since_s = now_s
            found.wanted = True

    def observe(
        self,
        table: int,
        standings: Mapping[str, Standing],
        now_s: float,
        asked: Collection[str] | None = None,
    ) -> None:
        """Take in how conversations stand; those that have ended lose their environments.

        A conversation that this table has known, and no longer knows, has ended. One that only an
        earlier table has known gets some time, as one that has not begun: its client may come back.
        ``asked`` None means that the table was asked about all.
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

    def to_prepare(self, near: int, most: int) -> list[Environment]:
        """Return the environments to prepare now, at most ``most`` at a time.

        A command waits for them, or their conversation is bound, or among the first ``near`` in the
        queue (ThunderAgent, section 4.4).
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
        """Return the environments without a holder, except those that are being prepared."""
        return [one for one in self._all.values() if not one.holders and one.state != "preparing"]

    def preparing(self, number: int) -> None:
        self._do({"op": "state", "number": number, "state": "preparing"})

    def ready(self, number: int, ports: Collection[int] = ()) -> None:
        self._do({"op": "state", "number": number, "state": "ready", "ports": [*ports]})

    def failed(self, number: int, error: str) -> None:
        self._do({"op": "state", "number": number, "state": "failed", "error": error})

    def removing(self, number: int) -> None:
        self._do({"op": "state", "number": number, "state": "removing"})

    def removed(self, number: int) -> None:
        self._do({"op": "removed", "number": number})

    def recover(self, entries: Iterable[Entry], now_s: float) -> None:
        """Continue from a predecessor's entries, in a new ledger.

        What it was preparing is prepared again. Conversations that no table has known get their
        time anew.
        """
        for entry in entries:
            self._apply(entry)
        for one in self._all.values():
            if one.state == "preparing":
                one.state = "declared"
            for holder in one.holders.values():
                holder.since_s = now_s

    def snapshot(self) -> list[Entry]:
        """Return entries that make an equal ledger."""
        entries: list[Entry] = [{"op": "next", "number": self._next}]
        for one in self._all.values():
            entries += [
                {"op": "declare", "number": one.number, "slot": one.slot, "tenant": one.tenant,
                 "spec": one.spec.model_dump()},
                {"op": "state", "number": one.number, "state": one.state, "ports": [*one.ports],
                 "error": one.error},
            ]  # fmt: skip
            for conversation_id, holder in one.holders.items():
                named = {"number": one.number, "conversation": conversation_id}
                entries.append({"op": "hold", **named, "at_s": holder.since_s})
                if holder.seen_by is not None:
                    entries.append({"op": "seen", **named, "table": holder.seen_by})
        return entries

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
            # It will be removed; a conversation that asks for its name gets another.
            self._unshare(one)

    def _unshare(self, one: Environment) -> None:
        if self._shared.get((one.tenant, one.spec.name)) == one.number:
            del self._shared[one.tenant, one.spec.name]


_FIELDS = tuple(Spec.model_fields)


def _place(one: Environment, near: int) -> int | None:
    if one.wanted and one.holders:
        return -1
    standings = [holder.standing for holder in one.holders.values()]
    if any(standing.state == "live" for standing in standings):
        return 0
    waiting = [standing.place for standing in standings if standing.state == "waiting"]
    return min((place for place in waiting if place < near), default=None)
