"""Every engine does everything: the paper's collocated baseline (section 5.1).

Settings: ConServe's own application with ``placement=collocated decoders=N`` and the paper's
chunked prefill: ``max_num_batched_tokens`` is the largest chunk whose iteration takes at most
five times an unloaded decode step, which `largest_chunk` finds from measured points. The paper
found 2,944 tokens for Qwen3-0.6B on an A40, which is the default on GPUs. The default on CPUs, 512,
was measured with the embedded model (docs/benchmarks.md). Measure with ``python -m benchmarks.peers
chunk``, and give what it finds as ``chunk_tokens``.
"""

from collections.abc import Iterable

from benchmarks.peers.application import application
from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerPlan

NAME = "collocated"
GPU_CHUNK_TOKENS = 2944
CPU_CHUNK_TOKENS = 512
SLO_MULTIPLE = 5.0


def plan(options: Options) -> PeerPlan:
    """N engines, none of them a prefiller."""
    return application(
        NAME,
        options,
        f"placement={NAME}",
        prefillers=0,
        decoders=options.engines,
        engine={"max_num_batched_tokens": chunk_tokens(options)},
    )


def chunk_tokens(options: Options) -> int:
    """The most tokens of an iteration: as asked for, else what was measured on such hardware."""
    return options.chunk_tokens or (GPU_CHUNK_TOKENS if options.gpu else CPU_CHUNK_TOKENS)


def largest_chunk(
    points: Iterable[tuple[int, float]], decode_step_s: float, multiple: float = SLO_MULTIPLE
) -> int:
    """The paper's rule for a collocated engine's chunk, from measured iterations.

    The chunk counts if all smaller ones stay within the bound too, so that one lucky
    measurement does not decide.

    Args:
        points: tokens of a chunk, and seconds of an iteration that computes it.
        decode_step_s: seconds of a decode step without load.
        multiple: how many decode steps an iteration may take.

    Raises:
        ValueError: no points, or not even the smallest chunk stays within the bound.
    """
    if decode_step_s <= 0:
        raise ValueError(f"decode_step_s: {decode_step_s:g} is not positive")
    largest = 0
    for tokens, step_s in sorted(points):
        if step_s > multiple * decode_step_s:
            break
        largest = tokens
    if not largest:
        raise ValueError(
            f"no chunk stays within {multiple:g} x {decode_step_s:g} s; measure smaller ones"
        )
    return largest
