"""The formulas of docs/howto/models.md give the bytes that each rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpt import GPT, make_tokens, token_loss, wrap
from small_trainings import make_training, train
from torch.distributed.tensor import DTensor

from paceline import Mesh
from paceline.testing import run_ranks

FAST = [Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2)]
SLOW = [
    Mesh(dp_shard=4),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(tp=2, dp_shard=2),
    Mesh(pp=4),
]
SPLIT = ("wq", "wk", "wv", "fc1", "wo.weight", "fc2.weight")  # by tensor_parallel


def _size_of(tensor: Any) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(own.numel() * own.element_size())


def _held_bytes(job: Any) -> int:
    """Bytes of parameters, gradients and AdamW state on this rank, before an update."""
    model = wrap(job, GPT())
    training = make_training(
        job, model, make_tokens(8), optimizer=torch.optim.AdamW, count="tokens"
    )
    (optimizer,) = training.optimizers
    gradients = 0

    def measure(*_: Any) -> None:
        nonlocal gradients
        held = [p.grad for g in optimizer.param_groups for p in g["params"]]
        gradients = sum(_size_of(g) for g in held if g is not None)

    optimizer.register_step_pre_hook(measure)
    train(training, token_loss, until=2)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    state = [value for p in parameters for value in optimizer.state[p].values()]
    return gradients + sum(map(_size_of, (*parameters, *state)))


@pytest.mark.parametrize(
    "mesh", [*FAST, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)], ids=str
)
def test_a_rank_holds_what_the_formula_says(mesh: Mesh) -> None:
    sizes = {name: p.numel() for name, p in GPT().named_parameters()}
    counters = 4 * len(sizes)  # AdamW counts the steps of each parameter
    split = sum(size for name, size in sizes.items() if any(part in name for part in SPLIT))
    whole = sum(sizes.values()) - split
    held = run_ranks(_held_bytes, nproc=mesh.data_size * mesh.tp * mesh.pp, mesh=mesh)
    if mesh.pp > 1:
        assert sum(held) == 16 * (split + whole) + counters
        assert max(held) < sum(held)
    else:
        assert set(held) == {16 * (split // mesh.tp + whole) // mesh.dp_shard + counters}
