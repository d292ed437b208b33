"""A failure or a hang on one node of two: both launchers name the same rank."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from hangs import PLAIN
from launching import Finished, finish, node_words, start, wait_served, wait_until

STEPS = """
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(3))
print("at", time.time(), flush=True)
"""
WAIT = "\ndist.all_reduce(torch.ones(3))"
KILL = "if rank == 3: os.kill(os.getpid(), signal.SIGKILL)" + WAIT
RAISE = "if rank == 1: raise ValueError('bad')\ntime.sleep(600)"


def _run_nodes(tmp_path: Path, port: int, script: str, ranks: int, *more: str) -> list[Finished]:
    (tmp_path / "train.py").write_text(PLAIN + STEPS + script)
    words = node_words(port, f"--nproc-per-node={ranks}", *more, "train.py")
    nodes = [start(words, tmp_path) for _ in range(2)]
    return [finish(node) for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "cause", "code", "how"),
    [(RAISE, 1, 1, 1, "ValueError: bad"), (KILL, 2, 3, 137, "killed by SIGKILL")],
)
def test_both_nodes_name_the_cause(
    tmp_path: Path, free_port: int, script: str, ranks: int, cause: int, code: int, how: str
) -> None:
    """With `ranks` on each node; rank `cause` is on the second."""
    ends = _run_nodes(tmp_path, free_port, script, ranks)
    ended = time.time()
    for end in ends:
        assert end.code == code, ends
        assert f"paceline: rank {cause} of {2 * ranks} failed: {how}" in end.err.splitlines()
    # One node saw the failure, the other was told.
    assert sum("another node, host" in end.err for end in ends) == 1
    assert sum("see the output of the launcher on host" in end.err for end in ends) == 1
    assert "".join(end.err for end in ends).count("Traceback") == (script is RAISE)
    if ranks == 2:
        # Only the ranks that noticed before they were ended.
        assert all(
            re.search(r"  ranks? [0-2,-]+ failed as a consequence: ", end.err) for end in ends
        ), ends
    assert ended - max(float(at) for e in ends for at in re.findall(r"at ([\d.]+)", e.out)) < 10


EVALUATES = """
def evaluate():
    time.sleep(1), os.kill(os.getpid(), signal.SIGSTOP)
if rank == 3:
    evaluate()
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
def test_a_hang_is_judged_over_both_nodes(tmp_path: Path, free_port: int) -> None:
    ends = _run_nodes(tmp_path, free_port, EVALUATES, 2, "--hang-after=2", "--on-hang=end")
    line = (PLAIN + STEPS + EVALUATES).splitlines().index(
        "    time.sleep(1), os.kill(os.getpid(), signal.SIGSTOP)"
    ) + 1
    for end in ends:
        assert end.code == 1, ends
        assert re.search(
            r"\nhang: ranks 0-2 have waited \d+ s in all_reduce #4 \(f32\[3\]\) at ", end.err
        )
        assert f"has not entered it: stopped (state T) at train.py:{line}" in end.err
        assert "paceline: rank 3 of 4 failed: blocked the other ranks" in end.err
        assert end.err.count("hang:") == 1


GOES_ON = """
if "HOST" not in os.environ:
    open("gone-on", "w").close()
    time.sleep(600)
open("host-ended", "w").close()
"""


@pytest.mark.slow
def test_a_node_whose_ranks_have_ended_reports_the_loss_of_the_other_node(
    tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "train.py").write_text(PLAIN + GOES_ON)
    words = node_words(free_port, "train.py")
    host = start(words, tmp_path, HOST="1")
    assert host.stderr is not None
    assert "waiting for 2 nodes" in host.stderr.readline()
    wait_served(free_port)
    other = start(words, tmp_path)
    for name in ("gone-on", "host-ended"):
        wait_until((tmp_path / name).exists, other)
    other.kill()
    other.communicate()
    end = finish(host)
    assert end.code == 1, end
    lost = f"paceline: {os.uname().nodename} 127.0.0.1: no heartbeat for 3 s"
    assert f"{lost}; the ranks of this node had already ended" in end.err


ENDS_LATE = """
dist.barrier()
if "HOST" not in os.environ:
    open("goes-on", "w").close()
    while not os.path.exists("third"):
        time.sleep(0.05)
    open("whole", "w").close()
"""


@pytest.mark.ci
def test_a_node_that_comes_while_the_job_ends_does_not_begin_it_again(
    tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "train.py").write_text(PLAIN + ENDS_LATE)
    words = node_words(free_port, "--nnodes=2:3", "--rdzv-conf=last_call_timeout=2", "train.py")
    host = start(words, tmp_path, HOST="1")
    wait_served(free_port)
    other = start(words, tmp_path)
    wait_until((tmp_path / "goes-on").exists, other)
    third = start(words, tmp_path)
    assert third.stderr is not None
    assert "waiting for" in third.stderr.readline()
    assert "this node joins at their next restart" in third.stderr.readline()
    (tmp_path / "third").touch()
    ends = [finish(node) for node in (host, other)]
    assert [end.code for end in ends] == [0, 0], ends
    assert (tmp_path / "whole").exists()
    assert "stop and restart" not in ends[0].err + ends[1].err
    assert finish(third).code == 1


LEAVES = "if rank == 1: sys.exit(0)" + WAIT
# A child keeps the connections open, so the other rank does not notice the end.
LEAVES_UNSEEN = """
if rank == 1:
    if os.fork():
        os._exit(0)
    time.sleep(600)
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [False, True])
def test_a_rank_that_ended_on_another_node_is_named(
    tmp_path: Path, free_port: int, unseen: bool
) -> None:
    words = ["--hang-after=2", "--on-hang=end"] if unseen else []
    ends = _run_nodes(tmp_path, free_port, LEAVES_UNSEEN if unseen else LEAVES, 1, *words)
    ended = time.time()
    for end in ends:
        assert end.code == 1, ends
        if unseen:
            assert "\nhang: rank 0 (host " in end.err
            assert "has not entered it: ended with exit code 0\n" in end.err
            assert "\nwhy:  rank 1 finished while the others still run.\n" in end.err
        else:
            said = "paceline: rank 1 ended with exit code 0 while the others went on"
            assert said in end.err.splitlines(), ends
            assert "rank 0 failed as a consequence: it lost its peer" in end.err
            assert "or the cause is on another host" not in end.err
    assert ended - max(float(at) for e in ends for at in re.findall(r"at ([\d.]+)", e.out)) < 15
