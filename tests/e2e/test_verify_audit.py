"""`paceline verify` on scripts that do not use paceline: each fault is found, none in its twin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from verifying import verify, verify_json

pytestmark = pytest.mark.usefixtures("verify_server")

TESTS = Path(__file__).parents[1]
RULES = {
    "01": "order of passes",
    "02": "shards",
    "03": "shards",
    "04": "evaluated samples",
    "05": "step of one process",
    "06": "step of one process",
    "07": "weights",
    "08": "no_sync around backward only",
    "09": "weights",
    "10": "weights",
    "11": "random numbers",
    "12": "random numbers",
    "13": "schedule",
    "14": "clipping before unscaling",
    "15": "weights",
    "16": "buffers",
    "17": "collective on some ranks only",
    "18": "weights",
    "19": "reported numbers",
    "20": "devices",
    "21": "weights",
    "23": "step of one process",
    "61": "step of one process",
    "65": "reported numbers",
    "66": "step of one process",
    "67": "shards",
    "68": "buffers",
    "69": "step of one process",
    "70": "schedule",
    "71": "step of one process",
    "72": "shards",
    "73": "schedule",
    "74": "step of one process",
    "75": "step of one process",
    "79": "reported numbers",
    "81": "step of one process",
    "83": "step of one process",
    "84": "step of one process",
    "85": "shards",
    "86": "weights",
    "89": "step of one process",
    "90": "shards",
    "91": "reported numbers",
    "98": "shards",
    "99": "reported numbers",
}
# Broken scripts whose only finding is a note: it is not certain that one process does something else.
NOTES = {
    "03_stream_overlaps": "shards",
    "05_closure": "step of one process",
    "05_gradient_summed": "step of one process",
    "11_gan_noise": "random numbers",
    "11_noise_before_forward": "random numbers",
    "11_resumed": "random numbers",
    "11_same_dropout_mask": "random numbers",
    "12_generator_copied_into_workers": "random numbers",
    "12_worker_seed_constant": "random numbers",
    "23_tokens_sum_and_count": "step of one process",
    "08_no_sync_around_backward_only": "no_sync around backward only",
    "61_clip_after_reduction": "step of one process",
    "65_gathered_with_labels": "reported numbers",
    "66_class_weights": "step of one process",
    "69_tokens_weighted": "step of one process",
    "71_contrastive": "step of one process",
    "73_one_cycle": "schedule",
    "74_gathered_pairs": "step of one process",
    "75_clipped_shards": "step of one process",
    "89_penalty": "step of one process",
    "90_normalised_parts": "shards",
    "91_total_cost": "reported numbers",
}
# Broken scripts whose fault is not found: the ranks draw their samples with replacement, or resume a pass
# that does not end in the watched steps.
MISSED = {"72_resumed_position", "98_weighted_parts"}
# The test of the report finds a fault in a gradient; the quick sound scripts are also evaluated. All others
# are slow.
QUICK: set[str] = set()
QUICK_SOUND = {"04_validation_padded", "92_random_negatives"}
QUICK_REFUSED = {"exits_early_on_one_rank", "spawns_ranks"}


def audit(script: Path, nproc: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the facts."""
    return verify_json("--nproc", nproc, str(script), folder=folder)


def break_script(change: Path, folder: Path) -> Path:
    """A copy of the sound script in `folder`, with the fault that this diff makes."""
    script = folder / f"{change.stem}.py"
    shutil.copy(TESTS / "sound" / script.name, script)
    subprocess.run(["git", "apply", str(change)], cwd=folder, check=True)
    return script


def scripts(kind: str, quick: set[str]) -> list[Any]:
    """All scripts (or diffs) of a folder as parameters; all but the quick ones are marked slow."""
    found = []
    for path in sorted((TESTS / kind).iterdir()):
        marks: tuple[pytest.MarkDecorator, ...] = () if path.stem in quick else (pytest.mark.slow,)
        if kind == "broken" and path.stem in MISSED:
            marks = (pytest.mark.skip(reason="this fault is not found"),)
        found.append(pytest.param(path, id=path.stem, marks=marks))
    assert len(found) >= len(quick)
    return found


def processes_of(script: Path) -> str:
    """1, 2 and 3 for the first script of each rule, 1 and 2 for the others."""
    number = script.name[:2]
    if number not in RULES:
        return "1,2"
    return "1,2,3" if script == min(script.parent.glob(f"{number}_*")) else "1,2"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("change", scripts("broken", QUICK))
def test_the_fault_is_found_and_no_other(change: Path, tmp_path: Path) -> None:
    script = break_script(change, tmp_path)
    code, facts = audit(script, processes_of(change), tmp_path)
    is_note = script.stem in NOTES
    for each in facts["audits"]:
        (found,) = each["notes"] if is_note else each["faults"]
        assert found["rule"] == NOTES.get(script.stem, RULES[script.name[:2]]), facts
        assert found["at"].startswith(script.name) or str(script) in found["at"]
        assert all(found[part] for part in ("what", "why", "fix", "evidence", "ranks"))
        assert bool(each["faults"]) != is_note
    assert code == (not is_note)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", scripts("sound", QUICK_SOUND))
def test_no_fault_is_found_in_a_sound_script(script: Path, tmp_path: Path) -> None:
    code, facts = audit(script, processes_of(script), tmp_path)
    assert [fault for each in facts["audits"] for fault in each["faults"]] == []
    assert code == 0


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
    assert (code, found["faults"], found["notes"]) == (0, [], [])
    reasons = [each["why"] for each in found["not_seen"]]
    assert not any("no exchange" in why or "seed" in why for why in reasons)
    passed = [each["rule"] for each in found["passed"]]
    assert ("step of one process" in passed) != (name == "optimizer_averages")


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
    code, facts = audit(TESTS / "sound" / "64_no_seed.py", "1,2", tmp_path)
    assert code == 0
    assert "calls no torch.manual_seed" in facts["remarks"][0]
    judged = {each["rule"]: each["evidence"] for each in facts["audits"][0]["passed"]}
    assert "gets the gradient of one process" in judged["step of one process"]


@pytest.mark.slow
def test_a_metric_of_one_rank_is_a_note(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (TESTS / "sound" / "67_normalised.py").read_text()
    script.write_text(text.replace("        dist.all_reduce(counts)\n", ""))
    code, facts = audit(script, "1,2", tmp_path)
    notes = facts["audits"][0]["notes"]
    assert [note["rule"] for note in notes] == ["reported numbers"]
    assert notes[0]["effect"] == "50% of the samples are in the number"
    assert code == 0


@pytest.mark.slow
def test_a_perplexity_that_is_averaged_over_ranks_is_a_note(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (TESTS / "sound" / "70_plateau.py").read_text()
    whole = "    dist.all_reduce(sums)\n    return (sums[0] / sums[1]).item()"
    assert whole in text
    own = (
        "    mean = (sums[0] / sums[1]).exp() / dist.get_world_size()\n    dist.all_reduce(mean)\n"
    )
    script.write_text(text.replace(whole, own + "    return mean.item()"))
    code, facts = audit(script, "1,3", tmp_path)
    notes = facts["audits"][0]["notes"]
    assert [note["rule"] for note in notes] == ["reported numbers"]
    assert "perplexity" in notes[0]["why"]
    assert code == 0


def test_every_fault_has_its_script_and_twin() -> None:
    for name in RULES:
        broken = {path.stem for path in (TESTS / "broken").glob(f"{name}_*.diff")}
        assert broken
        assert broken <= {path.stem for path in (TESTS / "sound").glob("*.py")}
    assert all((TESTS / "broken" / f"{name}.diff").exists() for name in NOTES)


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
    script = break_script(TESTS / "broken/05_compiled.diff", tmp_path)
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
    done = verify("--bitwise", "--steps", "3", str(TESTS / "sound/05_compiled.py"), folder=tmp_path)
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
