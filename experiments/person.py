"""A person beside background agents: one conversation with a turn each 10 s, alone and beside 20 agents.

python -m experiments.person --systems vllm conversation order peer:vllm peer:vllm_router
A name without ``peer:`` is an ``engine_scheduler`` of ConServe.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import sys
import time
from itertools import pairwise

from experiments.agents import Answer, Refused, ask, clients, words
from experiments.harness import Experiment, percentile

MODEL = "/tmp/real4"


async def agent(session, url, header, name, at_s, stop_s, out, options):
    """One agent's conversations, until it is stopped; turns go into ``out``."""
    rng = random.Random(name)
    await asyncio.sleep(rng.uniform(0, 4))
    fields = {"service_tier": "flex"} if options.tier else {}
    number = 0
    while True:
        number += 1
        messages = []
        own = {header: f"{name}-{number}"} if header else {}
        for turn in range(rng.randint(2, 12) if number == 1 else 12):
            size = rng.randint(1000, 1500) if turn == 0 else rng.randint(100, 300)
            messages.append({"role": "user", "content": words(rng, size)})
            answer = Answer()
            out.append(answer)
            tokens = rng.randint(50, 200)
            try:
                await ask(session, url, messages, tokens, own, answer=answer, **fields)
            except Refused as error:
                answer.headers = {"refused": str(error.status)}
                print("refused", error, file=sys.stderr)
                await asyncio.sleep(1)
                break
            messages.append({"role": "assistant", "content": answer.text})
            await asyncio.sleep(rng.uniform(0, 2))
        if options.releases:
            with contextlib.suppress(Exception):
                async with session.delete(f"{url}/v1/conversations/{name}-{number}") as r:
                    await r.read()


def agents_process(url, header, name, from_s, until_s, options, pipe):
    async def main():
        out = []
        async with clients() as session:
            tasks = [
                asyncio.create_task(agent(session, url, header, f"{name}-a{n}", 0, 0, out, options))
                for n in range(options.agents)
            ]
            while time.perf_counter() < until_s:
                for t in tasks:
                    if t.done():
                        t.result()
                await asyncio.sleep(0.1)
            now = time.perf_counter()
            for t in tasks:
                t.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return out, now

    out, now = asyncio.run(main())
    tokens = prompt = cached = 0.0
    waits, ttfts, gaps = [], [], []
    turns = 0
    for one in out:
        if not one.sent_s:
            continue
        arrivals = one.arrivals_s
        usage = one.usage if one.headers and arrivals and one.ended_s else {}
        inside = [a for a in arrivals if from_s <= a <= until_s]
        share = len(inside) / len(arrivals) if arrivals else 0
        # Parts of a cut stream are about a token each.
        total = usage.get("completion_tokens", len(arrivals))
        tokens += total * share
        if usage and from_s <= one.ended_s <= until_s:
            turns += 1
            c = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            prompt += usage["prompt_tokens"] - c
            cached += c
        first = arrivals[0] if arrivals else now
        if first >= from_s:
            ttfts.append(first - one.sent_s)
        ends = [*arrivals] if one.ended_s else [*arrivals, now]
        gaps += [b - a for a, b in pairwise(ends) if b >= from_s and a <= until_s]
    span = until_s - from_s
    pipe.send({
        "tokens_s": tokens / span, "prompt_s": prompt / span, "turns": turns,
        "cached": cached / max(1, cached + prompt),
        "ttft_p50": percentile(ttfts, 0.5), "ttft_max": max(ttfts),
        "gap_p50": percentile(gaps, 0.5), "gap_p99": percentile(gaps, 0.99), "gap_max": max(gaps),
    })


async def person(url, header, name, from_s, until_s, options):
    rng = random.Random(name)
    messages, found = [], []
    own = {header: name} if header else {}
    at_s = from_s - options.warm + 5 if options.warm >= 15 else from_s
    at_s = from_s - int((from_s - at_s) / options.every) * options.every
    timing = random.Random(f"{name}-times")
    async with clients() as session:
        while at_s < until_s - 5:
            await asyncio.sleep(max(0, at_s + timing.uniform(-1, 1) - time.perf_counter()))
            messages.append({"role": "user", "content": words(rng, 50 if messages else 500)})
            answer = await ask(session, url, messages, 50, own)
            messages.append({"role": "assistant", "content": answer.text})
            if at_s >= from_s and len(messages) > 2:
                found.append((answer.ttft_s, answer.ended_s - answer.sent_s, max(answer.gaps_s),
                              dict(answer.headers)))
            why = None
            if options.why:
                async with session.get(f"{url}/v1/conversations/{name}") as r:
                    why = (await r.json()).get("last_turn")
                print(f"sent {answer.sent_s:.4f} first {answer.arrivals_s[0]:.4f} {answer.ttft_s:.3f} {answer.ended_s - answer.sent_s:.3f}", why, file=sys.stderr)
            at_s += options.every
        if options.releases:
            async with session.delete(f"{url}/v1/conversations/{name}") as r:
                await r.read()
    return {
        "turns": len(found),
        "ttft_p50": percentile([f[0] for f in found], 0.5),
        "ttft_p95": percentile([f[0] for f in found], 0.95),
        "e2e_p50": percentile([f[1] for f in found], 0.5),
        "e2e_p95": percentile([f[1] for f in found], 0.95),
        "gap_max": max(f[2] for f in found),
        "all": [(f[0], f[1]) for f in found],
    }


def cell(url, header, name, kind, options):
    from_s = time.perf_counter() + options.warm
    until_s = from_s + options.seconds
    out = {"cell": kind, "name": name}
    process = None
    if kind != "person":
        here, there = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=agents_process, args=(url, header, name, from_s, until_s, options, there))
        process.start()
    if kind != "agents":
        out["person"] = asyncio.run(person(url, header, f"{name}-p", from_s, until_s, options))
    if process:
        process.join(timeout=options.seconds + options.warm + 60)
        out["agents"] = here.recv()
    return out


def show(experiment, found):
    rows = []
    base = {}
    for one in found:
        p, a = one.get("person"), one.get("agents")
        sys_, kind = one["system"], one["cell"]
        b = base.setdefault(sys_, {})
        ms = lambda v: f"{1000 * v:.0f}"
        row = [sys_, kind]
        for key in ("ttft_p50", "ttft_p95", "e2e_p50", "e2e_p95"):
            if p is None:
                row.append("")
                continue
            if kind == "person":
                b.setdefault(key, p[key])
            ratio = f" {p[key] / b[key]:.2f}" if key in b and kind == "both" else ""
            row.append(ms(p[key]) + ratio)
        if a is None:
            row += [""] * 6
        else:
            if kind == "agents":
                b.setdefault("tokens_s", a["tokens_s"])
            ratio = f" {a['tokens_s'] / b['tokens_s']:.2f}" if "tokens_s" in b and kind == "both" else ""
            row += [f"{a['tokens_s']:.0f}{ratio}", f"{a['prompt_s']:.0f}", f"{a['cached']:.2f}", f"{a['ttft_p50']:.2f}", f"{a['ttft_max']:.1f}",
                    f"{a['gap_max']:.2f}"]
        rows.append(row)
    experiment.show("person beside agents", ["system", "cell", "TTFT p50", "p95", "e2e p50", "p95",
                    "out/s", "prompt/s", "cached", "TTFT p50", "max wait", "max gap"], rows, names=2)


def main():
    experiment = Experiment("person", __doc__, width=150)
    experiment.module = "person"
    o = experiment.option
    o("--systems", ["vllm", "conversation"])
    o("--settings", [""], "of ConServe's, beside the usual")
    o("--cells", ["person", "agents", "both"])
    o("--agents", 20)
    o("--seconds", 90.0)
    o("--warm", 25.0)
    o("--every", 10.0)
    o("--model", MODEL)
    o("--engines", 1)
    o("--tier", 1)
    o("--why", 0)
    o("--times", 1)
    o("--hacks", [""], "variants of additional_config conserve, as JSON; each is an application")
    o("--seed", "1")
    o("--json", "person.jsonl")
    options = experiment.parse()
    found = []
    engine = ("engine.max_model_len=8192",)
    for system, hack in [(s, h) for s in options.systems for h in options.hacks]:
        with contextlib.ExitStack() as stack:
            if system.startswith("peer:"):
                from conserve_lab.peers.plan import Options
                from conserve_lab.peers.running import start
                peer = stack.enter_context(start(system[5:], Options(
                    engines=options.engines, model=options.model,
                    engine={"max_model_len": 8192}, port=8000)))
                url, header, options.releases = peer.url, peer.session_header, False
                import experiments.agents as ea
                ea.MODEL = peer.model
                options_tier, options.tier = options.tier, 0
            else:
                import experiments.agents as ea
                ea.MODEL = "conserve-embedded"
                settings = (f"model={options.model}", "served_model_name=conserve-embedded",
                            *engine, f"engine_scheduler={system}", "lmcache.port=0",
                            *([f"engine.additional_config={{\"conserve\": {hack}}}"] if hack else []),
                            f"decoders={options.engines}", *filter(None, options.settings))
                url = stack.enter_context(experiment.serving(*settings, prefillers=0, name=system))
                header, options.releases = "X-Conversation-Id", True
            # Warm-up of code paths.
            for number, kind in enumerate(options.cells * options.times):
                got = cell(url, header, f"{options.seed}-{system}-{number}", kind, options)
                got["system"] = system + hack + (" " + " ".join(options.settings) if any(options.settings) else "")
                got["at"] = time.time()
                found.append(got)
                with open(options.json, "a") as f:
                    f.write(json.dumps(got, default=str) + "\n")
                p, a = got.get("person"), got.get("agents")
                print(system, kind, {k: v for k, v in (p or {}).items() if k != "all"}, a,
                      file=sys.stderr, flush=True)
                time.sleep(2)
    show(experiment, found)


if __name__ == "__main__":
    main()
