"""`paceline run --recover in-place`: a failed rank gets a new process, and the others keep theirs."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Finished, finish, run, spawn, start, wait_until

from paceline.testing import digest

# Writes a row for each step and rank, then the digest of the weights. `faults` is a list of
# [rank, step, kind], of which each happens once unless its kind begins with "again".
TRAINS = """
import json, os, signal, socket, stat, time
import torch, paceline
from torch import nn
from paceline.testing import digest

def fault(rank, step, faults):
    for number, (at_rank, at_step, kind) in enumerate(faults):
        mark = f"fault-{number}"
        if (at_rank, at_step) == (rank, step) and (kind.startswith("again") or not os.path.exists(mark)):
            open(mark, "w").close()
            if kind.endswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "again exit":
                os._exit(0)
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind in ("break", "close"):
                return spoil_sockets(kind)
            raise ValueError("injected")

def spoil_sockets(kind):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                if kind == "close":
                    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
                    continue
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.getpeername()
                    if copy.family != socket.AF_UNIX:
                        copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected, or closed in the meantime

# Once, in the process in place of rank 1: kill this rank, or start slowly.
def disturb_recovery(rank):
    if os.environ["RANK"] == "1" and os.path.exists("fault-0") and not os.path.exists("disturbed"):
        open("disturbed", "w").close()
        if rank == "slow":
            return time.sleep(5)
        if rank == "raise":
            raise OSError("in the new process")
        pids = {rank: pid for rank, pid, _ in map(json.loads, open("rows"))} | {1: os.getpid()}
        os.kill(pids[rank], signal.SIGKILL)

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))
    def forward(self, x):
        self.forwards += 1
        return x.relu()

def lose_peer_late(rank):
    # In step 20 rank 1 is killed, and rank 0 loses it, after the gradients of all ranks have arrived.
    from paceline.job import current_step
    from paceline.parallel.ddp import DDPStrategy
    finish = DDPStrategy.finish
    def finish_late(self, optimizer):
        finish(self, optimizer)
        if current_step.step == 20 and rank < 2 and not os.path.exists(f"late-{rank}"):
            open(f"late-{rank}", "w").close()
            if rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(torch.zeros(1))
    DDPStrategy.finish = finish_late

class Meter:
    # Has no state before the first count.
    count = 0
    def state_dict(self):
        return {"count": self.count} if self.count else {}
    def load_state_dict(self, state):
        self.count = state["count"]

def main(before="", backend=None, disturbed=None, **settings):
    if disturbed is not None:
        disturb_recovery(disturbed)
    with paceline.join(backend=backend) as job:
        if before == "second":
            train(job, folder="first")
        train(job, before, **settings)

def train(job, before="", faults=(), steps=40, workers=0, every_steps=1000, micro_batch=4, pause_s=0,
          nan=(), folder="kept"):
    torch.manual_seed(0)
    if before == "late":
        lose_peer_late(job.rank)
    x = torch.randn(500, 16)
    model = nn.Sequential(nn.Linear(16, 64), Counts(), nn.Dropout(0.1), nn.Linear(64, 4))
    if before == "barrier":
        torch.distributed.barrier()
    wrap = paceline.fsdp if before == "fsdp" else paceline.ddp
    model = wrap(job, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(x, x[:, :4] * 2)
    if workers:
        data = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
        batches = paceline.Batches(job, data)
    else:
        batches = paceline.Batches(job, data, global_batch=24, micro_batch=micro_batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    meter = Meter()
    training = paceline.Training(
        job, model, optimizer, batches, schedule=None if before == "scheduler" else schedule,
        checkpoints=paceline.Checkpoints(folder, every_steps=every_steps),
        on_non_finite="skip" if nan else None,
    )
    training.report("report")
    if before == "keep":
        training.keep(meter=torch.nn.Linear(1, 1))
    if before == "meter":
        training.keep(meter=meter)
    if before == "sum":
        paceline.sum_over_ranks(job, 1.0)
    for step in training.steps(until=steps):
        if before == "top":
            paceline.sum_over_ranks(job, 1.0)
        if before == "log":
            training.log(reduce="sum", ones=1.0)
        for bx, by in step:
            meter.count += 1
            loss = nn.functional.mse_loss(model(bx), by)
            if before == "meter":
                loss = loss * (1 + meter.count / 100)
            if step.number in nan:
                loss = loss * torch.nan
            fault(job.rank, step.number, faults)
            step.backward(loss)
            if before == "update inside":
                step.update()
        if before != "update inside":
            step.update()
        time.sleep(pause_s if step.number == 30 else 0)
        with open("rows", "a") as file:
            file.write(json.dumps([job.rank, os.getpid(), step.number]) + "\\n")
    training.export("end.pt")
    with open(f"buffers-{job.rank}", "w") as file:
        file.write(digest(list(model.buffers())))
    with open(f"skipped-{job.rank}", "w") as file:
        file.write(str(training.num_skipped))

main(**json.loads(os.environ["SETTINGS"]))
"""


def train(folder: Path, *, ranks: int = 3, words: str = "", **settings: Any) -> tuple[Any, ...]:
    """Run it; how it ended, the digest of its weights, and how many processes each rank had."""
    folder.mkdir()
    end = run(f"--nproc-per-node={ranks} {words}", TRAINS, folder, SETTINGS=json.dumps(settings))
    assert end.code == 0, end.err
    # The buffers are those of one rank, which may have been replaced.
    weights = {n: v for n, v in torch.load(folder / "end.pt").items() if "forwards" not in n}
    pids: dict[int, list[int]] = defaultdict(list)
    for line in (folder / "rows").read_text().splitlines():
        rank, pid, _ = json.loads(line)
        if pid not in pids[rank]:
            pids[rank].append(pid)
    return end, digest(weights), {rank: len(found) for rank, found in pids.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, Path]]:
    """A function that runs it without faults, once for each setting; the digest and the folder."""
    found: dict[str, tuple[str, Path]] = {}

    def end(**settings: Any) -> tuple[str, Path]:
        key = json.dumps(settings, sort_keys=True)
        if key not in found:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            found[key] = train(folder, **settings)[1], folder
        return found[key]

    return end


IN_PLACE = "--recover=in-place --max-restarts=9 --hang-after=60"  # tests share the cores


def assert_replaced(end: Finished, times: int) -> None:
    assert end.err.count("replaced in place") == times, end.err
    assert "restarted ranks" not in end.err, end.err


def test_only_the_rank_that_failed_gets_a_new_process(undisturbed: Any, tmp_path: Path) -> None:
    expected, folder = undisturbed()
    faults = [[1, 20, "kill"], [0, 30, "raise"]]
    end, found, processes = train(tmp_path / "faults", words=IN_PLACE, faults=faults)
    assert_replaced(end, 2)
    assert found == expected
    assert processes == {0: 2, 1: 2, 2: 1}
    # A repeated forward does not count twice.
    assert (tmp_path / "faults/buffers-2").read_text() == (folder / "buffers-2").read_text()


@pytest.mark.ci
def test_a_rank_takes_over_a_step_that_another_has_finished(
    undisturbed: Any, tmp_path: Path
) -> None:
    expected, _ = undisturbed()
    end, found, _ = train(tmp_path / "faults", words=IN_PLACE, before="late")
    assert_replaced(end, 1)
    assert found == expected


@pytest.mark.ci
def test_the_new_process_knows_how_many_steps_were_left_out(tmp_path: Path) -> None:
    settings = {"nan": [5, 9], "faults": [[1, 20, "kill"]]}
    end, _, _ = train(tmp_path / "faults", ranks=2, words=IN_PLACE, **settings)
    assert_replaced(end, 1)
    assert [(tmp_path / f"faults/skipped-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"faults": [[0, 1, "kill"]]}),  # in the first step
        (2, {"faults": [[1, 39, "kill"], [1, 40, "kill"]]}),  # in the last
        (3, {"faults": [[0, 20, "kill"], [2, 20, "kill"]], "every_steps": 1}),
        (3, {"faults": [[1, 20, "stop"]], "workers": 1}),
        (4, {"faults": [[3, 20, "raise"]]}),
        (3, {"faults": [[0, 20, "break"], [2, 30, "break"]]}),
        (2, {"faults": [[1, 20, "kill"]], "before": "update inside", "micro_batch": 12}),
    ],
)
def test_each_end_is_equal_to_the_bit(
    ranks: int, settings: dict[str, Any], undisturbed: Any, tmp_path: Path
) -> None:
    others = {name: settings[name] for name in settings if name not in ("faults", "every_steps")}
    expected, _ = undisturbed(ranks=ranks, **others)
    end, found, _ = train(tmp_path / "faults", ranks=ranks, words=IN_PLACE, **settings)
    assert "replaced in place" in end.err or "have connected again" in end.err, end.err
    assert "restarted ranks" not in end.err, end.err
    assert found == expected


@pytest.mark.ci
def test_ranks_that_are_no_neighbor_of_the_failed_one_notice_it(tmp_path: Path) -> None:
    """In a ring over Gloo rank 3 has connections with ranks 0 and 2, which their loader workers hold too."""
    settings = {"backend": "gloo", "faults": [[1, 20, "kill"]], "workers": 1}
    end, _, processes = train(tmp_path / "faults", ranks=4, words=IN_PLACE, **settings)
    assert_replaced(end, 1)
    assert processes == {0: 1, 1: 2, 2: 1, 3: 1}


@pytest.mark.ci
def test_rank_0_is_replaced_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    in_terminal = (
        "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )
    words = ["-m", "paceline", "run", "--nproc-per-node=2", *IN_PLACE.split(), "train.py"]
    settings = json.dumps({"faults": [[0, 20, "kill"]]})
    command = [sys.executable, "-c", in_terminal, sys.executable, *words]
    end = finish(spawn(command, tmp_path, SETTINGS=settings))
    assert end.code == 0, end.out
    assert end.out.count("replaced in place") == 1, end.out


@pytest.mark.ci
def test_a_rank_that_ends_in_the_loop_is_named(tmp_path: Path) -> None:
    settings = json.dumps({"faults": [[1, 20, "again exit"]]})
    end = run(f"--nproc-per-node=2 {IN_PLACE}", TRAINS, tmp_path, SETTINGS=settings)
    assert end.code == 1
    assert "rank 1 ended with exit code 0 while the others went on" in end.err, end.err


@pytest.mark.ci
def test_gloo_connects_again(undisturbed: Any, tmp_path: Path) -> None:
    """The collective that broke is never completed; it is no hang when the ranks do something else later."""
    settings = {"backend": "gloo", "faults": [[1, 20, "kill"]], "pause_s": 3.0}
    expected, _ = undisturbed(ranks=2, backend="gloo")
    words = f"{IN_PLACE} --hang-after=1"
    end, found, _ = train(tmp_path / "faults", ranks=2, words=words, **settings)
    assert_replaced(end, 1)
    assert found == expected
    assert "has waited" not in end.err.partition("replaced in place")[2]


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        {"faults": [[1, 20, "kill"]], "disturbed": 1},  # the new process fails at once
        {"faults": [[1, 20, "kill"]], "disturbed": 2},  # another rank fails in the meantime
        {"faults": [[1, 20, "close"]]},  # it may wait forever, and cannot tell the launcher
    ],
)
def test_all_start_again_if_a_recovery_fails(
    settings: dict[str, Any], undisturbed: Any, tmp_path: Path
) -> None:
    expected, _ = undisturbed()
    words = f"{IN_PLACE} --hang-after=3"
    end, found, _ = train(tmp_path / "faults", words=words, every_steps=5, **settings)
    assert "no recovery in place" in end.err, end.err
    assert "restarted ranks" in end.err
    assert found == expected


@pytest.mark.ci
def test_a_new_process_that_starts_slowly_is_awaited_and_shown(tmp_path: Path) -> None:
    settings = {"faults": [[1, 20, "kill"]], "disturbed": "slow"}
    words = f"{IN_PLACE} --hang-after=1"
    end, _, _ = train(tmp_path / "faults", ranks=2, words=words, **settings)
    assert_replaced(end, 1)
    assert "rank 1 has not connected to the others" in end.err, end.err


@pytest.mark.ci
def test_sigterm_during_a_recovery_requests_a_restart(tmp_path: Path) -> None:
    settings = json.dumps({"faults": [[1, 20, "kill"]], "disturbed": "slow"})
    (tmp_path / "train.py").write_text(TRAINS)
    words = ["run", "--nproc-per-node=2", *IN_PLACE.split(), "train.py"]
    job = start(words, tmp_path, SETTINGS=settings)
    wait_until((tmp_path / "disturbed").exists, job)
    job.terminate()
    end = finish(job)
    assert end.code == 75, end.err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"faults": [[1, 20, "raise"]]}, "ValueError: injected"),
        ({"faults": [[1, 20, "kill"]], "disturbed": "raise"}, "OSError: in the new process"),
    ],
)
def test_the_report_has_the_traceback_of_a_process_that_was_replaced(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    train(tmp_path / "faults", ranks=2, words=f"{IN_PLACE} --log-dir=logs", **settings)
    [error] = (tmp_path / "faults/logs").glob("failure-*/rank1-error.txt")
    assert text in error.read_text()


@pytest.mark.ci
def test_a_script_without_a_training_starts_again(tmp_path: Path) -> None:
    script = """
import os, signal, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1 and not os.path.exists("mark"):
    open("mark", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
    end = run(f"--nproc-per-node=2 {IN_PLACE}", script, tmp_path)
    assert end.code == 0, end.err
    assert "restarted ranks" in end.err


@pytest.mark.ci
@pytest.mark.parametrize("before", ["barrier", "sum", "fsdp", "keep", "second", "top"])
def test_all_start_again_where_a_process_cannot_be_replaced(
    before: str, undisturbed: Any, tmp_path: Path
) -> None:
    """A call that the others do not make; a model in parts; a kept object; the second training."""
    settings = {"before": before, "every_steps": 5, "faults": [[1, 23, "kill"]]}
    expected, _ = undisturbed(ranks=2)
    end, found, _ = train(tmp_path / "faults", ranks=2, words=IN_PLACE, **settings)
    assert "restarted ranks" in end.err, end.err
    assert found == expected


@pytest.mark.ci
@pytest.mark.parametrize("before", ["scheduler", "meter"])
def test_all_start_again_where_a_state_would_differ(before: str, tmp_path: Path) -> None:
    """A scheduler that the training does not know; an object that was empty when the loop began."""
    settings = {"before": before, "faults": [[1, 23, "kill"]]}
    end, _, _ = train(tmp_path / "faults", ranks=2, words=IN_PLACE, **settings)
    assert "replaced in place" not in end.err
    assert "restarted ranks" in end.err, end.err


@pytest.mark.ci
def test_values_that_were_logged_in_the_repeated_step_are_kept(tmp_path: Path) -> None:
    settings = {"before": "log", "faults": [[1, 20, "kill"]]}
    end, _, _ = train(tmp_path / "faults", ranks=2, words=IN_PLACE, **settings)
    assert_replaced(end, 1)
    lines = map(json.loads, (tmp_path / "faults/report/metrics.jsonl").read_text().splitlines())
    assert {line["step"]: line["ones"] for line in lines}[20] == 2.0


@pytest.mark.ci
def test_the_last_step_is_saved_if_all_ranks_raise(tmp_path: Path) -> None:
    faults = [[0, 18, "raise"], [1, 18, "raise"]]
    end, _, _ = train(tmp_path / "faults", ranks=2, words=IN_PLACE, faults=faults)
    assert "resumed after step 17" in end.err, end.err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "how"), [("raise", "ValueError: injected"), ("kill", "killed by SIGKILL")]
)
def test_a_rank_that_fails_twice_in_one_step_ends_the_job(
    kind: str, how: str, tmp_path: Path
) -> None:
    settings = json.dumps({"faults": [[1, 20, f"again {kind}"]]})
    end = run(f"--nproc-per-node=2 {IN_PLACE}", TRAINS, tmp_path, SETTINGS=settings)
    assert end.code == (1 if kind == "raise" else 137), end.err
    assert end.err.count("replaced in place") == 1
    assert "rank 1 failed in step 20 again" in end.err
    assert end.err.count("begins") == 0
    assert how in end.err.partition(" failed: ")[2]


def test_it_needs_one_node_and_restarts(tmp_path: Path) -> None:
    end = run("--nproc-per-node=2 --recover=in-place", TRAINS, tmp_path, SETTINGS="{}")
    assert end.code == 2
    assert "--max-restarts" in end.err
