"""More models as people copy them: of several inputs or results, with attributes that forwards set, of sequences, graphs."""

import math
from collections import namedtuple
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Outputs = namedtuple("Outputs", ["logits", "aux"])


class WithAuxiliary(nn.Module):
    """GoogLeNet: a named tuple in training, a tensor in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.branches = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Sequential(nn.Conv2d(8, 2, 1), nn.Conv2d(2, 4, 3, padding=1))])
        self.aux1, self.fc = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        aux = self.aux1(F.adaptive_avg_pool2d(x, 1).flatten(1)) if self.training else None
        x = torch.cat([branch(x) for branch in self.branches], 1)
        x = self.fc(torch.flatten(F.adaptive_avg_pool2d(F.relu(x), (1, 1)), 1))
        return Outputs(x, aux) if aux is not None else x


class DenseLayer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(inner), nn.ReLU(inplace=True), nn.Conv2d(inner, 4, 3, padding=1)

    def forward(self, given: Any) -> torch.Tensor:
        before = [given] if isinstance(given, torch.Tensor) else given
        return self.conv1(self.relu1(self.norm1(torch.cat(before, 1))))


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, inner: int) -> None:
        super().__init__()
        for n in range(layers):
            self.add_module(f"denselayer{n + 1}", DenseLayer(inner + n * 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 8, 3, 2, 1, bias=False))
        self.features.add_module("denseblock1", DenseBlock(3, 8))
        self.features.add_module("norm5", nn.BatchNorm2d(20))
        self.classifier = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> Any:
        out = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class PaddedUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1))
        self.up, self.conv, self.outc = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x2 = F.relu(self.inc(x))
        x1 = self.up(F.relu(self.down(x2)))
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.outc(F.relu(self.conv(torch.cat([x2, x1], dim=1))))


class VectorQuantized(nn.Module):
    """VQ-VAE, whose book is a moving average that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 4, 4, 4), nn.ConvTranspose2d(4, 3, 4, 4)
        self.book = nn.Embedding(8, 4)
        self.book.weight.requires_grad_(False)
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x: torch.Tensor) -> Any:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 4)
        nearest = torch.argmin(torch.cdist(flat, self.book.weight), 1)
        chosen = torch.zeros(len(nearest), 8).scatter_(1, nearest.unsqueeze(1), 1)
        q = torch.matmul(chosen, self.book.weight).view(z.shape)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.book.weight.mul_(0.9).add_(chosen.t() @ flat / self.sizes.unsqueeze(1), alpha=0.1)
        loss = 0.25 * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        return {"loss": loss, "recon": self.decoder(q.permute(0, 3, 1, 2).contiguous()), "codes": nearest.detach()}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class RotaryLlama(nn.Module):
    """Rotary positions as complex numbers in an attribute, and a loss that is kept there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.norms = nn.ModuleList([RMSNorm(16) for _ in range(3)])
        self.qkv, self.wo = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.w1, self.w2, self.w3 = (
            nn.Linear(16, 24, bias=False),
            nn.Linear(24, 16, bias=False),
            nn.Linear(16, 24, bias=False),
        )
        self.embed.weight = self.output.weight
        angles = torch.outer(torch.arange(32).float(), 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.last_loss: torch.Tensor | None = None

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, tokens: torch.Tensor, start: int = 0) -> Any:
        b, t = tokens.shape
        h = self.embed(tokens)
        self.turns = self.turns.to(h.device)
        q, k, v = (one.view(b, t, 2, 8) for one in self.qkv(self.norms[0](h)).chunk(3, -1))
        q, k, v = (one.transpose(1, 2) for one in (self._turned(q), self._turned(k), v))
        mask = torch.triu(torch.full((t, t), float("-inf"), device=tokens.device), diagonal=start + 1)
        scores = F.softmax((q @ k.transpose(2, 3) / math.sqrt(8) + mask).float(), -1).type_as(q)
        h = h + self.wo((scores @ v).transpose(1, 2).reshape(b, t, 16))
        x = self.norms[1](h)
        logits = self.output(self.norms[2](h + self.w2(F.silu(self.w1(x)) * self.w3(x))))
        self.last_loss = F.cross_entropy(logits[:, :-1].reshape(-1, 50), tokens[:, 1:].reshape(-1))
        return logits


class SelectiveScan(nn.Module):
    """Mamba, as its minimal version has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.conv = nn.Embedding(50, 8), nn.Linear(8, 32), nn.Conv1d(16, 16, 4, padding=3, groups=16)
        self.steps, self.dt, self.outer = nn.Linear(16, 10, bias=False), nn.Linear(2, 16), nn.Linear(16, 8)
        self.logs = nn.Parameter(torch.log(torch.arange(1, 5).repeat(16, 1).float()))
        self.straight, self.head = nn.Parameter(torch.ones(16)), nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> Any:
        x, gate = self.inner(self.embed(ids)).split([16, 16], dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, : ids.shape[1]].transpose(1, 2))
        delta, b, c = self.steps(x).split([2, 4, 4], dim=-1)
        delta = F.softplus(self.dt(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.logs)))
        given = torch.einsum("bld,bln,bld->bldn", delta, b, x)
        state, found = torch.zeros((x.shape[0], 16, 4)), []
        for n in range(x.shape[1]):
            state = decay[:, n] * state + given[:, n]
            found.append(torch.einsum("bdn,bn->bd", state, c[:, n]))
        return self.head(self.outer((torch.stack(found, 1) + x * self.straight) * F.silu(gate)))


class Translator(nn.Module):
    """Two inputs, attention over the encoder's states, its own words fed back, and writes into a tensor of results."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.words = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.encoder, self.joined = nn.GRU(8, 8, bidirectional=True), nn.Linear(16, 8)
        self.attention, self.energy = nn.Linear(24, 8), nn.Linear(8, 1, bias=False)
        self.decoder, self.out = nn.GRU(24, 8), nn.Linear(32, 50)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        states, last = self.encoder(self.source(source.t()))
        hidden = torch.tanh(self.joined(torch.cat((last[-2], last[-1]), 1)))
        outputs, word = torch.zeros(target.shape[1], len(source), 50), target[:, 0]
        for n in range(1, target.shape[1]):
            repeated = hidden.unsqueeze(1).repeat(1, len(states), 1)
            energy = torch.tanh(self.attention(torch.cat((repeated, states.permute(1, 0, 2)), 2)))
            weights = F.softmax(self.energy(energy).squeeze(2), 1).unsqueeze(1)
            seen = torch.bmm(weights, states.permute(1, 0, 2)).permute(1, 0, 2)
            embedded = self.words(word).unsqueeze(0)
            output, state = self.decoder(torch.cat((embedded, seen), 2), hidden.unsqueeze(0))
            hidden = state.squeeze(0)
            outputs[n] = self.out(torch.cat((output.squeeze(0), seen.squeeze(0), embedded.squeeze(0)), 1))
            word = outputs[n].argmax(1)
        return outputs.transpose(0, 1)


class RevIN(nn.Module):
    """Keeps the mean and the spread that it takes off for when it adds them again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean = torch.mean(x, dim=1, keepdim=True).detach()
            self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        return (x - self.affine_bias) / (self.affine_weight + 1e-10) * self.stdev + self.mean


class PatchForecast(nn.Module):
    """PatchTST: patches of a series by ``unfold``."""

    def __init__(self) -> None:
        super().__init__()
        self.revin, self.embed, self.places = RevIN(3), nn.Linear(8, 16), nn.Parameter(torch.zeros(5, 16))
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Sequential(nn.Flatten(-2), nn.Linear(80, 6))

    def forward(self, x: torch.Tensor) -> Any:
        z = self.revin(x, "norm").permute(0, 2, 1).unfold(-1, 8, 4)
        b, c, patches, _ = z.shape
        u = self.embed(z).reshape(b * c, patches, 16) + self.places
        for layer in self.encoder:
            u = layer(u)
        return self.revin(self.head(u.reshape(b, c, patches, 16)).permute(0, 2, 1), "denorm")


class Recommender(nn.Module):
    """DLRM: a table for each feature, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(4)])
        self.bottom, self.top = (
            nn.Sequential(nn.Linear(3, 8), nn.ReLU()),
            nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 1)),
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> Any:
        x = self.bottom(dense)
        all_ = torch.cat([x, *(table(sparse[:, n : n + 1]) for n, table in enumerate(self.tables))], 1).view(len(x), -1, 8)
        products = torch.bmm(all_, all_.transpose(1, 2))
        rows = torch.tensor([i for i in range(5) for _ in range(i)])
        columns = torch.tensor([j for i in range(5) for j in range(i)])
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(1)


class GraphAttention(nn.Module):
    """On a graph that is a buffer, with a map of attention kept to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) < 0.4).float())
        self.w, self.a = nn.Linear(4, 8, bias=False), nn.Parameter(torch.randn(16, 1) * 0.1)
        self.out, self.attention = nn.Linear(80, 5), None

    def forward(self, x: torch.Tensor) -> Any:
        h = self.w(x)
        e = F.leaky_relu(torch.matmul(h, self.a[:8]) + torch.matmul(h, self.a[8:]).transpose(1, 2), 0.2)
        self.attention = F.softmax(torch.where(self.edges > 0, e, -9e15 * torch.ones_like(e)), dim=-1)
        return self.out(F.elu(self.attention @ h).flatten(1))


class Experts(nn.Module):
    """A mixture as gpt-fast has it, whose shapes depend on values; its block stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3, bias=False), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, 8)
        weights, which = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        each, given = which.view(-1), flat.repeat_interleave(2, dim=0)
        found = torch.empty_like(given)
        for n, expert in enumerate(self.experts):
            found[each == n] = expert(given[each == n])
        return (found.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).view(x.shape)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.layers = nn.ModuleList([nn.ModuleDict({"norm": RMSNorm(8), "ff": Experts()}) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer["ff"](layer["norm"](x))  # type: ignore[index]
        return self.head(x)
