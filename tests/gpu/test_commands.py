"""What the commands do and say on a host with a GPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.explain.reading import causes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this host"),
]


def _paceline(words: str, script: str, tmp_path: Path) -> tuple[int, str]:
    """The exit code of `paceline WORDS train.py`, and what it wrote to both streams."""
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words.split(), "train.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    return done.returncode, done.stdout


TRAINING = """
import torch, torch.nn.functional as F, paceline

with paceline.join(seed=1) as job:
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
    net = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 10))
    model = paceline.ddp(job, net.to(job.device))
    batches = paceline.Batches(job, data, global_batch=256, workers=1)
    training = paceline.Training(job, model, torch.optim.AdamW(model.parameters()), batches, precision="bf16",
                                 checkpoints=paceline.Checkpoints("checkpoints", every_steps=20))
    training.report("run", flops=6 * sum(p.numel() for p in net.parameters()))
    for step in training.steps(until=400):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y), reduction="sum")
        step.update()
    print("trained on", job.device)
"""


def test_run_trains_on_the_gpu_and_reports_it(tmp_path: Path) -> None:
    code, text = _paceline("run --nproc-per-node=gpu", TRAINING, tmp_path)
    assert code == 0, text
    assert "trained on cuda:0" in text
    assert "precision: bf16" in text or torch.cuda.get_device_capability() < (8, 0)
    records = [json.loads(line) for line in (tmp_path / "run/clock.jsonl").read_text().splitlines()]
    assert torch.cuda.get_device_name() in json.dumps(records[0])
    for words in (["report", "run", "--md"], ["top", "run", "--once"]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout)


def test_profile_shows_kernels_and_memory(tmp_path: Path) -> None:
    code, text = _paceline("profile --skip=5 --steps=10 --nproc-per-node=1", TRAINING, tmp_path)
    assert code == 0, text
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    costliest = text.partition("costliest operations on the GPU")[2]
    assert "aten::" in costliest, text
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])


# By cause: a script that provokes it.
SCRIPTS = {
    "cuda-out-of-memory": "torch.empty(1 << 50, device='cuda')",
    "cuda-no-such-device": "torch.cuda.set_device(99)",
    "cuda-device-assert": """
torch.ones(4, device='cuda')[torch.tensor([7], device='cuda')]
torch.cuda.synchronize()
""",
    "cuda-in-fork": """
class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.ones(1, device='cuda')
torch.ones(1, device='cuda')
list(torch.utils.data.DataLoader(OnGpu(), num_workers=1))
""",
    "no-backend-for-device": "dist.init_process_group('nccl'); dist.all_reduce(torch.ones(1))",
    "duplicate-gpu": """
torch.cuda.set_device(0)
dist.init_process_group('nccl')
dist.all_reduce(torch.ones(1, device='cuda'))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_cause_is_named(tmp_path: Path, name: str) -> None:
    script = "import torch, torch.distributed as dist\n" + SCRIPTS[name]
    nproc = 2 if name == "duplicate-gpu" else 1
    code, text = _paceline(f"run --nproc-per-node={nproc}", script, tmp_path)
    cause = next(each for each in causes() if each.name == name)
    assert code != 0
    assert f"why:   {cause.why}" in text, text


NCCL = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8).cuda()
for _ in range(30):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
print("trained", loss.item())
"""


def test_a_plain_script_trains_over_nccl(tmp_path: Path) -> None:
    code, text = _paceline("run --nproc-per-node=gpu", NCCL, tmp_path)
    assert code == 0, text
    assert text.count("trained") == torch.cuda.device_count()


def test_verify_says_that_it_needs_a_gpu_for_each_process(tmp_path: Path) -> None:
    nproc = torch.cuda.device_count() + 1
    code, text = _paceline(f"verify --nproc=1,{nproc}", NCCL, tmp_path)
    assert code == 3
    assert "there are more local ranks than visible GPUs" in text, text


WAITS = """
import torch, torch.distributed as dist, os
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:BACKEND")
x = torch.ones(1, device="cuda")
for _ in range(20):
    dist.all_reduce(x)
if dist.get_rank() == LAST:
    torch.cuda._sleep(1 << 35)  # cycles; about 20 s
    x.item()
dist.all_reduce(x)
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_its_gpu_is_named(tmp_path: Path) -> None:
    script = WAITS.replace("BACKEND", "gloo").replace("LAST", "1")
    code, text = _paceline("run --nproc-per-node=2 --hang-after=4", script, tmp_path)
    assert code == 0
    assert "waiting: rank 0 " in text, text
    assert "not entered it: at train.py:10, in x.item, busy" in text


def test_a_gpu_that_computes_before_a_collective_of_nccl_is_no_hang(tmp_path: Path) -> None:
    script = WAITS.replace("BACKEND", "nccl").replace("LAST", "0").replace("    x.item()\n", "")
    script = script.replace("dist.destroy", "x.item()\ndist.destroy")
    code, text = _paceline("run --nproc-per-node=1 --hang-after=4", script, tmp_path)
    assert code == 0
    assert "hang:" not in text, text
    assert "waiting:" not in text, text
