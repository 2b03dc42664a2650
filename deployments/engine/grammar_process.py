"""Compiles grammars for `deployments.engine.grammars`, which starts it by ``python -m``.

It reads JSON lines: what an engine's compiler is made of, then one grammar after another. It
answers each by a line: what is wrong with it, or null. What takes too long or too much memory ends
the process.
"""

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import xgrammar as xgr

# Of one core, for a grammar and its first steps. Some hundred ordinary properties take a tenth.
MOST_CPU_S = 2.0
_MOST_BYTES = 2**30
# An engine waits for the mask of each token, in every step of all its requests.
_TRIED_TOKENS = 32
_MOST_STEP_S = 0.02
NO_TEXT = "no text fits this grammar or schema; correct it"
# xgrammar begins with the time and a line of its code.
_PLACE = re.compile(r"^\[[\d:]+\] \S+ ")


def main() -> None:
    """Answer on the standard output until the input ends."""
    os.nice(3)
    # xgrammar prints its warnings.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = json.loads(sys.stdin.readline())
    info = xgr.TokenizerInfo.deserialize_json(told["tokenizer"])
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    kinds: dict[str, Callable[[str], Any]] = {
        "json": lambda schema: compiler.compile_json_schema(schema, **told["whitespace"]),
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "lark": compiler.compile_lark,
        "structural_tag": lambda tag: _structural_tag(compiler, json.loads(tag)),
    }
    resource.setrlimit(resource.RLIMIT_DATA, (_in_use() + _MOST_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        kind, text = json.loads(line)
        # The signal ends the process, wherever it computes.
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            if kind == "guidance":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
                problem = llguidance.LLMatcher.validate_grammar(grammar) or None
            else:
                problem = _unfit(kinds[kind](text), info.vocab_size)
        except Exception as error:
            # The compiler raises whatever is wrong with a client's grammar.
            problem = _PLACE.sub("", str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(problem), file=answers, flush=True)


def _structural_tag(compiler: xgr.GrammarCompiler, tag: dict[str, Any]) -> xgr.CompiledGrammar:
    if "structures" not in tag:
        return compiler.compile_structural_tag(tag)
    items = [
        xgr.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])


def _in_use() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[5]) * resource.getpagesize()


def _unfit(compiled: Any, vocabulary: int) -> str | None:
    """Return the problem of a grammar on a random way: no token fits, or it takes long to tell."""
    matcher, mask = xgr.GrammarMatcher(compiled), xgr.allocate_token_bitmask(1, vocabulary)
    draw = random.Random(1)
    for _ in range(_TRIED_TOKENS):
        begun_s = time.process_time()
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")[:vocabulary]
        possible = bits.nonzero()[0]
        if not len(possible):
            return NO_TEXT
        if not matcher.accept_token(int(draw.choice(possible))):
            break
        if time.process_time() - begun_s > _MOST_STEP_S:
            return "each token of it takes too long to check; make it simpler"
        if matcher.is_terminated():
            break
    return None


if __name__ == "__main__":
    main()
