"""`paceline verify` on scripts that do not use paceline: each fault is found, none in its twin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from mutations import MUTATIONS, Mutation, apply, read_program
from verifying import verify, verify_json

from paceline.audit.rules import RULES

pytestmark = pytest.mark.usefixtures("verify_server")

TESTS = Path(__file__).parents[1]
# All other programs are slow. The test of the report, which also runs on other systems, has a mutation.
QUICK_SOUND = {"classifier", "random_negatives"}
QUICK_REFUSED = {"exits_early_on_one_rank", "spawns_ranks"}
# These, and the programs without a fault, have the same verdict on 2, 3 and 4 ranks.
ON_ANY_NUMBER_OF_RANKS = {
    "class_weights_of_one_rank",
    "equal_noise",
    "loss_divided_by_world_size",
    "mean_of_means",
    "parts_of_stream_overlap",
    "schedule_too_short",
    "set_epoch_forgotten",
    "statistics_drift_apart",
}


def audit(script: Path, nproc: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the facts."""
    return verify_json("--nproc", nproc, str(script), folder=folder)


def scripts(folder: str, quick: set[str]) -> list[Any]:
    """All scripts of a folder as parameters; all but the quick ones are marked slow."""
    found = []
    for path in sorted((TESTS / folder).glob("*.py")):
        marks = () if path.stem in quick else (pytest.mark.slow,)
        found.append(pytest.param(path, id=path.stem, marks=marks))
    return found


def mutations() -> list[Any]:
    return [
        pytest.param(base, mutation, id=mutation.name)
        for base, changes in MUTATIONS.items()
        for mutation in changes
    ]


def line_of(finding: dict[str, Any], script: Path) -> str:
    """The text of the line that a finding names, such as "train.py:33 in main()"."""
    name, _, rest = finding["at"].partition(":")
    assert name.endswith(script.name), finding
    return script.read_text().splitlines()[int(rest.split()[0]) - 1]


def verdict(of_ranks: dict[str, Any]) -> dict[str, list[str]]:
    """The checks with a fault, and those with a note."""
    return {kind: sorted(each["rule"] for each in of_ranks[kind]) for kind in ("faults", "notes")}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("base", "mutation"), mutations())
def test_the_fault_is_found_and_no_other(base: str, mutation: Mutation, tmp_path: Path) -> None:
    script = tmp_path / f"{mutation.name}.py"
    script.write_text(apply(base, mutation))
    code, facts = audit(script, "1,2", tmp_path)
    (of_ranks,) = facts["audits"]
    findings = {each["rule"]: each for each in of_ranks["notes"] + of_ranks["faults"]}
    assert verdict(of_ranks)["faults"] == ([] if mutation.is_note else [mutation.check]), facts
    found = findings[mutation.check]
    assert mutation.line in line_of(found, script)
    assert all(found[part] for part in ("what", "why", "fix", "evidence", "ranks"))
    assert code == (not mutation.is_note)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "script", scripts("verify_programs", QUICK_SOUND) + scripts("sound", QUICK_SOUND)
)
def test_no_fault_is_found_in_a_sound_script(script: Path, tmp_path: Path) -> None:
    code, facts = audit(script, "1,2", tmp_path)
    assert [fault for each in facts["audits"] for fault in each["faults"]] == []
    assert code == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("base", "mutation"),
    [pytest.param(base, None, id=base) for base in MUTATIONS]
    + [each for each in mutations() if each.id in ON_ANY_NUMBER_OF_RANKS],
)
def test_a_verdict_depends_neither_on_the_number_of_ranks_nor_on_chance(
    base: str, mutation: Mutation | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(apply(base, mutation) if mutation else read_program(base))
    verdicts = []
    for counts in ("1,2,3,4", "1,2"):
        _, facts = audit(script, counts, tmp_path)
        verdicts += [verdict(of_ranks) for of_ranks in facts["audits"]]
    assert len(verdicts) == 4
    assert all(each == verdicts[0] for each in verdicts), verdicts
    assert bool(verdicts[0]["faults"]) == bool(mutation and not mutation.is_note)


def test_every_check_has_mutations() -> None:
    checks = {each.check for changes in MUTATIONS.values() for each in changes}
    assert checks == {rule.name for rule in RULES}
    assert {each.id for each in mutations()} >= ON_ANY_NUMBER_OF_RANKS
    for base, changes in MUTATIONS.items():
        for mutation in changes:
            assert mutation.line in apply(base, mutation), mutation.name


HEAD = """
import os, torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
"""
LOOP = """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        loss = cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
DDP = """
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
"""
TASK = """
class Task(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return cross_entropy(self.model(x), y)

task = Task(model)
"""
AVERAGING = """
class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= world
        return super().step(closure)

model = net
opt = Averaging(model.parameters(), lr=0.05)
"""
PARTS = """
sampler = DistributedSampler(data, num_replicas=1, rank=0)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = torch.nn.Linear(1, 2)
"""
SOUND = {
    "ddp_in_a_module": HEAD + DDP + TASK + LOOP.replace("cross_entropy(model(a), b)", "task(a, b)"),
    "forward_called": HEAD + DDP + LOOP.replace("model(a)", "model.forward(a)"),
    "wrapped_when_several": HEAD
    + DDP.replace("model = ", "model = net if world == 1 else ")
    + TASK
    + LOOP.replace("cross_entropy(model(a), b)", "task(a, b)"),
    "optimizer_averages": HEAD + AVERAGING + LOOP,
    "parts_of_samples": HEAD
    + PARTS
    + DDP
    + LOOP.replace("model(a)", "model(a.chunk(world, 1)[rank].unsqueeze(-1)).mean(1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_an_exchange_that_is_seldom_seen_is_no_fault(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOUND[name] + "dist.destroy_process_group()\n")
    code, facts = audit(script, "1,2", tmp_path)
    (found,) = facts["audits"]
    assert (code, found["faults"]) == (0, [])
    reasons = [each["why"] for each in found["not_seen"]]
    assert not any("no exchange" in why or "seed" in why for why in reasons)
    passed = [each["rule"] for each in found["passed"]]
    # One process has the features of one rank's part only, so its gradient is another one: a note.
    assert ("step of one process" in passed) != (name == "parts_of_samples")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["break", "break_late", "evaluates", "fails_at_the_end"])
def test_no_exit_code_0_follows_a_run_that_failed(name: str, tmp_path: Path) -> None:
    ends = {
        "evaluates": "    if rank == 0:\n        with torch.no_grad():\n            model(x)\n"
        "    dist.barrier()\n",
        "fails_at_the_end": "assert rank == 0\n",
    }
    breaks = {"break": "i == 9", "break_late": "epoch and i == 9"}
    loop = LOOP + ends.get(name, "")
    if name in breaks:
        loop = LOOP + f"        if rank == 0 and {breaks[name]}:\n            break\n"
    script = tmp_path / "train.py"
    net = "net.append(torch.nn.BatchNorm1d(2))\n"
    script.write_text(HEAD + net + DDP + loop + "dist.destroy_process_group()\n")
    done = verify(str(script), folder=tmp_path)
    assert done.returncode in (1, 3)
    assert "sound" not in done.stdout


@pytest.mark.slow
def test_a_checkpoint_of_the_first_run_is_told(tmp_path: Path) -> None:
    load = """
if os.path.exists("last.pt"):
    net.load_state_dict(torch.load("last.pt")["net"])
"""
    save = """
if rank == 0:
    import argparse
    torch.save({"net": net.state_dict(), "args": argparse.Namespace(lr=1)}, "last.pt")
dist.destroy_process_group()
"""
    script = tmp_path / "train.py"
    script.write_text(HEAD + load + DDP + LOOP + save)
    code, facts = audit(script, "1,2", tmp_path)
    assert code == 3
    assert "last.pt at train.py:15, which an earlier run of this verification wrote" in facts["why"]


@pytest.mark.slow
def test_a_script_without_a_seed_is_seeded_and_the_report_says_so(tmp_path: Path) -> None:
    code, facts = audit(TESTS / "sound" / "no_seed.py", "1,2", tmp_path)
    assert code == 0
    assert "calls no torch.manual_seed" in facts["remarks"][0]
    judged = {each["rule"]: each["evidence"] for each in facts["audits"][0]["passed"]}
    assert "gets the gradient of one process" in judged["step of one process"]


SENTENCES = {
    "becomes_another_program": "never took an optimizer step",
    "exits_with_words": "needs at least 2 processes",
    "exits_without_training": "never took an optimizer step",
    "spawns_ranks": "the script starts its own ranks",
    "starts_ranks": "the script starts its own ranks",
    "wants_arguments": "the script does not accept its arguments",
    "exits_early": "every rank exits after 3 of 100 steps",
    "exits_early_at_once": "ended after 3 of 100 steps without an error",
    "exits_early_on_one_rank": "rank 1 exits after 3 of ",
    "forks": "the script forks",
    "forks_a_trainer": "the script forks",
    "needs_gpu_cuda": "the script needs a GPU",
    "needs_gpu_nccl": "the script needs a GPU",
    "never_steps": "never took an optimizer step",
    "raises": "RuntimeError: no disk for rank 0",
    "reads_stdin": "the script reads its standard input",
    "steps_by_world_size": "steps with 1 process and 6 with 2",
    "trains_in_spawned_process": "never took an optimizer step",
}


WHYS = {
    "becomes_another_program": "another program took its place",
    "exits_without_training": "it called sys.exit() at",
    "trains_in_spawned_process": "it started a process there, and verify cannot watch what that does",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", scripts("refused", QUICK_REFUSED))
def test_a_script_that_cannot_be_judged(script: Path, tmp_path: Path) -> None:
    if "gpu" in script.stem and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU on this host")
    code, facts = audit(script, "1,2", tmp_path)
    assert code == 3
    assert SENTENCES[script.stem] in facts["what"]
    assert WHYS.get(script.stem, "") in facts["why"]
    assert facts["fix"] or script.stem in ("raises", "exits_early_at_once", "exits_with_words")


@pytest.mark.ci
def test_the_report_as_text(tmp_path: Path) -> None:
    (mutation,) = [m for m in MUTATIONS["classifier"] if m.name == "loss_divided_by_world_size"]
    script = tmp_path / "train.py"
    text = apply("classifier", mutation)
    script.write_text(text.replace("model = DDP(net)", "model = DDP(torch.compile(net))"))
    done = verify("--steps", "20", str(script), folder=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("FAULT  the gradient is 0.5 times that of one process"), done.stderr
    assert [line.split(":")[0].strip() for line in lines[1:7]] == [
        "rule",
        "where",
        "effect",
        "why",
        "shown",
        "fix",
    ]
    assert any(line.startswith("compared: the run of 1 process (20 steps)") for line in lines)
    assert any(line.startswith("passed (") for line in lines)
    assert lines[-3].startswith("remark: torch.compile was turned off during verification")
    assert lines[-2].startswith("remark: the script trains on after the 20 steps that were watched")
    assert lines[-1].startswith("1 fault, 0 notes, ")
    assert done.returncode == 1


@pytest.mark.slow
def test_our_example_is_sound(tmp_path: Path) -> None:
    code, facts = audit(TESTS.parent / "examples/plain_torchrun.py", "1,2", tmp_path)
    assert (code, facts["audits"][0]["faults"]) == (0, [])


@pytest.mark.slow
def test_options_of_comparisons_are_refused_for_an_audited_script(tmp_path: Path) -> None:
    done = verify(
        "--bitwise", "--steps", "3", str(TESTS / "sound/compiled_whole.py"), folder=tmp_path
    )
    assert "--bitwise has no effect on a script that does not use paceline" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "two", "x.py"], "--nproc must be numbers"),
        (["--nproc", "1", "x.py"], "--nproc needs a number from 2 to 64"),
        (["--nproc", "0,2", "x.py"], "--nproc needs a number from 2 to 64"),
        (["--steps", "0", "x.py"], "--steps: must be 1 or more"),
        (["--rtol", "2", "x.py"], "--rtol must lie between 0 and 1"),
        (["--rtol", "0.1", "--bitwise", "x.py"], "--rtol has no effect with --bitwise"),
        (["no-such-script.py"], "there is no script 'no-such-script.py'"),
        ([], "are required: SCRIPT"),
    ],
)
def test_wrong_usage(words: list[str], message: str, tmp_path: Path) -> None:
    done = verify(*words, folder=tmp_path)
    assert message in done.stderr
    assert done.returncode == 2
