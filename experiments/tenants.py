"""Tenants with 10, 3 and 1 conversations on one engine that has room for five at a time."""

import asyncio, json, random, subprocess, sys, tempfile, time
from pathlib import Path

import experiments.agents as ea
from experiments.agents import Answer, ask, clients, words
from experiments.harness import Experiment

ea.MODEL = "conserve-embedded"


async def talk(session, url, key, name, options, out):
    rng = random.Random(name)
    number = 0
    while True:
        number += 1
        messages = []
        headers = {"Authorization": f"Bearer {key}", "X-Conversation-Id": f"{name}-{number}"}
        for turn in range(options.turns):
            messages.append({"role": "user", "content": words(rng, 60 if turn else options.words)})
            answer = Answer()
            out.append(answer)
            await ask(session, url, messages, 60, headers, answer=answer)
            messages.append({"role": "assistant", "content": answer.text})
            if options.gap:
                await asyncio.sleep(options.gap)
        async with session.delete(f"{url}/v1/conversations/{name}-{number}", headers=headers) as r:
            await r.read()


async def measure(url, keys, counts, options):
    outs = {name: [] for name in counts}
    async with clients() as session:
        tasks = [asyncio.create_task(talk(session, url, keys[name], f"{name}{n}", options, outs[name]))
                 for name, count in counts.items() for n in range(count)]
        await asyncio.sleep(options.warm)
        since = time.perf_counter()
        def served():
            got = {}
            for name, out in outs.items():
                tokens = 0
                for one in out:
                    tokens += len(one.arrivals_s)
                    if one.arrivals_s:
                        u = one.usage or {}
                        cached = (u.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                        if u:
                            tokens += u["prompt_tokens"] - cached
                got[name] = tokens
            return got
        before = served()
        end = since + options.seconds
        while time.perf_counter() < end:
            for t in tasks:
                if t.done():
                    t.result()
            await asyncio.sleep(0.5)
        took = time.perf_counter() - since
        after = served()
        async with session.get(f"{url}/metrics", headers={"Authorization": f"Bearer {keys['ops']}"}) as r:
            text = await r.text()
        jain = [l for l in text.splitlines() if l.startswith("conserve_tenant_fairness ")]
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rate = {n: (after[n] - before[n]) / took for n in outs}
    return rate, jain


def main():
    e = Experiment("tenants", __doc__, width=120)
    o = e.option
    o("--seconds", 90.0); o("--warm", 30.0); o("--gap", 0.0); o("--turns", 12); o("--words", 1400)
    o("--case", 0); o("--blocks", 0); o("--gib", 0.0)
    options = e.parse()
    for counts, weights in (({"a": 10, "b": 3, "c": 1}, {}), ({"a": 6, "b": 6}, {"a": 3}))[options.case:]:
        with tempfile.TemporaryDirectory() as d:
            file = Path(d) / "keys.json"
            keys = {}
            for name in (*counts, "ops"):
                run = subprocess.run([sys.executable, "-m", "conserve_cli.main", "keys", "add", name, "--file", str(file),
                    *(["--admin"] if name == "ops" else [])], capture_output=True, text=True)
                print(run.stdout, run.stderr, file=sys.stderr)
                keys[name] = next(w for w in (run.stdout + run.stderr).split() if w.startswith(("csk-",)))
            for name, weight in weights.items():
                subprocess.run([sys.executable, "-m", "conserve_cli.main", "keys", "limits", name, "--weight", str(weight), "--file", str(file)], check=True)
            settings = [f"keys_file={file}", "lmcache.port=0", "engine.max_model_len=8192"]
            if options.blocks: settings.append(f"decoders.engine.num_gpu_blocks_override={options.blocks}")
            settings += [f"lmcache.size_gb={options.gib}"] if options.gib else []
            with e.serving(*settings, prefillers=0, name="tenants") as url:
                rate, jain = asyncio.run(measure(url, keys, counts, options))
                x = [rate[n] / weights.get(n, 1) for n in rate]
                print(counts, weights, {n: round(r) for n, r in rate.items()}, "Jain", round(sum(x)**2 / len(x) / sum(v*v for v in x), 3), jain, flush=True)

main()
