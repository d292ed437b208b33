"""`paceline verify` names the right line, step and cure, where an earlier version named others."""

from __future__ import annotations

from pathlib import Path

import pytest
from verifying import verify_json

pytestmark = pytest.mark.usefixtures("verify_server")

HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
draws = torch.Generator().manual_seed(1)
x = torch.randn(300, 4, generator=draws)
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(0)
"""
LOADER = """
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=12, sampler=sampler)
"""
MODEL = """
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
"""
LOOP = """
number = 0
for epoch in range(3):
    for x, y in loader:
        {begin}
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        number += 1
        {end}
    dist.all_reduce(torch.ones(1))
"""
LOOP_ALONE = LOOP.format(begin="", end="")

OPTIONS = ("--nproc", "2,3", "--hang-after", "8")
# Of each script: the rule, the step, and words of the report. The line ends with "# here".
CASES = {
    "drift of the second optimizer": (
        HEAD
        + LOADER
        + """
gen, disc = DDP(nn.Linear(3, 4)), nn.Linear(4, 1)
opt_gen = torch.optim.Adam(gen.parameters(), lr=0.01)
opt_disc = torch.optim.Adam(disc.parameters(), lr=0.01)
for epoch in range(3):
    for real, _ in loader:
        fake = gen(torch.ones(len(real), 3))
        opt_gen.zero_grad()
        F.softplus(-disc(fake)).mean().backward()
        opt_gen.step()
        opt_disc.zero_grad()
        (F.softplus(-disc(real)) + F.softplus(disc(fake.detach()))).mean().backward()
        opt_disc.step()  # here
""",
        ("weights", 1, "its gradient differs between ranks too: it was not reduced"),
    ),
    "a model called without its wrapper": (
        HEAD + LOADER + MODEL + LOOP_ALONE.replace("model(x), y)", "model.module(x), y)  # here"),
        ("weights", 1, "call the wrapped model, not `model.module`"),
    ),
    "mean over the tokens of all ranks": (
        HEAD
        + LOADER
        + MODEL
        + """
for epoch in range(3):
    for x, y in loader:
        tokens = (x > 0).sum()
        dist.all_reduce(tokens)
        loss = F.mse_loss(model(x), y, reduction="sum") / tokens
        opt.zero_grad()
        loss.backward()  # here
        opt.step()
""",
        ("step of one process", 1, "or by the samples of all of them"),
    ),
    "the optimizer's state": (
        HEAD
        + LOADER
        + MODEL.replace("SGD", "Adam")
        + """
if rank == 0:
    state = opt.state_dict()
    state["state"] = {k: {"step": torch.tensor(9.0), "exp_avg": torch.ones_like(p),
                          "exp_avg_sq": torch.ones_like(p)} for k, p in enumerate(model.parameters())}
    opt.load_state_dict(state)  # here
"""
        + LOOP_ALONE,
        ("weights", 1, "and not the states of optimizers"),
    ),
    "random_split without a seed": (
        HEAD
        + "torch.manual_seed(rank)\ndata, validation = random_split(data, [240, 60])"
        + LOADER
        + MODEL
        + LOOP_ALONE.replace("in loader:", "in loader:  # here"),
        ("shards", 1, "random_split(..., generator="),
    ),
    "an optimizer in place of another": (
        HEAD
        + LOADER
        + MODEL
        + LOOP.replace("model(x), y)", "model(x), y)  # here").format(
            begin="if number == 6: opt = torch.optim.Adam(model.parameters(), lr=0.01)",
            end="if number == 8 and rank == 0: model.module[0].weight.data.clamp_(-0.1, 0.1)",
        ),
        ("weights", 9, "equal on all ranks after step 8"),
    ),
    "loaders of different lengths": (
        HEAD
        + """
bounds = [12 * (3 * r + (r > 0)) for r in range(world + 1)]
shard = Subset(data, range(bounds[rank], bounds[rank + 1]))
loader = DataLoader(shard, batch_size=12, shuffle=True)
"""
        + MODEL
        + LOOP_ALONE.replace("in loader:", "in loader:  # here"),
        ("collectives", 4, "got fewer batches than the others in one pass"),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_the_backward_computes_again_is_no_forward_of_its_own(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "sound" / "80_recomputed.py"
    _, facts = verify_json("--nproc", "1,2", str(script), folder=tmp_path)
    (audit,) = facts["audits"]
    assert "step of one process" in [each["rule"] for each in audit["passed"]]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_place_and_cure(name: str, tmp_path: Path) -> None:
    source, (rule, step, words) = CASES[name]
    (tmp_path / "train.py").write_text(source)
    _, facts = verify_json(*OPTIONS, "train.py", folder=tmp_path)
    line = 1 + source[: source.index("# here")].count("\n")
    for each in facts["audits"]:
        (fault,) = each["faults"]
        assert (fault["rule"], fault["step"]) == (rule, step), fault
        assert fault["at"].split(" ")[0] == f"train.py:{line}", fault
        assert words in " ".join(map(str, fault.values()))
