"""Every private name of torch that Paceline uses: why, since which torch, and what happens without it.

No other module may use a private name of torch, except `torch._foreach_*`, which torch's own documentation
names for lists of tensors and which every supported version has. A caller asks `find(path)` for the object.
If the installed torch does not have it, `find` warns once and returns None, and the caller switches its
feature off. Before a class that replaces private methods of torch is used, `has(path)` is asked for each.
Only names in `NAMES` can be found. `tests/unit/test_torch_private.py` looks up each of them, so a new torch
that lacks a name fails that test first.

torch is imported when a name is first looked up, because the launcher starts ranks before it imports torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import log


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: module and attributes, such as `torch.nn.parallel.DistributedDataParallel._pre_forward`.
        why: why it is needed, and why no public name is enough.
        since: the first torch release that has been tested with it.
        without: what Paceline does if the name is missing, as the end of a sentence.
        of_objects: whether only objects have the attribute, not their class: `attribute` reads it.
    """

    path: str
    why: str
    without: str
    since: str = "2.11"
    of_objects: bool = False


COMPILER = "torch._dynamo"
NAMES = (
    # job
    PrivateName(
        "torch.distributed.distributed_c10d._abort_process_group",
        why="the public destroy_process_group may wait for work that never ends after a failure",
        without="a failed job destroys its process group the public way, which may take its timeout",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store",
        why="the store of a process group that Ray Train has made is nowhere else",
        without="paceline.join refuses the process group of Ray Train",
    ),
    # audit
    PrivateName(
        "torch._C._are_functorch_transforms_active",
        why="torch.func has no public way to tell that a forward runs inside vmap or grad",
        without="paceline verify cannot watch a model that is called inside torch.func",
    ),
    # shm
    PrivateName(
        "torch.distributed.ProcessGroup._allgather_base",
        why="torch before 2.13 has all_gather_single, a method of groups, under this name only",
        without="nothing changes: later versions of torch call all_gather_single",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        why="torch before 2.13 has reduce_scatter_single, a method of groups, under this name only",
        without="nothing changes: later versions of torch call reduce_scatter_single",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._register_backend",
        why="a process group in Python has no public way to use Gloo for what it does not do itself",
        without="groups of the backends `shm` and `mpi` use Gloo",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._set_default_backend",
        why="torch asks every group for its default backend, which only this method sets",
        without="groups of the backends `shm` and `mpi` use Gloo",
    ),
    PrivateName(
        "torch.distributed.ProcessGroupGloo._set_sequence_number_for_group",
        why="torch calls it for each Gloo group that it makes, so that the flight recorder counts works",
        without="the flight recorder does not number the collectives that `shm` leaves to Gloo",
    ),
    PrivateName(
        "torch.UntypedStorage._share_fd_cpu_",
        why="the public share_memory_() does not return the file descriptor that other ranks open",
        without="`shm` copies gradients to sum them",
    ),
    # parallel
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        why="the public meta device fails where a forward names a device, and autocast ignores it",
        without="paceline run --dry-run refuses a pipeline",
    ),
    PrivateName(
        "torch.distributed.pipelining.PipelineStage._warmup_backward_result",
        why="stages tell each other whether they know their shapes, which a dry run never receives",
        since="2.13",
        without="nothing changes: earlier versions of torch do not ask",
    ),
    PrivateName(
        "torch.Tensor._version",
        why="no public name tells whether a tensor was changed in place",
        without="`reproducible` does not refuse a buffer that a forward changes in place",
    ),
    PrivateName(
        "torch.distributed.Reducer._check_reducer_finalized",
        why="DDP reports an unfinished reduction only in its next forward",
        without="a parameter that a backward did not reach is reported one step later, by torch",
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel.__setstate__",
        why="DDP has no public way to reduce over another process group; unpickling makes a new reducer",
        without="after a failure all ranks start again, also with paceline run --recover in-place",
    ),
    # clock
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        why="no public call tells when a backward has computed its gradients and waits for their sums",
        without="what a backward of DDP waits for counts as backward",
    ),
    # training
    PrivateName(
        "torch.autograd.graph.Node._saved_reduction",
        why="nothing else in a loss tells whether torch's loss function took the mean or the sum",
        without="a loss that is a mean is not refused",
        of_objects=True,
    ),
    PrivateName(
        "torch.autograd.graph.Node._saved_self_sym_sizes",
        why="nothing else in a loss tells over how many values `mean` was taken",
        without="a loss that is a mean is not refused",
        of_objects=True,
    ),
    PrivateName(
        "torch.autograd.graph.Node._saved_total_weight",
        why="nothing else tells by what the mean of `cross_entropy` was divided",
        without="a mean over another number than the count is not refused",
        of_objects=True,
    ),
    PrivateName(
        "torch.autograd.graph.Node._saved_target",
        why="nothing else tells how many targets each sample of a mean over tokens has",
        without="a mean over several targets in each sample is refused",
        of_objects=True,
    ),
    PrivateName(
        "torch.autograd.graph.Node._saved_ignore_index",
        why="nothing else tells which targets `cross_entropy` ignored",
        without="a mean over several targets in each sample is refused",
        of_objects=True,
    ),
    PrivateName(
        "torch.amp.GradScaler._found_inf_per_device",
        why="the scaler has no public way to tell which of several optimizers it did not step",
        without="schedules also advance in steps that the loss scaler skips",
    ),
    PrivateName(
        "torch.amp.GradScaler._unscale_grads_",
        why="the scaler has no public way to agree over ranks that hold different gradients",
        without="precision='fp16' is refused if the model is split over ranks",
    ),
    PrivateName(
        "torchmetrics.Metric._reductions",
        why="torchmetrics has no public way to merge states of ranks of which some have no update",
        since="1.8",
        without="`evaluate` refuses metrics of torchmetrics",
        of_objects=True,
    ),
    # watch: flight_recorder.py does not use `find`, because it must not import torch
    PrivateName(
        "torch._C._distributed_c10d._dump_nccl_trace",
        why="the only way to read the flight recorder of NCCL in a running rank; only in builds with NCCL",
        without="hangs in collectives of NCCL are explained by stacks alone",
    ),
    PrivateName(
        "torch._C._distributed_c10d._dump_fr_trace",
        why="the only way to read the flight recorder of a running rank",
        without="hangs are explained by stacks alone",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._world",
        why="the names and the ranks of all process groups are nowhere else",
        without="reports of hangs do not name the ranks of a group",
    ),
    # launch
    PrivateName(
        COMPILER,
        why="processes that fork ranks import it early, since the first optimizer imports it",
        without="a forked rank imports more before its first step",
    ),
    # audit
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
        why="no public hook tells which samples a DataLoader puts into a batch",
        without="`paceline verify` knows samples by their content only, and some rules cannot judge",
    ),
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter._reset",
        why="no public hook tells when the iterator of persistent workers begins another pass",
        without="after a pass that was left early, `paceline verify` gives batches the wrong samples",
    ),
    *(
        PrivateName(
            f"torch.utils.data._utils.fetch.{name}",
            why="no public hook is called where a worker of a DataLoader loads samples",
            since="2.11",
            without="`paceline verify` does not see samples being loaded, and some rules cannot judge",
        )
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")
    ),
)

_BY_PATH = {name.path: name for name in NAMES}


@functools.cache
def find(path: str) -> Any | None:
    """The object at `path`, or None, after one warning, if the installed torch does not have it.

    Methods are found on their class, so call them with the instance as the first argument.

    Raises:
        KeyError: `path` is not in `NAMES`.
    """
    name = _BY_PATH[path]
    found = look_up(path)
    if found is None:
        version = importlib.import_module("torch").__version__
        log.once(f"torch {version} has no {path}: {name.without}.")
    return found


def attribute(path: str, owner: Any) -> Any | None:
    """The attribute at `path` of an object; None if this object has none.

    Raises:
        KeyError: `path` is not in `NAMES`.
    """
    return getattr(owner, _BY_PATH[path].path.rpartition(".")[2], None)


def wrap(path: str, wrapper: Callable[[Any], Any]) -> bool:
    """Replace the function at `path` by `wrapper(function)`; False if the installed torch has none."""
    function = find(path)
    if function is None:
        return False
    owner, _, name = path.rpartition(".")
    setattr(look_up(owner), name, wrapper(function))
    return True


def look_up(path: str) -> Any | None:
    """The object at a dotted path of modules and attributes; None if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute, None)
            if found is None:
                return None
        return found
    return None
