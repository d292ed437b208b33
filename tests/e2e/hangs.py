"""Scripts that hang, one for each kind of hang, and the expected report. Shared with benchmarks/verdicts.py.

The line that ends with `# WAITS` is where the other ranks wait. The line that ends with `# STUCK` is where
rank 1 is, or the rank that the kind names, for which they wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launching import start

PLAIN = """
import os, queue, re, signal, socket, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
"""
PACELINE = """
import os, queue, re, signal, socket, sys, threading, time
import torch, torch.distributed as dist
import paceline
job = paceline.join(device="cpu", backend="BACKEND", timeout_s=600)
"""
STEPS = """
rank, world = dist.get_rank(), dist.get_world_size()
def step():
    dist.all_reduce(torch.ones(7, 3)) # WAITS
for _ in range(3):
    dist.all_reduce(torch.ones(5))
"""


@dataclass(frozen=True)
class Kind:
    """One way to hang.

    Args:
        body: The script after three steps without a fault.
        says: Parts of the report; `{STUCK}` and `{WAITS}` are the numbers of the marked lines.
        word: `hang` or `waiting`.
        backend: Of the script with paceline; shm itself refuses calls that differ.
        slow: Whether only `make test-slow` runs it.
        once: Whether the tests run it on 2 ranks without paceline only; the benchmark runs all cases.
    """

    body: str
    says: tuple[str, ...]
    word: str = "hang"
    backend: str = "shm"
    slow: bool = True
    once: bool = False


def _stuck(line: str, before: str = "") -> str:
    indented = "".join(f"    {text}\n" for text in before.splitlines())
    return f"def evaluate():\n{indented}    {line} # STUCK\nif rank == 1:\n    evaluate()\nstep()\n"


NOT_ENTERED = "has not entered it: evaluate() at train.py:{STUCK}"
ALL_REDUCE = " s in all_reduce #4 (f32[7,3]) at train.py:{WAITS}"
_LOADER = """
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5 and rank == 1:
            time.sleep(600) # STUCK
        return index
for batch in torch.utils.data.DataLoader(Samples(), num_workers=1):
    step()
"""
_ORDER = """
groups = [dist.new_group(), dist.new_group()]
for group in groups if rank != 1 else groups[::-1]:
    dist.all_reduce(torch.ones(2), group=group) # WAITS
"""
_DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for number in range(3):
    loss = model(torch.ones(2, 4)).sum()
    if number == 2 and rank == 1:
        queue.Queue().get() # STUCK
    loss.backward() # WAITS
"""
_RUDE = """
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
def link(fd): return os.path.exists(f'/proc/self/fd/{fd}') and os.readlink(f'/proc/self/fd/{fd}')
for fd in map(int, os.listdir('/proc/self/fd')):
    if fd == int(os.environ['PACELINE_CONTROL_FD']) or 'paceline-probe' in str(link(fd)):
        os.close(fd)
"""
_PIPE = "here, there = os.pipe()"
_POLL = "while not os.path.exists('/nowhere'): time.sleep(0.2)"

KINDS: dict[str, Kind] = {
    "sleeps": Kind(
        _stuck("time.sleep(600)"), (ALL_REDUCE, NOT_ENTERED + ", in time.sleep"), slow=False
    ),
    "skips a backward": Kind(
        _DDP,
        ("in all_reduce #", "(gradients, f32[20])", "train.py:{WAITS}", "at train.py:{STUCK}, in "),
    ),
    "loops in Python": Kind(
        _stuck("while True: pass"), (ALL_REDUCE, NOT_ENTERED, "busy"), word="waiting"
    ),
    "loops in C": Kind(
        _stuck("re.match('(a+)+$', 'a' * 60 + 'b')"),
        (ALL_REDUCE, NOT_ENTERED, "holding the GIL, busy"),
        word="waiting",
        slow=False,
    ),
    "sleeps in C": Kind(
        _stuck("library.sleep(600)", "import ctypes\nlibrary = ctypes.PyDLL(None)"),
        (ALL_REDUCE, NOT_ENTERED, "holding the GIL"),
    ),
    "is stopped": Kind(
        _stuck("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1.2)"),
        (ALL_REDUCE, "has not entered it: stopped (state T) at train.py:", "kill -CONT"),
    ),
    "calls another collective": Kind(
        "if rank == 1:\n    dist.barrier() # STUCK\nelse:\n    step()\n",
        ("all_reduce #4 (f32[7,3])", "barrier #4", "different collectives as number 4"),
        backend="gloo",
        slow=False,
    ),
    "takes groups in another order": Kind(
        _ORDER,
        ("in all_reduce #1 (f32[2], group of ranks 0", "at train.py:{WAITS}", "orders"),
    ),
    "is at its end": Kind(
        "if rank == 1:\n    threading.Thread(target=time.sleep, args=(600,)).start()\nelse:\n    step()\n",
        (ALL_REDUCE, "has not entered it: not in the script"),
    ),
    "waits for a lock": Kind(
        _stuck("lock.acquire()", "lock = threading.Lock()\nlock.acquire()"),
        (ALL_REDUCE, NOT_ENTERED + ", in lock.acquire"),
    ),
    "waits for a queue": Kind(
        _stuck("queue.Queue().get()"), (ALL_REDUCE, NOT_ENTERED, "a lock, a queue or a process")
    ),
    "waits for its loader": Kind(
        _LOADER,
        ("in all_reduce #9 (f32[7,3])", "waiting for a loader worker: pid", "__getitem__() at"),
    ),
    "reads from a pipe": Kind(
        _stuck("os.read(here, 1)", _PIPE), (ALL_REDUCE, NOT_ENTERED + ", in os.read")
    ),
    "waits for the network": Kind(
        _stuck("socket.create_server(('127.0.0.1', 0)).accept()"), (ALL_REDUCE, NOT_ENTERED)
    ),
    "waits for a file": Kind(_stuck(_POLL), (ALL_REDUCE, NOT_ENTERED + ", in time.sleep")),
    "gets nothing": Kind(
        "if rank == 0:\n    dist.recv(torch.ones(1), src=1) # WAITS\nelse:\n    step()\n",
        ("all_reduce #4 (f32[7,3])", "at train.py:{WAITS}, in recv with rank 1"),
    ),
    # Its probe goes on, but the rank cannot answer.
    "blocks signals and closes files": Kind(
        _stuck("time.sleep(600)", _RUDE), (ALL_REDUCE, NOT_ENTERED), once=True
    ),
    "barriers differ": Kind(
        "if rank == 0:\n    dist.barrier() # STUCK\nstep()\ndist.barrier()\n",
        ("barrier #4", "all_reduce #4 (f32[7,3])", "different collectives as number 4"),
        backend="gloo",
    ),
}


# None of this is a hang, no matter how long it takes and how busy the machine is.
HEALTHY = """
rank, scale = dist.get_rank(), float(os.environ["SCALE"])
def compute(seconds):
    end = time.monotonic() + seconds * scale
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)
def save(seconds):
    end = time.monotonic() + seconds * scale
    while time.monotonic() < end:
        with open("saved", "wb") as file:
            file.write(bytes(8 << 20))
            os.fsync(file.fileno())
def train(steps):
    for _ in range(steps):
        compute(0.1)
        dist.all_reduce(torch.ones(1000))
compute(12)  # the first step compiles
for alone in (compute, save):
    train(20)
    if rank == 0:
        alone(20)
    dist.barrier()
train(20)
print("done")
"""


def script(kind: Kind, *, paceline: bool) -> str:
    """The script of this kind, with or without paceline."""
    head = PACELINE.replace("BACKEND", kind.backend) if paceline else PLAIN
    return head + STEPS + kind.body


def expected(kind: Kind, text: str) -> list[str]:
    """Parts of the report that this script must get."""
    lines = {
        mark: number
        for number, line in enumerate(text.splitlines(), 1)
        for mark in ("WAITS", "STUCK")
        if line.endswith(f"# {mark}")
    }
    return [words.format(**lines) for words in kind.says]


def verdict(text: str, tmp_path: Path, world: int) -> str:
    """The first report of a run that hangs; the run is then ended."""
    (tmp_path / "train.py").write_text(text)
    process = start(
        [
            "run",
            f"--nproc-per-node={world}",
            "--hang-after=2",
            "--shutdown-timeout=1",
            "train.py",
        ],
        tmp_path,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith(("fix:", "paceline: rank")):  # the last line of a report, or a crash
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)
    return "".join(lines[1:])
