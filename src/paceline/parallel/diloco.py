"""`diloco`: hosts that train apart for many steps, and then average what they have learned. For slow links.

Each host trains with the user's optimizer on its share of each step's samples. After `every` steps the hosts
exchange how far their weights have moved. The mean of that is the gradient of an outer optimizer, SGD with
Nesterov momentum, whose weights all hosts take. Sources: Douillard et al., DiLoCo, arXiv:2311.08105;
fragments that are exchanged at different steps, while the training goes on: Streaming DiLoCo,
arXiv:2501.18512; 8-bit differences: INTELLECT-1, arXiv:2412.01152. With `outer_lr=1` and `outer_momentum=0`
it is local SGD, Stich, arXiv:1805.09767.

Inside a host the ranks train as usual: `ddp` or `fsdp` on a copy of the job that has the ranks of the host
only. This file adds the outer optimizer. Its weights and its momentum are in host memory, and the hosts
exchange them through Gloo, on any device.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from paceline import log
from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import ConfigError, StepError, listed
from paceline.job import collectives
from paceline.job.arguments import require_integers, require_positive
from paceline.job.exchange import FOREVER, Exchange
from paceline.job.job import Job
from paceline.job.mesh import DataAxis
from paceline.job.recovery import SET_UP, needs_all_ranks
from paceline.parallel.ddp import DDPStrategy, ddp
from paceline.parallel.modules import (
    DILOCO,
    agree_on_parameters,
    broadcast_state,
    is_split,
    local,
    owned_parameters,
    plain_name,
    refuse_module,
    refuse_wrapped,
    unwrap,
    whole,
)
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm

Wrap = Callable[[Job, nn.Module], nn.Module]
Named = dict[str, torch.Tensor]

# Steps between the begin of a fragment's exchange and its result, as in Streaming DiLoCo. A fixed number, so
# that the weights do not depend on how fast the link is.
_OVERLAP_STEPS = 5
_BLOCK = 1024  # elements that share a scale in int8: 4 bytes more for each 1024


def diloco(
    job: Job,
    module: nn.Module,
    *,
    every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    outer_dtype: str = "fp32",
    wrap: Wrap | None = None,
) -> nn.Module:
    """Wrap `module` so that each host trains it alone, and the hosts average their weights every few steps.

    The hosts are those of the launcher, or, with a mesh, the `dp_replicate` groups of `dp_shard` ranks. The
    result is not that of one process; [slow links](../howto/slow_links.md) says what holds instead.

    Args:
        every: Number of steps from one outer step to the next, at least 1. The paper uses 500.
        outer_lr: Learning rate of the outer optimizer, > 0; 1 takes the mean of the hosts' weights.
        outer_momentum: Its Nesterov momentum, in [0, 1).
        fragments: Parts of the model that take their outer steps at different times, at most `every`. With
            more than one, a part is exchanged while the next few steps run.
        outer_dtype: What is sent: "fp32", "bf16", or "int8" with a scale for each 1024 elements. Sums and the
            outer optimizer use float32.
        wrap: How the ranks of a host train together: called as `wrap(job, module)` with a job that has only
            these ranks. None is `paceline.ddp`, or `paceline.fsdp` with a mesh of `dp_shard` > 1. Options:
            `functools.partial(paceline.fsdp, blocks=Block)`.

    Returns:
        The wrapped module. Make the optimizer afterwards. Its parameters are those of this host;
        checkpoints, `Training.export` and `evaluate` use the outer weights, which are equal on all hosts.

    Raises:
        ConfigError: an option is out of range, the mesh has other axes, or `ddp` or `fsdp` refuses the
            module.
        RankDisagreement: the ranks' parameters or options differ; the error names the first difference.

    Cost: host memory for two copies of the parameters (with FSDP of this rank's part), one more while
    parts are exchanged. A host sends `2 (N - 1) / N` times the parameters in `outer_dtype` every `every`
    steps, for N hosts.

    Collective: all ranks, once for each model, in the same order.
    """
    require_integers(1, every=every, fragments=fragments)
    require_positive(outer_lr=outer_lr)
    if not 0 <= outer_momentum < 1:
        raise ConfigError(f"outer_momentum must be in [0, 1), got {outer_momentum!r}.")
    if outer_dtype not in _CODES:
        raise ConfigError(
            f"outer_dtype must be one of {listed(list(_CODES))}, got {outer_dtype!r}."
        )
    if fragments > every:
        raise ConfigError(
            f"fragments={fragments} is more than every={every}.",
            why="each fragment has a step of its own for its exchange.",
            fix=f"fragments={every}, or fewer.",
        )
    if job.data.size != job.world_size:
        raise ConfigError(
            f"diloco averages replicas of the model, but the mesh is {job.mesh}.",
            fix="Mesh(dp_replicate=HOSTS, dp_shard=-1).",
        )
    refuse_wrapped(module, wrap="paceline.diloco")
    refuse_module(job, module, wrap="paceline.diloco")
    if complex_ := [n for n, p in module.named_parameters() if p.is_complex()]:
        raise ConfigError(f"diloco cannot average complex parameters: {listed(complex_)}.")
    if job.is_dry_run:
        raise ConfigError("a dry run does not support diloco.", fix="leave --dry-run out.")
    if job.is_replacement:
        raise needs_all_ranks("paceline.diloco")
    options = f"{every=}, {outer_lr=}, {outer_momentum=}, {fragments=}, {outer_dtype=}"
    agree_on_parameters(job, module, options)
    hosts = _hosts.get(job) or _hosts.setdefault(job, _find_hosts(job))
    if job.data.group is not None:
        broadcast_state(job, module, job.data.group)
    if wrap is None and job.mesh is not None and job.mesh.dp_shard > 1:
        from paceline.parallel.fsdp import fsdp as wrap  # importing FSDP2 takes 0.5 s
    wrapped = (wrap or ddp)(hosts.job, module)
    link = _Link(job, hosts, outer_dtype, is_split=is_split(wrapped))
    inner, settings = unwrap(wrapped), {"lr": outer_lr, "momentum": outer_momentum}
    inner.__dict__[DILOCO] = Outer(inner, link, every=every, fragments=fragments, **settings)
    return wrapped


# Hosts.


@dataclass(frozen=True, eq=False)
class Hosts:
    """The hosts of a job, as one of its ranks sees them.

    Attributes:
        ranks: Those of each host.
        index: Of this rank's host.
        job: This rank's host as a job of its own. `rank` is still the rank in the whole job.
    """

    ranks: tuple[tuple[int, ...], ...]
    index: int
    job: Job


_hosts: WeakKeyDictionary[Job, Hosts] = WeakKeyDictionary()


def _find_hosts(job: Job) -> Hosts:
    if job.mesh is not None:
        size = job.mesh.dp_shard
        firsts = list(range(0, job.world_size, size))
    else:
        local_ranks = collectives.gather(job, job.local_rank, call=SET_UP)
        firsts = [rank for rank, number in enumerate(local_ranks) if number == 0]
        if local_ranks != [n for a, b in pairwise([*firsts, job.world_size]) for n in range(b - a)]:
            raise ConfigError(
                "the ranks of a host are not neighbours, so diloco does not know the hosts.",
                fix="place the ranks by host (block distribution), or give join a mesh.",
            )
    ranks = tuple(tuple(range(a, b)) for a, b in pairwise([*firsts, job.world_size]))
    index = next(i for i, own in enumerate(ranks) if job.rank in own)
    if job.rank == 0:
        sizes = ", ".join(str(len(own)) for own in ranks[:8])
        log.logger.info("diloco: %d hosts, with %s ranks.", len(ranks), sizes)
    job.state_ranks = tuple(firsts)
    host, size = copy.copy(job), len(ranks[index])
    host.world_size, host.mesh, host.device_mesh = size, None, None
    if len(ranks) == 1:
        return Hosts(ranks, 0, host)
    host.group = host.control = host.exchange = None
    if max(map(len, ranks)) > 1:
        host.group = _group_of(job, ranks)
        host.control = _group_of(job, ranks, backend="gloo", timeout=FOREVER)
        assert job.store is not None
        assert job.peers is not None
        host.exchange = Exchange(
            host.control,
            dist.PrefixStore(f"diloco/{index}", job.store),
            timeout_s=job.timeout_s,
            reraise=host.reraise,
            failure=job.peers.failure,
        )
        job.on_leave(host.exchange.close)
    if size == 1:
        host.group = host.control = None
    place = ranks[index].index(job.rank)
    host._data = DataAxis(place, size, host.group, host.control, tuple(range(size)), True)
    return Hosts(ranks, index, host)


def _group_of(job: Job, lists: Iterable[Sequence[int]], **options: Any) -> Any:
    """The group of this rank among those of `lists`; None if it is in none. All ranks make all groups."""
    options = {"timeout": timedelta(seconds=job.timeout_s)} | options
    made = [(ranks, dist.new_group(list(ranks), **options)) for ranks in lists]
    return next((group for ranks, group in made if job.rank in ranks), None)


# What is sent.


def _to_int8(values: torch.Tensor) -> torch.Tensor:
    """Codes and scales as bytes. NaN and infinity make their block NaN."""
    blocks = values.view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(127)
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])


def _from_int8(data: torch.Tensor) -> torch.Tensor:
    number = data.numel() // (_BLOCK + 4)
    codes, scales = data[: number * _BLOCK], data[number * _BLOCK :]
    values = codes.view(torch.int8).view(number, _BLOCK).float()
    return values.mul_(scales.view(torch.float32)[:, None]).view(-1)


_CODES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] | None] = {
    "fp32": None,
    "bf16": (
        lambda values: values.bfloat16().view(torch.uint8),
        lambda data: data.view(torch.bfloat16).float(),
    ),
    "int8": (_to_int8, _from_int8),
}


class _Link:
    """Sums vectors over the hosts.

    Attributes:
        hosts: The hosts.
    """

    def __init__(self, job: Job, hosts: Hosts, dtype: str, *, is_split: bool) -> None:
        self.job, self.hosts = job, hosts
        self._code = _CODES[dtype]
        self._between = self._inside = None
        if len(hosts.ranks) == 1:
            return
        if is_split and len({len(own) for own in hosts.ranks}) > 1:
            raise ConfigError(
                f"hosts have different numbers of ranks: {sorted({len(own) for own in hosts.ranks})}.",
                why="each rank of a host exchanges its part of the model with one rank of each other host.",
                fix="use as many ranks on each host, or wrap=paceline.ddp.",
            )
        if is_split:  # each rank has a part of its own
            self._between = _group_of(job, zip(*hosts.ranks, strict=True), backend="gloo")
        else:  # the first rank of each host sends, for all of its host
            self._between = _group_of(job, [[own[0] for own in hosts.ranks]], backend="gloo")
            if max(map(len, hosts.ranks)) > 1:
                self._inside = _group_of(job, hosts.ranks, backend="gloo")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over hosts, in place, the same bits on all of them. `values`: float32, in host memory."""
        if self._between is not None:
            if self._code is None:
                dist.all_reduce(values, group=self._between)
            else:
                values.copy_(self._sum_of_codes(values, *self._code))
        if self._inside is not None:
            dist.broadcast(values, group=self._inside, group_src=0)
        return values

    def _sum_of_codes(
        self,
        values: torch.Tensor,
        encode: Callable[[torch.Tensor], torch.Tensor],
        decode: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """As a ring all-reduce sends: each host sums one part for all, and sends the sum of it to all."""
        number = len(self.hosts.ranks)
        part = -(-values.numel() // (number * _BLOCK)) * _BLOCK
        padded = torch.zeros(number * part)
        padded[: values.numel()] = values
        sent = torch.stack([encode(own) for own in padded.view(number, part)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._between)
        own = encode(torch.stack([decode(each) for each in received]).sum(0))
        dist.all_gather(list(received.unbind()), own, group=self._between)
        return torch.cat([decode(each) for each in received])[: values.numel()]


# The outer optimizer.


class _Fragment:
    """Some parameters, and the outer optimizer's state of them: vectors of float32 or wider in host memory.

    Attributes:
        offset: It takes its outer steps after the steps of which this is the rest by `every`.
        samples: What each host has trained on since the last outer step.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], offset: int, hosts: int) -> None:
        self.named, self.offset = named, offset
        self._sizes = [local(p.detach()).numel() for _, p in named]
        dtypes = [p.dtype for _, p in named]
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self.weights = self.read()
        self.velocity = torch.zeros_like(self.weights)
        self.samples = [0] * hosts

    def read(self) -> torch.Tensor:
        """The weights of this host."""
        return self._vector([local(p.detach()) for _, p in self.named])

    def _vector(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.reshape(-1).to("cpu", self._dtype) for part in parts])

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        for (_, p), part in zip(self.named, torch.split(values, self._sizes), strict=True):
            own = local(p.detach())
            own.copy_(part.view(own.shape))

    def tensors(self, values: torch.Tensor) -> Named:
        """A vector as tensors by name, sharded as the parameters; they share its memory."""
        parts = torch.split(values, self._sizes)
        return {name: _shaped(part, p) for (name, p), part in zip(self.named, parts, strict=True)}

    def vector(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """A vector from tensors by name, sharded as the parameters, or whole."""
        return self._vector([_part_of(tensors[name], p) for name, p in self.named])


def _shaped(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    own = part.view(local(p.detach()).shape)
    if not hasattr(p, "placements"):
        return own
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    return DTensor.from_local(
        own.to(p.device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )


def _part_of(tensor: torch.Tensor, p: Any) -> torch.Tensor:
    """This rank's part of a tensor that is sharded as a parameter, or whole."""
    if hasattr(p, "placements") and not hasattr(tensor, "placements"):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(
            tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None
        )
    return local(tensor)


class _Pending:
    """An exchange in progress, in a thread. Only it uses its groups, so their order is that of the steps.

    Attributes:
        due: The step after which the result is taken.
        sent: The weights of this host at the begin.
    """

    def __init__(
        self, fragment: int, due: int, sent: torch.Tensor, values: torch.Tensor, link: _Link | None
    ) -> None:
        self.fragment, self.due, self.sent, self._values = fragment, due, sent, values
        self._link = link
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._link is not None:  # else it was loaded with its result
                self._link.sum(self._values)
        except BaseException as error:
            self._error = error

    def result(self) -> torch.Tensor:
        self._thread.join()
        if self._error is not None:
            assert self._link is not None
            self._link.job.reraise(self._error)
        return self._values


class Outer:
    """The outer optimizer of one model.

    Attributes:
        hosts: Which take part.
        is_new: Whether nothing was trained or loaded yet.
    """

    def __init__(
        self,
        module: nn.Module,
        link: _Link,
        *,
        every: int,
        lr: float,
        momentum: float,
        fragments: int,
    ) -> None:
        self.hosts, self._link, self.every = link.hosts, link, every
        self._lr, self._momentum = lr, momentum
        names: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                names.setdefault(p, []).append(plain_name(module, name))
        named = [(own[0], p) for p, own in names.items()]
        self._tied = {name: own[0] for own in names.values() for name in own}
        fragments = min(fragments, len(named))
        self._fragments = [
            _Fragment(own, (i + 1) * every // fragments % every, len(self.hosts.ranks))
            for i, own in enumerate(_cut(named, fragments))
        ]
        self._delay = 0 if fragments == 1 else min(_OVERLAP_STEPS, every // fragments)
        self._pending: _Pending | None = None
        self.is_new = True
        self._takes_outer = False  # was loaded from another number of hosts
        self._own: list[torch.Tensor] | None = (
            None  # weights of this host, while the outer ones are in place
        )

    def begin(self) -> None:
        """The training begins, perhaps with weights that were loaded since `diloco`."""
        for fragment in self._fragments:
            if self.is_new:
                fragment.weights = fragment.read()
            elif self._takes_outer:
                fragment.write(fragment.weights)
        self.is_new = self._takes_outer = False

    def after_step(self, step: int, samples: Sequence[int]) -> None:
        """Begin and end exchanges after a step. `samples`: how many each host has trained on."""
        for fragment in self._fragments:
            fragment.samples = [a + b for a, b in zip(fragment.samples, samples, strict=True)]
        if self._pending is not None and step >= self._pending.due:
            self._end_exchange()
        for number, fragment in enumerate(self._fragments):
            if step % self.every == fragment.offset:
                self._begin_exchange(number, step + self._delay)
                if not self._delay:
                    self._end_exchange()

    def end(self) -> None:
        """Bring the hosts together: an outer step of all that was trained since the last one."""
        if self._pending is not None:
            self._end_exchange()
        for number, fragment in enumerate(self._fragments):
            if sum(fragment.samples):
                self._begin_exchange(number, 0)
                self._end_exchange()
            fragment.write(fragment.weights)

    def _begin_exchange(self, number: int, due: int) -> None:
        if self._pending is not None:  # of a run with another `every`
            self._end_exchange()
        fragment = self._fragments[number]
        sent = fragment.read()
        share = fragment.samples[self.hosts.index] / sum(fragment.samples)
        fragment.samples = [0] * len(fragment.samples)
        difference = (fragment.weights - sent).mul_(share)
        self._pending = _Pending(number, due, sent, difference, self._link)

    def _end_exchange(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        clock.enter(COMMUNICATION)
        fragment = self._fragments[pending.fragment]
        self._take_step(fragment, pending.result())
        if self._delay:  # what this host has learned since then stays
            fragment.write(fragment.read().add_(fragment.weights - pending.sent))
        else:
            fragment.write(fragment.weights)

    def _take_step(self, fragment: _Fragment, gradient: torch.Tensor) -> None:
        """As torch.optim.SGD(nesterov=True)."""
        fragment.velocity.mul_(self._momentum).add_(gradient)
        change = gradient.add(fragment.velocity, alpha=self._momentum)
        fragment.weights.sub_(change, alpha=self._lr)

    def refuse_unknown(self, module: nn.Module, owned: Iterable[torch.Tensor]) -> None:
        """Raise StepError for trained parameters that are not averaged."""
        known = {id(p) for fragment in self._fragments for _, p in fragment.named}
        named = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        unknown = [name for key, name in named.items() if key not in known]
        if unknown or any(p.requires_grad and id(p) not in {*known, *named} for p in owned):
            raise StepError(
                f"diloco does not know {listed(unknown) or 'some parameters of the optimizer'}: they would "
                "differ between hosts.",
                why="they were added or unfrozen after the model was wrapped, or are in no model.",
                fix="call paceline.diloco(...) when all parameters are in the model and unfrozen.",
                parameters=unknown,
            )

    # State.

    def vectors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The fragments of the outer weights, as far as this rank has them."""
        yield from ((i, fragment.weights) for i, fragment in enumerate(self._fragments))

    def parameters(self) -> Named:
        """The weights of this host by name."""
        found = {name: p.detach() for f in self._fragments for name, p in f.named}
        return {name: found[first] for name, first in self._tied.items()}

    def weights(self) -> Named:
        """The outer weights by name, sharded as the parameters."""
        found = {n: t for f in self._fragments for n, t in f.tensors(f.weights).items()}
        return {name: found[first] for name, first in self._tied.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the outer weights inside of this context, or until the next step begins."""
        if self._own is not None:  # already, by an iterator that is not closed yet
            yield
            return
        self._own = own = [fragment.read() for fragment in self._fragments]
        try:
            for fragment in self._fragments:
                fragment.write(fragment.weights)
            yield
        finally:
            if self._own is own:
                self.give_back()

    def give_back(self) -> None:
        """Give the model the weights of this host again."""
        own, self._own = self._own, None
        if own is not None:
            for fragment, values in zip(self._fragments, own, strict=True):
                fragment.write(values)

    def state_dict(self) -> dict[str, Any]:
        """What is equal on all hosts, beside the weights. Waits for an exchange in progress."""
        pending, ahead = self._pending, None
        if pending is not None:
            fragment = self._fragments[pending.fragment]
            ahead = [pending.fragment, pending.due, fragment.tensors(pending.result())]
        return {
            "velocity": {n: t for f in self._fragments for n, t in f.tensors(f.velocity).items()},
            "samples": [fragment.samples for fragment in self._fragments],
            "pending": ahead,
        }

    def host_state(self) -> dict[str, Any]:
        """What differs between hosts."""
        sent: Named = {}
        if self._pending is not None:
            sent = self._fragments[self._pending.fragment].tensors(self._pending.sent)
        return {"weights": self.parameters(), "sent": sent}

    def load(self, weights: Named, state: dict[str, Any], sent: Named | None) -> None:
        """Load a state. `sent`: of this host; None if the state is that of another number of hosts."""
        if self._pending is not None:
            self._pending.result()
        self._pending, self.is_new = None, False
        self._takes_outer = sent is None
        matches = len(state["samples"]) == len(self._fragments)
        for number, fragment in enumerate(self._fragments):
            fragment.weights = fragment.vector(weights)
            fragment.velocity = fragment.vector(state["velocity"])
            fragment.samples = [0] * len(self.hosts.ranks)
            if matches and sent is not None:
                fragment.samples = list(state["samples"][number])
        if matches and state["pending"] is not None:
            number, due, tensors = state["pending"]
            fragment = self._fragments[number]
            result = fragment.vector(tensors)
            if sent is None:
                self._take_step(fragment, result)
            else:
                self._pending = _Pending(number, due, fragment.vector(sent), result, None)


def _cut(
    named: Sequence[tuple[str, nn.Parameter]], number: int
) -> list[Sequence[tuple[str, nn.Parameter]]]:
    """Neighbouring parameters in `number` parts of about equal sizes, none of them empty."""
    total, at, cuts = sum(p.numel() for _, p in named), 0, [0]
    for i, (_, p) in enumerate(named):
        left = number - len(cuts)
        is_full = at >= total * len(cuts) / number or len(named) - i == left
        if i and left and is_full:
            cuts.append(i)
        at += p.numel()
    return [named[a:b] for a, b in pairwise([*cuts, len(named)])]


@contextmanager
def outer_weights(model: nn.Module) -> Iterator[None]:
    """A model of `diloco` has its outer weights inside of this context; any other model is left as it is."""
    outer: Outer | None = unwrap(model).__dict__.get(DILOCO)
    if outer is None or outer.is_new:
        yield
        return
    with outer.in_place():
        yield


# What the strategy inside of a host does.
_AS_INSIDE = (
    *("divisor", "needs_equal_micro_batches", "backward", "finish", "leave_step", "grad_norm"),
    *("check_precision", "largest_over_ranks"),
)


class DiLoCoStrategy(Strategy):
    """The strategy of `ddp` or `fsdp` on each host, and an outer step of all hosts after every few steps."""

    def prepare(self, batches: Batches) -> None:
        self._batches = batches
        self._outers: list[Outer] = [unwrap(model).__dict__[DILOCO] for model in self._models]
        hosts = self._outers[0].hosts
        self.hosts, self._index = hosts.ranks, hosts.index
        self.gradient_job = host = hosts.job
        self._refuse(batches)
        # Also for one rank: it may be without samples in a step, and runs a padding micro-batch then.
        kind: type[Strategy] = DDPStrategy
        if any(map(is_split, self._models)):
            from paceline.parallel.fsdp import FSDPStrategy as kind
        self._inner = kind(host, self._models, self._optimizers, batches)
        for name in _AS_INSIDE:
            setattr(self, name, getattr(self._inner, name))

    def _refuse(self, batches: Batches) -> None:
        what = why = ""
        if batches.num_samples is None:
            what = "a stream"
            why = "its ranks exchange in each step how many samples they have read."
        elif batches.is_auto:
            what = 'micro_batch="auto"'
            why = "all ranks agree in each step whether it has fitted into memory."
        elif any(isinstance(m, SyncBatchNorm) for each in self._models for m in each.modules()):
            what = "sync_batchnorm"
            why = "its forward is a collective of all hosts; plain BatchNorm needs none."
        if what:
            raise ConfigError(f"diloco cannot be combined with {what}.", why=why)

    def num_samples(self, step: PlannedStep) -> int:
        return max(1, self._samples_of_hosts(step)[self._index])

    def _samples_of_hosts(self, step: PlannedStep) -> list[int]:
        number, size = step.num_samples, self._job.data.size
        bounds = [number * first // size for first in (*(own[0] for own in self.hosts or ()), size)]
        return [b - a for a, b in pairwise(bounds)]

    def begin_loop(self, step: int, last: int | None) -> None:
        for outer in self._outers:
            outer.begin()
        every = max(outer.every for outer in self._outers)
        if last is not None and every > last and self._job.rank == 0:
            log.once(
                f"diloco(every={every}) is more than the {last} steps of this training: the hosts are "
                "averaged once, at its end."
            )

    def micro_batches(self, step: PlannedStep) -> Iterator[MicroBatch]:
        for outer in self._outers:
            outer.give_back()
        yield from self._inner.micro_batches(step)

    def after_update(self, step: int, planned: PlannedStep) -> None:
        for outer in self._outers:
            outer.after_step(step, self._samples_of_hosts(planned))

    def end_loop(self) -> None:
        for outer in self._outers:
            outer.end()

    def whole_state(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        module = unwrap(model)
        outer = module.__dict__[DILOCO].weights()
        for name, value in self._inner.whole_state(model):
            value = outer.get(plain_name(module, name), value)
            yield name, whole(value) if isinstance(value, torch.Tensor) else value

    # A checkpoint has the outer weights in the place of the models, and under `strategy.hosts` the weights
    # and the optimizers of each host.

    def to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        hosted = [outer.host_state() for outer in self._outers]
        own = {"models": hosted, "optimizers": [each["state"] for each in state["optimizers"]]}
        return {
            **state,
            "models": [
                {**model, **outer.weights()}
                for model, outer in zip(state["models"], self._outers, strict=True)
            ],
            "optimizers": [{**each, "state": {}} for each in state["optimizers"]],
            "strategy": {**state["strategy"], "hosts": {f"{self._index}": own}},
        }

    def state_dict(self) -> Any:
        outer = [outer.state_dict() for outer in self._outers]
        return {"outer": outer, "num_hosts": len(self.hosts or ())}

    def wants(self, path: str) -> bool:
        kind, _, rest = path.removeprefix("strategy.").partition(".")
        return kind != "hosts" or rest.partition(".")[0] in ("0", f"{self._index}")

    def trained_paths(self) -> list[str]:
        own = f"strategy.hosts.{self._index}.models"
        return [
            f"{own}.{i}.weights.{n}" for i, o in enumerate(self._outers) for n in o.parameters()
        ]

    def templates(self) -> Named:
        found: Named = {}
        for i, outer in enumerate(self._outers):
            places = [f"outer.{i}.velocity", f"outer.{i}.pending.2"]
            for host in {0, self._index}:
                kinds = [f"models.{i}.weights", f"models.{i}.sent"]
                kinds += [f"optimizers.{n}.{i}" for n in range(len(self._optimizers))]
                places += [f"hosts.{host}.{kind}" for kind in kinds]
            for name, p in outer.parameters().items():
                found |= {f"strategy.{place}.{name}": p for place in places}
        return found

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        strategy, models = saved["strategy"], saved["models"]
        key, hosts = f"{self._index}", strategy["hosts"]
        is_same = strategy["num_hosts"] == len(self.hosts or ()) and key in hosts
        own = hosts[key] if is_same else hosts[min(hosts, key=int)]
        self._loaded = models, [each["sent"] if is_same else None for each in own["models"]]
        if is_same:
            models = [{**m, **h["weights"]} for m, h in zip(models, own["models"], strict=True)]
        elif self._job.rank == 0:
            log.logger.info(
                "diloco: saved by %d hosts, resumed on %d: all begin with the outer weights and the "
                "optimizer of host 0.",
                *(strategy["num_hosts"], len(self.hosts or ())),
            )
        pairs = zip(saved["optimizers"], own["optimizers"], strict=True)
        return {**saved, "models": models, "optimizers": [{**o, "state": s} for o, s in pairs]}

    def load_state_dict(self, state: Any) -> None:
        models, sent = self._loaded
        for outer, *each in zip(self._outers, models, state["outer"], sent, strict=True):
            outer.load(*each)

    def check(self) -> None:
        owned = owned_parameters(*self._optimizers)
        for model, outer in zip(self._models, self._outers, strict=True):
            outer.refuse_unknown(unwrap(model), owned if len(self._models) == 1 else ())
        self._inner.check()

    def facts(self) -> dict[str, Any]:
        return self._inner.facts() | {"diloco_every": max(o.every for o in self._outers)}
