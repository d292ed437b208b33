"""`paceline run` on several hosts: network namespaces with their own addresses, names and /etc/hosts."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from hosts import hosts, needs_firewall, needs_hosts
from launching import Finished, finish, run, wait_until
from scripts import training_script

pytestmark = needs_hosts

MEET = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, round = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 3 and "--fail" in sys.argv and round == 0:
    raise ValueError("once")
total = torch.ones(3) * rank
dist.all_reduce(total)
names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
print("met", rank, os.uname().nodename, total[0].item(), *[os.environ.get(n) for n in names], flush=True)
dist.destroy_process_group()
"""


def _met(out: str) -> list[str]:
    return sorted(line.partition("met ")[2] for line in out.splitlines() if "met " in line)


@pytest.mark.ci
def test_two_hosts_with_debian_names_meet_restart_and_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    with hosts(2) as made:
        words = [
            "--nnodes=2",
            "--nproc-per-node=2",
            "--max-restarts=1",
            f"--host={made.address(1)}",
        ]
        # The node with number 0 has the higher address: numbers of the user count more than addresses.
        ends = made.run(
            [*words, "train.py", "--fail"],
            tmp_path,
            by_host={0: ["--node-rank=1"], 1: ["--node-rank=0"]},
        )
        assert [end.code for end in ends] == [0, 0], ends
        pinned = "6.0 eth0 eth0 eth0"
        assert _met(ends[1].out) == [f"{rank} node1 {pinned}" for rank in (0, 1)]
        assert _met(ends[0].out) == [f"{rank} node0 {pinned}" for rank in (2, 3)]
        assert "use eth0 (10.77.0.2), which has the address of 10.77.0.2" in ends[1].err
        assert "use eth0 (10.77.0.1), which leads to 10.77.0.2" in ends[0].err
        for end in ends:
            line = r"rank 3 failed: ValueError: once at \S*train.py:6 .*\(host node0, .*; restart 1 of 1"
            assert re.search(line, end.err), end.err


JOINS = """
import torch, torch.distributed as dist, torch.distributed.rpc, paceline
with paceline.join(device="cpu", timeout_s=20) as job:
    total = torch.ones(1)
    dist.all_reduce(total, group=job.group)
    with paceline.rpc(job, timeout_s=20) as names:
        assert dist.rpc.rpc_sync(names[1 - job.rank], torch.add, args=(total, 0)) == total
    print("sum", total.item())
"""
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "{}",
    "SLURM_NODEID": "{}",
}
NAMED = {
    "RANK": "{}",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29600",
}


def _run_jobs(cwd: Path, words: list[str], *jobs: dict[str, str]) -> list[Finished]:
    """Run these words on two hosts for each job; the number of a host replaces `{}` in the variables."""
    with hosts(2, {1: "10.77.0.1 node0"}) as made:
        running = [
            made.spawn(n, words, cwd, **{key: text.format(n) for key, text in job.items()})
            for job in jobs
            for n in range(2)
        ]
        return [finish(process) for process in running]


@pytest.mark.ci
def test_ranks_meet_at_a_host_whose_own_name_is_a_loopback_address(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOINS)
    ends = _run_jobs(tmp_path, [sys.executable, "train.py"], STEP, NAMED)
    assert [end.out for end in ends] == ["sum 2.0\n"] * 4, ends


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mpich", "openmpi"])
@pytest.mark.ci
def test_mpi_ranks_of_two_hosts(tmp_path: Path, kind: str, backend: str) -> None:
    if backend == "mpi" and not importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    launcher, option, slots = {
        "openmpi": (
            "mpirun.openmpi -x MASTER_ADDR=10.77.0.1 -x MASTER_PORT=29500 --allow-run-as-root "
            "--mca plm_rsh_agent",
            "--host",
            ":1",
        ),
        "mpich": (
            "mpiexec.hydra -genv MASTER_ADDR 10.77.0.1 -genv MASTER_PORT 29500 -launcher-exec",
            "-hosts",
            "",
        ),
    }[kind]
    name, *words = launcher.split()
    # mpi4py's wheel loads the library of the launcher that is beside Python, or else this one.
    own = str(Path(sys.executable).parent) if (kind, backend) == ("mpich", "mpi") else None
    found = shutil.which(name, path=own)
    if found is None:
        pytest.skip(f"{name} is not installed (.ci/packages installs it; pip install mpich)")
    more = {"MPI4PY_LIBMPI": "libmpi.so.40"} if kind == "openmpi" else {}
    # A process may join again. A file for each rank, because mpiexec mixes the lines of its ranks.
    writes = 'print("sum", total.item(), file=open(f"{job.rank}.txt", "a"))'
    (tmp_path / "train.py").write_text(JOINS.replace('print("sum", total.item())', writes) * 2)
    with hosts(2) as made:
        addresses = ",".join(made.address(n) + slots for n in range(2))
        words = [found, *words, made.remote_shell(tmp_path), option, addresses, "-n", "2"]
        job = made.spawn(
            0, [*words, sys.executable, "train.py"], tmp_path, PACELINE_BACKEND=backend, **more
        )
        end = finish(job)
    assert end.code == 0, end
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["sum 2.0\n" * 2] * 2


@pytest.mark.slow
def test_what_keeps_a_node_from_the_others_is_a_sentence(tmp_path: Path) -> None:
    """Each of these nodes waits for a rendezvous that it cannot reach; all at once, to save time."""
    (tmp_path / "train.py").write_text(MEET)
    # A namespace has no other program, so no port of it is open.
    names = {1: "127.0.0.1 node0"}
    cases = {
        0: (["--host=nowhere"], "the name nowhere does not resolve on node0"),
        # It would have to listen on all interfaces.
        4: (["--host=nowhere", "--node-rank=0"], "the name nowhere does not resolve on node4"),
        1: (
            ["--host=node0", "--node-rank=1"],
            "the name node0 resolves to 127.0.0.1 on node1, which is node1 itself",
        ),
        2: (
            ["--host=10.77.0.1"],
            "10.77.0.1 answers, and no process of the job listens on port 29400",
        ),
        3: (["--host=192.168.7.7"], "Network is unreachable"),
    }
    with hosts(5, names) as made:
        nodes = [
            made.start(n, ["run", "--nnodes=2", *words, "train.py"], tmp_path)
            for n, (words, _) in cases.items()
        ]
        for node, (_, sentence) in zip(nodes, cases.values(), strict=True):
            assert node.stderr is not None
            lines = [node.stderr.readline()]  # waiting for 2 nodes
            began = time.monotonic()
            lines += [node.stderr.readline() for _ in range(2)]
            assert time.monotonic() - began < 15
            assert "still waiting for the rendezvous at" in lines[1], lines
            assert sentence in lines[1], lines
            assert lines[2].startswith("  fix:   "), lines
        for node in nodes:
            node.terminate()
            assert finish(node).code == 143


@pytest.mark.slow
@needs_firewall
def test_a_firewall_that_drops_packets_is_named_and_an_open_range_is_enough(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEET)
    table = "add table inet test; add chain inet test in { type filter hook input priority 0; policy drop; };"
    accept = [f"add rule inet test in {what} accept" for what in ("iif lo", "ct state established")]
    ports = "add rule inet test in tcp dport 29499-29550 accept"
    with hosts(2) as made:
        for node in range(2):
            made.call(node, "nft", ";".join([table, *accept]))
            made.call(node, "sysctl", "-qw", "net.ipv4.ip_local_port_range=29500 29550")
        words = ["--nnodes=2", f"--host={made.address(0)}:29499", "train.py"]
        nodes = [made.start(n, ["run", *words], tmp_path) for n in range(2)]
        assert nodes[1].stderr is not None
        lines = [nodes[1].stderr.readline() for _ in range(2)]
        assert "10.77.0.1 does not answer on port 29499" in lines[1], lines
        for node in range(2):
            made.call(node, "nft", ports)
        ends = [finish(node) for node in nodes]
        assert [end.code for end in ends] == [0, 0], ends
        assert [len(_met(end.out)) for end in ends] == [1, 1]
        assert re.search(r"store 10\.77\.0\.1:295[0-5]\d", ends[0].err)


@pytest.mark.slow
def test_nodes_that_differ_or_are_missing_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(MEET + f"# {name}\n")
    with hosts(3) as made:
        words = ["run", "--nnodes=4", f"--host={made.address(0)}", "train.py"]
        first = made.start(0, [*words[:1], "--node-rank=0", *words[1:]], tmp_path / "a")
        second = made.start(1, [*words[:1], "--node-rank=3", *words[1:]], tmp_path / "a")
        assert first.stderr is not None
        lines = [first.stderr.readline() for _ in range(2)]
        other = finish(made.start(2, words, tmp_path / "b"))
        assert other.code == 1
        assert "train.py on node2 (10.77.0.3) is not the train.py of node0 (10.77.0.1)" in other.err
        # A second launcher of the same host, as of another job, cannot take part by mistake.
        taken = finish(made.start(0, words, tmp_path / "a"))
        assert taken.code == 2
        assert "cannot listen on 10.77.0.1:29400: Address already in use" in taken.err
        assert re.search(r"why: +the port is taken by pid \d+ \(.*paceline run", taken.err)
        lines.append(first.stderr.readline())
        here = "2 of 4 nodes are here (node 0: node0 10.77.0.1, node 3: node1 10.77.0.2)"
        assert any(f"{here}; missing: nodes 1, 2" in line for line in lines), lines
        assert re.search(r"A node was refused at [\d:]{8}: train.py on node2", lines[-1]), lines
        for node in (first, second):
            node.terminate()
            finish(node)


@pytest.mark.slow
def test_a_folder_that_another_host_does_not_see_is_refused(tmp_path: Path) -> None:
    script = training_script('print("step", step.number, flush=True)', checkpoints="sys.argv[1]")
    (tmp_path / "train.py").write_text(script)
    run = tmp_path / "run"
    run.mkdir()
    with hosts(2) as made:
        words = f"-m paceline run --nnodes=2 --host={made.address(0)} train.py {run}"
        own_disk = f"mount -t tmpfs none {run} && exec {sys.executable} {words}"
        nodes = [made.spawn(n, ["sh", "-c", own_disk], tmp_path) for n in range(2)]
        ends = [finish(node) for node in nodes]
    assert [end.code for end in ends] == [70, 70]
    said = f"ranks do not share {run}: rank 0 does not see what rank 1 has just written there."
    text = "".join(end.err for end in ends)  # the first of both launchers tells all
    assert said in text
    assert "use storage that all hosts share" in text
    assert not any("step" in end.out for end in ends)


GOES_ON = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print("round", world, time.monotonic(), flush=True)
while True:
    word = torch.zeros(1)
    if os.path.exists("end"):
        word += 1
    dist.all_reduce(word)
    open(f"step{os.uname().nodename}", "w").write(f"{world} {time.monotonic()}")
    time.sleep(0.01)
    if word > 0:
        break
print("ended", world, flush=True)
dist.destroy_process_group()
"""


def _wait_world(path: Path, world: int, since: float = 0.0, deadline_s: float = 40.0) -> float:
    """Wait until a host has made a step with so many ranks after `since`; returns when."""

    def made_at() -> float:
        words = path.read_text().split() if path.exists() else []
        is_new = len(words) == 2 and int(words[0]) == world and float(words[1]) > since
        return float(words[1]) if is_new else 0.0

    return float(wait_until(made_at, deadline_s=deadline_s))


@pytest.mark.slow
def test_a_node_of_a_second_job_at_the_same_endpoint_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOES_ON)
    with hosts(3) as made:
        words = ["run", "--nnodes=2", f"--host={made.address(0)}", "train.py"]
        first = [made.start(n, words, tmp_path) for n in range(2)]
        _wait_world(tmp_path / "stepnode0", 2)
        other = made.start(2, words, tmp_path)
        assert other.stderr is not None
        began = time.monotonic()
        lines = [other.stderr.readline() for _ in range(2)]
        assert time.monotonic() - began < 15
        assert "2 of 2 nodes are here" in lines[1], lines
        assert "If they are another job, give this one another port" in lines[1], lines
        (tmp_path / "end").touch()
        assert [finish(node).code for node in first] == [0, 0]
        end = finish(other)
        assert end.code == 1
        assert "If that was another job, give this one another port." in end.err, end


@pytest.mark.slow
def test_a_cut_cable_costs_nothing_if_it_is_short_and_a_restart_if_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOES_ON)
    step = tmp_path / "stepnode0"
    with hosts(2) as made:
        words = ["run", "--nnodes=1:2", "--max-restarts=5", f"--host={made.address(0)}"]
        words += ["--rdzv-conf=last_call_timeout=20", "train.py"]
        first, second = [made.start(n, words, tmp_path) for n in range(2)]
        _wait_world(step, 2)
        made.cut(1)
        time.sleep(1)  # the cable is cut for so long
        made.heal(1)
        _wait_world(step, 2, since=time.monotonic())
        made.cut(1)
        cut_at = time.monotonic()
        assert first.stderr is not None
        while "no heartbeat" not in (line := first.stderr.readline()):
            assert line
        assert time.monotonic() - cut_at < 6
        assert "node1 10.77.0.2: no heartbeat for 3 s; restart 1 of 5 begins" in line
        _wait_world(step, 1, since=cut_at)
        made.heal(1)
        _wait_world(step, 2, since=time.monotonic())
        (tmp_path / "end").touch()
        ends = [finish(first), finish(second)]
        assert [end.code for end in ends] == [0, 0], ends
        # One round before the long cut, which the short one did not end; then alone; then both again.
        assert re.findall(r"round (\d)", ends[0].out) == ["2", "1", "2"], ends
        assert "ended 2" in ends[1].out


@pytest.mark.slow
def test_a_signal_ends_a_node_whose_rendezvous_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOES_ON)
    with hosts(2) as made:
        words = ["run", "--nnodes=2", f"--host={made.address(0)}", "train.py"]
        host, other = [made.start(n, words, tmp_path) for n in range(2)]
        _wait_world(tmp_path / "stepnode1", 2)
        made.cut(0)
        time.sleep(2)  # its launcher has asked the rendezvous meanwhile
        other.terminate()
        end = finish(other, 20)
        assert end.code == 143, end
        host.terminate()
        finish(host)


@pytest.mark.slow
def test_a_node_that_is_killed_comes_back_and_a_late_one_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOES_ON)
    step = tmp_path / "stepnode0"
    with hosts(3) as made:
        words = ["run", "--nnodes=2:3", "--max-restarts=9", f"--host={made.address(0)}", "train.py"]
        nodes = [made.start(n, words, tmp_path) for n in range(2)]
        _wait_world(step, 2, deadline_s=60)  # torch's last call for more nodes takes 30 s
        nodes.append(made.start(2, words, tmp_path))
        _wait_world(step, 3)
        nodes[1].kill()
        nodes[1].communicate()
        _wait_world(step, 2, since=time.monotonic())
        nodes[1] = made.start(1, words, tmp_path)
        _wait_world(step, 3, since=time.monotonic())
        (tmp_path / "end").touch()
        ends = [finish(node) for node in nodes]
        assert [end.code for end in ends] == [0, 0, 0], ends


NOTES = """
def note(what):
    with open(f"{what}-{os.uname().nodename}", "a") as file:
        file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step.number}\\n")
"""
TRAINS = training_script(
    'note("done"); time.sleep(0.1 * os.path.exists("slow"))',
    before=NOTES,
    before_update='note("began")',
    checkpoints='"kept", every_steps=20',
    options="reproducible=True",
    epochs=10,
)


def _steps(folder: Path, what: str) -> list[tuple[int, int]]:
    """The round and step of each line that the ranks of all hosts have written, in order."""
    texts = [path.read_text() for path in folder.glob(f"{what}-*")]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return sorted((int(number), int(step)) for number, step in lines)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of one process: the weights."""
    done = run("", TRAINS, tmp_path_factory.mktemp("undisturbed"))
    assert done.code == 0, done
    return done.out


@pytest.mark.parametrize(
    ("lost", "node"),
    [
        pytest.param("launcher", 1, marks=pytest.mark.ci),
        pytest.param("host", 1, marks=pytest.mark.ci),
        pytest.param("cable and host", 1, marks=pytest.mark.slow),
        pytest.param("launcher", 0, marks=pytest.mark.slow),
        pytest.param("cable and host", 0, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_a_lost_launcher_or_host_costs_at_most_the_steps_since_the_last_save(
    tmp_path: Path, undisturbed: str, lost: str, node: int
) -> None:
    """If host 0 is left, which serves the job's store, its rank saves the last step of all."""
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "slow").touch()
    with hosts(2) as made:
        words = ["run", "--nnodes=1:2", "--max-restarts=3", f"--host={made.address(0)}"]
        words += ["--rdzv-conf=last_call_timeout=5", "train.py"]
        nodes = [made.start(n, words, tmp_path) for n in range(2)]
        wait_until(lambda: _steps(tmp_path, "done")[-1:] >= [(0, 30)], *nodes)
        if "cable" in lost:
            made.cut(node)
        if lost == "launcher":
            nodes[node].kill()
        else:
            made.kill_all(node)
        nodes[node].communicate()
        (tmp_path / "slow").unlink()
        end = finish(nodes[1 - node], 150)  # a silent rendezvous counts as lost after a minute
        before = [step for number, step in _steps(tmp_path, "done") if number == 0][-1]
        if node == 0:
            assert end.code == 69, end
            for path in tmp_path.glob("began-*"):
                path.unlink()
            first = made.start(1, ["run", "train.py"], tmp_path)
            end = finish(first)
        assert end.code == 0, end
    again = next(step for number, step in _steps(tmp_path, "began") if node == 0 or number == 1)
    assert again <= before + 1
    assert again == (before // 20 * 20 if node == 0 else before) + 1
    assert end.out.splitlines()[-1] == undisturbed.splitlines()[-1]
