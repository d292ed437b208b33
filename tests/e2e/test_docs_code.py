"""Every Python block of the documentation runs, or says here why not; test_cli.py parses the commands.

The chapters of Learn are run by test_learn.py, and the README by test_readme.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Run:
    """How a block is run: `around` has it in place of the line `# block`; `dots` replaces its `...`."""

    around: str = "# block"
    dots: str = "pass"
    old: str = ""  # text of the block that is too large or too far away for a test,
    new: str = ""  # and what is run instead of it


@dataclass(frozen=True)
class NotRun:
    reason: str


BEGIN = """
import copy, functools, itertools, math, os
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate
import paceline
from paceline.data.plan import Position

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(64, 20)
train = test = dataset = TensorDataset(x, x[:, :4].argmax(1))

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

def score(model, batch):
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
            "accuracy": (model(batch[0]).argmax(1) == batch[1]).sum()}

def start(job, **options):
    net = torch.nn.Linear(20, 4)
    model = paceline.ddp(job, net) if job.world_size > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = paceline.Batches(job, train, global_batch=16)
    return model, optimizer, batches, paceline.Training(job, model, optimizer, batches, **options)
"""
JOB = "job = paceline.join(seed=7)\n"
PARTS = JOB + "model, optimizer, batches, training = start(job)\n"
BACKWARD = "for x, y in step: step.backward(F.cross_entropy(model(x), y))"
STEP = BACKWARD + "\nstep.update()"
IN_STEP = "for step in training.steps(epochs=1):\n    " + BACKWARD + "\n    "
TWO_MODELS = """
generator, critic = torch.nn.Linear(20, 20), torch.nn.Linear(20, 1)
opt_c = torch.optim.SGD(critic.parameters(), lr=0.1)
opt_g = torch.optim.SGD(generator.parameters(), lr=0.1)
batches = paceline.Batches(job, TensorDataset(torch.randn(64, 20)), global_batch=16)
"""
LOSSES = """critic_loss = (critic(real) - critic(generator(real).detach())).mean()
generator_loss = critic(generator(real)).mean()"""

# By page: its Python blocks in order. The blocks of a page share their names.
ONE_PROCESS: dict[str, list[Run | NotRun]] = {
    "howto/checkpoints.md": [
        Run(
            PARTS
            + "ema, is_best = torch.optim.swa_utils.AveragedModel(model), True\n# block\n"
            + "assert paceline.Checkpoints('runs/a/checkpoints').resume(job)['step'] == 40",
            dots=BACKWARD,
        ),
        Run(
            "model, optimizer, batches, training = start(job)\n# block\nassert step.number == 1200",
            dots=STEP,
        ),
        Run("step = 1300\n# block"),
    ],
    "concepts/reproducible.md": [
        Run(
            PARTS
            + "# block\nfor step in training.steps(epochs=1):\n    "
            + STEP.replace("\n", "\n    ")
        )
    ],
    "howto/data.md": [
        Run("# block\n    assert batches.steps_per_epoch == 1"),
        Run(
            "pad = default_collate\n# block\n    assert batches.micro_batch == batches.global_batch"
        ),
        Run(
            "class Items(torch.utils.data.IterableDataset):\n"
            "    def __iter__(self): return iter(range(8))\n"
            "    # block\n"
            "assert list(Items().shard(1, 3)) == [1, 4, 7]"
        ),
        Run(
            "class Images:\n"
            "    images, labels = torch.randn(8, 5, 5), list(range(8))\n"
            "    def __len__(self): return 8\n"
            "    # block\n"
            "with paceline.join(seed=7) as job:\n"
            "    batches = paceline.Batches(job, Images(), global_batch=4)\n"
            "    steps = batches.iterate(Position(7), epochs=1)\n"
            "    assert sum(len(micro.batch[1]) for step in steps for micro in step) == 8"
        ),
        Run(
            "class Files:\n"
            "    files = 'abcde'\n"
            "    def read(self, file): return file.upper()\n"
            "    # block\n"
            "assert list(Files().shard(1, 2)) == ['B', 'D']"
        ),
    ],
    "howto/evaluate.md": [
        Run(PARTS + "# block\nassert result.num_samples == 64"),
        Run("# block\nassert 0 <= validate(job, model, DataLoader(test, batch_size=8)) <= 1"),
    ],
    "howto/losses.md": [Run(PARTS + "# block")],
    "howto/join.md": [
        Run(),
        Run("def train(job): return job.rank\nranks = \\\n# block\nassert ranks == [0, 1]"),
    ],
    "howto/logging.md": [
        Run(PARTS + "waited, tokens = 0.1, 5\n" + IN_STEP + "step.update()\n    # block"),
        Run(
            "model, optimizer, batches, training = start(job)\n# block\n"
            + IN_STEP
            + "step.update()"
        ),
        Run(
            "# block\nmodel, optimizer, batches, training = start(job)\n"
            "training.report(loggers=[Print()])\n" + IN_STEP + "step.update()"
        ),
    ],
    "howto/loop.md": [
        Run(
            "cosine = lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 10)\n"
            "ema = torch.optim.swa_utils.AveragedModel(Net())\n"
            "# block\n"
            "    assert step.number == 10"
        ),
        Run(
            PARTS
            + "correct = 0\nfor step in training.steps(epochs=1):\n    # block\n    step.update()"
        ),
        Run("model, optimizer, batches, training = start(job)\n# block"),
        Run("model, optimizer, batches, training = start(job)\n# block\nassert step.number == 40"),
        Run("model, optimizer, batches, training = start(job)\n" + IN_STEP + "# block"),
        Run(
            "net = torch.nn.Linear(20, 4)\n"
            "model, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)\n"
            "training = paceline.Training(job, net, optimizer, start(job)[2],\n"
            "    schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))\n"
            + IN_STEP
            + "step.update()\n    # block"
        ),
        Run(
            "saves = paceline.Checkpoints('runs/early/checkpoints', keep=1)\n"
            "model, optimizer, batches, training = start(job, checkpoints=saves)\n# block\n"
            "final = paceline.evaluate(job, model, test, score).loss\n"
            "assert abs(final - patience.best) < 1e-6 and patience.best_step >= 4\n"
            "late = iter(range(10**6))\n"  # losses that grow: it stops after 4 epochs, and stays so
            "score = lambda model, batch: {'loss': float(next(late))}\n"
            "for resume in ('never', 'auto'):\n"
            "    saves = paceline.Checkpoints('runs/early/checkpoints', keep=1, resume=resume)\n"
            "    model, optimizer, batches, training = start(job, checkpoints=saves)\n"
            "    # block\n"
            "    assert training.number == 16, training.number"
        ),
        Run(
            "model, _, batches, _ = start(job)\n"
            "muon = torch.optim.SGD([model.weight], lr=0.1)\n"
            "adamw = torch.optim.AdamW([model.bias], lr=0.1)\n# block\nassert step.number == 40"
        ),
        Run(TWO_MODELS + "# block\nassert step.number == 40", dots=LOSSES),
        Run(
            TWO_MODELS
            + "training = paceline.Training(job, [generator, critic], [opt_c, opt_g], batches)\n# block\n"
            "assert step.number == 40",
            dots=LOSSES,
        ),
    ],
    "howto/monitoring.md": [
        Run(PARTS + "# block\n" + IN_STEP + "step.update()", old="9400", new="0"),
        Run(
            "model, optimizer, batches, training = start(job)\n# block\n"
            + IN_STEP
            + "step.update()"
        ),
        Run(
            "model, optimizer, batches, training = start(job)\n# block\n"
            + IN_STEP
            + "step.update()"
        ),
    ],
    "howto/mpi.md": [
        NotRun("needs mpiexec: tests/dist/test_mpi.py starts jobs with it"),
        NotRun("needs mpiexec: tests/dist/test_mpi.py starts jobs with it"),
    ],
    "howto/notebooks.md": [
        Run(
            "# block\nassert results == [0, 1]",
            old="...  # as in a script, with the job that `paceline.join` would return",
            new="return job.rank",
        ),
        Run("train = lambda job: None\n# block"),
    ],
    "howto/parameter_server.md": [
        NotRun("needs several ranks: tests/dist/test_rpc.py makes such calls"),
        NotRun("needs several ranks: test_the_parameter_server of tests/e2e/test_examples.py"),
    ],
    "howto/port.md": [
        Run(
            JOB + "text = torch.arange(1000)\n# block\n"
            "step = next(batches.iterate(Position(7), epochs=1))\n"
            "assert sum(len(micro.batch[0]) for micro in step) == 48"
        ),
        Run("model = torch.nn.Linear(20, 4)\n# block\nassert 0 <= correct <= 64"),
    ],
    "howto/precision.md": [Run("model = torch.nn.Linear(20, 4)\n# block")],
    "howto/ray.md": [NotRun("needs ray: tests/e2e/test_ray.py runs such a program")],
    "howto/testing.md": [Run("# block\ntest_total()")],
    "howto/trainer.md": [
        Run(old="epochs=10", new="epochs=2"),
        Run("# block\nassert trainer.fit(epochs=2, seed=7).steps == 142"),
    ],
}
TWO_RANKS: dict[str, list[Run | NotRun]] = {
    "howto/batchnorm.md": [Run(JOB + "# block\nmodel(x)")],
    "howto/fsdp.md": [
        Run("# block\n    model(x).sum().backward()"),
        Run("# block\nmodel = paceline.fsdp(job, Transformer(), blocks=Block)"),
        Run("# block\nmodel(x).sum().backward()"),
        Run("# block\nmodel(x)"),
    ],
    "howto/models.md": [
        Run(),
        Run(
            JOB + "net = torch.nn.Linear(20, 4)\n# block",
            old="(job, net,",
            new="(job, copy.deepcopy(net),",
        ),
    ],
    "howto/tensor.md": [Run("# block\n    model(x)"), Run()],
}


def blocks_of(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", text, re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def program_of(page: str, runs: list[Run | NotRun]) -> str:
    parts = [BEGIN]
    for run, block in zip(runs, blocks_of(page), strict=True):
        if isinstance(run, NotRun):
            continue
        assert run.old in block, (page, run.old)
        text = block.replace(run.old, run.new) if run.old else block
        text = re.sub(
            r"^( *)\.\.\.$", lambda at, r=run: textwrap.indent(r.dots, at[1]), text, flags=re.M
        )
        parts.append(
            re.sub(
                r"^( *)# block$",
                lambda at, t=text: textwrap.indent(t, at[1]),
                run.around,
                flags=re.M,
            )
        )
    parts.append("if 'job' in globals(): job.leave()")
    return "\n".join(parts)


def test_every_block_of_every_page_has_its_run() -> None:
    pages = {
        str(page.relative_to(DOCS)): len(blocks_of(str(page.relative_to(DOCS))))
        for page in DOCS.rglob("*.md")
        if "learn" not in page.parts
    }
    found = {page: number for page, number in pages.items() if number}
    listed = {page: len(runs) for page, runs in (ONE_PROCESS | TWO_RANKS).items()}
    assert listed == found


ALL = """
import os, runpy, sys
for path in sys.argv[1:]:
    folder = path.removesuffix(".py")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")
    print("ran", path)
"""


@pytest.mark.parametrize(("nproc", "pages"), [(1, ONE_PROCESS), (2, TWO_RANKS)], ids=["1", "2"])
@pytest.mark.ci
def test_the_blocks_run(nproc: int, pages: dict[str, list[Run | NotRun]], tmp_path: Path) -> None:
    paths = []
    for page, runs in pages.items():
        path = tmp_path / page.replace("/", "_").replace(".md", ".py")
        path.write_text(program_of(page, runs))
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
