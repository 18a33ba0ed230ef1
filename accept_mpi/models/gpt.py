"""A character-level GPT: GPT-2's arrangement (Radford et al. 2019) with learned positions and an untied head."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from accept_mpi.models.base import Chain, Named
from accept_mpi.models.blocks import positive, share


class _Embedding(nn.Module):
    """Tokens (n, t) -> (n, t, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.positions.weight[: tokens.shape[1]]
        embedded: torch.Tensor = self.dropout(self.tokens(tokens) + positions)
        return embedded


class _Attention(nn.Module):
    """x + causal self-attention(norm(x)), for x (n, t, width)."""

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = _linear(width, 3 * width, 0.02)
        self.project = _linear(width, width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        drop = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        result: torch.Tensor = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(n, t, width)))
        return result


class _Mlp(nn.Module):
    """x + mlp(norm(x)), for x (n, t, width); the MLP is two linear layers with a GELU between them."""

    def __init__(self, width: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = _linear(width, 4 * width, 0.02)
        self.project = _linear(4 * width, width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.widen(self.norm(x)), approximate="tanh")
        result: torch.Tensor = x + self.dropout(self.project(hidden))
        return result


class _Head(nn.Module):
    """Norm and linear layer: (n, t, width) -> scores (n, t, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = _linear(width, vocabulary, 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(self.norm(x))
        return scores


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def gpt(
    vocabulary: int = 128, context: int = 128, layers: int = 8, width: int = 256, heads: int = 8, dropout: float = 0.0
) -> Chain:
    """GPT in 2 + 2 * ``layers`` layers: embedding, then attention and MLP of each block, then the head.

    Tokens (n, t) int64 with t <= ``context`` -> scores (n, t, vocabulary).
    """
    positive(vocabulary=vocabulary, context=context, layers=layers, width=width, heads=heads)
    share(dropout=dropout)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
    residual_std = 0.02 / math.sqrt(2 * layers)
    chain: list[Named] = [("embedding", lambda: _Embedding(vocabulary, context, width, dropout))]
    for number in range(1, layers + 1):
        chain.append((f"block{number:02}_attention", lambda: _Attention(width, heads, dropout, residual_std)))
        chain.append((f"block{number:02}_mlp", lambda: _Mlp(width, dropout, residual_std)))
    chain.append(("head", lambda: _Head(width, vocabulary)))
    return Chain(chain)
