"""Models as tutorials and much-copied repositories write them: none knows of pipelines."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 32), nn.Linear(32, 24), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return functional.relu(out)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1, self.layer2 = nn.Sequential(BasicBlock(8, 8, 1)), nn.Sequential(BasicBlock(8, 16, 2))
        self.linear = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x)))))
        out = functional.avg_pool2d(out, 4)
        return self.linear(out.view(out.size(0), -1))


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.depth = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1, groups=16)
        self.linear, self.groups = nn.Linear(256, 10), 4

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        n, c, h, w = x.size()
        x = x.view(n, self.groups, c // self.groups, h, w).permute(0, 2, 1, 3, 4).reshape(n, c, h, w)
        x = functional.avg_pool2d(self.depth(functional.relu(x)), 2)
        return self.linear(x.view(x.size(0), -1))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1)
        self.fc = nn.Sequential(nn.Linear(16, 4), nn.ReLU(inplace=True), nn.Linear(4, 16), nn.Sigmoid())
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.conv(x)
        b, c, _, _ = x.size()
        y = self.fc(functional.adaptive_avg_pool2d(x, 1).view(b, c)).view(b, c, 1, 1)
        return self.last((x * y.expand_as(x)).mean([2, 3]))


class Windows(nn.Module):
    """Attention within windows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.head = (
            nn.Conv2d(3, 16, 4, 4),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 10),
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        x = torch.roll(x, (-2, -2), (1, 2))
        x = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, c)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.out(functional.softmax(q @ k.transpose(-2, -1), -1) @ v)
        x = x.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        return self.head(torch.roll(x, (2, 2), (1, 2)).mean((1, 2)))


class Points(nn.Module):
    """A cloud of points, turned by a matrix that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.angles = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.conv, self.bn, self.last = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> Any:
        found = torch.max(functional.relu(self.turn(x)), 2, keepdim=True)[0].view(-1, 16)
        matrix = self.angles(found) + torch.eye(3).flatten().view(1, 9).repeat(x.size()[0], 1)
        x = torch.bmm(x.transpose(2, 1), matrix.view(-1, 3, 3)).transpose(2, 1)
        x = torch.max(functional.relu(self.bn(self.conv(x))), 2, keepdim=True)[0].view(-1, 16)
        return functional.log_softmax(self.last(x), dim=1)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(32, 96), nn.Linear(32, 32), 4
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: torch.Tensor) -> Any:
        b, t, c = x.size()
        q, k, v = (one.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for one in self.c_attn(x).split(32, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = functional.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(32), CausalSelfAttention(), nn.LayerNorm(32)
        m = self.mlp = nn.ModuleDict({"c_fc": nn.Linear(32, 64), "c_proj": nn.Linear(64, 32), "act": nn.GELU()})
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """Gives its logits and, where it gets targets, its loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList([GPTBlock() for _ in range(2)])
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(50, 32), "wpe": nn.Embedding(16, 32), "h": blocks, "ln_f": nn.LayerNorm(32)}
        )
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(4))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: torch.Tensor, targets: Any = None) -> Any:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # type: ignore[operator]
        for block in self.transformer.h:  # type: ignore[union-attr]
            x = block(x)
        logits, loss = self.lm_head(self.transformer.ln_f(x)), None  # type: ignore[operator]
        if targets is not None:
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class CharacterRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.decode = nn.Embedding(50, 16), nn.LSTM(16, 24, 2, batch_first=True), nn.Linear(24, 50)

    def forward(self, x: torch.Tensor) -> Any:
        weight = next(self.parameters())
        hidden = weight.new_zeros(2, x.size(0), 24), weight.new_zeros(2, x.size(0), 24)
        found, hidden = self.lstm(self.embed(x), hidden)
        return self.decode(found)


class GRULoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(50, 16), nn.GRUCell(16, 16), nn.Linear(16, 50)

    def forward(self, x: torch.Tensor) -> Any:
        embedded, found = self.embed(x), []
        hidden = torch.zeros(x.size(0), 16, device=x.device)
        for step in range(x.size(1)):
            hidden = self.cell(embedded[:, step], hidden)
            found.append(hidden)
        return self.out(torch.stack(found, 1))


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(50, 16), nn.Linear(24, 4)
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, (k, 16)) for k in (2, 3, 4)])

    def _pooled(self, x: torch.Tensor, conv: nn.Module) -> torch.Tensor:
        x = functional.relu(conv(x)).squeeze(3)
        return functional.max_pool1d(x, x.size(2)).squeeze(2)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.embed(x).unsqueeze(1)
        return self.fc(torch.cat([self._pooled(out, conv) for conv in self.convs], 1))


IMAGES: list[type[nn.Module]] = [LeNet, Residual, Shuffle, SqueezeExcite, Windows]
TEXTS: list[type[nn.Module]] = [MinGPT, CharacterRNN, GRULoop, TextCNN]
