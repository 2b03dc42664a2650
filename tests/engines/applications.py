"""The applications that tests on engines use; `application(MAIN)` marks the tests of one."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.engines.real_shape import make_real_shape
from tests.engines.vision.model import DEEP, REAL, make_vision_model

# Where each of them serves.
URL = "http://127.0.0.1:8000"
# A minute on a free machine; a shared one may take many.
START_S = 1200.0
# How long a decoder of `SCALING` that leaves keeps its conversations.
DRAIN_S = 40


@dataclass(frozen=True)
class Application:
    """What is started, and how many engines it has when it is whole.

    Args:
        name: of its log, too.
        arguments: as for ``serve run conserve.app``.
        file: text of a Serve config file that is run instead, as ``serve deploy`` would.
        prefillers: how many it begins with.
        decoders: how many it begins with.
        encoders: how many it has.
        lone_engine: whether a bare engine runs beside it, to compare answers with.
        no_compiler: whether it runs with no compiler on PATH, as on a machine that has none.
        make_model: makes the model that they serve, in a folder; unset, it is the embedded one.
        adapters: names of adapters that it has; with any, it takes more of them by a file.
    """

    name: str
    arguments: tuple[str, ...] = ()
    file: str | None = None
    prefillers: int = 1
    decoders: int = 1
    encoders: int = 0
    lone_engine: bool = False
    no_compiler: bool = False
    make_model: Callable[[Path], None] | None = None
    adapters: tuple[str, ...] = ()


# float32, so that batches of different sizes do not change which token is the most likely. LMCache
# makes sure of all its memory when it starts. And the paper's placement, under which it is known
# beforehand where each prompt is prefilled.
_PAPER = "placement=conversation"
_ENGINES = ("engine.dtype=float32", "lmcache.size_gb=0.5")
_COMMON = (*_ENGINES, _PAPER)

# One prefiller, two decoders. Where it sends its spans, a collector listens during some tests:
# at a port below those that systems give to connections.
COLLECTOR_PORT = 24318
MAIN = Application(
    "main",
    (
        *_COMMON,
        "decoders=2",
        "log.format=json",
        f"tracing.endpoint=http://127.0.0.1:{COLLECTOR_PORT}",
    ),
    decoders=2,
    lone_engine=True,
)

# One decoder that is full soon, short waits for room, and conversations that end by themselves. As
# in the paper, idle ones keep their room.
SMALL = Application(
    "small",
    (
        *_COMMON,
        "decoders=1",
        "engine.max_model_len=2048",
        "decoders.engine.num_gpu_blocks_override=24",
        "pausing=off",
        "queue_timeout_s=8",
        "idle_timeout_s=15",
        "max_body_bytes=100000",
    ),
)

# Two decoders that are full soon, whose idle conversations give up their room; with adapters.
PAUSING = Application(
    "pausing",
    (
        *_COMMON,
        "decoders=2",
        "engine.max_model_len=2944",
        "decoders.engine.num_gpu_blocks_override=24",
        "queue_timeout_s=20",
    ),
    decoders=2,
    lone_engine=True,
    adapters=("a", "b"),
)

# One engine with a model that is shown images, which may fetch from names that stand for addresses
# that it must not connect to.
SIGHTED = Application(
    "sighted",
    (
        *_ENGINES,
        "prefillers=0",
        "decoders=1",
        "served_model_name=conserve-embedded",
        "engine.max_model_len=4096",
        'allowed_media_domains=["127.0.0.1", "localhost", "2130706433", "017700000001", "::1", '
        '"::ffff:127.0.0.1", "169.254.169.254", "10.0.0.1"]',
    ),
    prefillers=0,
    make_model=make_vision_model,
)

# The ConServe paper's system, with a model that is shown images: `make test` sees a few.
PAPER = Application(
    "paper",
    (
        *_ENGINES,
        "like=conserve_paper",
        "decoders=2",
        "served_model_name=conserve-embedded",
        "engine.max_model_len=4096",
    ),
    decoders=2,
    make_model=make_vision_model,
)

# One engine that does everything, and is full soon.
ONE = Application(
    "one",
    (
        *_ENGINES,
        "like=thunderagent",
        "decoders=1",
        "engine.max_model_len=2944",
        "engine.num_gpu_blocks_override=24",
    ),
    prefillers=0,
)

# A prefiller that hosts conversations as the decoder does; each is full soon.
ELASTIC = Application(
    "elastic",
    (
        *_ENGINES,
        "decoders=1",
        "engine.max_model_len=4096",
        "engine.num_gpu_blocks_override=48",
    ),
    lone_engine=True,
    no_compiler=True,
)

# A decoder whose scheduler knows conversations, and which is full soon.
SCHEDULED = Application(
    "scheduled",
    (
        *_COMMON,
        "engine_scheduler=conversation",
        "decoders=1",
        "engine.max_model_len=4096",
        "decoders.engine.num_gpu_blocks_override=56",
    ),
    lone_engine=True,
)

# The same with a lane for long prefills.
LANE = Application(
    "lane",
    (
        *_COMMON,
        "engine_scheduler=conversation_lane",
        "decoders=1",
        "engine.max_model_len=4096",
        "decoders.engine.num_gpu_blocks_override=80",
    ),
    lone_engine=True,
)

# Several of what the others have one of; turn 1 is prefilled remotely from 200 tokens.
WIDE = Application(
    "wide",
    file="""
proxy_location: Disabled
applications:
  - name: default
    import_path: conserve:app
    args:
      routers: 2
      prefillers: {replicas: 2, num_cpus: 0.1}
      decoders: {replicas: 2, num_cpus: 0.1}
      placement: conversation:200
      engine: {dtype: float32}
      lmcache: {size_gb: 0.5}
""",
    prefillers=2,
    decoders=2,
)

# One decoder to begin with, which may become three, and each is full soon, of what is idle too.
SCALING = Application(
    "scaling",
    (
        *_COMMON,
        "decoders=1",
        "decoders.max_replicas=3",
        "prefillers.num_cpus=0.1",
        "decoders.num_cpus=0.1",
        "engine.max_model_len=2944",
        "decoders.engine.num_gpu_blocks_override=24",
        "pausing=off",
        "queue_timeout_s=900",
        "autoscaling.window_s=6",
        f"drain_timeout_s={DRAIN_S}",
    ),
)

# Engines as other projects' tests of servers want them. What they do not say is decided the same in
# each run: without a temperature, an answer is greedy. And the model, which may not find the end of
# what it is unsure of, comes to one before a client has given up.
COMPATIBLE_ENGINE = {
    "dtype": "float32",
    "max_model_len": 4096,
    "enable_prompt_tokens_details": True,
    "override_generation_config": {"temperature": 0.0},
}
COMPATIBLE = Application(
    "compatible",
    (
        *(f"engine.{name}={json.dumps(value)}" for name, value in COMPATIBLE_ENGINE.items()),
        "lmcache.size_gb=0.5",
        "decoders=2",
        _PAPER,
    ),
    decoders=2,
)

# Tools run in environments; two decoders, so that one may be killed.
TOOLS = Application(
    "tools",
    (
        *_COMMON,
        "decoders=2",
        "environments.enabled=true",
        "environments.limits.wall_s=60",
    ),
    decoders=2,
)

# What programs send is long, and they are answered from a script (tests/acceptance/clients).
CLIENTS = Application(
    "clients",
    (
        *_COMMON,
        "decoders=2",
        "engine.max_model_len=32768",
        "engine.enable_prompt_tokens_details=true",
        'engine.logits_processors=["tests.acceptance.clients.forced:ForcedAnswers"]',
    ),
    decoders=2,
)

# A model that is shown images, under the name that tests ask for, with an engine that encodes them.
VISION = Application(
    "vision",
    (
        *_COMMON,
        "encoders=1",
        # An image has more tokens than a step.
        "encoders.engine.max_num_batched_tokens=96",
        "encoders.engine.max_num_seqs=8",
        "decoders=2",
        "served_model_name=conserve-embedded",
        "engine.max_model_len=4096",
        "engine.worker_extension_cls=tests.engines.vision.failing.FailingWorker",
        # Of six, which four do not divide. The encoder and the lone engine have all.
        "media.tower_layers=4",
    ),
    decoders=2,
    encoders=1,
    lone_engine=True,
    make_model=partial(make_vision_model, tower=DEEP),
)

# The same model, whose images are encoded beside answers.
STAGES = Application(
    "stages",
    (
        *_ENGINES,
        "engine_scheduler=conversation_lane",
        "prefillers=0",
        "decoders=2",
        "served_model_name=conserve-embedded",
        "engine.max_model_len=4096",
        "engine.worker_extension_cls=tests.engines.vision.slow.SlowWorker",
        # They divide its six layers. An encode that is cut leaves others in their slots.
        "media.tower_layers=2",
    ),
    prefillers=0,
    decoders=2,
    lone_engine=True,
    make_model=partial(make_vision_model, tower=DEEP),
)

# Other papers' systems: engines on which long prompts take several steps.
_STEPS = ("engine.max_model_len=4096", "engine.max_num_batched_tokens=512")
MARS, AGENTSERVE, NOVA = (
    Application(name, (*_ENGINES, f"like={name}", *_STEPS), prefillers=0)
    for name in ("mars", "agentserve", "nova")
)

# LMCache's chunk, of engines on GPUs.
GPU_CHUNK_TOKENS = 256

_GPU = ("served_model_name=conserve-embedded", "engine.max_model_len=40960", "lmcache.size_gb=16")
# Compiling would take minutes at each start of an engine; capturing takes seconds.
_GRAPHS = (
    "engine.compilation_config.mode=0",
    "engine.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
)

_on_gpu = functools.partial(Application, make_model=make_real_shape)

# A prefiller and a decoder that share one GPU, with a model of a real one's shape.
_GPU_PAIR = (_PAPER, "gpus=1", "prefillers=1", "decoders=1", *_GPU)
GPU = _on_gpu("gpu", (*_GPU_PAIR, *_GRAPHS))

# The default on one GPU, and two engines that share it and do everything.
GPU_ONE = _on_gpu("gpu-one", ("gpus=1", *_GPU, *_GRAPHS), prefillers=0)
GPU_TWO = _on_gpu("gpu-two", (*GPU_ONE.arguments, "decoders=2"), prefillers=0, decoders=2)

# A pair on three and seven tenths of its SMs, with graphs, which have to keep to them too.
_GPU_SLOTS = (
    "tiers.prefill.sm_slots=3",
    "tiers.decode.sm_slots=7",
    "prefillers.tier=prefill",
    "prefillers.num_gpus=0.4",
    "decoders.tier=decode",
    "decoders.num_gpus=0.6",
    "decoders.replicas=1",
)
GPU_SLOTS = _on_gpu("gpu-slots", (_PAPER, *_GPU_SLOTS, *_GPU, *_GRAPHS))

# With a lane in the decoder: its kernels beside the steps' on all SMs, without graphs, or each on
# its side of seven tenths of them.
_GPU_LANE = ("engine_scheduler=conversation_lane",)
GPU_LANE = _on_gpu("gpu-lane", (*_GPU_PAIR, "engine.enforce_eager=true", *_GPU_LANE))
GPU_LANE_SLOTS = _on_gpu("gpu-lane-slots", (*GPU_SLOTS.arguments, *_GPU_LANE))

# A decoder that encodes images beside its steps, with SMs for each stage.
GPU_STAGES = Application(
    "gpu-stages",
    (
        _PAPER,
        "gpus=1",
        "prefillers=0",
        "tiers.decode.sm_slots=10",
        "decoders.tier=decode",
        "decoders.replicas=1",
        "decoders.num_gpus=0.9",
        "served_model_name=conserve-embedded",
        "engine.max_model_len=8192",
        *_GRAPHS,
        'engine.additional_config={"conserve": {"stages": '
        '{"sms": 100, "encode": [30, 10, 7], "prefill": [40, 10, 10]}}}',
        "lmcache.size_gb=8",
        *_GPU_LANE,
    ),
    prefillers=0,
    make_model=functools.partial(make_vision_model, tower=REAL),
)

# Those that `make test` starts.
QUICK = (MAIN, PAPER, ONE, ELASTIC)

# In the order in which they are started.
APPLICATIONS = (
    *(
        MAIN,
        TOOLS,
        CLIENTS,
        SMALL,
        PAUSING,
        PAPER,
        ONE,
        ELASTIC,
        SCHEDULED,
        LANE,
        WIDE,
        SCALING,
        VISION,
        STAGES,
        SIGHTED,
        COMPATIBLE,
        MARS,
        AGENTSERVE,
        NOVA,
        GPU,
        GPU_ONE,
        GPU_TWO,
        GPU_SLOTS,
        GPU_LANE,
        GPU_LANE_SLOTS,
        GPU_STAGES,
    ),
)
