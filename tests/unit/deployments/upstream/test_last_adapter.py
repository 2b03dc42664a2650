"""LoRA on CPUs, of tokens with an adapter and without in one batch."""

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

RANK, WIDTH, SLOTS = 2, 4, 3
# Of five tokens; -1: without.
INDICES = torch.tensor([-1, 0, 2, -1, 1])


def added() -> torch.Tensor:
    """What a layer adds to each token's output, by each way to the kernels."""
    draw = torch.Generator().manual_seed(0)
    down, up = (
        torch.randn((SLOTS, 1, *shape), generator=draw) for shape in ((RANK, WIDTH), (WIDTH, RANK))
    )
    tokens = torch.randn((len(INDICES), WIDTH), generator=draw)
    inner = torch.ones((len(INDICES), RANK))
    punica_cpu.bgmv_shrink(tokens, down, inner, INDICES, 1.0)
    outputs = [torch.zeros((len(INDICES), WIDTH)) for _ in range(3)]
    punica_cpu.bgmv_expand(inner, up, outputs[0], INDICES, add_inputs=True)
    punica_cpu.bgmv_expand_slice(inner, up, outputs[1], INDICES, 0, WIDTH, True)
    lengths = torch.ones_like(INDICES)
    # An embedding's only half: its input is no shrunken one.
    shape = (len(INDICES), 1, len(INDICES))
    lora_ops.sgmv_expand(
        torch.ones_like(inner), up, outputs[2], lengths, lengths, INDICES, *shape, True
    )
    expected = torch.stack([
        up[index, 0] @ down[index, 0] @ token if index >= 0 else torch.zeros(WIDTH)
        for index, token in zip(INDICES, tokens, strict=True)
    ])  # fmt: skip
    with_one = INDICES >= 0
    assert torch.allclose(outputs[0][with_one], expected[with_one], atol=1e-5)
    assert torch.allclose(outputs[0], outputs[1])
    assert outputs[2][with_one].abs().sum(1).all()
    return torch.cat(outputs, 1)[~with_one]


def test_vllm_adds_the_last_adapter_where_there_is_none() -> None:
    assert added().abs().sum() > 0


@pytest.mark.usefixtures("patched")
def test_patched_vllm_adds_nothing_where_there_is_no_adapter() -> None:
    assert added().abs().sum() == 0
