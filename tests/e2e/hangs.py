"""Scripts that hang, one for each kind of hang, and the expected report. Shared with benchmarks/verdicts.py.

The line that ends with `# WAITS` is where the other ranks wait. The line that ends with `# STUCK` is where
rank 1 is, or the rank that the kind names, for which they wait.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from launching import start

_REPORT_S = 100.0  # below pytest's limit: the processes are ended, and the output is shown

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
        word: `hang`, or `waiting` where the rank may come by itself.
        backend: Of the script with paceline; shm itself refuses calls that differ.
        slow: Whether only `make test-slow` runs it.
        once: Whether the tests run it on 2 ranks without paceline only; the benchmark runs all cases.
    """

    body: str
    says: tuple[str, ...]
    word: str = "waiting"
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
_FORKED = """
lock = threading.Lock()
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        with lock: # STUCK
            return index
def refresh():
    with lock:
        time.sleep(2)
if rank == 1:
    threading.Thread(target=refresh, name="refresh").start()
    time.sleep(0.5)
for batch in torch.utils.data.DataLoader(Samples(), num_workers=1):
    step()
"""
_BESIDE = "waits for a lock, and was forked beside thread refresh (train.py:"
_REDUCE_SCATTER = """
if rank == 1:
    time.sleep(600) # STUCK
dist.reduce_scatter(torch.ones(3), [torch.ones(3)] * world) # WAITS
"""
_UNEVEN = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3 + (rank == 1)):
    loss = model(torch.randn(3, 4)).sum() # STUCK
    loss.backward()
    optimizer.step()
dist.barrier() # WAITS
"""
_RAISES = """
def load():
    return {}["label 7"] # STUCK
try:
    if rank == 1:
        load()
    step()
finally:
    FINALLY
"""
_RAISED = "raised KeyError: 'label 7' at train.py:{STUCK} in load, and still runs a"
_CLOSES_FILES = """
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
    "loops in Python": Kind(_stuck("while True: pass"), (ALL_REDUCE, NOT_ENTERED)),
    "loops in C": Kind(
        _stuck("re.match('(a+)+$', 'a' * 60 + 'b')"),
        (ALL_REDUCE, NOT_ENTERED, "holding the GIL"),
        slow=False,
    ),
    "sleeps in C": Kind(
        _stuck("library.sleep(600)", "import ctypes\nlibrary = ctypes.PyDLL(None)"),
        (ALL_REDUCE, NOT_ENTERED, "holding the GIL"),
    ),
    "is stopped": Kind(
        _stuck("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1.2)"),
        (ALL_REDUCE, "has not entered it: stopped (state T) at train.py:", "kill -CONT"),
        word="hang",
    ),
    "calls another collective": Kind(
        "if rank == 1:\n    dist.barrier() # STUCK\nelse:\n    step()\n",
        ("all_reduce #4 (f32[7,3])", "barrier #4", "different collectives as number 4"),
        backend="gloo",
        slow=False,
        word="hang",
    ),
    "raised an error, and waits for ranks": Kind(
        _RAISES.replace("FINALLY", "dist.barrier()"),
        ("all_reduce #4 (f32[7,3])", "waits in barrier #4", _RAISED, "The error is the cause."),
        backend="gloo",
        slow=False,
        word="hang",
    ),
    "raised an error, and cleans up": Kind(
        _RAISES.replace("FINALLY", "time.sleep(600)"), (ALL_REDUCE, "in time.sleep", _RAISED)
    ),
    "has a worker that waits for a lock": Kind(
        _FORKED, ("__getitem__() at train.py:{STUCK}, " + _BESIDE, "never released"), slow=False
    ),
    "has a worker that a lock keeps from its begin": Kind(
        _FORKED.replace(
            "class",
            "os.register_at_fork(after_in_child=lambda: lock.acquire() and lock.release())\nclass",
            1,
        ),
        ("has not begun, " + _BESIDE, "never released"),
    ),
    "skips a reduce_scatter": Kind(
        _REDUCE_SCATTER, ("in reduce_scatter #4 (f32[3]) at train.py:{WAITS}",), backend="gloo"
    ),
    "has more batches": Kind(
        _UNEVEN,
        (
            "in broadcast #",
            "at train.py:{STUCK}",
            "in barrier #",
            "Or rank 1 takes more steps than the others: uneven batches.",
            "optimizer.step() was called 3 times by ranks 0",
        ),
        backend="gloo",
        slow=False,
        word="hang",
    ),
    "takes groups in another order": Kind(
        _ORDER,
        ("in all_reduce #1 (f32[2], group of ranks 0", "at train.py:{WAITS}", "orders"),
        word="hang",
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
        word="hang",
    ),
    # Its probe goes on, but the rank cannot answer.
    "blocks signals and closes files": Kind(
        _stuck("time.sleep(600)", _CLOSES_FILES), (ALL_REDUCE, NOT_ENTERED), once=True
    ),
    "barriers differ": Kind(
        "if rank == 0:\n    dist.barrier() # STUCK\nstep()\ndist.barrier()\n",
        ("barrier #4", "all_reduce #4 (f32[7,3])", "different collectives as number 4"),
        backend="gloo",
        word="hang",
    ),
}


# A training in which rank 0 makes a call that the others do not make, before the call of a place.
EXTRA = """
import torch, torch.distributed as dist
import paceline
from torch.nn.functional import mse_loss
def extra(place):
    if place == "PLACE" and job.rank == 0:
        CALL # EXTRA
def score(model, batch):
    extra("score")
    return {"loss": (mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}
with paceline.join(device="cpu", backend="BACKEND") as job:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = paceline.ddp(job, torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, data, global_batch=16, micro_batch=2)
    saves = paceline.Checkpoints("saved", every_epochs=9)
    training = paceline.Training(job, model, optimizer, batches, checkpoints=saves)
    extra("loop")
    for step in training.steps(epochs=1):
        for x, y in step:
            step.backward(mse_loss(model(x), y))
            extra("backward")
        step.update()
        if step.number == 2:
            extra("evaluate in a step")
            paceline.evaluate(job, model, data, score, micro_batch=8)
            extra("save")
            training.save()
            extra("update")
    extra("evaluate")
    paceline.evaluate(job, model, data, score, micro_batch=8)
    extra("barrier")
    dist.barrier()
    extra("export")
    training.export("model.pt")
    extra("leave")
"""
# By place of the extra call: the call in which the others wait for it.
OTHERS_IN = {
    "loop": "paceline's steps",
    "evaluate in a step": "paceline.evaluate",
    "save": "training.save",
    "backward": "all_reduce #",
    "update": " #",  # of the gradients, or of the save
    "evaluate": "paceline.evaluate",
    "score": "paceline.evaluate",
    "barrier": "barrier #",
    "export": "training.export",
    "leave": "paceline's leave",
}


def extra_script(place: str, call: str, backend: str) -> tuple[str, int]:
    """A script whose rank 0 makes an extra call at this place, and the number of the line of that call."""
    text = EXTRA.replace("PLACE", place).replace("CALL", call).replace("BACKEND", backend)
    return text, 1 + [line.endswith("# EXTRA") for line in text.splitlines()].index(True)


# What a healthy rank may do alone for `alone_s` seconds, while the others wait for it.
ALONE = {
    "receives": """
from urllib.request import urlopen
from http.server import BaseHTTPRequestHandler, HTTPServer
class Slow(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for _ in range(50):
            time.sleep(alone_s / 50)
            self.wfile.write(bytes(1000))
server = HTTPServer(("127.0.0.1", 0), Slow)
if os.fork() == 0:
    server.handle_request()
    os._exit(0)
urlopen(f"http://127.0.0.1:{server.server_port}").read()
""",
    "waits for a request": """
here, there = socket.socketpair()
threading.Timer(alone_s, there.send, [b"x"]).start()
here.recv(1)
""",
    "reads": """
here, there = os.pipe()
threading.Timer(alone_s, os.write, [there, b"x"]).start()
os.read(here, 1)
""",
    "sleeps": "time.sleep(alone_s)",
    "backs off": """
end = time.monotonic() + alone_s
while time.monotonic() < end:
    time.sleep(min(2, alone_s))
""",
    "computes": """
end = time.monotonic() + alone_s
while time.monotonic() < end:
    torch.ones(1500, 1500) @ torch.ones(1500, 1500)
""",
    "imports": """
open("slow_module.py", "w").write(f"import time\\ntime.sleep({alone_s})")
sys.path.insert(0, ".")
import slow_module
""",
    "is debugged": """
import io, pdb
here, there = os.pipe()
threading.Timer(alone_s, os.write, [there, b"c\\n"]).start()
pdb.Pdb(stdin=os.fdopen(here), stdout=io.StringIO()).set_trace()
print("debugged")
""",
    "waits for a process": """
import subprocess
subprocess.run(["sleep", str(alone_s)], check=True)
""",
    "waits for a thread": """
thread = threading.Thread(target=time.sleep, args=(alone_s,))
thread.start()
thread.join()
""",
    "pickles": """
class Slow:
    def __reduce__(self):
        time.sleep(alone_s)
        return int, ()
""",
}


def alone_script(name: str, alone_s: float) -> str:
    """A script in which rank 1 does this alone, in a call of its own or in one of torch.distributed."""
    body = ALONE[name].strip()
    head = f"{PLAIN}rank, alone_s = dist.get_rank(), {alone_s}\ndist.all_reduce(torch.ones(3))\n"
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    thing = "Slow() if rank == 1 else 0" if name == "pickles" else "0"
    end = f"dist.all_gather_object([None, None], {thing})\ndist.barrier()\nprint('done')\n"
    return f"{head}if rank == 1:\n{indented}{end}"


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
    """The first report of a run that hangs; the run is then ended. Without a report, all it printed."""
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
    deadline = threading.Timer(_REPORT_S, process.kill)
    deadline.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith(("fix:", "paceline: rank")):  # the last line of a report, or a crash
                break
    finally:
        deadline.cancel()
        process.terminate()
        process.communicate(timeout=60)
    return "".join(lines[1:])
