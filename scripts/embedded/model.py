"""The embedded model in plain PyTorch, for training: Qwen3's architecture, under Qwen3's names."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 256
INTERMEDIATE = 512
LAYERS = 5
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
ROPE_THETA = 1_000_000.0
EPSILON = 1e-6


class Norm(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """RMS normalisation."""

    def __init__(self, size: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPSILON)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Attention(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """Causal attention with rotary positions, and queries and keys normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = _linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = Norm(HEAD_DIM, 1.5)
        self.k_norm = Norm(HEAD_DIM, 1.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads' outputs side by side, before o_proj."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return heads.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Perceptron(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """The gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = _linear(HIDDEN, INTERMEDIATE)
        self.up_proj = _linear(HIDDEN, INTERMEDIATE)
        self.down_proj = _linear(INTERMEDIATE, HIDDEN)
        nn.init.normal_(self.down_proj.weight, std=0.3 * INTERMEDIATE**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm(HIDDEN)
        self.mlp = Perceptron()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, where: Tensor | None) -> Tensor:
        """All positions, or only those of a mask, in a row."""
        heads = self.self_attn(self.input_layernorm(x), cos, sin)
        if where is not None:
            heads, x = heads[where], x[where]
        x = x + self.self_attn.o_proj(heads)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):  # type: ignore[misc]  # torch is taken as untyped.
    """The model without its output matrix, which here has rows only for tokens that are said.

    Dimension 0 of the residual stream is held at 1, so that every matrix has a bias in its
    column 0, which the architecture itself lacks.
    """

    def __init__(self, vocab_size: int, said: Tensor) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)
        self.output = nn.Parameter(self.embed_tokens.weight[said].detach() * HIDDEN**-0.5)
        self._prepare()
        self.hold()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def hold(self) -> None:
        """Put back what training must not change: dimension 0."""
        self.embed_tokens.weight[:, 0] = 1.0
        self.norm.weight[0] = 1.0
        for layer in self.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """Logits of the said tokens, at the positions of a mask."""
        cos, sin = rotations(ids.shape[1])
        x = self.embed_tokens(ids).to(cos.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, where if layer is self.layers[-1] else None)
        return self.norm(x).float() @ self.output.T

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _prepare(self) -> None:
        """Begin with what copying is made of, so that training need not find it.

        Layer 0 has heads that look 1, 2 and 3 tokens back, layer 1 heads that look for where
        the present token was the one before; values pass through as they are.
        """
        # Small against the bias in column 0, so that these heads go by position.
        looks = self.layers[0].self_attn
        looks.q_proj.weight[: 3 * HEAD_DIM] *= 0.05
        looks.k_proj.weight *= 0.05
        direction = _sharp_direction()
        for kv_head in range(KV_HEADS):
            looks.k_proj.weight[kv_head * HEAD_DIM :][:HEAD_DIM, 0] = direction
        for head, distance in enumerate((1, 2, 3)):
            # The key that is `distance` back is turned less by as many steps.
            looks.q_proj.weight[head * HEAD_DIM :][:HEAD_DIM, 0] = _turned(direction, -distance)
        for layer in self.layers:
            attention = layer.self_attn
            back = attention.o_proj.weight
            for head in range(HEADS):
                values = attention.v_proj.weight[head * KV_HEADS // HEADS * HEAD_DIM :][:HEAD_DIM]
                gain = 0.5 if layer is not self.layers[0] else 1.0
                back[:, head * HEAD_DIM :][:, :HEAD_DIM] = gain * values.T
        # Each of layer 0's heads writes where it can be told from the others and from the token.
        for head in range(HEADS):
            fresh = torch.randn(HIDDEN, HEAD_DIM) * HIDDEN**-0.5
            looks.o_proj.weight[:, head * HEAD_DIM :][:, :HEAD_DIM] = fresh
        match = self.layers[1].self_attn
        slow = torch.cat([torch.arange(12, 32), torch.arange(44, 64)])
        values, writes = looks.v_proj.weight[:HEAD_DIM], looks.o_proj.weight[:, :HEAD_DIM]
        for rows, source in ((match.q_proj, values), (match.k_proj, writes.T)):
            rows.weight[:HEAD_DIM] *= 0.1
            rows.weight[slow] = source[slow]


def rotations(length: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, one row each."""
    angles = torch.arange(length)[:, None] * _frequencies()[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _frequencies() -> Tensor:
    return ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def _sharp_direction() -> Tensor:
    """A vector of which turned copies are unlike: mostly in the fast pairs of dimensions."""
    energy = torch.zeros(HEAD_DIM // 2)
    energy[:3], energy[3:14] = 0.25, 0.25 / 11
    return torch.cat((energy.sqrt(), torch.zeros(HEAD_DIM // 2)))


def _turned(vector: Tensor, steps: int) -> Tensor:
    angles = _frequencies() * steps
    return _rotated(vector, angles.cos(), angles.sin())


def muon_matrices(model: Model) -> list[nn.Parameter]:
    """The layers' matrices."""
    return [p for p in model.layers.parameters() if p.ndim == 2]
