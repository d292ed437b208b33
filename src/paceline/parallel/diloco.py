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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from paceline import log
from paceline.clock.step_clock import COMMUNICATION, clock
from paceline.data.batches import Batches
from paceline.data.plan import MicroBatch, PlannedStep
from paceline.errors import CheckpointError, ConfigError, listed
from paceline.job import collectives
from paceline.job.arguments import require_integers, require_positive
from paceline.job.exchange import FOREVER, Exchange
from paceline.job.job import Job
from paceline.job.mesh import DataAxis
from paceline.job.recovery import SET_UP, needs_all_ranks
from paceline.parallel.ddp import DDPStrategy, ddp, refuse_unknown
from paceline.parallel.modules import (
    DILOCO,
    agree_on_parameters,
    broadcast_state,
    is_sharded,
    is_split,
    local,
    owned_parameters,
    plain_name,
    refuse_module,
    refuse_wrapped,
    sharded_like,
    unwrap,
    whole,
)
from paceline.parallel.strategy import Strategy
from paceline.parallel.syncbn import SyncBatchNorm

Wrap = Callable[[Job, nn.Module], nn.Module]
Named = dict[str, torch.Tensor]
Parameters = list[tuple[list[str], nn.Parameter]]  # with all names of tied ones
Code = Callable[[torch.Tensor], torch.Tensor]

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
    """Wrap `module` so that the ranks of a host train together, and hosts average their weights now and then.

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

    Cost: every rank keeps two copies of the parameters in fp32 in host memory (with FSDP of its part), and
    four while they are exchanged. With FSDP a save copies them to the device. A host sends
    `2 (N - 1) / N` times the parameters in `outer_dtype` every `every` steps, for N hosts.

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
        raise ConfigError(f"fragments must be at most every={every}, got {fragments}.")
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
    host_sum = HostSum(job, hosts, outer_dtype, is_split=is_split(wrapped))
    outer = Outer(unwrap(wrapped), host_sum, every, outer_lr, outer_momentum, fragments)
    unwrap(wrapped).__dict__[DILOCO] = outer
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
_new_groups: Any = dist.new_subgroups_by_enumeration  # has no annotations


def _find_hosts(job: Job) -> Hosts:
    if job.mesh is not None:
        firsts = list(range(0, job.world_size, job.mesh.dp_shard))
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
    host.group = host.control = host.exchange = None
    if several := [own for own in ranks if len(own) > 1]:
        host.group, _ = _new_groups(several, timeout=timedelta(seconds=job.timeout_s))
        host.control, _ = _new_groups(several, backend="gloo", timeout=FOREVER)
    if host.control is not None:
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
    place = ranks[index].index(job.rank)
    host._data = DataAxis(place, size, host.group, host.control, tuple(range(size)), True)
    return Hosts(ranks, index, host)


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


_CODES: dict[str, tuple[Code, Code] | None] = {
    "fp32": None,
    "bf16": (
        lambda values: values.bfloat16().view(torch.uint8),
        lambda data: data.view(torch.bfloat16).float(),
    ),
    "int8": (_to_int8, _from_int8),
}


class HostSum:
    """Sums vectors over the hosts, in a thread."""

    def __init__(self, job: Job, hosts: Hosts, dtype: str, *, is_split: bool) -> None:
        self._job, self.hosts, self._code = job, hosts, _CODES[dtype]
        self._between = self._inside = None
        if len(hosts.ranks) == 1:
            return
        # `fsdp` leaves the module of a host of one rank as it is.
        is_split = any(collectives.gather(job, is_split, call=SET_UP))
        sizes = sorted({len(own) for own in hosts.ranks})
        if is_split and len(sizes) > 1:
            raise ConfigError(
                f"hosts have different numbers of ranks: {sizes}.",
                why="each rank of a host exchanges its part of the model with one rank of each other host.",
                fix="use as many ranks on each host, or wrap=paceline.ddp.",
            )
        # Of ranks with the same part of the model. If all have the whole, the first of a host sends for it.
        lists = list(zip(*hosts.ranks, strict=True)) if is_split else [[r[0] for r in hosts.ranks]]
        # On a slow link a part may take longer than `timeout_s`.
        self._between, _ = _new_groups(lists, backend="gloo", timeout=FOREVER)
        if not is_split and sizes[-1] > 1:
            self._inside, _ = _new_groups(hosts.ranks, backend="gloo", timeout=FOREVER)

    def start(self, values: torch.Tensor) -> Future[torch.Tensor]:
        """Begin to sum float32 values in host memory, in place; the same bits on all hosts.

        One sum at a time, so that all hosts call the collectives in the same order.
        """
        future: Future[torch.Tensor] = Future()

        def run() -> None:
            try:
                future.set_result(self._sum(values))
            except BaseException as error:
                future.set_exception(error)

        # Not of a ThreadPoolExecutor: at exit Python would wait for Gloo.
        threading.Thread(target=run, daemon=True).start()
        return future

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        try:
            if self._between is not None and self._code is None:
                dist.all_reduce(values, group=self._between)
            elif self._between is not None and self._code is not None:
                values.copy_(self._sum_of_codes(values, *self._code))
            if self._inside is not None:
                dist.broadcast(values, group=self._inside, group_src=0)
        except RuntimeError as error:
            self._job.reraise(error)
        return values

    def _sum_of_codes(self, values: torch.Tensor, encode: Code, decode: Code) -> torch.Tensor:
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


class Fragment:
    """Some parameters, and the outer optimizer's state of them: vectors of float32 or wider in host memory.

    Attributes:
        offset: It takes its outer steps after the steps of which this is the rest by `every`.
        samples: What each host has trained on since the last outer step.
    """

    def __init__(self, named: Parameters, offset: int, hosts: int) -> None:
        self.named, self.offset = named, offset
        self._sizes = [local(p.detach()).numel() for _, p in named]
        self._dtype = max([torch.float32, *(p.dtype for _, p in named)], key=lambda d: d.itemsize)
        self.weights = self.read()
        self.velocity = torch.zeros_like(self.weights)
        self.samples = [0] * hosts

    def read(self) -> torch.Tensor:
        """The weights of this host."""
        return self.vector(self.parameters())

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        for (_, p), part in zip(self.named, torch.split(values, self._sizes), strict=True):
            own = local(p.detach())
            own.copy_(part.view(own.shape))

    def parameters(self) -> Named:
        return {name: p.detach() for names, p in self.named for name in names}

    def tensors(self, values: torch.Tensor) -> Named:
        """A vector as tensors by name, sharded as the parameters."""
        parts = zip(self.named, torch.split(values, self._sizes), strict=True)
        shaped = [(names, _shaped(part, p.detach())) for (names, p), part in parts]
        return {name: tensor for names, tensor in shaped for name in names}

    def vector(self, tensors: Mapping[str, Any]) -> torch.Tensor:
        """A vector from tensors by name, sharded as the parameters, or whole."""
        parts = [local(sharded_like(p, tensors[names[0]])) for names, p in self.named]
        return torch.cat([part.reshape(-1).to("cpu", self._dtype) for part in parts])


def _shaped(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    own = part.view(local(p).shape)
    if not is_sharded(p):
        return own
    tensor = torch.empty_like(p, dtype=part.dtype)
    local(tensor).copy_(own)
    return tensor


class _Exchange(NamedTuple):
    """An exchange in progress."""

    number: int  # of the fragment
    due: int  # the step after which the result is taken
    sent: torch.Tensor  # the weights of this host at the begin
    gradient: Future[torch.Tensor]


class Outer:
    """The outer optimizer of one model."""

    def __init__(
        self, module: nn.Module, sums: HostSum, every: int, lr: float, momentum: float, parts: int
    ) -> None:
        self.hosts, self._sums = sums.hosts, sums
        self.every, self._lr, self._momentum = every, lr, momentum
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                names.setdefault(p, []).append(plain_name(module, name))
        cut = _cut([(own, p) for p, own in names.items()], parts)
        self.fragments = [
            Fragment(own, (i + 1) * every // len(cut) % every, len(self.hosts.ranks))
            for i, own in enumerate(cut)
        ]
        self._delay = 0 if len(cut) == 1 else min(_OVERLAP_STEPS, every // len(cut))
        self._exchange: _Exchange | None = None
        self._is_training = False
        self._own: list[torch.Tensor] | None = None  # see `place`

    def begin(self) -> None:
        self._take_loaded()
        self._is_training = True

    def _take_loaded(self) -> None:
        """Before a training: begin anew if other weights than the outer ones were loaded into the model."""
        for fragment in () if self._is_training else self.fragments:
            own = fragment.read()
            fragment.write(fragment.weights)  # in the dtypes of the parameters
            if not torch.equal(fragment.read(), own):
                fragment.write(own)
                fragment.weights, fragment.velocity = own, torch.zeros_like(own)

    def after_step(self, step: int, samples: Sequence[int]) -> None:
        """Begin and end exchanges after a step. `samples`: how many each host has trained on."""
        for fragment in self.fragments:
            fragment.samples = [a + b for a, b in zip(fragment.samples, samples, strict=True)]
        if self._exchange is not None and step >= self._exchange.due:
            self._end_exchange()
        for number, fragment in enumerate(self.fragments):
            if step % self.every == fragment.offset:
                self._begin_exchange(number, step + self._delay)
                if not self._delay:
                    self._end_exchange()

    def end(self) -> None:
        """Bring the hosts together: an outer step of all that was trained since the last one."""
        self.give_back()
        if self._exchange is not None:
            self._end_exchange()
        for number, fragment in enumerate(self.fragments):
            if sum(fragment.samples):
                self._begin_exchange(number, 0)
                self._end_exchange()
            fragment.write(fragment.weights)
        self._is_training = False

    def _begin_exchange(self, number: int, due: int) -> None:
        if self._exchange is not None:  # of a run with another `every`
            self._end_exchange()
        fragment = self.fragments[number]
        sent = fragment.read()
        share = fragment.samples[self.hosts.index] / sum(fragment.samples)
        fragment.samples = [0] * len(fragment.samples)
        difference = (fragment.weights - sent).mul_(share)
        self._exchange = _Exchange(number, due, sent, self._sums.start(difference))

    def _end_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        with clock.during(COMMUNICATION):
            gradient = exchange.gradient.result()
        fragment = self.fragments[exchange.number]
        # As torch.optim.SGD(nesterov=True).
        fragment.velocity.mul_(self._momentum).add_(gradient)
        change = gradient.add(fragment.velocity, alpha=self._momentum)
        new = fragment.weights.sub_(change, alpha=self._lr)
        if self._delay:  # what this host has learned since then stays
            new = fragment.read().add_(new - exchange.sent)
        fragment.write(new)

    def place(self) -> list[torch.Tensor] | None:
        """Give the model the outer weights, unless it has them; keep and return those of this host."""
        if self._own is not None or not self._is_training:
            return None
        self._own = [fragment.read() for fragment in self.fragments]
        for fragment in self.fragments:
            fragment.write(fragment.weights)
        return self._own

    def give_back(self) -> None:
        own, self._own = self._own, None
        for fragment, values in zip(self.fragments, own or (), strict=own is not None):
            fragment.write(values)

    # State.

    def _by_name(self, vectors: Iterable[torch.Tensor]) -> Named:
        both = zip(self.fragments, vectors, strict=True)
        return {name: t for f, values in both for name, t in f.tensors(values).items()}

    def parameters(self) -> Named:
        return {name: p for f in self.fragments for name, p in f.parameters().items()}

    def weights(self) -> Named:
        """The outer weights by name, sharded as the parameters."""
        self._take_loaded()
        return self._by_name(fragment.weights for fragment in self.fragments)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is equal on all hosts, beside the weights, and what differs. Waits for an exchange."""
        pending: list[Any] | None = None
        sent: Named = {}
        if (exchange := self._exchange) is not None:
            fragment = self.fragments[exchange.number]
            gradient = fragment.tensors(exchange.gradient.result())
            pending = [exchange.number, exchange.due, gradient]
            sent = fragment.tensors(exchange.sent)
        velocity = self._by_name(fragment.velocity for fragment in self.fragments)
        samples = [fragment.samples for fragment in self.fragments]
        weights = self.parameters() if self._own is None else self._by_name(self._own)
        shared = {"velocity": velocity, "samples": samples, "pending": pending}
        return shared, {"weights": weights, "sent": sent}

    def load(self, weights: Named, state: dict[str, Any], sent: Named | None) -> None:
        """Load a state. `sent`: of this host; None if the state is that of another number of hosts."""
        if self._exchange is not None:
            self._exchange.gradient.result()
        self._exchange = self._own = None
        self._is_training = True
        is_same = sent is not None and len(state["samples"]) == len(self.fragments)
        none = [[0] * len(self.hosts.ranks)] * len(self.fragments)
        each = zip(self.fragments, state["samples"] if is_same else none, strict=True)
        for fragment, samples in each:
            fragment.weights = fragment.vector(weights)
            fragment.velocity = fragment.vector(state["velocity"])
            fragment.samples = list(samples)
        if is_same and sent is not None and state["pending"] is not None:
            number, due, tensors = state["pending"]
            fragment, gradient = self.fragments[number], Future[torch.Tensor]()
            gradient.set_result(fragment.vector(tensors))
            self._exchange = _Exchange(number, due, fragment.vector(sent), gradient)


def _cut(named: Parameters, number: int) -> list[Parameters]:
    """Neighbouring parameters in `number` parts of about equal sizes; in fewer if some are large."""
    total, at = sum(p.numel() for _, p in named), 0
    parts: dict[int, Parameters] = {}
    for names, p in named:
        middle = 2 * at + p.numel()
        parts.setdefault(middle * number // (2 * total), []).append((names, p))
        at += p.numel()
    return list(parts.values())


@contextmanager
def outer_weights(model: nn.Module) -> Iterator[None]:
    """A model of `diloco` has its outer weights inside of this context; any other model is left as it is."""
    outer: Outer | None = unwrap(model).__dict__.get(DILOCO)
    own = None if outer is None else outer.place()
    try:
        yield
    finally:
        if outer is not None and own is not None and outer._own is own:
            outer.give_back()


# What the strategy inside of a host does.
_AS_INSIDE = (
    *("divisor", "needs_equal_micro_batches", "backward", "finish", "leave_step", "grad_norm"),
    *("check_precision", "largest_over_ranks"),
)


class DiLoCoStrategy(Strategy):
    """The strategy of `ddp` or `fsdp` on each host, and an outer step of all hosts after every few steps."""

    hosts: tuple[tuple[int, ...], ...]

    def prepare(self, batches: Batches) -> None:
        self._outers: list[Outer] = [unwrap(model).__dict__[DILOCO] for model in self._models]
        hosts = self._outers[0].hosts
        self.hosts, self._index = hosts.ranks, hosts.index
        self.gradient_job = host = hosts.job
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
        # Also for one rank: it may be without samples in a step, and runs a padding micro-batch then.
        kind: type[Strategy] = DDPStrategy
        if any(map(is_split, self._models)):
            from paceline.parallel.fsdp import FSDPStrategy as kind
        self._inner = kind(host, self._models, self._optimizers, batches)
        for name in _AS_INSIDE:
            setattr(self, name, getattr(self._inner, name))

    def num_samples(self, step: PlannedStep) -> int:
        return max(1, self._samples_of_hosts(step)[self._index])

    def _samples_of_hosts(self, step: PlannedStep) -> list[int]:
        number, size = step.num_samples, self._job.data.size
        bounds = [number * first // size for first in (*(own[0] for own in self.hosts), size)]
        return [b - a for a, b in pairwise(bounds)]

    def begin_loop(self, step: int, last: int | None) -> None:
        for outer in self._outers:
            outer.begin()
        every = max(outer.every for outer in self._outers)
        if last is not None and every > last and self._job.rank == 0:
            log.once(
                f"diloco(every={every}) is more than the {last} steps of this training, whose end averages "
                "the hosts."
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
            if (weights := outer.get(plain_name(module, name))) is not None:
                value = whole(weights).to(value.dtype)
            yield name, value

    # A checkpoint has the outer weights in the place of the models, and under `strategy.hosts` the weights
    # and the optimizers of each host.

    def to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(state["models"], self._outers, strict=True)
        shared, hosted = zip(*[outer.state_dict() for outer in self._outers], strict=True)
        optimizers = [each["state"] for each in state["optimizers"]]
        own = {f"{self._index}": {"models": list(hosted), "optimizers": optimizers}}
        return {
            **state,
            "models": [{**model, **outer.weights()} for model, outer in pairs],
            "optimizers": [{**each, "state": {}} for each in state["optimizers"]],
            "strategy": {"outer": list(shared), "num_hosts": len(self.hosts), "hosts": own},
        }

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
            kinds = [f"models.{i}.weights", f"models.{i}.sent"]
            kinds += [f"optimizers.{n}.{i}" for n in range(len(self._optimizers))]
            places = [f"hosts.{host}.{kind}" for host in {0, self._index} for kind in kinds]
            places += [f"outer.{i}.velocity", f"outer.{i}.pending.2"]
            for name, p in outer.parameters().items():
                found |= {f"strategy.{place}.{name}": p for place in places}
        return found

    def own_part(self, saved: dict[str, Any]) -> dict[str, Any]:
        strategy, models = saved["strategy"], saved["models"]
        key, hosts = f"{self._index}", strategy["hosts"]
        is_same = strategy["num_hosts"] == len(self.hosts) and key in hosts
        own = hosts[key] if is_same else hosts[min(hosts, key=int)]
        self._loaded = models, [each["sent"] if is_same else None for each in own["models"]]
        if is_same:
            models = [{**m, **h["weights"]} for m, h in zip(models, own["models"], strict=True)]
        elif self._job.rank == 0:
            log.logger.info(
                "diloco: saved by %d hosts, resumed on %d: all begin with the outer weights and the "
                "optimizer of host 0.",
                *(strategy["num_hosts"], len(self.hosts)),
            )
        pairs = zip(saved["optimizers"], own["optimizers"], strict=True)
        return {**saved, "models": models, "optimizers": [{**o, "state": s} for o, s in pairs]}

    def load_state_dict(self, state: Any) -> None:
        models, sent = self._loaded
        for outer, each in zip(self._outers, state["outer"], strict=True):
            if other := sorted(each["velocity"].keys() ^ outer.parameters().keys()):
                raise CheckpointError(
                    f"{listed(other)}: trained either in the checkpoint or in this run, not in both.",
                    fix="freeze the same parameters; or load the weights alone with paceline.load_weights.",
                    parameters=other,
                )
        for outer, *each in zip(self._outers, models, state["outer"], sent, strict=True):
            outer.load(*each)

    def check(self) -> None:
        averaged = {id(p) for o in self._outers for f in o.fragments for _, p in f.named}
        for model in self._models:
            refuse_unknown(self._job, model, owned_parameters(*self._optimizers), averaged)
        self._inner.check()

    def facts(self) -> dict[str, Any]:
        return self._inner.facts() | {"diloco_every": max(o.every for o in self._outers)}
