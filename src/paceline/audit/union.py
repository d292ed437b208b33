"""Lets one process take steps of the ranks: from their weights, on the union of their samples.

In the ordinary run the samples of each batch are saved. In a few steps of it, the kept ones, rank 0 saves the
weights before the step, and each rank its gradients before the reduction and what the optimizer got. The
union run is the script on one process. Its training loaders give it the samples of all ranks, and in each
kept step it begins with the weights of the ranks. So its gradient is the one that the ranks must have, and
so are its weights and buffers at the next forward of training.

Kept are the first two steps, the last one, and the first one that takes the last batches of a pass.

In kept steps dropout is off. If the model has BatchNorm, the first two steps are not compared, and in the
others it uses its running statistics: with those of the batch, the gradient of a sample depends on others.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from paceline.audit import dropout, evidence, saved_weights
from paceline.audit.digests import digest, reals_of
from paceline.audit.events import LoaderSeen
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.run_plan import UNIONS, RunPlan
from paceline.audit.saved_weights import numbers
from paceline.parallel.modules import owned_parameters

_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The resolution of TF32, in which GPUs may multiply numbers of float32.
_TF32_EPS = 2.0**-10


def serialize(samples: list[Any]) -> bytes:
    """The samples of a batch, before the script's `collate_fn` gets them, which may change them.

    Empty if they cannot be saved, such as those of a class that is defined in a function.
    """
    buffer = io.BytesIO()
    try:
        torch.save([_without_rest(sample) for sample in samples], buffer)
    except Exception:
        return b""  # the union fails then, and the report says that it was not possible
    return buffer.getvalue()


def _without_rest(value: Any) -> Any:
    """The value, with copies of tensors that are a part of a larger one, which would be saved whole."""
    if (
        isinstance(value, torch.Tensor)
        and type(value) is torch.Tensor
        and value.layout is torch.strided
    ):
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if type(value) in (list, tuple):
        return type(value)(_without_rest(item) for item in value)
    if type(value) is dict:
        return {key: _without_rest(item) for key, item in value.items()}
    return value


def save_samples(plan: RunPlan, samples: bytes, batch: Any) -> None:
    """Save the samples of a batch under its digest, which the events of the rank contain too."""
    (plan.folder / f"samples-{digest(batch)}.pt").write_bytes(samples)


class UnionLoaders:
    """The training loaders of the ordinary run, for a union.

    Attributes:
        loaders: Their descriptions, by name; empty if this run is no union.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        is_union = plan.mode in UNIONS and plan.source is not None
        self._logs = evidence.read_logs(plan.source, plan.ranks) if is_union and plan.source else []
        names = self._logs[0].training_loaders if self._logs else []
        self.loaders: dict[str, LoaderSeen] = {name: self._logs[0].loaders[name] for name in names}

    def length(self, name: str) -> int | None:
        """The number of batches of a pass; None if unknown."""
        length = self.loaders[name].batches
        return length and length * (self._plan.ranks if self._plan.one_by_one else 1)

    def has_pass(self, name: str, number: int) -> bool:
        """Whether the ranks made this pass over the loader."""
        return any((name, number) in log.passes for log in self._logs)

    def batches(
        self, name: str, number: int, collate: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        """The samples of all ranks in one pass, made to batches by `collate`; None: joined, as they are."""
        of_ranks = [
            log.passes[name, number].batches for log in self._logs if (name, number) in log.passes
        ]
        reverse = self._plan.mode == "null"
        for index in range(max(map(len, of_ranks), default=0)):
            parts = [self._samples(own[index].content) for own in of_ranks if index < len(own)]
            for samples in (
                parts if self._plan.one_by_one else [[s for part in parts for s in part]]
            ):
                ordered = samples[::-1] if reverse else samples
                yield _joined(ordered) if collate is None else collate(ordered)

    def _samples(self, content: int) -> list[Any]:
        assert self._plan.source is not None
        path = self._plan.source / f"samples-{content}.pt"
        samples: list[Any] = torch.load(
            path, weights_only=False
        )  # the ordinary run wrote this file
        return samples


def _joined(values: list[Any]) -> Any:
    """Batches that the dataset itself makes, joined to one."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(values)
    if isinstance(first, Mapping):
        return {key: _joined([each[key] for each in values]) for key in first}
    if type(first) in (list, tuple):
        return type(first)(_joined(list(each)) for each in zip(*values, strict=True))
    raise TypeError(f"verify cannot join batches that contain a {type(first).__name__}")


def reached(loss: torch.Tensor) -> Iterable[torch.Tensor]:
    """The leaves that a backward from this loss reaches, by its graph."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(
            leaf := getattr(node, "variable", None), torch.Tensor
        ):  # of an AccumulateGrad
            yield leaf
        nodes += [following for following, _ in node.next_functions]


class KeptSteps:
    """What the hooks of the loop do in kept steps."""

    def __init__(self, progress: Progress, models: Models) -> None:
        self._progress, self._models, self._plan = progress, models, progress.plan
        self._kept = set(self._plan.kept)
        self._begun: set[tuple[int, int]] = set()  # the steps and models of the forwards so far
        self._hooked: set[int] = set()
        # By name of the parameter and number of the backward, this rank's gradients before the reduction.
        self._own: dict[str, dict[int, torch.Tensor]] = {}
        self._reduced: dict[str, torch.Tensor] = {}  # before a clipping
        self._backwards = 0
        self._steps: Counter[int] = Counter()  # of optimizers, by the number of the step
        self._eps = 0.0  # of the coarsest type in a forward
        self._has_batchnorm = False
        self._undo: list[Callable[[], None]] = []

    @property
    def _is_kept(self) -> bool:
        return self._progress.steps in self._kept and self._progress.evaluation is None

    def begin_forward(self, number: int, model: nn.Module, *, trains: bool) -> None:
        """Before a forward: save or load the weights, and turn off what makes a sample depend on others."""
        self._undo_all()
        step = self._progress.steps
        is_new = self._progress.evaluation is None and (step, number) not in self._begun
        if is_new:
            if step - 1 in self._kept:
                self._save_result(step, number, model)
            if self._keeps_end_of_pass(step, model):
                self._kept.add(step)
            self._begun.add((step, number))
        if not self._is_kept:
            return
        if is_new:
            self._save_or_load(step, number, model)
        if not trains:
            return
        self._undo.append(dropout.turn_off())
        norms = [m for m in model.modules() if isinstance(m, _BATCHNORMS) and m.training]
        self._has_batchnorm |= bool(norms)
        for module in norms if step > 1 else ():
            if module.running_mean is not None:
                module.training = False
                self._undo.append(partial(setattr, module, "training", True))

    def _keeps_end_of_pass(self, step: int, model: nn.Module) -> bool:
        if any(isinstance(module, _BATCHNORMS) for module in model.modules()):
            return False  # a rank with more batches than another would turn it off alone
        is_chosen = self._kept > set(self._plan.kept)
        is_begun = any(done == step for done, _ in self._begun)
        ends_pass = self._plan.mode == "ordinary" and self._progress.ends_pass
        return ends_pass and not is_chosen and not is_begun

    def _save_result(self, step: int, number: int, model: nn.Module) -> None:
        """Save what the step before has made of a model."""
        rank = self._progress.rank
        if rank == 0 or saved_weights.is_sharded(model):
            result = saved_weights.numbers_of(model, without=_BATCHNORMS)
            torch.save(result, self._plan.folder / f"result-{step}-{number}-{rank}.pt")

    def _save_or_load(self, step: int, number: int, model: nn.Module) -> None:
        def path(folder: Path, rank: int) -> Path:
            return folder / f"state-{step}-{number}-{rank}.pt"

        if self._plan.source is None:
            if self._progress.rank == 0 or saved_weights.is_sharded(model):
                torch.save(
                    saved_weights.copy_of(model), path(self._plan.folder, self._progress.rank)
                )
            return
        found = [path(self._plan.source, rank) for rank in range(self._plan.ranks)]
        saved = [torch.load(p, map_location="cpu", weights_only=True) for p in found if p.exists()]
        if saved:
            saved_weights.load(model, saved)

    def _undo_all(self) -> None:
        """Not right after the forward: a backward with checkpointing computes it again."""
        while self._undo:
            self._undo.pop()()

    def note_precision(self, module: nn.Module) -> None:
        """At each module that is called: how coarse its numbers are."""
        if not self._is_kept:
            return
        for p in module.parameters(recurse=False):
            kinds = [p.dtype]
            if torch.is_autocast_enabled(p.device.type):
                kinds.append(torch.get_autocast_dtype(p.device.type))
            self._eps = max(
                [self._eps, *(torch.finfo(k).eps for k in kinds if k.is_floating_point)]
            )
            tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
            self._eps = max(self._eps, _TF32_EPS if p.is_cuda and tf32 else 0.0)

    def begin_backward(self, losses: list[torch.Tensor]) -> None:
        """Before a backward: watch the gradients that it computes."""
        if not self._is_kept:
            return
        self._backwards += 1
        for leaf in (leaf for loss in losses for leaf in reached(loss)):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._hooked:
                self._hooked.add(id(leaf))
                leaf.register_hook(partial(self._add, leaf))  # type: ignore[no-untyped-call]

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self._is_kept or isinstance(leaf, DTensor):
            return
        if gradient.dtype.is_floating_point:
            self._eps = max(self._eps, torch.finfo(gradient.dtype).eps)
        name = self._models.name_of(leaf)
        self._reduced.pop(name, None)
        if leaf.grad is None or not bool(reals_of(leaf.grad).any()):
            self._own[name] = {}  # cleared since
        own, value = self._own.setdefault(name, {}), numbers(gradient)
        own[self._backwards] = own.get(self._backwards, 0) + value

    def keep_reduced(self, parameters: list[torch.Tensor]) -> None:
        """Before a clipping."""
        if self._is_kept:
            for p in parameters:
                if p.grad is not None:
                    self._reduced.setdefault(self._models.name_of(p), numbers(p.grad))

    def begin_update(self, step: int, optimizer: Optimizer) -> None:
        """Before step number `step` of an optimizer: save the gradients of its parameters."""
        self._undo_all()
        if step - 1 in self._kept:
            owned = [(p, p.grad) for p in owned_parameters(optimizer) if p.grad is not None]
            if not any(self._models.has(p) for p, _ in owned):
                return  # such as an adversarial perturbation of the rank's own samples
            final = {self._models.name_of(p): numbers(grad) for p, grad in owned}
            kept = {
                "final": final,
                "reduced": {name: self._reduced.get(name, own) for name, own in final.items()},
                "own": {name: self._own[name] for name in final if name in self._own},
                "dimensions": {
                    self._models.name_of(p): saved_weights.dimension(g) for p, g in owned
                },
                "eps": self._eps,
                "is_coupled": self._has_batchnorm and step <= 2,
            }
            rank = self._progress.rank
            torch.save(kept, self._plan.folder / f"step-{step}-{self._steps[step]}-{rank}.pt")
            self._steps[step] += 1
            for name in final:
                self._own.pop(name, None)
                self._reduced.pop(name, None)
            self._eps = 0.0
        elif step not in self._kept:
            self._own.clear()
            self._reduced.clear()
