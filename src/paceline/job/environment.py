"""Read rank, world size and rendezvous from the environment variables of a launcher.

Pure: the environment is an argument. The innermost complete set of variables is used, in the order
torchrun (or `paceline run`), MPI, Slurm step; so `srun torchrun` is torchrun. A set that is incomplete or
contradicts itself is an error that names the variables. Without any set the job has one process.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.job import slurm
from paceline.job.network import is_loopback

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH and Intel MPI
DRY_RUN_VARIABLE = "PACELINE_DRY_RUN"
DRY_RUN = "dry run"  # the launcher of a rank whose peers do not exist
FIREWALL_PORTS = slurm.PORTS


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank, world size and rendezvous of this process, from its launcher.

    Attributes:
        master: "host:port" of the store, if the launcher or the user named it. Without it the ranks of one
            host compute a port of the loopback.
        job_key: identifies the job: on one host, or on all if they compute the port of `master`. None if the
            launcher names no job (MPICH); on one host the process that started the rank identifies it then.
        restarts: how often the launcher has restarted the job.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str | None = None
    job_key: str | None = None
    restarts: int = 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size


def read(environ: Mapping[str, str]) -> RankInfo:
    """Read the environment of this process.

    Raises:
        ConfigError: a set of variables is incomplete, malformed, or contradicts itself.
    """
    for names in (OPEN_MPI, HYDRA):
        _refuse_partial(environ, names, names[:2])
    if all(name in environ for name in TORCHRUN):
        return _torchrun(environ)
    for names, build in ((OPEN_MPI, _open_mpi), (HYDRA, _hydra)):
        if all(name in environ for name in names):
            return build(environ)
    step = slurm.read_rank(environ)
    if step is not None:
        return _slurm(environ, step)
    _refuse_partial(environ, TORCHRUN, ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return RankInfo(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)


def _refuse_partial(
    environ: Mapping[str, str], names: tuple[str, ...], required_by: tuple[str, ...]
) -> None:
    have = [name for name in names if name in environ]
    missing = [name for name in names if name not in environ]
    # Inside a Slurm step or torchrun some variables of an outer MPI may be set; they do not apply here.
    # A shell of `srun --pty` has the variables of its own step.
    inner = all(name in environ for name in TORCHRUN)
    inner = inner or slurm.in_step(environ) or slurm.is_pty_shell(environ)
    if missing and any(name in environ for name in required_by) and not inner:
        raise ConfigError(
            f"the launcher's variables are incomplete: {', '.join(have)} set, "
            f"{', '.join(missing)} missing.",
            fix="start with `paceline run`, torchrun, mpirun or srun; or unset "
            f"{', '.join(have)} for a single process.",
            variables=missing,
        )


def _torchrun(environ: Mapping[str, str]) -> RankInfo:
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK")
    if environ.get(DRY_RUN_VARIABLE) == "1":
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
        return RankInfo(
            launcher=DRY_RUN,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing and world_size > 1:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: there is no rendezvous.",
            fix="start with `paceline run` or torchrun, or set them to the host and a free port of "
            "rank 0.",
            variables=missing,
        )
    master = None if missing else _named_master(environ)
    if "LOCAL_WORLD_SIZE" in environ:
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
    elif world_size == 1 or is_loopback(environ["MASTER_ADDR"]):
        local_world_size = world_size  # the user set the variables, and all ranks are on this host
    else:
        # A guess from one rank's variables could differ between ranks, which then hang.
        raise ConfigError(
            "LOCAL_WORLD_SIZE is not set, and MASTER_ADDR may be the address of another host.",
            why="all ranks must know how many of them are on each host.",
            fix="start with `paceline run` or torchrun; or set LOCAL_WORLD_SIZE to the number of ranks on "
            "this host, or MASTER_ADDR to 127.0.0.1 if all ranks are on one host.",
            variables=["LOCAL_WORLD_SIZE"],
        )
    return _checked(
        RankInfo(
            launcher="torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master=master,
            restarts=_integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        ),
        TORCHRUN,
    )


def _open_mpi(environ: Mapping[str, str]) -> RankInfo:
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    # On one host, where the key gives the port of the store: OpenMPI 4 hashes its names to 16 bits, and the
    # port of its server, one for each host, distinguishes jobs of one time.
    server = environ.get("PMIX_SERVER_URI2", "")
    one_host = environ[OPEN_MPI[1]] == environ[OPEN_MPI[3]]
    job_key = f"{name} {server}" if name and one_host else name
    return _mpi(environ, OPEN_MPI, job_key, option="-x {}={}")


def _hydra(environ: Mapping[str, str]) -> RankInfo:
    # No variable of Hydra names the job: HYDI_CONTROL_FD is 7 in all of them.
    return _mpi(environ, HYDRA, None, option="-genv {} {}")


def computed_port(job: str, ports: tuple[int, int] = FIREWALL_PORTS) -> int:
    """A port for the job with this name, which all ranks compute without communication.

    Args:
        ports: The first and the last that may be chosen.
    """
    low, high = ports
    return low + zlib.crc32(job.encode()) % (high - low + 1)


def _mpi(
    environ: Mapping[str, str], names: tuple[str, ...], job_key: str | None, *, option: str
) -> RankInfo:
    """A rank of MPI.

    Args:
        option: How this mpirun sets a variable of its ranks, with `{}` for the name and for the value.

    Raises:
        ConfigError: the ranks are on several hosts, and MASTER_ADDR is not set.
    """
    master = _named_master(environ)
    rank, world_size, local_rank, local_world_size = (_integer(environ, name) for name in names)
    if master is None and world_size != local_world_size:
        address = option.format("MASTER_ADDR", "<host of rank 0>")
        port = option.format("MASTER_PORT", 29500)
        raise ConfigError(
            "MPI ranks on several hosts do not know the host of rank 0.",
            why="mpirun tells no rank the host of another one.",
            fix=f"mpirun {address} {port} ...",
            variables=["MASTER_ADDR", "MASTER_PORT"],
        )
    return _checked(
        RankInfo(
            launcher="mpi",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master=master,
            job_key=job_key,
        ),
        names,
    )


def _slurm(environ: Mapping[str, str], step: slurm.SlurmStep) -> RankInfo:
    master = _named_master(environ)
    if master is None and len(step.tasks) > 1:
        master = step.endpoint
    return _checked(
        RankInfo(
            launcher="slurm",
            rank=step.rank,
            world_size=sum(step.tasks),
            local_rank=step.local_rank,
            local_world_size=step.tasks[step.node_rank],
            master=master,
            job_key=step.key,
            restarts=step.restarts,
        ),
        slurm.NEEDED[:3],
    )


def _named_master(environ: Mapping[str, str]) -> str | None:
    have = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ]
    if len(have) == 1:
        raise ConfigError(
            f"{have[0]} is set, but not the other of MASTER_ADDR and MASTER_PORT; set both or none.",
            variables=["MASTER_ADDR", "MASTER_PORT"],
        )
    if not have:
        return None
    host, port = environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT")
    if not host or not 1 <= port < 1 << 16:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port} are not an address.",
            fix="set them to the host of rank 0, and a port from 1 to 65535 that is free there.",
            variables=["MASTER_ADDR", "MASTER_PORT"],
        )
    return f"{host}:{port}"


def _integer(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if name not in environ and default is not None:
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"{name}={environ[name]!r} is not a whole number.", variables=[name]
        ) from None


def _checked(info: RankInfo, names: tuple[str, ...]) -> RankInfo:
    ok = (
        info.world_size >= 1
        and 0 <= info.rank < info.world_size
        and 0 <= info.local_rank < info.local_world_size <= info.world_size
    )
    if not ok:
        raise ConfigError(
            f"the launcher's variables contradict each other: rank {info.rank} of "
            f"{info.world_size}, local rank {info.local_rank} of {info.local_world_size}.",
            fix=f"check {', '.join(names)}; unset those that an outer launcher set.",
            variables=list(names),
        )
    return info
