"""A GPT of plain torch modules; byte-level unless told otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256

# GPT-2's 0.02 is for a wider and deeper model; in the 300 steps of a default run this one stays at a held-out
# loss of 2.4 with it, and comes to 2.2 with 0.05 (0.1: 2.3).
INIT_STD = 0.05


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        # No bias: attention does not depend on that of the keys, whose gradient is rounding noise then, and
        # AdamW makes steps of full size out of it. The comparison would show little else.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, context, width) to the same."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + fed


class GPT(nn.Module):
    """Predicts the next byte, or token; the embedding serves as the output layer too."""

    def __init__(
        self, context: int, width: int, heads: int, layers: int, seed: int, vocabulary: int = BYTES
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() == 2:
                # As in GPT-2, what each block adds to the residual path starts small.
                adds = name.endswith(("attention_output.weight", "feed_forward.2.weight"))
                std = INIT_STD / math.sqrt(2 * layers) if adds else INIT_STD
                nn.init.normal_(param, std=std, generator=generator)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, float32, in nats per byte, of token ids of shape (batch, context)."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        # A loss of 16 bits would hide what a step changes, and could not be scaled.
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
