"""A Slurm cluster of this host: its own munge key, controller, and one slurmd for each node.

The nodes are called by addresses such as 127.5.7.2, which need no entry in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from launching import environment, unused_port

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
# They take the places of GPUs: Slurm wants that the files exist.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "stdin")

# A job that was requeued starts again after cred_expire seconds. A job of the partition `urgent` preempts one
# of `all`, which has the same nodes.
_CONFIGURATION = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,sched_min_interval=0
"""
_PARTITIONS = """
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The nodes of a running cluster, and commands for it.

    Attributes:
        nodes: their names.
        variables: the environment variables that Slurm's commands need.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.nodes = list(nodes)
        self.variables = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            # For the `paceline` of a batch script.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def serve(self, name: str, words: Sequence[str]) -> None:
        """Start a daemon, which stays in the foreground."""
        with (self.folder / "log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                words, stdout=log, stderr=log, cwd=self.folder, env=os.environ | self.variables
            )

    def serve_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        configuration = str(self.folder / "slurm.conf")
        self.serve(node, [find("slurmd"), "-N", node, "-D", "-f", configuration])

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """The output of a command of Slurm, which must succeed."""
        done = subprocess.run(
            words,
            env=environment(**self.variables),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch script from its folder; the number of the job."""
        return self.command(
            "sbatch", "--parsable", *options, script.name, cwd=script.parent
        ).strip()

    def check(self, script: Path, *options: str) -> str:
        """What `sbatch --test-only` says of a script; it submits nothing."""
        done = subprocess.run(
            ["sbatch", "--test-only", *options, str(script)],
            env=environment(**self.variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        text = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait_state(self, number: str, *states: str, timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until the job has one of these states; what the controller knows of it then."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, (states, job, self.log())
            time.sleep(0.1)
        return job

    def kill_node(self, node: str) -> None:
        """Kill the slurmd of a node and all that it started, as when the machine is switched off."""
        own = self.daemons[node]
        # slurmstepd leaves the tree of its slurmd; its title has the job, and its log the node.
        doomed = [psutil.Process(own.pid)]
        for process in psutil.process_iter(["name", "environ"]):
            variables = process.info["environ"] or {}
            if variables.get("SLURM_CONF") == self.variables["SLURM_CONF"] and (
                variables.get("SLURMD_NODENAME") == node
            ):
                doomed.append(process)
                with contextlib.suppress(psutil.Error):
                    doomed += [p for p in process.parents() if p.name() == "slurmstepd"]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        own.wait()

    def end(self) -> None:
        """End the daemons, and what they have started."""
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in reversed(self.daemons.values()):
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # A slurmstepd outlives its slurmd, and waits for it.
        for process in psutil.process_iter(["environ"]):
            variables = process.info["environ"] or {}
            if variables.get("SLURM_CONF") == self.variables["SLURM_CONF"]:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def log(self) -> str:
        """The end of what the daemons said."""
        return "".join(file.read_text()[-1500:] for file in sorted(self.folder.glob("*log")))

    def is_idle(self) -> bool:
        """Whether all nodes are up and have no job."""
        words = ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%T"]
        done = subprocess.run(
            words, env=os.environ | self.variables, capture_output=True, text=True, timeout=10
        )
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def wait_idle(self) -> None:
        """Wait until all nodes are free."""
        self.wait(self.is_idle)

    def wait(self, until: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Wait until this is true."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)


def find(name: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (.ci/packages installs it)")
    return found


@contextlib.contextmanager
def cluster(folder: Path, count: int) -> Iterator[Cluster]:
    """Start a cluster of this many nodes; skips the test where the daemons are not installed.

    Each node has 8 cores and 8 GPUs for Slurm, whatever this host has.
    """
    if os.getuid() != 0:
        pytest.skip("only root can start Slurm's daemons")
    munged, slurmctld, _, _ = (find(name) for name in DAEMONS)
    host = socket.gethostname().partition(".")[0]
    # Jobs of two clusters may have the same number, and so the same port.
    network = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
    nodes = [f"{network}.{number + 2}" for number in range(count)]
    configuration = _CONFIGURATION.format(host=host, folder=folder, port=unused_port())
    for node in nodes:
        configuration += (
            f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={unused_port()} CPUs=8 "
            f"Gres=gpu:{len(_DEVICES)} State=UNKNOWN\n"
        )
    (folder / "slurm.conf").write_text(configuration + _PARTITIONS)
    (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in _DEVICES))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    options = ("socket=munge.socket", "key-file=key", "pid-file=munge.pid", "log-file=munge.log")
    named = [f"--{o.replace('=', f'={folder}/')}" for o in (*options, "seed-file=munge.seed")]
    made = Cluster(folder, nodes)
    try:
        made.serve("munged", [munged, "--foreground", "--force", *named])
        made.wait(lambda: (folder / "munge.socket").exists())
        made.serve("slurmctld", [slurmctld, "-c", "-D", "-f", str(folder / "slurm.conf")])
        for node in nodes:
            made.serve_node(node)
        made.wait_idle()
        yield made
    finally:
        made.end()
