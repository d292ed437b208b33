"""A training in which one rank is slow, in one phase, by a factor. Shared with benchmarks/stragglers.py.

The line that ends with `# KIND` is the one that the report of that kind must name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launching import start

PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
wrap = torch.nn.parallel.DistributedDataParallel
"""
PACELINE = """
import torch, torch.distributed as dist
import paceline
job = paceline.join(device="cpu", backend="shm", timeout_s=600)
wrap = lambda model: paceline.ddp(job, model)
"""
BODY = """
import gc, itertools, random, sys, time
kind, slow_rank, slow_ms, workers = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
slow = dist.get_rank() == slow_rank
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        # Workers load while the step before is computed, which takes 40 ms.
        time.sleep(1e-3 * ((slow_ms + 40 * (workers > 0)) * (slow and kind == "data"))) # data
        return torch.ones(64)
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(1e-3 * (20 + slow_ms * (slow and kind == "backward"))) # backward
        return gradient.clone()
class Net(torch.nn.Sequential):
    def forward(self, x):
        time.sleep(1e-3 * (20 + slow_ms * (slow and kind == "forward"))) # forward
        return Both.apply(super().forward(x))
model = wrap(Net(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
junk = [[] for _ in range(200_000 * (slow and kind == "garbage collection"))]
class Weights:
    def __reduce__(self):
        time.sleep(slow_ms * 1e-3) # checkpoint
        return str, ()
counter = open(f"step{dist.get_rank()}", "w")
loader = torch.utils.data.DataLoader(Samples(), num_workers=workers)
for step, x in enumerate(itertools.islice(loader, int(sys.argv[5]))):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if slow and kind == "checkpoint":
        torch.save(Weights(), "weights.pt")
    end = time.perf_counter() + slow_ms / 1e3
    while slow and kind == "garbage collection" and time.perf_counter() < end:
        gc.collect() # garbage collection
    if kind == "uneven":
        time.sleep(random.random() * 0.04)
    while kind == "compute" and time.perf_counter() < end:
        torch.ones(300, 300) @ torch.ones(300, 300)
    if slow and kind == "other code":
        time.sleep(slow_ms * 1e-3) # the script
    counter.seek(0)
    print(f"{step:9}", end="", file=counter, flush=True)
print("done")
"""
STEP_MS = 40.0  # of a rank that is not slow
HEALTHY = ("even", "uneven", "compute")  # all ranks are equally fast on average
KINDS = ("data", "forward", "backward", "garbage collection", "checkpoint", "other code")


@dataclass(frozen=True)
class Run:
    """The result of a run.

    Args:
        said: The report of four lines; empty if there was none.
        steps: Steps of the slow rank until then.
    """

    said: str
    steps: int


def train(
    folder: Path,
    kind: str,
    *,
    world: int = 2,
    factor: float = 2.0,
    paceline: bool = False,
    workers: int = 0,
    steps: int = 400,
    rank: int = 1,
) -> Run:
    """Train until a straggler is reported, or to the end."""
    (folder / "train.py").write_text((PACELINE if paceline else PLAIN) + BODY)
    (folder / f"step{rank}").write_text("0")
    slow_ms = STEP_MS * (factor - 1)
    words = [kind, str(rank), str(slow_ms), str(workers), str(steps)]
    process = start(["run", f"--nproc-per-node={world}", "train.py", *words], folder)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            if line.startswith("slow:") or lines:
                lines.append(line)
            if line.startswith("fix:") and lines:
                break
        taken = int((folder / f"step{rank}").read_text() or 0)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    return Run("".join(lines), taken)


def line_of(folder: Path, kind: str) -> str:
    """The line where the script is slow, as a report writes it."""
    for number, line in enumerate((folder / "train.py").read_text().splitlines(), 1):
        if line.endswith(f"# {kind}"):
            return f"train.py:{number}"
    raise AssertionError(kind)


def right(run: Run, folder: Path, kind: str, rank: int = 1) -> bool:
    """Whether the report names the rank, the phase and the line."""
    named = re.match(rf"slow: rank {rank} \(.*\n      {kind} takes .*: (.*)\n", run.said)
    return named is not None and named[1].endswith(line_of(folder, kind))
