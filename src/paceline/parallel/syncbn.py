"""BatchNorm over the samples of all ranks, on CPU and CUDA: gradients and running statistics of one process
that normalises the whole batch.

Replaces `torch.nn.SyncBatchNorm`, which has no CPU version and cannot leave a sample out. A rank without
samples runs a padding micro-batch, which takes part in the collectives only. Gradients of weight and bias are
summed over ranks by the training's strategy, not here. In eval mode nothing is exchanged.

Ranks exchange (count, mean, M2) and merge them by the formula of Chan, Golub and LeVeque (1979).
E[x^2] - E[x]^2 would lose all digits if the mean is much larger than the deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from paceline import log
from paceline.errors import ConfigError, StepError, listed, refuse_different_values
from paceline.job import collectives
from paceline.job.job import Job
from paceline.job.recovery import SET_UP
from paceline.parallel.modules import is_pipeline, refuse_torch_syncbn, unwrap

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


class _Link:
    """A layer's reference to its job. Copies of a layer share it; a pickle has none."""

    def __init__(self, job: Job | None) -> None:
        self.job = job

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Link, (None,))


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm whose statistics in training are those of the samples of all ranks.

    Made by `sync_batchnorm` from torch's layers, whose parameters, buffers, hooks and names it keeps.

    Attributes:
        is_padding: Whether the samples of the next forward have weight 0: they are normalised, but count
            neither in statistics nor in any gradient.

    Collective: in training mode `forward` and its backward, all ranks, equally often.
    """

    is_padding: bool
    link: _Link

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`, shape (N, C, ...).

        Raises:
            ConfigError: on all ranks, if all ranks together have fewer than two values per channel.
            StepError: in training mode after the job was left, or after unpickling.
        """
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if not self.training:
            mean, var = self.running_mean, self.running_var
            use_batch = mean is None  # the layer keeps no statistics
            return F.batch_norm(input, mean, var, self.weight, self.bias, use_batch, eps=self.eps)
        job = self.link.job
        if job is None:
            raise StepError(
                "this SyncBatchNorm belongs to no job.",
                why="the model was unpickled, and a pickle does not contain the job.",
                fix="call paceline.sync_batchnorm(job, model) again.",
            )
        job.refuse_if_left()
        stats = _Statistics(job, input.detach(), is_padding=self.is_padding)
        if self.track_running_stats:
            self._track(stats)
        normalise: Any = _Normalise.apply
        output: torch.Tensor = normalise(input, self.weight, self.bias, stats, self.eps)
        return output

    @torch.no_grad()
    def _track(self, stats: _Statistics) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a plain average over all batches so far
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = stats.var * (stats.count / (stats.count - 1))
        self.running_mean.lerp_(stats.mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Statistics:
    """Count, mean and biased variance for each channel over all ranks, in float64 where there is one.

    `type` is the dtype to compute with: the input's, or float32 for half precision.
    """

    def __init__(self, job: Job, x: torch.Tensor, *, is_padding: bool) -> None:
        self.job = job
        self.is_empty = is_padding or x.numel() == 0
        self.dims = [0, *range(2, x.dim())]
        self.shape = [1, -1] + [1] * (x.dim() - 2)
        self.type = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        # Not every XPU has float64; there, counts are exact up to 2^24.
        self.wide = torch.float64 if x.device.type in ("cpu", "cuda") else torch.float32
        # Merged in rank order on all ranks, so equal to the last bit.
        rows = collectives.gather_rows(job, self._packed(x), job.data.group)
        counts, means, m2s = rows[:, :1], rows[:, 1::2], rows[:, 2::2]
        self.count = counts.sum()
        if self.is_empty or x.numel() == x.shape[1]:
            # The total can be less than 2 only if every rank is in this branch. It is not read otherwise,
            # because the host would then wait for the device in each layer.
            self._refuse_single_value()
        self.mean = (counts * means).sum(0) / self.count
        self.var = (m2s + counts * (means - self.mean) ** 2).sum(0) / self.count

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's (count, mean 0, M2 0, mean 1, M2 1, ...), shape (1 + 2C,)."""
        channels = x.shape[1]
        packed = torch.zeros(1 + 2 * channels, dtype=self.wide, device=x.device)
        if self.is_empty:
            return packed
        count = x.numel() // channels
        mean, var = _mean_and_var(x.to(self.type), self.dims, self.wide)
        packed[0] = count
        packed[1::2] = mean
        packed[2::2] = var * count
        return packed

    def _refuse_single_value(self) -> None:
        total = int(self.count)
        if total < 2:
            raise ConfigError(
                f"SyncBatchNorm got {total} value per channel over all ranks; training needs 2.",
                where=self.job.where(),
                why="the variance of a single value is 0.",
                fix="use a larger micro_batch, or a global_batch that does not leave a step with one sample.",
                count=total,
            )

    def shaped(self, per_channel: torch.Tensor) -> torch.Tensor:
        """Shape (C,) -> (1, C, 1, ...), in the dtype to compute with."""
        return per_channel.to(self.type).view(self.shape)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum(self.dims).to(self.wide)


def _mean_and_var(
    x: torch.Tensor, dims: list[int], wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type != "cpu":
        var, mean = torch.var_mean(x, dims, correction=0)
        return mean.to(wide), var.to(wide)
    # On CPU `var_mean` is not vectorised and takes 5 to 20 times as long. The float32 mean may be wrong by
    # thousandths of the deviation, so the mean of the differences corrects it.
    rough = x.mean(dims, keepdim=True)
    differences = x - rough
    left = differences.mean(dims).to(wide)
    var = differences.square_().mean(dims).to(wide) - left**2
    return rough.flatten().to(wide) + left, var


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, where mean and var depend on all ranks' x.

    With n values per channel over all ranks and xc = x - mean:
    dx = weight / std * (dy - sum(dy) / n - xc / std^2 * sum(dy * xc) / n), both sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        stats: _Statistics,
        eps: float,
    ) -> torch.Tensor:
        ctx.stats, ctx.eps = stats, eps
        ctx.save_for_backward(x, weight, bias)
        # Torch's fused kernel for known statistics; half precision keeps its dtype in and out.
        return F.batch_norm(
            x,
            stats.mean.to(stats.type),
            stats.var.to(stats.type),
            None if weight is None else weight.to(stats.type),
            None if bias is None else bias.to(stats.type),
            False,
            0.0,
            eps,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        stats: _Statistics = ctx.stats
        needs = ctx.needs_input_grad
        rstd = torch.rsqrt(stats.var + ctx.eps)
        dy = dy.to(stats.type)
        xc = x.to(stats.type) - stats.shaped(stats.mean)
        sums = torch.stack([stats.summed(dy), stats.summed(dy * xc)])
        if stats.is_empty:
            # Not a product with 0, because the loss of a padding micro-batch may be NaN.
            sums = torch.zeros_like(sums)
        dweight = (sums[1] * rstd).to(weight.dtype) if needs[1] else None
        dbias = sums[0].to(bias.dtype) if needs[2] else None
        if not needs[0]:
            return None, dweight, dbias, None, None
        # A copy, since weight and bias keep the sums of this rank: the strategy adds them up.
        sums = collectives.all_reduce(stats.job, sums.clone())
        if stats.is_empty:
            return torch.zeros_like(x), dweight, dbias, None, None
        scale = rstd if weight is None else rstd * weight.to(stats.wide)
        dx = torch.addcmul(stats.shaped(-scale * sums[0] / stats.count), dy, stats.shaped(scale))
        dx.addcmul_(xc, stats.shaped(-scale * rstd**2 * sums[1] / stats.count))
        return dx.to(x.dtype), dweight, dbias, None, None


def sync_batchnorm(job: Job, module: nn.Module) -> nn.Module:
    """Convert each BatchNorm of `module` to normalise over the samples of all ranks; returns `module`.

    In place: BatchNorm1d, 2d, 3d and torch's SyncBatchNorm become `SyncBatchNorm`, with the same
    parameters, buffers, hooks and names in the state. Subclasses with their own forward are not
    converted. Call it before or after `paceline.ddp`, which refuses torch's SyncBatchNorm. It also converts
    in a job of one process, so that one process uses the same formulas as several. A module without
    BatchNorm is returned unchanged, with a line in the log, so that a script whose model is an option can
    always call it.

    Raises:
        ConfigError: a BatchNorm layer has no shape yet.

    Collective: none for the call. Later every forward in training mode and its backward: all ranks.
    """
    converted, untracked = [], []
    link = _Link(job)
    for name, layer in module.named_modules():
        if isinstance(layer, _LAZY):
            raise ConfigError(
                f"BatchNorm layer {name!r} has no shape yet.",
                why="a lazy module gets its parameters in its first forward.",
                fix="run one forward before paceline.sync_batchnorm(...).",
            )
        if type(layer) in _KINDS or isinstance(layer, SyncBatchNorm):
            _convert(layer, link)
            converted.append(name)
            if layer.running_mean is None:
                untracked.append(name)
    if not converted:
        log.logger.info(
            "%s has no BatchNorm layer: sync_batchnorm has no effect.", type(module).__name__
        )
    if untracked and job.data.size > 1 and job.data.rank == 0:
        log.once(
            f"BatchNorm in {listed(untracked)} has no running statistics: in eval mode it normalises by the "
            "samples of one rank, so evaluation differs from that of one process."
        )
    return module


def _convert(layer: nn.Module, link: _Link) -> None:
    if not isinstance(layer, SyncBatchNorm):
        # The class of the object is changed, as in torch's lazy modules, so that hooks, flags and
        # other references to the layer stay valid.
        layer.__dict__.pop("process_group", None)
        layer.__dict__["is_padding"] = False
        layer.__class__ = SyncBatchNorm
    layer.__dict__["link"] = link


def agree_on_layers(job: Job, models: Sequence[nn.Module]) -> None:
    """Check that the ranks have converted the same BatchNorm layers. Refuse torch's, and any in a pipeline.

    Raises:
        RankDisagreement, ConfigError: on all ranks.
    """
    in_stages = any(map(is_pipeline, models))
    if not in_stages and not any(map(batchnorms, models)):
        return
    own = [
        name
        for model in models
        for name, layer in unwrap(model).named_modules()
        if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    each = collectives.gather(job, own, call=SET_UP)
    if not in_stages:
        fix = "call paceline.sync_batchnorm(job, model) on all ranks, or on none."
        refuse_different_values("names of synchronised BatchNorm layers", each, fix=fix)
        for model in models:
            refuse_torch_syncbn(job, unwrap(model))
    elif any(each) and job.data.size > 1:
        raise ConfigError(
            "SyncBatchNorm is not supported in a pipeline.",
            why="data ranks run different numbers of micro-batches.",
            fix="use GroupNorm or LayerNorm.",
        )


def batchnorms(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, _KINDS)]


class PaddingMode:
    """Keeps the samples of padding micro-batches out of all BatchNorm statistics of some models.

    Synchronised layers give them weight 0. Plain layers run in eval mode.

    Attributes:
        has_layers: Whether the models have any BatchNorm.
        synchronised: Whether any layer is synchronised, so that all ranks must run equally many forwards.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        found = [layer for model in models for layer in batchnorms(model)]
        self._layers = [layer for layer in found if isinstance(layer, SyncBatchNorm)]
        self._plain = [layer for layer in found if not isinstance(layer, SyncBatchNorm)]
        self._paused: list[Any] = []
        self.has_layers = bool(found)
        self.synchronised = bool(self._layers)

    def set(self, on: bool) -> None:
        """Set whether the next forwards are those of a padding micro-batch.

        A backward uses the setting of its forward. With activation checkpointing the backward runs the
        forward again, so leave it set until the backward is done.
        """
        for layer in self._layers:
            layer.__dict__["is_padding"] = on  # nn.Module.__setattr__ is ten times slower
        if on and not self._paused:
            self._paused = [x for x in self._plain if x.training and x.track_running_stats]
            for layer in self._paused:
                layer.training = False
        elif not on and self._paused:
            for layer in self._paused:
                layer.training = True
            self._paused = []


def plain_batchnorms(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers that `sync_batchnorm` has not converted.

    Layers in eval mode with running statistics are not listed: they give the same output on all ranks.
    """
    return [
        name
        for name, layer in unwrap(model).named_modules()
        if isinstance(layer, _KINDS)
        and not isinstance(layer, SyncBatchNorm)
        and (layer.training or layer.running_mean is None)
    ]


def warn_other_statistics(
    job: Job, model: nn.Module, *, micro_batch: int, global_batch: int
) -> None:
    """Warn once if BatchNorm makes training differ between numbers of ranks."""
    if job.data.rank != 0:
        return
    layers = unwrap(model).named_modules()
    synchronised = [name for name, layer in layers if isinstance(layer, SyncBatchNorm)]
    if synchronised and micro_batch < global_batch:
        log.once(
            f"BatchNorm in {listed(synchronised)} normalises by the samples of one forward on all ranks: "
            f"{min(micro_batch * job.data.size, global_batch)} on {job.data.size}, because of micro_batch="
            f"{micro_batch}. On another number of ranks it is another number, so training differs; leave "
            f"micro_batch out to normalise by the {global_batch} samples of the step."
        )
    if job.data.size > 1 and (names := plain_batchnorms(model)):
        log.once(
            f"BatchNorm in {listed(names)} normalises by the samples of one rank, so training on "
            f"{job.data.size} ranks differs from training on one; "
            "paceline.sync_batchnorm(job, model) makes them equal."
        )
