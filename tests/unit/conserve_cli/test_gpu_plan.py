"""`conserve serve` on a machine with GPUs: what it says before anything starts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conserve.settings import load
from conserve_cli import launching
from conserve_cli.serve import cli
from deployments.gpu_plans import here
from hetero.container import HostMemory
from tests.checkout import ROOT
from tests.nvml.standin import Machine
from tests.unit.hetero.planned import written
from tests.unit.hetero.shapes import QWEN3_06B, QWEN3_8B


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = written(tmp_path / "qwen3-8b", QWEN3_8B, 16_381_470_720)
    for name in ("model-00001-of-00001.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return f"model={folder}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster about, and nothing is started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def launch(*arguments: object) -> None:
        raise AssertionError("something is started")

    monkeypatch.setattr(launching, "Launch", launch)
    # Another program of this machine may have some.
    monkeypatch.setattr("conserve_cli.gpu_plan.busy_ports", lambda settings: ())


def said(*arguments: str, status: int = 0) -> str:
    outcome = CliRunner().invoke(cli, ["--plan", *arguments])
    assert outcome.exit_code == status, outcome.output
    return outcome.output


def words(*arguments: str) -> str:
    """The plan as one line."""
    return " ".join(said(*arguments).split())


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith("│")]


def test_two_cards_have_an_engine_each(machine: Machine, model: str) -> None:
    text = said(model)
    assert "2 x NVIDIA A40 (48.0 GiB)" in text
    assert [row[1:3] for row in rows(text)] == [["1", "prefiller"], ["1", "decoder"]]
    # 48 GiB, of which 44.2 are for the engine: 15.3 of weights, 3.2 of reserve, the rest KV.
    assert all({"15.3", "~25.7", "~187,279"} <= set(row) for row in rows(text))
    assert "estimated" in text
    known = "Tool calls: hermes (by its architecture, Qwen3ForCausalLM); reasoning: none."
    assert known in " ".join(text.split())
    assert "Host memory for KV:" in text
    assert "SM slots" not in text


def test_slots_of_adapters_are_in_the_plan(machine: Machine, model: str, tmp_path: Path) -> None:
    text = said(model, f"adapters_file={tmp_path / 'none-yet.json'}")
    # Four slots of rank 16 are half a gigabyte.
    assert all("15.7" in row for row in rows(text))


@pytest.mark.parametrize("cards", [1, 2])
def test_the_plans_of_two_models_in_the_docs_are_what_is_printed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: int
) -> None:
    machine.keep_gpus(cards)
    for gpu in machine.gpus:
        gpu.be_an_h100()
        gpu.memory_bytes = 81_559 << 20
    (tmp_path / "Qwen").mkdir()
    for name, config, size in (
        ("Qwen3-8B", QWEN3_8B, 16_381_470_720), ("Qwen3-0.6B", QWEN3_06B, 1_503_300_328),
    ):  # fmt: skip
        folder = written(tmp_path / "Qwen" / name, config, size)
        for file in ("model.safetensors", "tokenizer.json"):
            (folder / file).touch()
    monkeypatch.chdir(tmp_path)
    memory = HostMemory(512 << 30, 480 << 30)
    monkeypatch.setattr("deployments.gpu_plans.host_memory", lambda: memory)
    page = (ROOT / "docs/guides/models.md").read_text()
    file = re.search(r"gpus\.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert file is not None
    (tmp_path / "models.yaml").write_text(file[1])
    text = said("--config", "models.yaml")
    shown = " ".join(text[text.index("2 models on") :].split())
    assert shown in " ".join(page.split())


def test_problems_of_several_models_name_theirs(machine: Machine) -> None:
    models: dict[str, dict[str, Any]] = {"a": {"gpus": 2}, "b": {"engine": {"max_modle_len": 1}}}
    for one in models.values():
        one["model"] = "embedded"
    lines = said(f"models={json.dumps(models)}", status=2).splitlines()
    assert lines[0].startswith("gpus: 2 for a + 1 for b = 3 are asked for, and Ray has 2; ask for")
    assert lines[1].startswith("models.b.engine.max_modle_len: vLLM has no such engine argument")
    machine.fail_to_open(9)
    (line,) = said('models={"a": {"model": "embedded", "gpus": 2}}', status=2).splitlines()
    assert line.startswith("models.a.gpus: 2 are asked for, and this machine shows none")


def test_a_plan_of_several_models_on_cpus_has_the_sum(machine: Machine) -> None:
    models = {"a": {"model": "embedded", "prefillers": 0}, "b": {"model": "embedded"}}
    text = words(f"models={json.dumps(models)}", "device=cpu")
    assert "No GPU: 2 a decoders x (0.0 weights + 1.0 KV space) + 1 b prefillers x (" in text
    assert "= 5.0 GiB on the CPU. Host memory for KV: 2 GiB a node" in text


SLOTS = (
    "tiers.prefill.sm_slots=3", "prefillers.tier=prefill", "prefillers.num_gpus=0.4",
    "tiers.decode.sm_slots=7", "decoders.tier=decode", "decoders.num_gpus=0.6", "decoders=1",
)  # fmt: skip


def test_what_engines_on_one_card_share_is_in_the_plan(machine: Machine, model: str) -> None:
    for gpu in machine.gpus:
        gpu.be_an_h100()
        gpu.memory_bytes = 81_559 << 20
    text = said(model, "gpus=1", "prefillers=1", "decoders=1")
    # What the prefiller holds for conversations is as much as the decoder does.
    assert [row[4] for row in rows(text)] == ["0.5", "0.5"]
    assert all("123,0" in row[-2] for row in rows(text))
    assert "1 of 2 GPUs have no engine" in text
    assert "Prefillers and decoders both keep conversations" in text
    assert "take turns unless MPS runs" in " ".join(text.split())
    text = said(model, *SLOTS)
    assert "SM slots" in text
    assert [" ".join(row[6:9]) for row in rows(text)] == ["3 of 10", "7 of 10"]


@pytest.mark.parametrize(
    ("arguments", "gib", "refusal"),
    [
        ((*SLOTS, "tiers.decode.sm_slots=8"), 48,
         "1 prefiller x 3 + 1 decoder x 8 = 11 slots may be asked of one GPU"),
        (("decoders.engine.tensor_parallel_size=2",), 48,
         "decoders.engine.tensor_parallel_size: 2, but prefillers have the default: LMCache's "
         "keys say among how many workers KV is split, so a decoder would find nothing of what a "
         "prefiller has stored; set engine.tensor_parallel_size for both roles"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_refused_with_the_sums(
    machine: Machine, model: str, arguments: tuple[str, ...], gib: int, refusal: str
) -> None:
    for gpu in machine.gpus:
        gpu.memory_bytes = gib << 30
    assert refusal in said(model, *arguments, status=2)


@pytest.mark.parametrize("device", ["device=auto", "device=cpu"])
def test_a_model_that_is_not_there_is_refused(
    machine: Machine, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hub is not asked, as with HF_HUB_OFFLINE.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("/no/such/folder", "acme/no-such-model"):
        text = said(f"model={model}", device, status=2)
        assert f"model: config.json of '{model}' cannot be read" in text
    text = said(f"model={tmp_path}", device, status=2)
    assert "config.json cannot be read: there is none" in text
    # On a cluster it may lie on other nodes.
    monkeypatch.setattr("conserve_cli.gpu_plan._of_cluster", lambda: [here()])
    monkeypatch.setattr("conserve_cli.gpu_plan.require_ray", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "Host memory for KV" in said("model=acme/no-such-model", device)


def test_arguments_that_vllm_does_not_know_are_refused(machine: Machine, model: str) -> None:
    text = said(
        model, "engine.max_modle_len=8192", "prefillers.engine.max_num_seq=2",
        "decoders.engine.gpu_memory_utilization=0.8", "decoders.engine.enforce_eager=ja", status=2,
    )  # fmt: skip
    meant = "did you mean max_model_len?"
    assert f"engine.max_modle_len: vLLM has no such engine argument; {meant}" in text
    assert "prefillers.engine.max_num_seq: vLLM has no such engine argument" in text
    assert "decoders.engine.enforce_eager: give true or false" in text
    assert "gpu_memory_utilization" not in text
    assert "engine.tensor_parallel_size: give a whole number" in said(
        model, "engine.tensor_parallel_size=two", status=2
    )


def test_a_plan_is_made_without_vllm_too(
    machine: Machine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.engine_arguments.sys.executable", "/bin/false")
    text = said(model, "engine.max_num_seqs=64")
    assert "vLLM cannot be asked about this: it ended with status 1" in text
    assert "2 x NVIDIA A40" in text


def test_without_a_gpu_it_says_so(machine: Machine) -> None:
    machine.fail_to_open(9)
    assert "1 prefillers and 2 decoders run on the CPU" in said()
    alone = said("like=agentserve")
    assert "No GPU: 1 decoder runs on the CPU" in alone
    assert "TPOT above which prefills are cut: twice a step without prefills" in alone
    assert "run on the CPU" in said("device=cpu")


def test_the_dtype_of_engines_on_cpus_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    why = "dtype: float32: ONEDNN_MAX_CPU_ISA=AVX2 leaves out the kernels for bfloat16"
    assert why in words("device=cpu")
    launching.laid_out(load({"device": "cpu"}))
    assert why in " ".join(capsys.readouterr().out.split())


def test_a_start_waits_for_the_engines_of_the_plan(machine: Machine, model: str) -> None:
    """The application counts the same ones by itself (deployments/app.py)."""
    settings = launching.laid_out(load({"model": model.removeprefix("model=")}))
    assert (settings.prefiller_replicas, settings.decoders.replicas) == (1, 1)


def test_on_a_cluster_the_application_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("conserve_cli.gpu_plan.require_ray", lambda address: None)
    assert launching.laid_out(load({})).decoders.replicas == 1
    assert launching.laid_out(load({"decoders": 3})).decoders.replicas == 3
    # With one GPU there is no prefiller to wait for, whatever else is said of decoders.
    for asked, fewest in (({"decoders": 1}, 0), ({"prefillers": 2}, 2), ({"device": "cpu"}, 1)):
        assert launching.laid_out(load(asked)).prefillers.replicas == fewest


def test_every_check_that_fails_is_a_line(
    machine: Machine, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is planned, let alone started."""
    monkeypatch.setattr(
        "conserve_cli.gpu_plan.busy_ports", lambda settings: ["port: 8000 is in use"]
    )
    monkeypatch.setattr(
        "deployments.engine_arguments.refused_arguments",
        lambda settings, gpu, of_model: ["engine.seed: give a whole number"],
    )
    given = ("decoders.tier=fats", "tiers.fast.accelerator_type=A40", "keys_file=/no/keys.json")
    wrong = (model, *given, "engine.seed=x")
    for plan in (["--plan"], []):
        done = CliRunner().invoke(cli, [*plan, *wrong])
        assert done.exit_code == 2
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            *("keys_file", "port", "decoders.tier", "engine.seed"),
        ]
        assert lines[2].endswith("; did you mean fast?")
    # A start asks vLLM, which takes seconds, about arguments alone.
    asked: list[bool] = []
    monkeypatch.setattr(
        "deployments.engine_arguments.refused_arguments",
        lambda settings, gpu, of_model: asked.append(of_model) or ["model: no"],
    )
    monkeypatch.setattr("conserve_cli.gpu_plan.busy_ports", lambda settings: ())
    launching.laid_out(load({"model": model.removeprefix("model=")}))
    assert asked == []
    assert "model: no" in said(model, status=2)
    assert asked == [True]


def test_tiers_and_gpus_that_this_machine_has_not_are_refused(machine: Machine) -> None:
    machine.fail_to_open(9)
    text = said("gpus=2", "prefillers=0", status=2)
    assert text.startswith("gpus: 2 are asked for, and this machine shows none; leave it out")
    text = said("decoders.tier=fast", status=2)
    assert text.startswith("decoders.tier: no node offers 'fast' (custom resource fast); start")


def test_a_cluster_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for plan in (["--plan"], []):
        done = CliRunner().invoke(cli, plan)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == (
            "RAY_ADDRESS: no usable Ray at 127.0.0.1:1: nothing listens there (Connection "
            "refused)\n"
        )
