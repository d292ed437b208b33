"""Every Python block of the documentation runs; test_cli.py parses the commands.

A block that joins a job, or that imports paceline, runs as it stands. Other blocks are parts of a program:
they run in a job, with the names of `SETUP`. The chapters of Learn are run by test_learn.py, and the README
by test_readme.py. The pages of the checks of verify show parts of other scripts, right and wrong ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

SETUP = """
import copy, functools, itertools, math, os
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate
import paceline

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(64, 20)
train = test = dataset = TensorDataset(x, x[:, :4].argmax(1))
get_batch = lambda split: (torch.randn(12, 20), torch.zeros(12, dtype=torch.int64))
is_best, waited, tokens, step = True, 0.1, 5, 1300
pad = default_collate
cosine = lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 10)

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(20, 40), torch.nn.Linear(40, 20)
    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))

class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(20, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

ema = torch.optim.swa_utils.AveragedModel(Net())

def score(model, batch):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
            "accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

def start(job):
    global net, model, optimizer, muon, adamw, batches, training
    global generator, critic, opt_g, opt_c, correct
    net = torch.nn.Linear(20, 4)
    model = paceline.ddp(job, copy.deepcopy(net)) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, bias = model.parameters()
    muon, adamw = torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.1)
    generator, critic = torch.nn.Linear(20, 20), torch.nn.Linear(20, 1)
    opt_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    opt_c = torch.optim.SGD(critic.parameters(), lr=0.1)
    batches = paceline.Batches(job, train, global_batch=16)
    training = paceline.Training(job, model, optimizer, batches)
    correct = 0
"""
BACKWARD = "for x, y in step: step.backward(F.cross_entropy(model(x), y))"
GAN = """critic_loss = generator_loss = 0
critic_loss = (critic(real) - critic(generator(real).detach())).mean()
generator_loss = critic(generator(real)).mean()"""

TWO_RANKS = {
    "howto/batchnorm.md",
    "howto/fsdp.md",
    "howto/models.md",
    "howto/parameter_server.md",
    "howto/tensor.md",
}
NOT_RUN = {  # text of a block: why it cannot run here
    "from ray.train": "needs ray: tests/e2e/test_ray.py runs such a program",
}
BEFORE = {  # text of a block: what it needs besides
    "stopping = paceline": "training = paceline.Training(job, model, optimizer, batches, "
    "checkpoints=paceline.Checkpoints('runs/early'))",
    "model = paceline.ddp(job, net, compress": "net = copy.deepcopy(net)",
    "block.forward = functools.partial": "model = Transformer()",
    "train(job)": "train = lambda job: None",
    'load_weights(model, "weights")': "from pathlib import Path\n"
    "from paceline.checkpoint.export import write_file\n"
    "state = Transformer().state_dict()\n"
    "paceline.on_rank0(job, lambda: write_file(Path('weights/model.safetensors'), state))",
    "checkpoints.save(job, step": "step = 1300",
}
AFTER = {  # text of a block: what is run after it
    "def shard(self": "assert list(shard(range(8), 1, 3)) == [1, 4, 7]",
    "def validate(": "assert 0 <= validate(job, model, DataLoader(test, batch_size=8)) <= 1",
    "def test_total": "test_total()",
    "paceline.evaluate(job, model, test, score)\nresult.": "assert result.num_samples == 64",
}


def blocks_of(page: Path) -> list[str]:
    found = re.findall(
        r"^( *)```python\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S
    )
    return [textwrap.dedent(block) for _, block in found]


def program_of(block: str) -> str:
    """A block as a program that runs after `SETUP`."""
    dots = GAN if "critic_loss" in block else BACKWARD if "for step in" in block else "pass"
    if dots is BACKWARD and "step.update" not in block:
        dots = f"{BACKWARD}\nstep.update()"
    text = re.sub(
        r"^( *)\.\.\.( *#.*)?$", lambda at: textwrap.indent(dots, at[1]), block, flags=re.M
    )
    before, after = (
        "\n".join(lines for part, lines in texts.items() if part in block)
        for texts in (BEFORE, AFTER)
    )
    if re.search(r"^import paceline|paceline\.join\(", text, re.M):
        return f"{before}\n{text}\n{after}\nif 'job' in globals(): job.leave()\n"
    if not re.search(r"for step in|step: int|saves|checkpoints\.", text) and re.search(
        r"\bstep\b|training\.log\(", text
    ):
        if "step.backward" not in text:
            text = f"{BACKWARD}\n{text}"
        if "step.update" not in text:
            text = f"{text}\nstep.update()"
        text = "for step in training.steps(epochs=1):\n" + textwrap.indent(text, "    ")
    body = textwrap.indent(f"start(job)\n{before}\n{text}\n{after}", "    ")
    return f"with paceline.join(seed=7) as job:\n{body}\n"


def _pages(two_ranks: bool) -> dict[str, str]:
    """The program of each page with Python blocks that run."""
    programs = {}
    for page in sorted(DOCS.rglob("*.md")):
        name = str(page.relative_to(DOCS))
        blocks = [b for b in blocks_of(page) if not any(text in b for text in NOT_RUN)]
        if page.parent.name in ("learn", "verify"):
            continue
        if blocks and (name in TWO_RANKS) == two_ranks:
            programs[name] = "\n".join([SETUP, *map(program_of, blocks)])
    return programs


ALL = """
import os, runpy, sys
for path in sys.argv[1:]:
    folder = path.removesuffix(".py")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    print("page", path, flush=True)
    runpy.run_path(path, run_name="__main__")
    print("ran", path)
"""


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.ci
def test_the_blocks_run(nproc: int, tmp_path: Path) -> None:
    paths = []
    for name, program in _pages(two_ranks=nproc == 2).items():
        path = tmp_path / name.replace("/", "_").replace(".md", ".py")
        path.write_text(program)
        paths.append(str(path))
    (tmp_path / "all_pages.py").write_text(ALL)
    launch = [] if nproc == 1 else ["-m", "paceline", "run", "--nproc-per-node", str(nproc)]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "all_pages.py"), *paths],
        cwd=tmp_path,
        env=os.environ | {"WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    assert all(f"ran {path}" in done.stdout for path in paths)
