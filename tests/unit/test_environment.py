"""Variables of launchers: each set, mixtures of sets, and contradictions."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.job.environment import read

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[7-8]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "42",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "world_size"),
    [
        ({"PATH": "/bin"}, "none", 0, 1),
        (TORCHRUN, "torchrun", 3, 4),
        (OPEN_MPI, "mpi", 1, 2),
        (HYDRA, "mpi", 1, 2),
        (SLURM, "slurm", 2, 3),
        # The innermost complete set.
        (SLURM | TORCHRUN, "torchrun", 3, 4),
        (SLURM | OPEN_MPI, "mpi", 1, 2),
        (OPEN_MPI | TORCHRUN, "torchrun", 3, 4),
        # Leftovers of an outer launcher.
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, "slurm", 2, 3),
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "0"}, "torchrun", 3, 4),
        # The launcher counts, not what a script exports.
        (SLURM | {"WORLD_SIZE": "8"}, "slurm", 2, 3),
    ],
)
def test_the_place_of_a_rank(
    environ: dict[str, str], launcher: str, rank: int, world_size: int
) -> None:
    place = read(environ)
    assert (place.launcher, place.rank, place.world_size) == (launcher, rank, world_size)
    local = {"none": (0, 1), "torchrun": (1, 2), "mpi": (1, 2), "slurm": (0, 1)}[launcher]
    assert (place.local_rank, place.local_world_size) == local
    assert place.one_host == (launcher in ("none", "mpi"))
    assert place.master == {"torchrun": "10.0.0.1:29500", "slurm": place.master}.get(launcher)


def test_only_what_names_a_job_is_its_key() -> None:
    # OpenMPI 4 has 65,536 names; two jobs of MPICH see the same values of everything.
    one, two = ({**OPEN_MPI, "PMIX_SERVER_URI2": f"1.0;tcp4://127.0.0.1:{port}"} for port in (1, 2))
    assert read(one).job_key == read({**one, "OMPI_COMM_WORLD_RANK": "0"}).job_key
    assert read(one).job_key != read(two).job_key
    assert read({**HYDRA, "HYDI_CONTROL_FD": "7"}).job_key is None
    assert read({**SLURM, "SLURM_STEP_ID": "1"}).job_key != read(SLURM).job_key


def _without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


SEVERAL_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}


def test_the_user_names_the_address_of_mpi_ranks() -> None:
    named = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    one, two = (read({**SEVERAL_HOSTS, **named, "PMIX_SERVER_URI2": uri}) for uri in ("1", "2"))
    assert one.master == two.master == "a:1"
    assert one.job_key == two.job_key  # each host has a server of its own
    assert read({**HYDRA, "PMI_SIZE": "4", **named}).master == "a:1"


def test_the_ranks_of_each_host_are_not_guessed() -> None:
    """With two hosts of two ranks, ranks 0 and 1 would take all four for ranks of one host."""
    by_hand = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    for rank in ("0", "1", "2", "3"):
        with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not set") as caught:
            read(by_hand | {"RANK": rank, "LOCAL_RANK": str(int(rank) % 2)})
        assert caught.value.variables == ["LOCAL_WORLD_SIZE"]
        assert read(
            by_hand | {"LOCAL_RANK": rank, "RANK": rank, "MASTER_ADDR": "localhost"}
        ).one_host
    assert read(by_hand | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).local_world_size == 1


PLACE, ADDRESS = ["RANK", "WORLD_SIZE", "LOCAL_RANK"], ["MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize(
    ("environ", "variables", "text"),
    [
        *(
            (TORCHRUN | wrong, PLACE, "contradict")
            for wrong in (
                {"RANK": "4"},
                {"RANK": "-1"},
                {"WORLD_SIZE": "0"},
                {"LOCAL_RANK": "2"},
                {"LOCAL_WORLD_SIZE": "5"},
            )
        ),
        (TORCHRUN | {"RANK": "three"}, ["RANK"], "is not a whole number"),
        *(
            (launcher | {"MASTER_ADDR": host, "MASTER_PORT": port}, ADDRESS, "are not an address")
            for launcher in (TORCHRUN, OPEN_MPI, SLURM)
            for host, port in (("", "29500"), ("10.0.0.1", "70000"), ("a", "0"))
        ),
        *(
            (_without(TORCHRUN, name), [name], name)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        ),
        *((_without(OPEN_MPI, name), [name], name) for name in OPEN_MPI if "OMPI" in name),
        (SEVERAL_HOSTS, ADDRESS, "mpirun -x MASTER_ADDR="),
        (HYDRA | {"PMI_SIZE": "4"}, ADDRESS, "mpirun -genv MASTER_ADDR <"),  # MPICH has no -x
    ],
)
def test_what_is_refused(environ: dict[str, str], variables: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        read(environ)
    assert caught.value.variables == variables
