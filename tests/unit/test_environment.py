"""Variables of launchers: each set, mixtures of sets, and contradictions."""

from __future__ import annotations

import re

import pytest

from paceline.errors import ConfigError
from paceline.job.environment import RankInfo, read

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


def test_nothing_is_one_process() -> None:
    assert read({"PATH": "/bin"}) == RankInfo(
        launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1
    )


def test_torchrun() -> None:
    place = read(TORCHRUN)
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 3, 4)
    assert (place.local_rank, place.local_world_size) == (1, 2)
    assert place.master == "10.0.0.1:29500"
    assert not place.one_host


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA])
def test_mpi_on_one_host(environ: dict[str, str]) -> None:
    place = read(environ)
    assert (place.launcher, place.rank, place.world_size, place.one_host) == ("mpi", 1, 2, True)
    assert place.master is None


def test_only_what_names_a_job_is_its_key() -> None:
    # OpenMPI 4 has 65,536 names; two jobs of MPICH see the same values of everything.
    one, two = ({**OPEN_MPI, "PMIX_SERVER_URI2": f"1.0;tcp4://127.0.0.1:{port}"} for port in (1, 2))
    assert read(one).job_key == read({**one, "OMPI_COMM_WORLD_RANK": "0"}).job_key
    assert read(one).job_key != read(two).job_key
    assert read({**HYDRA, "HYDI_CONTROL_FD": "7"}).job_key is None
    assert read({**SLURM, "SLURM_STEP_ID": "1"}).job_key != read(SLURM).job_key


def test_prterun_alone_is_refused_because_it_gives_no_world_size() -> None:
    prterun = {"PRTE_LAUNCHED": "1", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1@1"}
    with pytest.raises(ConfigError, match="prterun"):
        read(prterun)
    assert read(prterun | OPEN_MPI).launcher == "mpi"
    assert read(prterun | TORCHRUN).launcher == "torchrun"


SEVERAL_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI_4 = {
    "PMIX_NAMESPACE": "1337327617",
    "OMPI_MCA_orte_hnp_uri": "1337327616.0;tcp://10.0.0.1,10.1.0.1:45909",
    "PMIX_SERVER_URI2": "1337327616.{};tcp4://127.0.0.1:37091",
}
OPEN_MPI_5 = {
    "PMIX_NAMESPACE": "prterun-node-0-22586@1",
    "PMIX_SERVER_URI2": "prterun-node-0-22586@0.{};tcp4://127.0.0.1:44407",
}


@pytest.mark.parametrize(("names", "host"), [(OPEN_MPI_4, "10.0.0.1"), (OPEN_MPI_5, "node-0")])
def test_openmpi_on_several_hosts_meets_on_the_host_of_mpirun(
    names: dict[str, str], host: str
) -> None:
    def on(rank: int, server: int) -> RankInfo:
        served = {"PMIX_SERVER_URI2": names["PMIX_SERVER_URI2"].format(server)}
        local = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2)}
        return read({**SEVERAL_HOSTS, **names, **served, **local})

    first, last = on(0, 0), on(3, 1)
    assert first.master is not None
    assert re.fullmatch(rf"{host}:295[0-5]\d", first.master)
    assert (last.master, last.job_key) == (first.master, first.job_key)
    with pytest.raises(ConfigError, match="name only its own host, and rank 0 is on") as caught:
        on(0, 1)  # as with mpirun on a login node
    assert caught.value.variables == ["MASTER_ADDR", "MASTER_PORT"]
    assert "mpirun -x MASTER_ADDR=" in str(caught.value)


def test_openmpi_4_jobs_of_one_name_do_not_meet() -> None:
    # Its names have 16 bits; the port of mpirun distinguishes the jobs.
    uri = "1337327616.0;tcp://10.0.0.1:{}"
    served = {"PMIX_SERVER_URI2": "1337327616.0;tcp4://127.0.0.1:37091"}
    one, two = (
        read({**SEVERAL_HOSTS, **OPEN_MPI_4, **served, "OMPI_MCA_orte_hnp_uri": uri.format(port)})
        for port in (45909, 45910)
    )
    assert one.job_key != two.job_key
    assert one.master != two.master


@pytest.mark.parametrize(
    "names",
    [
        {"PMIX_NAMESPACE": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::1]:45909"},
        {"PMIX_NAMESPACE": "prte-node-0-22586@1"},  # of a DVM
    ],
)
def test_variables_of_openmpi_that_name_no_host(names: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no name and no IPv4 address of its own host"):
        read({**SEVERAL_HOSTS, **names})


def test_the_user_names_the_address_of_mpi_ranks() -> None:
    named = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read({**SEVERAL_HOSTS, **OPEN_MPI_4, **named}).master == "a:1"
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR="):
        read(SEVERAL_HOSTS)
    hydra = {**HYDRA, "PMI_SIZE": "4"}
    assert read({**hydra, **named}).master == "a:1"
    with pytest.raises(ConfigError, match="mpirun -genv MASTER_ADDR <"):  # MPICH has no -x
        read(hydra)


@pytest.mark.parametrize("launcher", [TORCHRUN, OPEN_MPI, SLURM])
@pytest.mark.parametrize(("host", "port"), [("", "29500"), ("10.0.0.1", "70000"), ("a", "-1")])
def test_what_is_no_address_is_refused(launcher: dict[str, str], host: str, port: str) -> None:
    with pytest.raises(ConfigError, match="are not an address"):
        read({**launcher, "MASTER_ADDR": host, "MASTER_PORT": port})


def test_the_innermost_complete_set_wins() -> None:
    assert read({**SLURM, **TORCHRUN}).launcher == "torchrun"
    assert read({**SLURM, **OPEN_MPI}).launcher == "mpi"
    assert read({**OPEN_MPI, **TORCHRUN}).launcher == "torchrun"


def test_leftovers_of_an_outer_launcher_do_not_spoil_a_complete_set() -> None:
    assert read({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "slurm"
    assert read({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "0"}).launcher == "torchrun"
    # A batch script that exports torchrun's size for its srun: complete is Slurm's set.
    assert read({**SLURM, "WORLD_SIZE": "3"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("whole", "missing"),
    [
        *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
        *((OPEN_MPI, name) for name in OPEN_MPI if name != "PMIX_NAMESPACE"),
    ],
)
def test_an_incomplete_set_is_refused_with_its_missing_name(
    whole: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=missing) as caught:
        read({name: value for name, value in whole.items() if name != missing})
    assert caught.value.variables == [missing]


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


@pytest.mark.parametrize(
    ("whole", "wrong", "variables"),
    [
        (TORCHRUN, {"RANK": "4"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN, {"RANK": "-1"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN, {"WORLD_SIZE": "0"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN, {"LOCAL_RANK": "2"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN, {"RANK": "three"}, ["RANK"]),
        (SLURM, {"WORLD_SIZE": "8"}, ["WORLD_SIZE"]),
    ],
)
def test_contradictions_are_refused(
    whole: dict[str, str], wrong: dict[str, str], variables: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(whole | wrong)
    assert caught.value.variables == variables
