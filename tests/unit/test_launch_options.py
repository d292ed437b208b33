"""The options of `paceline run`, and the check of its script."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from paceline.command_line import check_script
from paceline.errors import ConfigError
from paceline.launch.options import parser, read_options


@pytest.mark.parametrize("before", [[], ["--nproc-per-node=2", "--max-restarts", "1", "-r3"]])
@pytest.mark.parametrize("script", [["train.py"], ["-m", "package.train"], ["--", "train"]])
def test_all_words_after_the_script_are_its_own(before: list[str], script: list[str]) -> None:
    # Abbreviations of the launcher's options, its own names, its words, and what argparse would take away.
    words = "--logs x --n 2 --max 3 --host=h -m -x -- --nnodes 7 --help train.py"
    read = read_options([*before, *script, *words.split()])
    assert read.args.training_script == script[-1]
    assert read.args.training_script_args == words.split()
    assert read.args.module == (script[0] == "-m")
    assert (read.args.nproc_per_node, read.args.max_restarts) == (("2", 1) if before else ("1", 0))


@pytest.mark.parametrize(
    "name", ["-n", "--nproc", "--nprocs", "--num-processes", "--num_processes"]
)
def test_the_number_of_ranks_has_the_names_of_other_launchers(name: str) -> None:
    for words in ([name, "3"], [f"{name}=3"] if name.startswith("--") else [f"{name}3"]):
        assert read_options([*words, "train.py"]).args.nproc_per_node == "3"


@pytest.mark.parametrize(
    ("variable", "options", "expected"),
    [
        (None, [], (5, 30)),
        ("120", [], (5, 120)),  # a rank that hangs does not delay a restart for so long
        ("2", [], (2, 2)),
        ("120", ["--shutdown-timeout=60"], (60, 60)),
    ],
)
def test_how_long_ranks_may_take_to_end(
    variable: str | None,
    options: list[str],
    expected: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    read = read_options([*options, "train.py"])
    assert (read.grace_s(may_save=False), read.grace_s(may_save=True)) == expected


@pytest.mark.parametrize("value", ["abc", "-5", "0.5", "nan", ""])
def test_the_variable_of_the_shutdown_timeout_is_checked(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
    said = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be a whole number of seconds, and is {value!r}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_options(["train.py"])


def test_the_interpreter_of_the_ranks_is_the_one_of_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    assert read_options(["train.py", "-x"]).command_of(0)[0] == "/opt/python"


def test_devices_that_are_missing_name_the_way_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="gpu cannot be used here: Cuda is not") as raised:
        read_options(["--nproc-per-node=gpu", "train.py"])
    assert "`cpu`" in str(raised.value)


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.1", "10.0.0.1:29400"),
        ("node0:1234", "node0:1234"),
        ("fd00::1", "[fd00::1]:29400"),
        ("[fd00::1]", "[fd00::1]:29400"),
        ("[fd00::1]:1234", "[fd00::1]:1234"),
    ],
)
def test_the_host(host: str, endpoint: str) -> None:
    assert str(read_options(["--nnodes=2", "--host", host, "train.py"]).endpoint) == endpoint


@pytest.mark.parametrize(("given", "nodes"), [("2", "2"), ("2:2", "2"), ("1:3", "1:3")])
def test_the_number_of_nodes_has_one_spelling(given: str, nodes: str) -> None:
    assert read_options([f"--nnodes={given}", "--host", "10.0.0.1", "train.py"]).nnodes == nodes


NOT_HOSTS = ("", ":29400", "http://x:1", "10.0.0.1:99999", "10.0.0.1:abc", "a b", "[a]")
REFUSED = [
    *(
        (["--nnodes=2", "--host", host], f"--host is '{host}', which is not a")
        for host in NOT_HOSTS
    ),
    *(
        (words.split(), said)
        for words, said in {
            "--nproc-per-node=0": "--nproc-per-node must be at least 1",
            "--nproc-per-node=x": "--nproc-per-node=x cannot be used here",
            "--nnodes=0": "--nnodes must be 1 or more, and is 0",
            "--nnodes=a": "--nnodes must be a number or MIN:MAX",
            "--nnodes=2 --node-rank=-1": "--node-rank is -1, and there are 2 nodes",
            "--node-rank=1": "--node-rank is 1, and there is 1 node",
            "--nnodes=2 --rdzv-endpoint=a:b": "--rdzv-endpoint is 'a:b', which is not a",
            "--standalone --nnodes=2": "--standalone is for one node",
            "--max-restarts=-1": "--max-restarts must be 0 or more",
            "--nnodes=2 --rdzv-backend=etcd": "--rdzv-backend=etcd cannot be used here",
            "--nnodes=2 --rdzv-conf=join_timeot=3": "--rdzv-conf has no 'join_timeot'",
            "--nnodes=2 --rdzv-conf=join_timeout=-3": "join_timeout must be a positive number",
            "--local-ranks-filter=a": "--local-ranks-filter must be numbers",
            "--redirects=4": "--redirects is '4'",
            "--tee=0:1,1": "--tee is '0:1,1'",
            "--no-python no-such-program": "there is no program 'no-such-program'",
            "--hang-after=-1": "0 to switch it off; it is -1.0.",
            "--hang-after=0 --on-hang=end": "--on-hang=end needs --hang-after",
            "--on-hang=end": "--on-hang=end needs --hang-after",
            "--no-python --on-hang=end --hang-after=9": "--hang-after has no effect with --no-python",
            "--shutdown-timeout=-1": "--shutdown-timeout must be a whole number of seconds, and is -1",
        }.items()
    ),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_options_that_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_options([*words, "train.py"])


def test_missing_scripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no script"):
        check_script(str(tmp_path / "no.py"))
    with pytest.raises(ConfigError, match="is a directory"):
        check_script(str(tmp_path))
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")  # valid Python too
    with pytest.raises(ConfigError, match="is a notebook"):
        check_script(str(notebook))
    (tmp_path / "__main__.py").touch()
    check_script(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("t.py", "127.0.0.1:0"),
        ("--standalone t.py", "127.0.0.1:0"),
        ("--master-port=4711 t.py", "127.0.0.1:4711"),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 t.py", "127.0.0.1:0"),
    ],
)
def test_one_node_binds_its_own_store(words: str, where: str) -> None:
    options = read_options(words.split())
    assert options.endpoint is None
    assert "{}:{}".format(*options.address) == where
    assert options.notes == ()


@pytest.mark.parametrize(
    ("words", "endpoint", "is_host"),
    [
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:4711", "localhost:4711", None),
        ("--rdzv-backend=c10d --rdzv-endpoint=a", "a:29400", None),
        ("--rdzv-backend=c10d --rdzv-endpoint=a --rdzv-conf=is_host=true", "a:29400", True),
        # As in torchrun, static rendezvous is served by node 0, the default of --node-rank.
        ("--master-addr=10.0.0.1", "10.0.0.1:29500", True),
        ("--master-addr=10.0.0.1 --master-port=4711 --node-rank=1", "10.0.0.1:4711", False),
    ],
)
def test_several_nodes_meet_where_torchrun_would(
    words: str, endpoint: str, is_host: bool | None
) -> None:
    found = read_options(["--nnodes=2", *words.split(), "t.py"]).endpoint
    assert found is not None
    assert (str(found), found.is_host) == (endpoint, is_host)


def test_torchrun_has_six_options_that_are_unknown_here() -> None:
    def names(options: Iterable[argparse.Action]) -> set[str]:
        return {name for option in options for name in option.option_strings}

    missing = names(get_args_parser()._actions) - names(parser().arguments)
    assert {name.replace("_", "-") for name in missing} == {
        "--start-method",
        "--duplicate-stdout-filters",
        "--duplicate-stderr-filters",
        "--logs-specs",
        "--event-log-handler",
        "--numa-binding",
    }


def test_an_option_of_the_launcher_after_the_script_is_noted() -> None:
    (note,) = read_options(["t.py", "--nproc_per_node=2", "--lr", "1"]).notes
    assert note.startswith("--nproc-per-node after the script is given to the script")
    assert read_options(["--nproc-per-node=2", "t.py", "--lr", "1"]).notes == ()


def test_reading_options_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    read_options(["--nproc-per-node=2", "t.py"])
    assert "OMP_NUM_THREADS" not in os.environ


def test_host_counts_more_than_the_port_that_kubeflow_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_PORT", "4711")
    options = read_options(["--nnodes=2", "--host=10.0.0.1", "t.py"])
    assert str(options.endpoint) == "10.0.0.1:29400"
