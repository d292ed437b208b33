"""A parameter server on torch's RPC: sharded embedding tables, sparse gradients, asynchronous workers.

    paceline run --nproc-per-node 4 --max-restarts 3 examples/parameter_server.py --servers 2

The first ranks are servers, the others are workers. Row i of a table is on server i % servers. A worker pulls
the rows of a batch, computes their gradients, and pushes these to the servers, without waiting for the other
workers, unless it is more than `--staleness` steps ahead of the slowest one.

Rank 0 writes runs/parameter_server/snapshot.pt every `--snapshot-every` steps. A run that is started again,
on any number of servers and workers, continues from this file. The data are pairs of a user and an item.
"""

import argparse
import os
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

import paceline

SIZES = {"users": (2000, 16), "items": (500, 16)}
BATCH = 256
FILE = Path("runs/parameter_server/snapshot.pt")


class Shard:
    """The rows `index`, `index + count`, ... of all tables, and the state of their optimizer."""

    def __init__(self, index: int, count: int, snapshot: dict | None) -> None:
        self.lock = threading.Lock()  # RPC answers calls in several threads
        self.count = count
        self.tables, self.optimizers = {}, {}
        for name, (rows, width) in SIZES.items():
            values = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
            values = snapshot["tables"][name] if snapshot else values / width**0.5
            table = torch.nn.Parameter(values[index::count].clone())
            optimizer = torch.optim.Adagrad([table], lr=0.5)
            if snapshot:
                optimizer.state[table]["sum"].copy_(snapshot["sums"][name][index::count])
            self.tables[name], self.optimizers[name] = table, optimizer

    def pull(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.lock, torch.no_grad():
            return {name: self.tables[name][each // self.count] for name, each in ids.items()}

    def push(self, gradients: dict[str, tuple[Tensor, Tensor]]) -> None:
        with self.lock:
            for name, (ids, values) in gradients.items():
                table = self.tables[name]
                table.grad = torch.sparse_coo_tensor(
                    (ids // self.count)[None], values, table.shape, check_invariants=False
                )
                self.optimizers[name].step()

    def copy(self) -> dict[str, dict[str, Tensor]]:
        with self.lock:
            sums = {n: o.state[self.tables[n]]["sum"].clone() for n, o in self.optimizers.items()}
            tables = {name: table.detach().clone() for name, table in self.tables.items()}
            return {"tables": tables, "sums": sums}


class Turns:
    """On rank 0: how many steps each worker has done, and which workers may begin their next one.

    A worker that others wait for, and that did not end its step for `lost_s`, is left out.
    """

    def __init__(self, workers: list[int], done: int, total: int, staleness: int, lost_s: float):
        self.changed = threading.Condition()
        self.steps = dict.fromkeys(workers, 0)
        self.waiting: dict[int, Future[bool]] = {}
        self.in_step_since = dict.fromkeys(workers, time.monotonic())
        self.done, self.total = done, total  # steps of all workers, with those before a restart
        self.staleness, self.lost_s = staleness, lost_s
        self.paused = False
        self.max_lead = 0

    def next(self, worker: int, first: bool) -> Future[bool]:
        """End this worker's step; the result comes when it may begin another: False if it should stop."""
        turn: Future[bool] = Future()
        with self.changed:
            if worker not in self.steps:
                raise LookupError(f"worker {worker} was left out: its step took too long")
            del self.in_step_since[worker]
            if not first:
                self.steps[worker] += 1
                self.done += 1
            self.waiting[worker] = turn
            self.changed.notify_all()
            self._admit()
        return turn

    def _admit(self) -> None:
        for worker, turn in list(self.waiting.items()):
            lead = self.steps[worker] - min(self.steps.values())
            if self.done >= self.total:
                del self.waiting[worker], self.steps[worker]
                turn.set_result(False)
            elif not self.paused and lead <= self.staleness:
                del self.waiting[worker]
                self.max_lead = max(self.max_lead, lead)
                self.in_step_since[worker] = time.monotonic()
                turn.set_result(True)

    def wait_until_done(self, steps: int) -> bool:
        """Wait for this number of steps in all; False if the workers have stopped."""
        with self.changed:
            while self.steps and self.done < steps:
                self._wait_once()
            return bool(self.steps)

    def pause(self) -> int:
        """Let no step begin, and wait for those that have begun; the number of steps done."""
        with self.changed:
            self.paused = True
            while self.in_step_since:
                self._wait_once()
            return self.done

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self._admit()

    def _wait_once(self) -> None:
        self.changed.wait(0.2)
        for worker, since in list(self.in_step_since.items()):
            blocks = self.paused or any(other in self.waiting for other in self.steps)
            if blocks and time.monotonic() - since > self.lost_s:
                print(f"worker {worker} is left out: no sign for {self.lost_s:g} s", flush=True)
                del self.in_step_since[worker], self.steps[worker]
        self._admit()


# What the functions below use on the rank that they are called on.
shard: Shard
turns: Turns
finished: Future[None] = Future()


def pull(ids: dict[str, Tensor]) -> dict[str, Tensor]:
    return shard.pull(ids)


def push(gradients: dict[str, tuple[Tensor, Tensor]]) -> None:
    shard.push(gradients)


def copy_shard() -> dict[str, dict[str, Tensor]]:
    return shard.copy()


# These two answer when their Future has a result, and hold no thread of the server until then.
@rpc.functions.async_execution
def next_turn(worker: int, first: bool) -> Future[bool]:
    return turns.next(worker, first)


@rpc.functions.async_execution
def wait_finished() -> Future[None]:
    return finished


class Rows:
    """The rows of one batch, requested at once from all servers."""

    def __init__(self, ids: dict[str, Tensor], servers: int) -> None:
        self.unique, self.where = {}, {}
        for name, each in ids.items():
            self.unique[name], self.where[name] = torch.unique(each, return_inverse=True)
        # By server: which of the unique rows it has.
        self.masks = [{n: u % servers == s for n, u in self.unique.items()} for s in range(servers)]
        self.answers = [
            rpc.rpc_async(server, pull, args=({n: self.unique[n][m] for n, m in masks.items()},))
            for server, masks in enumerate(self.masks)
        ]

    def wait(self) -> dict[str, Tensor]:
        """The values of the batch, in its order; they take a gradient."""
        self.leaves = {n: torch.empty(len(u), SIZES[n][1]) for n, u in self.unique.items()}
        for masks, answer in zip(self.masks, self.answers, strict=True):
            for name, values in answer.wait().items():
                self.leaves[name][masks[name]] = values
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        return {name: F.embedding(self.where[name], leaf) for name, leaf in self.leaves.items()}

    def push_gradients(self) -> list[Future[None]]:
        sent = []
        for server, masks in enumerate(self.masks):
            part = {n: (self.unique[n][m], self.leaves[n].grad[m]) for n, m in masks.items()}
            sent.append(rpc.rpc_async(server, push, args=(part,)))
        return sent


def draw_pairs(size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A user likes an item if the product of two hidden vectors is positive."""
    hidden = torch.Generator().manual_seed(7)
    tastes = torch.randn(SIZES["users"][0], 4, generator=hidden)
    traits = torch.randn(SIZES["items"][0], 4, generator=hidden)
    users = torch.randint(len(tastes), (size,), generator=generator)
    items = torch.randint(len(traits), (size,), generator=generator)
    return {"users": users, "items": items}, ((tastes[users] * traits[items]).sum(1) > 0).float()


def work(rank: int, servers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids, likes = draw_pairs(BATCH, generator)
    rows = Rows(ids, servers)
    # timeout=0: a turn may take as long as the slowest worker needs for a step.
    may_step = rpc.rpc_sync(0, next_turn, args=(rank, True), timeout=0)
    while may_step:
        values = rows.wait()
        scores = (values["users"] * values["items"]).sum(1)
        F.binary_cross_entropy_with_logits(scores, likes).backward()
        pushed = rows.push_gradients()
        ids, likes = draw_pairs(BATCH, generator)
        rows = Rows(ids, servers)  # the next batch is on its way while the servers apply this one
        torch.futures.wait_all(pushed)
        may_step = rpc.rpc_sync(0, next_turn, args=(rank, False), timeout=0)


def take_snapshot(servers: int) -> dict:
    """All tables after the same steps: no worker is in a step while the shards are copied."""
    done = turns.pause()
    try:
        parts = [rpc.rpc_async(server, copy_shard) for server in range(servers)]
        snapshot: dict = {"done": done, "tables": {}, "sums": {}}
        for server, part in enumerate(parts):
            for kind, shares in part.wait().items():
                for name, share in shares.items():
                    whole = snapshot[kind].setdefault(name, torch.empty(SIZES[name]))
                    whole[server::servers] = share
    finally:
        turns.resume()
    return snapshot


def save(snapshot: dict) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    torch.save(snapshot, FILE.with_suffix(".new"))
    os.replace(FILE.with_suffix(".new"), FILE)


def accuracy(tables: dict[str, Tensor]) -> float:
    ids, likes = draw_pairs(20_000, torch.Generator().manual_seed(1000))
    scores = (tables["users"][ids["users"]] * tables["items"][ids["items"]]).sum(1)
    return ((scores > 0) == (likes > 0)).float().mean().item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--servers", type=int, default=1)
    options.add_argument("--steps", type=int, default=2000, help="of all workers together")
    options.add_argument("--staleness", type=int, default=4)
    options.add_argument("--lost-s", type=float, default=30.0, help="leave out a silent worker")
    options.add_argument("--snapshot-every", type=int, default=500)
    args = options.parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns without a choice
    global shard, turns
    with paceline.join(device="cpu") as job:
        workers = list(range(args.servers, job.world_size))
        snapshot = torch.load(FILE) if FILE.exists() else None
        done = snapshot["done"] if snapshot else 0
        if job.rank < args.servers:
            shard = Shard(job.rank, args.servers, snapshot)
        if job.rank == 0:
            turns = Turns(workers, done, args.steps, args.staleness, args.lost_s)
        with paceline.rpc(job):
            if job.rank in workers:
                work(job.rank, args.servers, seed=1000 * done + job.rank)
            if job.rank != 0:
                rpc.rpc_sync(0, wait_finished, timeout=0)
                return
            next_save = done + args.snapshot_every
            while turns.wait_until_done(next_save):
                save(take_snapshot(args.servers))
                next_save += args.snapshot_every
            snapshot = take_snapshot(args.servers)
            save(snapshot)
            print(
                f"accuracy {100 * accuracy(snapshot['tables']):.1f} % after {snapshot['done']} steps, "
                f"at most {turns.max_lead} ahead"
            )
            finished.set_result(None)


if __name__ == "__main__":
    main()
