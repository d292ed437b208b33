"""A small language model and its data, for tests of layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

VOCAB, LENGTH, WIDTH, HEADS = 12, 8, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(size, length, self.n_heads, -1).transpose(1, 2)

        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(y.transpose(1, 2).reshape(size, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


# How `paceline.tensor_parallel` splits linear layers: by their outputs or by their inputs.
TP_PLAN = {
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.fc1": "colwise",
    "layers.*.feed_forward.fc2": "rowwise",
}


class GPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.tp_plan = TP_PLAN
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_tokens(n: int) -> TensorDataset:
    """`n` sequences; the target of each token is a function of the token and its place."""
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=torch.Generator().manual_seed(2))
    return TensorDataset(ids, (3 * ids + torch.arange(LENGTH)) % VOCAB)


def token_loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    ids, targets = batch
    logits = model(ids)
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ), targets.numel()


def wrap(job: paceline.Job, model: nn.Module) -> nn.Module:
    """The model in the layout of the job's mesh."""
    mesh = job.mesh or paceline.Mesh()
    if mesh.pp > 1:
        model = paceline.pipeline(job, model)
    if mesh.tp > 1:
        model = paceline.tensor_parallel(job, model)
    if mesh.dp_shard > 1 or (mesh.tp > 1 and mesh.pp == 1):
        return paceline.fsdp(job, model, blocks=Block)
    return model if mesh.pp > 1 else paceline.ddp(job, model)
