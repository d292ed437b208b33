"""`paceline plan`: costs by hand, what the command shows of a folder of a run, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import write_folder
from torch import nn

import paceline
from paceline.cli.main import main
from paceline.clock import record
from paceline.exit_codes import ExitCode
from paceline.plan.model import Link, Measured, Way, estimate
from paceline.plan.read import read_link, read_step
from paceline.report.run import load
from paceline.training.run_facts import model_facts

MB = 1e6
LINK = Link(bytes_per_s=100 * MB, latency_s=0.001)
# One process: a step of 100 ms; the backward computes the two buckets of gradients in 40 and 20 ms.
RUN = Measured(
    nodes=1,
    ranks_per_node=1,
    device="cpu",
    layout="DDP",
    global_batch=64,
    micro_batches=1,
    data_s=0.005,
    forward_s=0.02,
    backward_s=0.06,
    other_s=0.015,
    communication_s=0.0,
    spread=(0.9, 1.2),
    parameters=3_000_000 // 4,
    buckets=[2 * MB, 1 * MB],
    blocks=[(1 * MB, 1 * MB), (2 * MB, 2 * MB)],
    powersgd_bytes=0.3 * MB,
    compress="",
    memory_bytes=100 * MB,
    state_bytes=12 * MB,
)


def _step_ms(kind: str, nodes: int = 2, run: Measured = RUN, **options: Any) -> float:
    way = Way(kind=kind, **options)
    return 1e3 * estimate(run, LINK, way, nodes, weak=True).step_s


def test_the_costs_of_rings() -> None:
    # 4 nodes of a rank: 2 (m - 1) alpha + 2 (p - 1) / p n / beta
    assert LINK.all_reduce_s(4, 4, 4 * MB) == pytest.approx(6 * 0.001 + 6 / 4 * 0.04)
    assert LINK.half_ring_s(4, 4, 4 * MB) == pytest.approx(3 * 0.001 + 3 / 4 * 0.04)
    # 2 nodes of 4 ranks: a part passes one link between nodes, and seven parts of eight pass each link.
    assert LINK.half_ring_s(2, 8, 4 * MB) == pytest.approx(0.001 + 7 / 8 * 0.04)


def test_the_sum_of_a_bucket_overlaps_with_the_rest_of_the_backward() -> None:
    # Sums of 2 MB and 1 MB over two ranks: 22 and 12 ms. The first overlaps with 20 ms of the backward.
    assert _step_ms("DDP", 1) == pytest.approx(100)
    assert _step_ms("DDP") == pytest.approx(100 + 2 + 12)
    # Half of the bytes: 12 and 7 ms. The first one ends within the backward.
    assert _step_ms("fp16") == pytest.approx(100 + 7)


def test_on_a_gpu_fsdp_overlaps_and_over_gloo_it_does_not() -> None:
    # Gathers of 11 and 6 ms, twice. Gloo's reduce-scatter is an all-reduce, 22 and 12 ms.
    assert _step_ms("FSDP") == pytest.approx(100 + 2 * 17 + 34)
    # In the backward 22 and 12 ms, as DDP's sums. The gathers before the forward fit into its 20 ms.
    gpu = replace(RUN, device="cuda")
    assert _step_ms("FSDP", run=gpu) == pytest.approx(100 + 2 + 12)
    # Gathers in bf16, 3.5 and 6 ms: in the backward 6 + 11 ms and 3.5 + 6 ms. The first ones hide.
    halved = replace(gpu, blocks=[(0.5 * MB, 1 * MB), (1 * MB, 2 * MB)])
    assert _step_ms("FSDP", run=halved) == pytest.approx(100 + 9.5)


def test_each_micro_batch_of_fsdp_gathers() -> None:
    run = replace(RUN, micro_batches=4)
    assert _step_ms("FSDP", run=run) == pytest.approx(100 + 4 * 2 * 17 + 34)  # and one sum
    # A micro-batch has 5 ms of forward and 15 ms of backward. Of the gathers for a forward, 17 ms, 12 ms are
    # left. In a backward they begin at 10 ms and end at 27 ms: 12 ms are left. In the last one the gathers
    # and sums take 22 and 12 ms: 29 ms are left.
    gpu = replace(run, device="cuda")
    assert _step_ms("FSDP", run=gpu) == pytest.approx(100 + 4 * 12 + 3 * 12 + 29)
    # With half of the samples two micro-batches of 5 and 15 ms are left.
    strong = estimate(gpu, LINK, Way(kind="FSDP"), 2, weak=False)
    assert 1e3 * strong.step_s == pytest.approx(15 + 85 / 2 + 2 * 12 + 12 + 29)


def test_communication_inside_a_node() -> None:
    run = replace(RUN, ranks_per_node=4, communication_s=0.05)
    assert _step_ms("DDP", 1, run) == pytest.approx(150)
    # Over the links 2 (1 + 7 / 8 * 20) ms = 37 and 19.5 ms; 16.5 ms of the first are left with the second.
    assert _step_ms("DDP", 2, run) == pytest.approx(150)  # 36.5 ms overlap with 50 ms
    fast = replace(run, communication_s=0.03)
    assert _step_ms("DDP", 2, fast) == pytest.approx(100 + 17 + 19.5)
    # DiLoCo's sum, 2 (1 + 15) ms, comes after the sums in the node.
    assert _step_ms("DiLoCo", 2, run, every=1) == pytest.approx(100 + 50 + 32)
    # A run on several nodes does not tell it apart.
    assert _step_ms("DiLoCo", 2, replace(run, nodes=2), every=1) == pytest.approx(100 + 32)


def test_samples_of_a_rank_are_whole() -> None:
    # 54 samples on 3 nodes are 18 on each, on any number of nodes.
    run = replace(RUN, nodes=3, global_batch=54)
    assert estimate(run, LINK, Way(kind="DiLoCo", every=10**9), 7, weak=True).step_s == (
        pytest.approx(0.1)
    )
    # 29 samples in 29 micro-batches: a rank of two has 15 at most, in 15 micro-batches.
    run = replace(RUN, global_batch=29, micro_batches=29)
    left_s = estimate(run, LINK, Way(kind="FSDP"), 2, weak=False).exposed_s
    assert left_s == pytest.approx(15 * 2 * 0.017 + 0.034)


def test_diloco_and_powersgd_send_less() -> None:
    assert _step_ms("DiLoCo", every=50) == pytest.approx(100 + 32 / 50)
    # 750,000 numbers in fp32, whatever the dtype of the gradients.
    assert _step_ms("DiLoCo", every=1, run=replace(RUN, buckets=[MB])) == pytest.approx(132)
    # P, Q and the vectors of a bucket: 2 ms of latency each, and 2 ms and 1 ms for a third of 0.3 MB.
    assert _step_ms("PowerSGD") == pytest.approx(100 + 6 + 6 + 3)


def test_hybrid_sharding_sums_over_the_nodes_alone() -> None:
    run = replace(RUN, ranks_per_node=4)
    assert _step_ms("HSDP", run=run) == pytest.approx(100 + 34)  # 22 and 12 ms over Gloo
    # A ring of 8 ranks over 2 nodes: 37 and 19.5 ms.
    assert _step_ms("DDP", run=run) == pytest.approx(100 + 17 + 19.5)


def test_strong_and_weak_scaling() -> None:
    way = Way(kind="DiLoCo", every=10**9)  # without communication
    strong, weak = (estimate(RUN, LINK, way, 4, weak=weak) for weak in (False, True))
    # The optimizer and the rest of the loop, 15 ms, are not divided.
    assert 1e3 * strong.step_s == pytest.approx(15 + 85 / 4)
    assert strong.samples_per_s == pytest.approx(64 / strong.step_s)
    assert 1e3 * weak.step_s == pytest.approx(100)
    assert weak.samples_per_s == pytest.approx(4 * 64 / weak.step_s)
    assert weak.efficiency == pytest.approx(1)
    assert strong.efficiency == pytest.approx(100 / 4 / (15 + 85 / 4))
    assert estimate(RUN, LINK, way, 128, weak=False).limit == "samples"


def test_the_band_and_what_limits_a_step() -> None:
    def of(link: Link, **changes: float) -> Any:
        return estimate(replace(RUN, **changes), link, Way(kind="DDP"), 2, weak=True)

    low, high = of(LINK).band_s
    # The fast and the slow quarter of the windows. At the slow end nothing overlaps, at 0.9 of the rate.
    assert (1e3 * low, 1e3 * high) == pytest.approx((90 + 14, 120 + 34 / 0.9))
    assert of(LINK).limit == "computation"
    assert of(LINK, data_s=1).limit == "data"
    assert of(Link(MB, 0.001)).limit == "bandwidth"
    assert of(Link(100 * MB, 1)).limit == "latency"


def test_memory() -> None:
    def of(kind: str, run: Measured, nodes: int = 2) -> float | None:
        return estimate(run, LINK, Way(kind=kind), nodes, weak=True).memory_bytes

    # One process has no gradients after a step: 9 MB of its memory are state, and 91 MB are not.
    assert of("DDP", RUN) == (91 + 12) * MB
    assert of("FSDP", RUN) == (91 + 6) * MB
    assert of("DiLoCo", RUN) == (91 + 12 + 6) * MB  # weights of the last sum, and momentum, in fp32
    assert of("DiLoCo", replace(RUN, device="cuda")) == (91 + 12) * MB  # in host memory
    assert of("FSDP", replace(RUN, state_bytes=None)) is None
    assert of("DDP", replace(RUN, state_bytes=None)) == 103 * MB
    # The buckets of DDP stay: 12 MB are state.
    replicas = replace(RUN, ranks_per_node=2)
    assert of("DDP", replicas) == 100 * MB
    assert of("HSDP", replicas) == (88 + 6) * MB
    sharded = replace(RUN, layout="FSDP", ranks_per_node=2)  # 4.5 MB of its memory are state
    assert of("FSDP", sharded) == (95.5 + 3) * MB
    assert of("HSDP", sharded) == (95.5 + 6) * MB
    assert of("DDP", sharded) == (95.5 + 12) * MB
    # A GPU with less than weights and AdamW's state, 9 of 12 MB, as with cpu_offload.
    full = replace(RUN, device="cuda", memory_bytes=8 * MB)
    assert of("FSDP", full, 64) == 12 / 64 * MB


FACTS = {
    "mesh": None,
    "strategy": "DDP",
    "data_ranks": 2,
    "local_world_size": 2,
    "global_batch": 64,
    "micro_batch": 16,
    "compress": "PowerSGD(rank=4, start_step=100)",
    "parameters": 750_000,
    "buckets": [2_000_000, 1_000_000],
    "blocks": [[1_000_000, 1_000_000], [2_000_000, 2_000_000]],
    "powersgd_bytes": [10_000, 500],
    "state_bytes": 9_000_000,
}
SPENT_S = {"data": 0.01, "forward": 0.02, "backward": 0.06, "optimizer": 0.01}


def _write(folder: Path, **facts: Any) -> None:
    fast = SPENT_S | {"forward": 0.01, "communication": 0.01}
    write_folder(folder, [fast, SPENT_S], steps=60, window=10, **(FACTS | facts))


def test_the_step_of_a_run(tmp_path: Path) -> None:
    _write(tmp_path)
    step = read_step("", load(str(tmp_path)).record)
    assert (step.nodes, step.ranks_per_node, step.micro_batches) == (1, 2, 2)
    assert step.step_s == pytest.approx(0.1)
    assert step.forward_s == pytest.approx(0.02)  # of the rank that the other one waits for
    assert (step.other_s, step.communication_s) == (pytest.approx(0.01), 0)
    assert step.powersgd_bytes == 4 * 10_000 + 500
    assert step.memory_bytes == 2e9


def test_the_command_shows_each_way_on_each_number_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, compress="")
    words = ["plan", str(tmp_path), "--link", "1Gbit,50us", "--nodes", "1,8"]
    assert main(words) == ExitCode.OK
    text = capsys.readouterr().out
    assert "strong scaling" in text
    assert main([*words, "--weak", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    names = list(found["ways"])
    assert names[0] == "as it is"
    assert {"HSDP", "DiLoCo, H=500"} <= {*names}
    assert all(name in text for name in names if not name.startswith("accumulation"))
    one, eight = found["ways"]["as it is"]
    assert (one["ranks"], eight["ranks"]) == (2, 16)
    assert eight["samples_per_s"] * eight["step_s"] == pytest.approx(8 * 64)  # weak scaling
    assert one["step_s"] == pytest.approx(0.1)
    assert one["limit"] == "computation"
    assert eight["band_s"][0] <= eight["step_s"] <= eight["band_s"][1]


@pytest.mark.ci
def test_the_page_has_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path)
    page = tmp_path / "plan.html"
    words = ["plan", str(tmp_path), "--link", "1Gbit"]
    assert main([*words, "--html", str(page)]) == ExitCode.OK
    assert "HSDP" in capsys.readouterr().out
    assert '"field":"samples/s"' in page.read_text()
    assert main([*words, "--html", str(tmp_path)]) == ExitCode.CANNOT_CREATE


def test_a_training_writes_what_a_plan_needs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
    with paceline.join(device="cpu") as job:
        data = torch.utils.data.TensorDataset(torch.zeros(8, 512))
        batches = paceline.Batches(job, data, global_batch=8, micro_batch=4)
        training = paceline.Training(job, model, torch.optim.AdamW(model.parameters()), batches)
        training.report(tmp_path / "short")
        for step in training.steps(until=1):
            step.run(lambda batch: model(batch[0]).square().mean())
            step.update()
    facts = load(str(tmp_path / "short")).record.run
    write_folder(tmp_path / "run", [SPENT_S], steps=60, window=10, **facts)
    found = read_step("", load(str(tmp_path / "run")).record)
    sizes = [p.numel() for p in model.parameters()]
    assert found.parameters == sum(sizes)
    assert found.micro_batches == 2
    # The first bucket ends with the gradient that makes it 1 MiB.
    assert found.buckets == [4 * (512 + 1024 * 512), 4 * (1024 + 512 * 1024)]
    # Of each element of the Sequential: gathered, and gradients.
    blocks = [4 * 1024 * 513, 4 * 512 * 1025]
    assert found.blocks == [[size, size] for size in blocks]
    model[0].requires_grad_(False)
    halves = model_facts([model], [], bucket_bytes=0, param_bytes=2)["blocks"]
    assert halves == [[blocks[0] / 2, 0], [blocks[1] / 2, blocks[1]]]
    assert found.state_bytes == 4 * sum(found.buckets)
    assert found.powersgd_bytes == 2 * 4 * 2 * (512 + 1024) + 4 * (1024 + 512)


REDUCE = {
    "world_size": 4,
    "bytes": 16 * MB,
    "seconds": 0.166,
    "part_bytes": 1 * MB,
    "part_seconds": 0.016,
    "fp16_seconds": 0.106,
}


def _write_doctor(path: Path, reduce: Any = REDUCE, local_ranks: Any = (0, 0, 0, 0)) -> None:
    """A file as the launcher writes it; of one host without `local_ranks`."""
    ranks = [{"local_rank": each} for each in local_ranks]
    facts = {"reduce": [reduce], "links": ["one"] if ranks else [], "ranks": ranks}
    lines = json.dumps({"facts": facts}, indent=1).splitlines()
    path.write_text("\n".join(f"[0] {line}" for line in lines))


def test_the_link_of_a_doctor(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    _write_doctor(path)
    link = read_link(str(path))
    assert link.latency_s == pytest.approx(0.001)  # 6 ms at 0 bytes
    assert link.all_reduce_s(4, 4, 16 * MB) == pytest.approx(0.166)
    assert link.all_reduce_s(4, 4, 1 * MB) == pytest.approx(0.016)
    fp16 = estimate(RUN, link, Way(kind="fp16"), 4, weak=True).exposed_s
    assert (
        fp16
        > estimate(RUN, replace(link, fp16_bytes_per_s=0), Way(kind="fp16"), 4, weak=True).exposed_s
    )
    assert replace(link, bytes_per_s=link.fp16_bytes_per_s).all_reduce_s(
        4, 4, 8 * MB
    ) == pytest.approx(0.106)
    # The same times on two hosts of two ranks: a part passes one link between them, and not three.
    _write_doctor(path, local_ranks=(0, 1, 0, 1))
    link = read_link(str(path))
    assert link.latency_s == pytest.approx(0.003)
    assert link.all_reduce_s(2, 4, 16 * MB) == pytest.approx(0.166)


def test_the_rate_of_a_link_is_that_of_its_frames() -> None:
    link = read_link("10Gbit,0.1ms")
    assert link.bytes_per_s == pytest.approx(10e9 / 8 * 1448 / 1514)
    assert link.latency_s == pytest.approx(1e-4)
    assert read_link("10 Gbit/s, 0.1 ms") == link
    assert read_link("100 mbit").latency_s == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("link", "sentence"),
    [
        ("0bit", "has a rate of 0"),
        ("Gbit", "is neither a link nor a file"),
        ("10GB", "has an unknown unit"),
        ("1Gbit,5min", "has an unknown unit"),
        ("runs/doctor.json", "is neither a link nor a file"),
        ("", "is neither a link nor a file"),
    ],
)
def test_a_wrong_link_is_refused(
    tmp_path: Path, link: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    assert main(["plan", str(tmp_path), "--link", link]) == ExitCode.USAGE
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reduce", "sentence"),
    [
        (None, "it was measured on one host"),
        ({"error": "no route to host"}, "no route to host."),
        (
            REDUCE | {"part_seconds": 0.2, "fp16_seconds": 0.3},
            "took no longer than one of fewer bytes",
        ),
        (REDUCE | {"fp16_seconds": 0.005}, "took no longer than one of fewer bytes"),
        ({"world_size": 4}, "no 'seconds'"),
    ],
)
def test_a_doctor_without_a_link_is_refused(
    tmp_path: Path,
    reduce: dict[str, Any] | None,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write(tmp_path)
    path = tmp_path / "doctor.json"
    _write_doctor(path, reduce or REDUCE, (0, 0, 0, 0) if reduce else ())
    assert main(["plan", str(tmp_path), "--link", str(path)]) == ExitCode.USAGE
    assert sentence in capsys.readouterr().err


def test_a_run_on_gpus_needs_a_doctor_on_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, device="cuda")
    path = tmp_path / "doctor.json"
    _write_doctor(path)
    assert main(["plan", str(tmp_path), "--link", str(path)]) == ExitCode.USAGE
    assert "it has no all-reduce on GPUs" in capsys.readouterr().err
    # 10 times as fast over NCCL, which DiLoCo does not use.
    fast = REDUCE | {key: REDUCE[key] / 10 for key in REDUCE if "seconds" in key}
    _write_doctor(path, REDUCE | {"gpu": fast})
    words = ["plan", str(tmp_path), "--link", str(path), "--nodes", "2", "--json"]
    assert main(words) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    # 3 MB over two nodes, of one rank each as one of the doctor's: 2 ms of latency, and 3 MB at 150 MB/s.
    assert found["ways"]["DiLoCo, H=50"][0]["exposed_s"] == pytest.approx((0.002 + 0.02) / 50)


@pytest.mark.parametrize("nodes", ["0", "1,-2", "1,", "two"])
def test_numbers_of_nodes_are_one_or_more(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "runs/a", "--link", "1Gbit", "--nodes", nodes])
    assert end.value.code == ExitCode.USAGE
    assert "--nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"strategy": "Pipeline", "data_ranks": 1}, "its strategy is Pipeline"),
        ({"local_world_size": 3}, "different numbers of ranks"),
        ({"strategy": "Exact"}, "its strategy is Exact"),
        (
            {"strategy": "FSDP", "data_ranks": 1, "mesh": "tp=2"},
            "its model is split over ranks (tp=2)",
        ),
        ({"strategy": "FSDP", "local_world_size": 1}, "it ran on several hosts with FSDP"),
        ({"buckets": None}, "does not tell its buckets"),
        ({"global_batch": None}, "does not tell its global_batch"),
        ({"blocks": None, "device": None}, "does not tell its device, blocks"),
    ],
)
def test_a_layout_that_the_run_cannot_tell_about_is_refused(
    tmp_path: Path, facts: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, **facts)
    assert main(["plan", str(tmp_path), "--link", "1Gbit"]) == ExitCode.DATA
    printed = capsys.readouterr().err
    assert sentence in printed
    assert record.FILE in printed


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"step": 0, "run": {}}\n', "0 windows of the newest start can be used"),
        ('{"loss": 1}\nnot JSON\n', "2 lines have another format"),
        (None, "is not the folder of a run"),
    ],
)
def test_a_clock_file_without_steps_or_of_another_format_is_refused(
    tmp_path: Path, lines: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        (tmp_path / record.FILE).write_text(lines)
    assert main(["plan", str(tmp_path), "--link", "1Gbit"]) == ExitCode.DATA
    assert sentence in capsys.readouterr().err
