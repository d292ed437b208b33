"""Parameters, gradients and optimizer state split over the ranks: a front to torch's `fully_shard` (FSDP2).

It adds checks before training that name parameters, equal weights at the start, and the same steps as one
process: ranks with fewer samples run padding micro-batches. torch shards, gathers and reduces.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline import log, torch_private
from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, StepError, listed
from paceline.job import collectives
from paceline.job.job import Job
from paceline.parallel.modules import (
    PIPELINE,
    SPLIT_BY,
    UNFILLED,
    agree_on_parameters,
    allocate_meta,
    broadcast_tensors,
    enclosing,
    equalize_buffers,
    is_pipeline,
    layer_class,
    local,
    names_matching,
    owned_parameters,
    refuse_compiled,
    refuse_module,
    refuse_unfilled,
    refuse_wrapped,
    refusing_on_all_ranks,
    roots,
    tied_parameters,
    unreached_error,
    unwrap,
    warn_untrained,
    whole,
)
from paceline.parallel.replay import FSDPReplay
from paceline.parallel.strategy import Strategy, norms_over_ranks

Blocks = type[nn.Module] | str | Iterable[type[nn.Module] | str]

# Gradients of the same computation may differ by rounding, where kernels add in any order: by half the digits
# of bfloat16, the coarsest format, at most. Gradients of different heads or parts of the sequence differ by
# about their own size.
_GRADIENT_TOLERANCE = 2.0**-4
_UNSCALE = "torch.amp.GradScaler._unscale_grads_"
_PARAM_DTYPE = "_paceline_param_dtype"  # attribute of a module: as given to `fsdp`
_ROUNDING = 1e-5  # of the largest gradient: smaller ones are not compared
# Of each parameter's gradients: one may be 0, as after a layer that begins with zeros, or equal by chance.
_COMPARISONS = 5


def fsdp(
    job: Job,
    module: nn.Module,
    *,
    blocks: Blocks | None = None,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | None = None,
    cpu_offload: bool = False,
    init: Callable[[nn.Module], None] | Literal["later"] | None = None,
) -> nn.Module:
    """Split the parameters of `module` over the ranks, in place; weights become those of rank 0.

    Each rank holds an equal part of every parameter, of its gradient and of its optimizer state. The
    parameters of a block are gathered before its forward and its backward and freed after them; those
    outside of all blocks stay gathered from forward to backward. With one data rank, as in a job of one
    process, the module is returned as it is; with `param_dtype` it is sharded over that rank, so that it
    computes in the same dtypes as on several ranks.

    Parameters are sharded over the axis `dp_shard` of the job's mesh and replicated over `dp_replicate`
    (hybrid sharding); without a mesh they are sharded over all ranks.

    Args:
        blocks: The submodules whose parameters are gathered together: classes of submodules (`Block`),
            patterns of their names (`"layers.*"`), or several of both. Usually the repeated layer of the
            model. None finds it: the class that is repeated in a `ModuleList` or `Sequential` and holds
            most parameters. Without one all parameters are gathered together. Rank 0 logs the choice.
        param_dtype: The dtype of gathered parameters, and so of the computation, such as torch.bfloat16.
            Sharded parameters, sums of gradients and the optimizer keep their own dtype. None: gathered
            parameters keep theirs too.
        reshard_after_forward: Whether parameters of a block are freed after its forward and gathered again
            for its backward. False needs memory for all parameters and saves one gather. None: True, but
            False in a pipeline, whose stages keep their parameters gathered during a step.
        cpu_offload: Keep sharded parameters, gradients and optimizer state in host memory. GPUs only.
        init: For a module on the meta device: called with each submodule that has parameters or buffers of
            its own, when these are allocated, to fill them. None calls `reset_parameters`. One block is
            allocated at a time, so a model may be larger than the memory of a rank. "later" leaves the module
            on the meta device, where it needs no memory, for `load_weights` to fill.

    Returns:
        The module, whose parameters are `DTensor`s. Make the optimizer afterwards.

    Raises:
        ConfigError: the module has no trainable parameter, a parameter on another device than the job's, or
            one that cannot be initialised; an entry of `blocks` matches no submodule; the module is sharded
            already; an option has no effect.
        RankDisagreement: the ranks' parameters or blocks differ; the error names the first difference.

    Collective: all ranks, once for each model, in the same order.
    """
    refuse_wrapped(
        module, wrap="paceline.fsdp", after=("paceline.pipeline", "paceline.tensor_parallel")
    )
    if isinstance(module, FSDPModule):
        raise ConfigError(
            "this module is sharded by torch's fully_shard already.", fix="leave fully_shard out."
        )
    refuse_compiled(module, wrap="paceline.fsdp")
    is_meta = any(p.is_meta for p in module.parameters())
    if init is not None and not is_meta:
        raise ConfigError("init has no effect: no parameter of the module is on the meta device.")
    if cpu_offload and job.device.type == "cpu":
        raise ConfigError("cpu_offload has no effect: this rank computes on the CPU.")
    if reshard_after_forward and is_pipeline(module):
        raise ConfigError(
            "reshard_after_forward=True has no effect in a pipeline.",
            why="a stage keeps its parameters gathered during a step, for its many forwards and backwards.",
            fix="leave it out, or use a larger pp.",
        )
    if reshard_after_forward is None:
        reshard_after_forward = not is_pipeline(module)
    wanted = _repeated_layer(job, module) if blocks is None else blocks
    names = _block_names(module, wanted)
    # Inner blocks first: `fully_shard` leaves out parameters that an inner module has sharded already.
    names.sort(key=lambda name: -name.count("."))
    layers: list[nn.Module] = []
    for root in roots(module):  # of a pipeline: modules around the layers of a stage are no blocks
        own = dict(root.named_modules())
        layers += [*(own[name] for name in names if name in own), root]
    fill = None if init == "later" else init
    with refusing_on_all_ranks(job, module):
        _refuse_tied_blocks(module, names)
        if is_meta and init != "later":
            _refuse_split_meta(module)
            refuse_unfilled(module, fill)
        else:
            refuse_module(job, module, wrap="paceline.fsdp", may_be_meta=init == "later")
    if init == "later":
        module.__dict__[UNFILLED] = torch.device("cpu") if cpu_offload else job.device
        is_meta = False  # there is nothing to allocate here
    if job.data.group is None and param_dtype is None:
        for layer in (*layers, module) if is_meta else ():
            allocate_meta(layer, job.device, fill)
        return module
    agree_on_parameters(job, module, f"blocks={names}")
    if job.mesh is not None and job.mesh.dp_shard == 1 < job.mesh.dp_replicate and job.rank == 0:
        log.once(
            f"fsdp shards nothing: the mesh is {job.mesh}, so each data rank keeps all parameters. "
            "Mesh(dp_shard=-1) shards them over all ranks."
        )
    options: dict[str, Any] = {"mesh": _data_mesh(job)}
    if param_dtype is not None:
        if is_pipeline(module):
            module.__dict__[PIPELINE].compute_in(param_dtype)
        reduce_dtype = torch.float32  # sums over many ranks lose too much in 16 bits
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        )
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    try:
        for layer in layers:
            if is_meta:
                allocate_meta(layer, job.device, fill)
            if job.data.group is not None:
                whole = [
                    local(p.detach()) for p in layer.parameters() if not _has_axis(p, "dp_shard")
                ]
                broadcast_tensors(job, whole, job.data.group)
            # The parameters of the root are needed when backward begins, so they stay gathered.
            frees = reshard_after_forward and layer is not module
            fully_shard(layer, reshard_after_forward=frees, **options)
        if is_meta:  # buffers of a pipeline's model that belong to no stage
            allocate_meta(module, job.device, fill)
    except RuntimeError as error:
        job.reraise(error)
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)  # not every backend has an average
    equalize_buffers(job, module)
    module.__dict__[SPLIT_BY] = "paceline.fsdp"
    module.__dict__[_PARAM_DTYPE] = param_dtype
    if job.rank > 0:
        # torch says it on every rank, and of every model that ends with a linear layer.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return module


def _refuse_split_meta(module: nn.Module) -> None:
    """Refuse to fill what `tensor_parallel` has split: ranks with the same part would draw other values."""
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ConfigError(
            "the module is on the meta device and split by tensor_parallel, so it cannot be initialised.",
            fix='fsdp(..., init="later"), then paceline.load_weights(model, path).',
        )


def _data_mesh(job: Job) -> DeviceMesh:
    if job.world_size == 1:
        if not dist.is_initialized():
            job.set_variable("GLOO_SOCKET_IFNAME", "lo")  # else Gloo resolves the host name
            backend = dist.get_default_backend_for_device(job.device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            job.on_leave(dist.destroy_process_group)
        # The default group has the other hosts of `diloco` too.
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(alone, job.device.type, mesh_dim_names=("dp_shard",))
    if job.device_mesh is None:
        assert job.data.group is not None
        return DeviceMesh.from_group(job.data.group, job.device.type, mesh_dim_names=("dp_shard",))
    names = [n for n in ("dp_replicate", "dp_shard") if n in job.device_mesh.mesh_dim_names]
    mesh: DeviceMesh = job.device_mesh[tuple(names)]
    return mesh


def _has_axis(p: torch.Tensor, axis: str) -> bool:
    return isinstance(p, DTensor) and axis in (p.device_mesh.mesh_dim_names or ())


def _repeated_layer(job: Job, module: nn.Module) -> list[type[nn.Module]]:
    """The class that is repeated in a container and holds most parameters; none if there is no such class."""
    totals: Counter[type[nn.Module]] = Counter()
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            number_of = Counter(map(layer_class, container.children()))
            for child in container.children():
                if number_of[layer_class(child)] > 1:
                    totals[layer_class(child)] += sum(p.numel() for p in child.parameters())
    kinds = [kind for kind, size in totals.most_common(1) if size]
    if job.rank == 0 and kinds:
        number = sum(layer_class(layer) is kinds[0] for layer in module.modules())
        log.logger.info("fsdp: the blocks are the %d modules %s.", number, kinds[0].__name__)
    elif job.rank == 0:
        text = "fsdp: no repeated layer was found, so all parameters are gathered together; see blocks=."
        log.logger.info(text)
    return kinds


def _refuse_tied_blocks(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse a parameter that two blocks share: each block is sharded and freed on its own."""
    for first, *others in tied_parameters(module):
        for name in others:
            if enclosing(name, names) != enclosing(first, names):
                raise ConfigError(
                    f"{first} and {name} are one parameter, but belong to different blocks.",
                    why="each block is sharded, gathered and freed on its own.",
                    fix="choose blocks that hold both modules, or neither of them.",
                    parameters=[first, name],
                )


def _block_names(module: nn.Module, blocks: Blocks) -> list[str]:
    wanted = [blocks] if isinstance(blocks, (type, str)) else list(blocks)
    found: dict[str, None] = {}
    for each in wanted:
        named = set(names_matching(module, each, option="blocks") if isinstance(each, str) else ())
        # `*` matches dots too: the submodules inside of a block are no blocks.
        named -= {name for name in named if enclosing(name, named)}
        matches = [
            name
            for name, layer in module.named_modules()
            if name
            and (name in named or (isinstance(each, type) and isinstance(layer, each)))
            and any(True for _ in layer.parameters())
        ]
        if not matches and not is_pipeline(module):
            shown = each.__name__ if isinstance(each, type) else repr(each)
            raise ConfigError(
                f"blocks: {shown} matches no submodule with parameters in {type(module).__name__}.",
                fix='give a class of its submodules, or a pattern of their names such as "layers.*".',
            )
        found |= dict.fromkeys(matches)
    return list(found)


class FSDPStrategy(Strategy):
    """Gradients are summed and split over ranks by FSDP2 in the last backward of a step.

    It also serves models that are split by `tensor_parallel` alone.
    """

    def prepare(self, batches: Batches) -> None:
        self._roots = [r for m in self._models for r in roots(m) if isinstance(r, FSDPModule)]
        self.needs_equal_micro_batches = bool(self._roots)  # each forward gathers parameters
        self._compared: Counter[torch.Tensor] = Counter()  # see `_refuse_partial`
        is_split = any(map(is_pipeline, self._models))
        if len(self._roots) < len(self._models) and self._job.data.size > 1 and not is_split:
            raise ConfigError(
                "the model is split by tensor_parallel, but its gradients would not be summed over the "
                f"{self._job.data.size} data ranks.",
                fix="model = paceline.fsdp(job, model, blocks=...) after tensor_parallel.",
            )

    def check(self) -> None:
        owned = {id(p) for p in owned_parameters(*self._optimizers)}
        for model in self._models:
            named = dict(unwrap(model).named_parameters())
            unknown = [
                n
                for n, p in named.items()
                if p.requires_grad and self._roots and not _has_axis(p, "dp_shard")
            ]
            owned -= {id(p) for p in named.values()}
            if unknown:
                raise self._error(
                    f"fsdp does not know {listed(unknown)}: the gradients would differ over ranks.",
                    why="they were added after the model was sharded.",
                    fix="call paceline.fsdp(...) when all parameters are in the model.",
                    names=unknown,
                )
            warn_untrained(model, self._optimizers)
        if owned:
            raise self._error(
                f"the optimizer holds {len(owned)} parameters that are in no model.",
                why="fsdp, tensor_parallel and pipeline replace or remove parameters, so an optimizer made "
                "before them holds the old ones.",
                fix="make the optimizer after the model is wrapped.",
                names=[],
            )

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        for micro in super().micro_batches(step):
            self._set_sync(micro.is_last)
            yield micro

    def backward(
        self,
        loss: torch.Tensor,
        start: torch.Tensor,
        micro: MicroBatch,
        inputs: Sequence[torch.Tensor] | None,
    ) -> bool:
        if inputs is not None:
            raise ConfigError(
                "fsdp differentiates all parameters of a loss, and `optimizer=` names some of them.",
                where=self._job.where(),
                why="autograd computes gradients of gathered parameters, which the optimizer does not hold.",
                fix="one loss for all optimizers, `step.backward(loss)`; or paceline.ddp.",
            )
        return super().backward(loss, start, micro, inputs)

    def make_replay(self) -> FSDPReplay | None:
        # tensor_parallel and pipeline have collectives of their own.
        is_alone = bool(self._roots) and self._job.data.size == self._job.world_size
        return (
            FSDPReplay(self._roots)
            if is_alone and hasattr(FSDPModule, "reset_iter_state")
            else None
        )

    def _set_sync(self, on: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(on)

    def leave_step(self) -> None:
        super().leave_step()
        self._set_sync(True)

    def facts(self) -> dict[str, Any]:
        dtypes = [unwrap(model).__dict__.get(_PARAM_DTYPE) for model in self._models]
        return {"param_bytes": max((dtype.itemsize for dtype in dtypes if dtype), default=0)}

    def check_precision(self, precision: str, *, skips_non_finite: bool) -> None:
        if precision == "fp16" and torch_private.find(_UNSCALE) is None:
            raise ConfigError(
                f"precision='fp16' is not supported with torch {torch.__version__} if the model is split.",
                why=f"all ranks must leave out the same steps; torch has no {_UNSCALE}.",
                fix="use 'bf16'.",
            )

    def largest_over_ranks(self, value: torch.Tensor) -> None:
        if self._job.group is None:
            return
        try:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._job.group)
        except RuntimeError as error:
            self._job.reraise(error)

    def finish(self, optimizer: Optimizer) -> None:
        others = owned_parameters(*(each for each in self._optimizers if each is not optimizer))
        of_others = {id(p) for p in others}  # a later backward may give them their gradients
        self._refuse_unreached(
            [
                p
                for model in self._models
                for p in unwrap(model).parameters()
                if p.requires_grad and id(p) not in of_others
            ]
        )
        self._refuse_partial()
        for group in optimizer.param_groups:
            for p in group["params"]:
                # With SequenceParallel it is a sum over the rank's part only.
                if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                    p.grad = p.grad.redistribute(placements=p.placements)

    def _refuse_unreached(self, parameters: Iterable[torch.Tensor]) -> None:
        missing = {id(p) for p in parameters if p.grad is None}
        named = [pair for model in self._models for pair in unwrap(model).named_parameters()]
        if names := [name for name, p in named if id(p) in missing]:
            raise unreached_error(
                self._job,
                names,
                why="the ranks sum the gradients of several parameters together, so each needs all of them.",
                fix="freeze unused parameters with requires_grad_(False) before the model is wrapped.",
            )

    def _refuse_partial(self) -> None:
        """Refuse parameters that the ranks of the axis tp hold whole, but whose gradients differ.

        torch adds up gradients over the axis tp at the input of a colwise layer only. Behind that input, up
        to the rowwise layer, each rank has the gradient of its own part, and so has a whole parameter that is
        used there. Such gradients are compared in the first steps of each parameter.
        """
        if self._job.mesh is None or self._job.mesh.tp == 1:
            return
        whole = {
            p: name
            for model in self._models
            for name, p in unwrap(model).named_parameters()
            if not _has_axis(p, "tp") and self._compared[p] < _COMPARISONS
            if p.grad is not None and local(p.grad).numel()
        }
        if not whole:
            return
        gradients = [local(p.grad) for p in whole if p.grad is not None]
        own = [*torch._foreach_norm(gradients), *(g.sum() for g in gradients)]
        packed = torch.stack([value.double() for value in own]).to(self._job.device)
        group = self._job.device_mesh["tp"].get_group()
        # Shape (ranks, norm and sum, parameters).
        rows = collectives.gather_rows(self._job, packed, group).view(-1, 2, len(whole))
        differences = (rows - rows[0]).abs().amax((0, 1))
        sizes = rows.abs().amax((0, 1))
        # A gradient that should be 0, as that of a bias before a normalisation, is rounding alone.
        sizes[sizes < _ROUNDING * sizes.max()] = 0.0
        is_partial = ((differences > _GRADIENT_TOLERANCE * sizes) & (sizes > 0)).tolist()
        self._compared.update(list(whole))
        names = [name for name, wrong in zip(whole.values(), is_partial, strict=True) if wrong]
        if names:
            raise self._error(
                f"the ranks of the axis tp have different gradients of {listed(names)}.",
                why="the forward uses them between two split layers or on a part of the sequence, so each "
                "rank has the gradient of its own part.",
                fix='give their modules the style "replicated_with_grad_allreduce" in plan=, which adds up '
                "the gradients; or leave the layers around them out of the plan, or freeze them.",
                names=names,
            )

    def grad_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        by_holders: dict[int, list[torch.Tensor]] = {}
        for g in gradients:
            by_holders.setdefault(self._num_holders(g), []).append(local(g))
        # The share of this rank in the norm: parts that several ranks hold count once over all ranks.
        shares = [
            get_total_norm(each, foreach=True) / math.sqrt(number)
            for number, each in by_holders.items()
        ]
        stacked = torch.stack(
            shares or [torch.zeros((), device=self._job.device)]
        )  # in float64, in which a large square does not overflow
        own: torch.Tensor = torch.linalg.vector_norm(stacked.double())
        return norms_over_ranks(self._job, own.to(stacked.dtype), self._job.group)

    def _num_holders(self, tensor: torch.Tensor) -> int:
        """The number of ranks of the job that hold the same part of a tensor."""
        mesh = self._job.mesh
        ranks = self._job.world_size // (1 if mesh is None else mesh.pp)
        if not isinstance(tensor, DTensor):
            return ranks
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return ranks // math.prod(size for at, size in sizes if not at.is_replicate())

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, value in unwrap(model).state_dict().items():
            yield name, whole(value) if isinstance(value, torch.Tensor) else value

    def _error(self, what: str, *, why: str, fix: str, names: list[str]) -> StepError:
        return StepError(what, where=self._job.where(), why=why, fix=fix, parameters=names)
