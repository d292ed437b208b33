"""SIGTERM, SIGUSR1 and SIGUSR2: all ranks stop after the same step, save, and ask to be started again."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Finished, alive, finish, node_words, run, spawn, start, wait_until

from paceline.checkpoint.reader import read
from paceline.checkpoint.store import committed, open_store, read_manifest
from paceline.job.preemption import SAME_SIGNAL_S

SCRIPT = """
import atexit, hashlib, os, signal, time, torch, paceline
from torch.utils.data import TensorDataset

atexit.register(time.sleep, float(os.environ.get("END_S", 0)))

def score(model, batch):
    if job.rank == 0:
        say(f"scored {job.rank}")
    time.sleep(0.02)
    return {"seen": (torch.tensor(float(len(batch[0]))), len(batch[0]))}

def say(line):
    with open("lines", "a") as file:
        file.write(line + "\\n")

signals = os.open(f"signals{os.environ.get('RANK')}", os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
size, workers = int(os.environ.get("SIZE", 96)), int(os.environ.get("WORKERS", 0))
with paceline.join(seed=3, device="cpu", timeout_s=30) as job:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(), torch.nn.Linear(16, 1)
    )
    model = paceline.ddp(job, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    training = paceline.Training(
        job, model, optimizer, paceline.Batches(job, data, global_batch=12, workers=workers),
        checkpoints=paceline.Checkpoints("kept", keep=2),
    )
    slow = os.environ.get("SLOW_S")
    try:
        loop = training.steps(epochs=5)  # still there when the job is left
        for step in loop:
            for x, y in step:
                step.backward((model(x) - y).square().sum(), count=len(x), reduction="sum")
            step.update()
            if step.number == 7 and os.environ.get("EVALUATE"):
                paceline.evaluate(job, model, data, score, micro_batch=1)
            say(f"step {step.number} {job.rank} {os.getpid()}")
            if slow:
                time.sleep(float(slow))
    except paceline.Preempted as end:
        say(f"ended {end.step} {job.rank}")
        raise
    say(f"whole {job.rank}")
    if job.rank == 0:
        state = training.state_dict()["models"]
        state = state[0] if isinstance(state, list) else state
        digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values()))
        print("weights", digest.hexdigest())
"""
RANKS = "--nproc-per-node=3"
SLOW = {"SLOW_S": "0.05"}


def lines(folder: Path, first: str) -> list[list[str]]:
    """The lines that the ranks wrote and that begin with this word."""
    path = folder / "lines"
    text = path.read_text() if path.exists() else ""
    return [words for words in map(str.split, text.splitlines()) if words[:1] == [first]]


def wait_for(process: subprocess.Popen[str], folder: Path, first: str, count: int) -> None:
    wait_until(lambda: len(lines(folder, first)) >= count, process)


def begin(folder: Path, words: str = RANKS, **more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    return start(["run", *words.split(), "train.py"], folder, **(SLOW | more))


def pids(folder: Path) -> dict[int, int]:
    """The process of each rank."""
    return {int(rank): int(pid) for _, _, rank, pid in lines(folder, "step")}


def check_preempted(folder: Path, done: Finished, ranks: int = 3) -> int:
    """All ended after the same step, which is saved; that step."""
    assert done.code == 75, done
    ends = lines(folder, "ended")
    assert sorted(int(rank) for _, _, rank in ends) == list(range(ranks)), done
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "kept").glob("step-*"))
    done_by_ranks = {int(rank): int(step) for _, step, rank, _ in lines(folder, "step")}
    assert set(done_by_ranks.values()) <= {saved - 1, saved}, "an evaluation may hide the last"
    assert f"after step {saved}: saved in kept; exit code 75" in done.err
    assert "Traceback" not in done.err
    return saved


def weights(done: Finished) -> str:
    assert done.code == 0, done
    found = re.search(r"weights (\w+)", done.out)
    assert found is not None, done
    return found[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that 3 ranks end with."""
    return weights(run(RANKS, SCRIPT, tmp_path_factory.mktemp("undisturbed")))


@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGUSR2", marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_signal_to_the_launcher(tmp_path: Path, undisturbed: str, number: str) -> None:
    process = begin(tmp_path, RANKS + " --max-restarts=3 --monitor-interval=90")
    wait_for(process, tmp_path, "step", 15)
    process.send_signal(signal.Signals[number])
    done = finish(process)
    step = check_preempted(tmp_path, done)
    assert 5 <= step < 40
    assert {words[1] for words in lines(tmp_path, "ended")} == {str(step)}
    assert f"preempted by {number} after" in done.err
    assert "restart 1" not in done.err
    assert done.err.count("paceline: preempted: all ranks have ended") == 1
    # The second run resumes and reaches the end.
    done = run(RANKS, SCRIPT, tmp_path)
    assert f"resumed after step {step} " in done.err
    assert weights(done) == undisturbed
    assert all(not alive(pid) for pid in pids(tmp_path).values())


@pytest.mark.slow
def test_a_signal_to_one_rank(tmp_path: Path, undisturbed: str) -> None:
    process = begin(tmp_path, RANKS + " --max-restarts=3 --monitor-interval=90")
    wait_for(process, tmp_path, "step", 9)
    os.kill(pids(tmp_path)[1], signal.SIGUSR1)
    done = finish(process)
    check_preempted(tmp_path, done)
    assert "preempted by a signal to another rank" in done.err
    assert "restart 1" not in done.err
    assert weights(run(RANKS, SCRIPT, tmp_path)) == undisturbed


@pytest.mark.slow
def test_a_signal_to_all_ranks_stops_a_long_evaluation(tmp_path: Path) -> None:
    process = begin(tmp_path, EVALUATE="1")
    wait_for(process, tmp_path, "scored", 2)
    process.send_signal(signal.SIGTERM)
    assert check_preempted(tmp_path, finish(process)) == 7
    assert len(lines(tmp_path, "scored")) < 32, "rank 0 has 32 batches"


@pytest.mark.slow
def test_a_signal_to_one_rank_in_an_evaluation(tmp_path: Path, undisturbed: str) -> None:
    process = begin(tmp_path, EVALUATE="1")
    wait_for(process, tmp_path, "scored", 2)
    os.kill(pids(tmp_path)[2], signal.SIGUSR2)
    assert check_preempted(tmp_path, finish(process)) == 7
    # Step 7 is committed, so the second run does not evaluate.
    assert weights(run(RANKS, SCRIPT, tmp_path, EVALUATE="1")) == undisturbed


@pytest.mark.slow
def test_every_process_of_the_ranks_is_signalled(tmp_path: Path, undisturbed: str) -> None:
    process = begin(tmp_path, WORKERS="2")
    wait_for(process, tmp_path, "step", 9)
    for pid in pids(tmp_path).values():
        os.killpg(pid, signal.SIGTERM)  # and its loader workers
    process.send_signal(signal.SIGTERM)  # forwarded to ranks that have received it already
    check_preempted(tmp_path, finish(process))
    assert weights(run(RANKS, SCRIPT, tmp_path, WORKERS="2")) == undisturbed


SLOW_LOGGER = """
import os, time, torch, paceline
from torch.utils.data import TensorDataset

class Slow:
    def log(self, step, values): pass
    def close(self): time.sleep(60)

with paceline.join(device="cpu") as job:
    model = paceline.ddp(job, torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = paceline.Batches(job, TensorDataset(torch.zeros(8, 2)), global_batch=4)
    checkpoints = paceline.Checkpoints("kept")
    training = paceline.Training(job, model, optimizer, batches, checkpoints=checkpoints)
    training.report(loggers=[Slow()])
    for step in training.steps():
        step.run(lambda batch: model(batch[0]).mean())
        step.update()
        training.log(loss=step.loss)
        if step.number == 3:
            open("began", "w").close()
        time.sleep(0.02)
"""


@pytest.mark.ci
def test_a_slow_logger_does_not_use_up_the_time_to_exit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_LOGGER)
    words = ["run", "--nproc-per-node=2", "--shutdown-timeout=8", "train.py"]
    process = start(words, tmp_path)
    wait_until((tmp_path / "began").exists, process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 75, done
    assert "SIGKILL" not in done.err
    assert re.search(r"Slow did not take the last metrics within \d s", done.err)
    assert list((tmp_path / "kept").glob("step-*"))


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = begin(tmp_path, "--nproc-per-node=2", SLOW_S="20")
    wait_for(process, tmp_path, "step", 2)
    process.send_signal(signal.SIGTERM)
    signals = [tmp_path / f"signals{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.read_bytes() for path in signals), process)
    time.sleep(SAME_SIGNAL_S)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143
    assert lines(tmp_path, "ended") == [], "the step did not end"


SLOW_SAVE = """
import os, time
from paceline.checkpoint import writer
from paceline.checkpoint.store import Store

# Writing takes 0.4 s longer on rank 1, and the commit takes a second.
write, commit, wait = Store.write, writer.commit, writer.Save._await

def slow_write(self, name, parts):
    if "rank-" in name and os.path.exists("signalled"):
        time.sleep(float(os.environ["WRITE_S"]) + 0.4 * int(os.environ["RANK"]))
    write(self, name, parts)

def slow_commit(*args):
    time.sleep(1 if os.path.exists("signalled") else 0)
    commit(*args)

def noted(self, keys):
    if os.path.exists("signalled"):
        open(f"written-{os.environ['RANK']}", "w").close()
    wait(self, keys)

Store.write, writer.commit, writer.Save._await = slow_write, slow_commit, noted
""" + SCRIPT.replace("keep=2", "keep=2, every_steps=8")


def _second_signal(
    tmp_path: Path, undisturbed: str, write_s: float, to_ranks: bool, before: Callable[[], object]
) -> tuple[bool, bool]:
    """Send a second signal after this; whether all ranks had written then, and whether the save counts."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "train.py").write_text(SLOW_SAVE)
    words = ["run", "--nproc-per-node=3", "train.py"]
    process = start(words, tmp_path, SLOW_S="0.05", WRITE_S=str(write_s))
    wait_until((tmp_path / "kept/step-8").exists, process)
    saved = steps_in(tmp_path)
    (tmp_path / "signalled").touch()
    process.send_signal(signal.SIGTERM)
    time.sleep(SAME_SIGNAL_S)
    before()
    all_written = len(list(tmp_path.glob("written-*"))) == 3
    ranks = pids(tmp_path)
    for pid in ranks.values() if to_ranks else [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    done = finish(process)
    assert done.code in (143, 75), done
    store = open_store(str(tmp_path / "kept"))
    for step in committed(store):
        read(store, read_manifest(store, step))
    counts = steps_in(tmp_path)[-1] > saved[-1] or done.code == 75
    (tmp_path / "signalled").unlink()
    assert weights(run(RANKS, SLOW_SAVE, tmp_path, WRITE_S="0")) == undisturbed
    return all_written, counts


def steps_in(folder: Path) -> list[int]:
    return committed(open_store(str(folder / "kept")))


@pytest.mark.parametrize(
    ("ranks", "counts", "to_ranks"),
    [
        pytest.param(3, True, False, marks=pytest.mark.ci),
        pytest.param(3, True, True, marks=pytest.mark.ci),
        pytest.param(1, False, False, marks=pytest.mark.slow),
        pytest.param(1, False, True, marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_commits_what_all_ranks_have_written(
    tmp_path: Path, undisturbed: str, ranks: int, counts: bool, to_ranks: bool
) -> None:
    def wait() -> None:
        wait_until(lambda: len(list(tmp_path.glob("written-*"))) >= ranks)

    found = _second_signal(tmp_path, undisturbed, 1.0, to_ranks, wait)
    assert found == (ranks == 3, counts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_signal_at_random_moments_of_a_save_loses_nothing(
    tmp_path: Path, undisturbed: str
) -> None:
    rng = random.Random(1)
    found = []
    for number in range(20):
        moment = functools.partial(time.sleep, rng.uniform(0, 1.8))
        folder = tmp_path / str(number)
        found.append(_second_signal(folder, undisturbed, 0.6, bool(number % 2), moment))
    assert all(counts for all_written, counts in found if all_written), found
    assert {all_written for all_written, _ in found} == {False, True}


@pytest.mark.ci
def test_a_rank_whose_peer_failed_does_not_finish_its_step(tmp_path: Path) -> None:
    # On a busy host the kernel may take seconds to end a killed process.
    process = begin(tmp_path, "--nproc-per-node=2 --shutdown-timeout=25", SLOW_S="20")
    wait_for(process, tmp_path, "step", 2)
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    done = finish(process)
    assert done.code == 137
    assert "rank 1 of 2 failed: killed by SIGKILL" in done.err
    assert lines(tmp_path, "ended") == [], "the step did not end"


@pytest.mark.slow
def test_a_training_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    process = spawn([sys.executable, "train.py"], tmp_path, **SLOW)
    wait_for(process, tmp_path, "step", 3)
    process.send_signal(signal.SIGTERM)
    check_preempted(tmp_path, finish(process), ranks=1)


PLAIN = """
import os, time
open(f"began{os.environ['RANK']}", "w").close()
time.sleep(60)
"""


@pytest.mark.slow
def test_a_script_without_a_training_is_ended_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    process = start(["run", "--nproc-per-node=2", "train.py"], tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    process.send_signal(signal.SIGUSR1)
    done = finish(process)
    assert done.code == 128 + signal.SIGUSR1
    assert "preempted" not in done.err


LATE = """
import os, signal, sys, time
def end(number, frame):
    if os.environ["RANK"] == "0":
        sys.exit(int(sys.argv[1]))
    if sys.argv[2] == "stays":
        return
    raise OSError("no space left for the checkpoint")
signal.signal(signal.SIGTERM, end)
open(f"began{os.environ['RANK']}", "w").close()
for _ in range(600):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("code", ["75", pytest.param("0", marks=pytest.mark.ci)])
@pytest.mark.parametrize("other", ["raises", "stays"])
def test_a_rank_that_does_not_end_well_after_a_signal_is_reported(
    tmp_path: Path, code: str, other: str
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    words = ["run", "--nproc-per-node=2", "--shutdown-timeout=2", "late.py", code, other]
    process = start(words, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 128 + signal.SIGTERM
    assert "preempted" not in done.err
    if other == "stays":
        assert "paceline: rank 1 did not end within 2 s, and got SIGKILL" in done.err
    else:
        assert "[1] OSError: no space left for the checkpoint" in done.err
        assert "paceline: rank 1 of 2 failed: OSError: no space left" in done.err
        assert "the last output of the ranks here are in " in done.err


@pytest.mark.slow
@pytest.mark.parametrize("end_s", [("0", "0"), ("2", "0"), ("0", "2")])
def test_a_notice_to_one_node_stops_both(
    tmp_path: Path, free_port: int, end_s: tuple[str, str]
) -> None:
    """Also if one of them, which may serve the store, ends before the other."""
    words = " ".join(node_words(free_port, "--max-restarts=3")[1:])
    nodes = [begin(tmp_path, words, END_S=seconds) for seconds in end_s]
    wait_for(nodes[0], tmp_path, "step", 15)
    nodes[1].send_signal(signal.SIGTERM)
    ends = [finish(node) for node in nodes]
    assert [end.code for end in ends] == [75, 75], ends
    both = Finished(75, "", "".join(end.err for end in ends))
    check_preempted(tmp_path, both, ranks=2)


MIXED = """
import os, sys, time
rank = int(os.environ["RANK"])
time.sleep(2 * (rank == int(sys.argv[1])))
sys.exit(75 * (rank == int(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize(("late", "preempted"), [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")])
def test_a_node_that_ends_well_leaves_with_a_preempted_one(
    tmp_path: Path, free_port: int, backend: str, late: str, preempted: str
) -> None:
    """Each ends with the code of its ranks when the ranks of both have ended, whichever serves the store."""
    (tmp_path / "train.py").write_text(MIXED)
    words = ["run", "--nnodes=2", f"--rdzv-backend={backend}", "--rdzv-id=job"]
    words += [f"--rdzv-endpoint=127.0.0.1:{free_port}", f"--master-port={free_port}"]
    script = ["train.py", late, preempted]
    nodes = [start([*words, f"--node-rank={node}", *script], tmp_path) for node in (0, 1)]
    done = [finish(node) for node in nodes]
    assert sorted(end.code for end in done) == [0, 75], done
    assert not any("Traceback" in end.err for end in done), done


RESTARTS = """
import os, sys, time, torch, paceline
from torch.utils.data import TensorDataset
round_ = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"began{round_}", "w").close()
if round_ == "1":
    time.sleep(60)  # as if it still imported
with paceline.join(device="cpu") as job:
    model = torch.nn.Linear(1, 1)
    batches = paceline.Batches(job, TensorDataset(torch.ones(8, 1)), global_batch=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in paceline.Training(job, paceline.ddp(job, model), optimizer, batches).steps(epochs=1):
        raise OSError("bad sample")
"""


@pytest.mark.ci
@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_while_the_ranks_restart_requests_a_restart(tmp_path: Path, number: str) -> None:
    (tmp_path / "train.py").write_text(RESTARTS)
    process = start(["run", "--max-restarts=3", "train.py"], tmp_path)
    wait_until((tmp_path / "began1").exists)
    process.send_signal(signal.Signals[number])
    done = finish(process)
    assert done.code == 75, done
    assert f"received {number} during a restart; exit code 75 requests another one" in done.err


WORKER = """
import os, signal, time
from paceline.job.preemption import notice
notice.ignore_in_worker()
for pause in (0, 1.1, 0):
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)
    time.sleep(pause)
"""


@pytest.mark.ci
def test_two_sigterms_within_a_second_are_one_in_a_loader_worker() -> None:
    """A scheduler and the launcher may both send it. One that comes later ends the worker."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True)
    assert done.stdout.split() == ["alive"] * 2, done.stderr
    assert done.returncode == -signal.SIGTERM
