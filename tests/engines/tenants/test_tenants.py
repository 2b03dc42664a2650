"""Two tenants on the same engines: neither meets the other, in ids, lists, or anybody's cache."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.launch import Launch
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from tests.engines.applications import START_S, URL
from tests.engines.client import Reply, chat, new_client, prose

TENANTS = ("acme", "umbrella", "sharing1", "sharing2", "limited")
# A shorter first prompt is prefilled by its decoder, which asks LMCache for it.
REMOTE_FROM_TOKENS = 350


@dataclass
class Keys:
    path: Path
    of: dict[str, str]

    def change(self, content: KeyFile) -> None:
        keyfile.write(self.path, content)


@pytest.fixture
def keys(machine_alone: None, tmp_path: Path) -> Iterator[Keys]:
    """Keys of an application that runs, with two decoders."""
    content, of = KeyFile.new(), {}
    for name in TENANTS:
        content, of[name] = content.with_key(name, "2026-01-31")
    content, of["ops"] = content.with_key("ops", "2026-01-31", admin=True)
    for name in ("sharing1", "sharing2"):
        content = content.with_tenant(name, Tenant(shares_cache=True))
    content = content.with_tenant("limited", Tenant(Limits(turns=1)))
    path = tmp_path / "keys.json"
    keyfile.write(path, content)
    arguments = (
        "engine.dtype=float32",
        "lmcache.size_gb=0.5",
        "decoders=2",
        f"placement=conversation:{REMOTE_FROM_TOKENS}",
        f"keys_file={path}",
    )
    with Launch(arguments, tmp_path / "tenants.log") as application:
        application.wait_until_serving(URL, 1, 2, timeout_s=START_S)
        yield Keys(path, of)


@dataclass
class Client:
    """One tenant's."""

    http: httpx.AsyncClient
    key: str

    async def chat(self, messages: list[Any], name: str | None = None, **options: Any) -> Reply:
        headers = {"Authorization": f"Bearer {self.key}"}
        return await chat(self.http, messages, name, tokens=8, headers=headers, **options)

    async def ask(self, method: str, path: str) -> httpx.Response:
        return await self.http.request(method, URL + path, headers={"x-api-key": self.key})

    async def listed(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = (await self.ask("GET", "/v1/conversations")).json()["data"]
        return data

    async def last_turn(self, reply: Reply) -> dict[str, int]:
        assert reply.status == 200, reply.body
        found = await self.ask("GET", f"/v1/conversations/{reply.conversation}")
        assert found.status_code == 200, found.text
        stats: dict[str, int] = found.json()["last_turn"]
        return stats


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def test_tenants_meet_nowhere(keys: Keys, rng: random.Random) -> None:
    async with new_client() as http:
        clients = {name: Client(http, key) for name, key in keys.of.items()}
        await _keys_are_needed(http, keys)
        await _conversations_are_apart(clients, rng)
        await _caches_are_apart(clients, rng)
        await _limits_are_kept(clients["limited"], rng)
        await _a_revoked_key_is_good_no_more(clients, keys)


async def _keys_are_needed(http: httpx.AsyncClient, keys: Keys) -> None:
    refused = await chat(http, [user("hello")])
    assert (refused.status, refused.body["error"]["code"]) == (401, "invalid_api_key")
    assert (await http.get(URL + "/health")).status_code == 200
    # From here, an operator may look without one.
    assert (await http.get(URL + "/metrics")).status_code == 200


async def _conversations_are_apart(clients: dict[str, Client], rng: random.Random) -> None:
    acme, umbrella = clients["acme"], clients["umbrella"]
    messages = [user(prose(rng, 30))]
    first = await acme.chat(messages)
    assert first.status == 200
    messages = [*messages, {"role": "assistant", "content": first.content}, user("and then?")]
    again = await acme.chat(messages)
    assert again.conversation == first.conversation
    theirs = await umbrella.chat(messages)
    assert theirs.status == 200
    assert theirs.conversation != first.conversation
    # Stating the other's id makes one of its own.
    stated = await umbrella.chat(messages, first.conversation)
    assert stated.conversation == first.conversation
    for client, name, ids in (
        (acme, "acme", {first.conversation}),
        (umbrella, "umbrella", {theirs.conversation, first.conversation}),
    ):
        listed = await client.listed()
        assert {one["id"] for one in listed} == ids
        assert {one["tenant"] for one in listed} == {name}
    path = f"/v1/conversations/{theirs.conversation}"
    assert (await acme.ask("GET", path)).status_code == 404
    assert (await acme.ask("DELETE", path)).status_code == 404
    everybody = await clients["ops"].listed()
    assert sorted(one["tenant"] for one in everybody) == ["acme", "umbrella", "umbrella"]
    for one in everybody:
        ended = await clients["ops"].ask(
            "DELETE", f"/v1/conversations/{one['id']}?tenant={one['tenant']}"
        )
        assert ended.status_code == 200
    assert await umbrella.listed() == []


async def _caches_are_apart(clients: dict[str, Client], rng: random.Random) -> None:
    """A beginning comes from LMCache on its tenant's second decoder, and is new to the others."""
    beginning = prose(rng, 200)

    async def both(first: Client, second: Client, mark: str) -> tuple[dict[str, int], Reply]:
        long = await first.chat([user(f"{mark} {beginning} {prose(rng, 300)}")])
        handed_over = await first.last_turn(long)
        assert handed_over["prompt_tokens"] >= REMOTE_FROM_TOKENS
        assert handed_over["lmcache_tokens"] > 0
        short = await second.chat([user(f"{mark} {beginning}")])
        assert short.decoder != long.decoder
        stats = await second.last_turn(short)
        assert 128 < stats["prompt_tokens"] < REMOTE_FROM_TOKENS
        for one in await clients["ops"].listed():
            path = f"/v1/conversations/{one['id']}?tenant={one['tenant']}"
            await clients["ops"].ask("DELETE", path)
        return stats, short

    acme, umbrella = clients["acme"], clients["umbrella"]
    same, _ = await both(acme, acme, "same")
    assert same["lmcache_tokens"] >= 128
    other, _ = await both(acme, umbrella, "other")
    assert (other["lmcache_tokens"], other["decoder_cached_tokens"]) == (0, 0)
    shared, _ = await both(clients["sharing1"], clients["sharing2"], "shared")
    assert shared["lmcache_tokens"] >= 128
    # Nor is it where a decoder has it in its own cache: both have, by now.
    asked = await umbrella.chat([user(f"same {beginning}")], cache_salt="x")
    stats = await umbrella.last_turn(asked)
    assert (stats["lmcache_tokens"], stats["decoder_cached_tokens"]) == (0, 0)
    asked = await acme.chat([user(f"same {beginning}")])
    assert (await acme.last_turn(asked))["decoder_cached_tokens"] >= 128
    await _end(acme, asked.conversation)
    await asyncio.gather(*(_end(umbrella, one["id"]) for one in await umbrella.listed()))


async def _end(client: Client, name: str) -> None:
    assert (await client.ask("DELETE", f"/v1/conversations/{name}")).status_code == 200


async def _limits_are_kept(limited: Client, rng: random.Random) -> None:
    messages = [user(prose(rng, 20))]
    long = {"stream": True, "max_tokens": 400, "ignore_eos": True}
    began = asyncio.Event()
    running = asyncio.ensure_future(limited.chat(messages, "one", began=began, **long))
    await asyncio.wait_for(began.wait(), 120)
    refused = await limited.chat(messages, "two")
    assert (refused.status, refused.body["error"]["code"]) == (429, "tenant_limit")
    assert "turns" in refused.body["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert (await running).status == 200
    assert (await limited.chat(messages, "two")).status == 200
    for name in ("one", "two"):
        await _end(limited, name)
    text = (await limited.http.get(URL + "/metrics")).text
    assert 'conserve_tenant_refusals_total{limit="turns",tenant="limited"} 1.0' in text
    assert 'conserve_tenant_held_tokens{tenant="limited"} 0.0' in text
    assert 'conserve_tenant_running_turns{tenant="limited"} 0.0' in text


async def _a_revoked_key_is_good_no_more(clients: dict[str, Client], keys: Keys) -> None:
    acme = clients["acme"]
    assert (await acme.ask("GET", "/v1/models")).status_code == 200
    keys.change(keyfile.read(keys.path).without_key(acme.key))
    deadline_s = time.monotonic() + 10
    while (await acme.ask("GET", "/v1/models")).status_code == 200:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.1)
    assert (await acme.ask("GET", "/v1/models")).status_code == 401
    assert (await clients["umbrella"].ask("GET", "/v1/models")).status_code == 200
