"""The rules of `paceline verify` on made-up evidence, and how evidence is recorded and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from paceline import torch_private
from paceline.audit import audit, evidence, record_data, record_loop, saved_weights
from paceline.audit.audit import AuditResult, judge
from paceline.audit.digests import (
    digest,
    exact_parts,
    states_inside,
)
from paceline.audit.events import (
    BackwardBegun,
    BatchGiven,
    CollectiveBegun,
    CollectiveEnded,
    DDPBuilt,
    EndedByVerify,
    Event,
    Failed,
    ForwardEnded,
    OptimizerStepBegun,
    OptimizerStepEnded,
    PassBegun,
    PassExhausted,
    PassStopped,
    ProcessStarted,
    RankEnded,
    RankStarted,
    ScheduleStepped,
    SeedSet,
)
from paceline.audit.evidence import RankLog, Run, TrainingLoaders
from paceline.audit.models import Models
from paceline.audit.progress import Progress
from paceline.audit.record import Recorder, intercept
from paceline.audit.record_collectives import CollectiveHooks
from paceline.audit.refusals import Refused, refuse, refuse_other_steps
from paceline.audit.rules import RULES
from paceline.audit.rules.collectives import unmatched_collective
from paceline.audit.rules.rule import Case, Finding, NoFault, NotJudged, Rule, outliers
from paceline.audit.run_plan import RunPlan
from paceline.verify.report import report


def run(mode: Any, *ranks: list[Event], hung: bool = False) -> Run:
    logs = [RankLog(rank, events, []) for rank, events in enumerate(ranks)]
    return Run(RunPlan(Path("x"), mode, len(ranks), 20), logs, 0, hung=hung)


def case(*ranks: list[Event], hung: bool = False) -> Case:
    ordinary = run("ordinary", *ranks, hung=hung)
    return Case(run("solo", ranks[0]), ordinary, why_no_union="no union.")


def beside_union(one: list[Event], *ranks: list[Event]) -> Case:
    """A case in which one process did this with the samples and weights of the ranks."""
    return Case(run("solo", one), run("ordinary", *ranks), run("union", one))


def call(op: str, line: int, ranks: int = 2) -> CollectiveBegun:
    return CollectiveBegun(
        op=op,
        at=f"t.py:{line}",
        steps_done=3,
        group=list(range(ranks)),
        reduce="SUM",
        evaluation=None,
    )


def test_an_extra_collective_is_reported_with_what_the_others_are_in() -> None:
    usual = [call("all_reduce", 5), call("barrier", 9)]
    judged = unmatched_collective(case([call("all_reduce", 2), *usual], usual))
    assert isinstance(judged, Finding)
    assert judged.at == "t.py:2"
    assert "rank 0: all_reduce SUM at t.py:2; rank 1: all_reduce SUM at t.py:5" in judged.what


def test_the_last_of_three_ranks_does_not_enter() -> None:
    usual = [call("barrier", 9, 3)]
    judged = unmatched_collective(case(usual, usual, [RankEnded()], hung=True))
    assert isinstance(judged, Finding)
    assert judged.at == "t.py:9"
    assert "ranks 0 and 1: barrier SUM at t.py:9; rank 2: none" in judged.what


def test_a_busy_rank_is_not_judged() -> None:
    usual = [call("barrier", 9)]
    judged = unmatched_collective(case(usual, [PassBegun(loader="a")], hung=True))
    assert judged == NotJudged("a rank was still computing when the run was stopped.")


def test_collectives_of_some_ranks_are_ignored() -> None:
    pair = replace(call("all_reduce", 2), group=[0, 1])
    usual = [call("barrier", 9, 3)]
    assert isinstance(unmatched_collective(case([pair, *usual], [pair, *usual], usual)), NoFault)


def test_a_part_of_a_trained_model_is_trained() -> None:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    models = Models(recorder)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    copy = deepcopy(model)
    models.on_call(model, trains=True)
    for part in (model[0], copy, model):
        models.on_call(part, trains=False)
    assert [models.is_trained(each) for each in (model[0], copy, model)] == [True, False, True]


@pytest.mark.parametrize("lines", [(8, 9), (9, 8)])
def test_ranks_that_reduce_at_other_lines_are_a_note(lines: tuple[int, int]) -> None:
    judged = unmatched_collective(case(*[[call("all_reduce", line)] for line in lines]))
    assert isinstance(judged, Finding)
    assert (judged.is_note, list(judged.ranks), judged.step) == (True, [1], 4)
    assert f"rank 0 at t.py:{lines[0]}, rank 1 at t.py:{lines[1]}" in judged.evidence


def test_rules_without_evidence_find_no_fault() -> None:
    empty: list[Event] = []
    for rule in RULES:
        judged = rule.judge(case(empty, empty))
        assert isinstance(judged, NoFault | NotJudged), rule.name
        assert (judged.evidence if isinstance(judged, NoFault) else judged.why)[-1] == "."


def test_a_known_message_of_a_script_that_failed_is_explained() -> None:
    said = "You set `devices=2` and `num_nodes=1` in Lightning, but the product (2 * 1) does not match the "
    failed = Failed(type="ValueError", message=f"{said}world size (1).", place="t.py:3")
    plan = RunPlan(Path("x"), "solo", 1, 20)
    with pytest.raises(Refused) as refused:
        refuse(Run(plan, [RankLog(0, [failed], [])], 1))
    assert "does not match the world size" in refused.value.what
    assert "LOCAL_WORLD_SIZE" in (refused.value.fix or "")


def _failed(rank: int, kind: str, message: str) -> RankLog:
    failed = Failed(type=kind, message=message, place=f"t.py:{rank}")
    return RankLog(rank, [failed], [])


def test_the_rank_that_failed_for_another_one_is_not_the_cause() -> None:
    lost = _failed(0, "RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:4321")
    plan = RunPlan(Path("x"), "ordinary", 2, 20)
    with pytest.raises(Refused) as refused:
        refuse(Run(plan, [lost, _failed(1, "KeyError", "'labels'")], 1))
    assert "KeyError: 'labels'" in refused.value.what
    assert refused.value.where == "t.py:1"
    with pytest.raises(Refused) as refused:
        refuse(Run(plan, [lost, RankLog(1, [], [])], 1))
    assert "Connection closed by peer" in refused.value.what


def test_only_the_error_that_ended_the_script_is_blamed_on_bitwise() -> None:
    for error, is_bitwise, fix in (
        ("reproducible training ...\n  why: x", True, "leave --bitwise out."),
        ("reproducible training ...\n  why: x", False, ""),
        ("precision must be one of", True, ""),
    ):
        plan = RunPlan(Path("x"), "solo", 1, 20, bitwise=is_bitwise)
        with pytest.raises(Refused) as refused:
            refuse(Run(plan, [_failed(0, "ConfigError", error)], 1))
        assert refused.value.fix == fix


class Halving(lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step()


def test_a_schedule_with_a_step_of_its_own_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    restarts = lr_scheduler.CosineAnnealingWarmRestarts
    monkeypatch.setattr(lr_scheduler.LRScheduler, "__init__", lr_scheduler.LRScheduler.__init__)
    for kind in (lr_scheduler.LRScheduler, restarts, Halving):
        monkeypatch.setattr(kind, "step", kind.step)
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    progress = Progress(RunPlan(tmp_path, "solo", 1, 20), recorder, 0)
    hooks = record_loop.LoopHooks(progress, cast(Any, None))
    intercept("__init__", hooks.build_schedule, lr_scheduler.LRScheduler)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for schedule in (restarts(optimizer, 3), Halving(optimizer, 2)):
        optimizer.step()
        schedule.step()
        (event,) = events
        assert isinstance(event, ScheduleStepped)
        events.clear()


def test_ranks_that_exchange_parts_before_the_backward_divide_a_model() -> None:
    exchange = [call("all_to_all_single", 3), CollectiveEnded()]
    ddp, backward = DDPBuilt(group_size=2), BackwardBegun(at="t.py:4")
    assert case(*[[ddp, *exchange, backward]] * 2).splits_model
    assert not case(*[[ddp, backward, *exchange]] * 2).splits_model


def _given(*ids: int) -> BatchGiven:
    return BatchGiven(loader="val", ids=list(ids))


# `group`: how many batches are fetched before their backwards.
@pytest.mark.parametrize("failing", ["solo", "ordinary"])
def test_no_run_that_failed_is_followed_by_exit_code_0(failing: str) -> None:
    failed = Failed(type="ValueError", message="no score\nfor 3", place="t.py:9")
    solo, ordinary = run("solo", [SeedSet()]), run("ordinary", [], [])
    codes = [report([AuditResult(Case(solo, ordinary))], []).exit_code]
    if failing == "solo":
        solo = replace(run("solo", [SeedSet(), failed]), returncode=1)
    else:
        ordinary = replace(run("ordinary", [], [EndedByVerify(), failed]), returncode=1)
    result = report([AuditResult(Case(solo, ordinary))], [])
    assert [*codes, result.exit_code] == [0, 3]
    cause = "failed after the watched steps with ValueError: no score, at t.py:9."
    assert any(cause in line for line in result.lines)


@pytest.mark.parametrize(("epoch", "known"), [(3, 3), (torch.tensor(3), 3), ("third", None)])
def test_an_epoch_may_be_set_by_any_name(tmp_path: Path, epoch: Any, known: int | None) -> None:
    class Samples(torch.utils.data.Sampler[int]):
        def set_epoch(self, to: Any) -> None:
            self.to = to

    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), cast(Any, SimpleNamespace()), 0)
    hooks, sampler = record_data.DataHooks(progress), Samples()
    loader = DataLoader(cast(Any, [1, 2]), sampler=sampler)
    hooks.set_epoch(Samples.set_epoch, sampler, to=epoch)
    assert sampler.to is epoch
    assert hooks._epoch_of(loader) == known


def test_a_rule_that_fails_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "RULES", (Rule("broken", lambda case: cast(NoFault, 1 / 0)),))
    judged = judge(case([], []))["broken"]
    assert isinstance(judged, NotJudged)
    assert "a bug of paceline: ZeroDivisionError" in judged.why


def test_collectives_of_other_threads_are_not_recorded() -> None:
    recorded: list[Event] = []

    class Log:
        @contextmanager
        def span(self, begun: Event, ended: type[Event]) -> Iterator[dict[str, Any]]:
            recorded.append(begun)
            yield {}

    progress = cast(Progress, SimpleNamespace(recorder=Log(), evaluation=None, steps=0))
    hooks = CollectiveHooks(progress)

    def barrier() -> None: ...

    thread = threading.Thread(target=hooks.collective, args=[barrier])
    thread.start()
    thread.join()
    assert recorded == []
    hooks.collective(barrier)
    assert len(recorded) == 1


def test_outliers() -> None:
    assert outliers(["a", "a", "b"]) == [2]
    assert outliers(["b", "a", "a"]) == [0]
    assert outliers(["a", "b"]) == [1]
    assert outliers(["a", "a"]) == []


def test_half_a_line_ends_the_log(tmp_path: Path) -> None:
    line = RankStarted(cores=[1]).to_json()
    (tmp_path / "rank0.jsonl").write_text(f"{line}\n{line[:9]}")
    (event,) = evidence.read_logs(tmp_path, 2)[0].events
    assert (type(event), event.to_json()) == (RankStarted, line)
    assert evidence.read_logs(tmp_path, 2)[1].events == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_values_without_readable_content_count_by_their_representation() -> None:
    values: list[Any] = [
        np.array(["a", "b"], object),
        np.array(["c", "d"], object),
        np.float32,
        np.float64,
        torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.qint8),
        torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8),
    ]
    assert len({digest(value) for value in values}) == len(values)


def test_digests_tell_values_shapes_and_types_apart() -> None:
    ones = torch.ones(4)
    values: list[Any] = [ones, ones.double(), ones.reshape(2, 2), [ones, ones], {"a": ones, "b": 1}]
    values += ["1", 1]
    images = [SimpleNamespace(tobytes=lambda: b"3"), SimpleNamespace(tobytes=lambda: b"4")]
    values += [None, Path("a"), Path("b"), *images]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.ones(4, 2).T[0]) == digest(ones)
    assert exact_parts((torch.rand(3), 5)) == exact_parts((torch.rand(3), 5)) != 0
    assert exact_parts(torch.rand(3)) == 0


def test_generators_are_found_in_containers_and_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].generator = torch.Generator()
    holder: dict[str, Any] = {"model": model, "each": [torch.Generator()], "many": [model] * 999}
    holder["itself"] = holder
    found = states_inside(SimpleNamespace(held=holder), "script")
    assert set(found) == {"script.held.model.0.generator", "script.held.each.0"}


def test_loaders_whose_batches_are_used_together_are_training_loaders() -> None:
    found = TrainingLoaders()
    for first in ("example", "a"):  # a batch of "example" is taken once, to see its shape
        found.on_batch(first)
        found.on_batch("b")
        found.on_forward()
        found.on_backward()
    assert list(found.names) == ["b"]
    found.on_batch("validation")
    found.on_forward()
    found.on_batch("a")
    found.on_batch("b")
    found.on_forward()
    found.on_backward()
    assert list(found.names) == ["b", "a"]


def test_without_private_names_of_torch_loaders_still_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The watch is off where torch lacks a name; the rules that need it do not answer `NoFault`."""
    monkeypatch.setattr(torch_private, "look_up", lambda path: None)
    torch_private.find.cache_clear()
    for name in ("__iter__", "__len__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    plan = RunPlan(tmp_path, "ordinary", 2, 20)
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    try:
        record_data.install(Progress(plan, recorder, 0))
        assert [len(batch) for batch in DataLoader(range(6), 4)] == [4, 2]
    finally:
        torch_private.find.cache_clear()
    events.append(BackwardBegun())
    run_ = Run(plan, [RankLog(rank, events, []) for rank in range(2)], 0)
    judged = judge(Case(run_, run_))
    for rule in ("shards", "random numbers"):
        assert isinstance(judged[rule], NotJudged), judged[rule]


def test_the_weights_of_an_evaluation_are_saved_only_if_it_has_a_result(tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 20), recorder, 0)
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    models: Any = SimpleNamespace(by_number=lambda: {0: model})
    assert progress.on_no_grad_forward(of_trained=True)
    saved_weights.begin_evaluation(progress, models)
    assert not list(tmp_path.glob("weights-*"))
    torch.nn.init.constant_(model.weight, before + 1)  # such as a mean of the weights, put back
    saved_weights.save_weights(progress)
    saved = torch.load(tmp_path / "weights-1-0.pt", weights_only=True)
    assert saved[0]["weight"][1].item() == before

    # In a union, the model has these weights until the training goes on.
    plan = RunPlan(tmp_path / "union", "union", 1, 20, source=tmp_path, ranks=2)
    progress = Progress(plan, recorder, 0)
    torch.nn.init.constant_(model.bias, before + 2)
    assert progress.on_no_grad_forward(of_trained=True)
    saved_weights.begin_evaluation(progress, models)
    assert model.weight.item() == before
    torch.nn.init.constant_(model.bias, 9.0)  # by the script, in the evaluation
    progress.on_forward(trains=True)
    assert model.weight.item() == before + 1
    assert model.bias.item() == 9.0


@pytest.mark.parametrize("steps", [1, 20, 41])
def test_a_pass_is_cut_after_half_of_the_steps(steps: int, tmp_path: Path) -> None:
    progress = Progress(RunPlan(tmp_path, "solo", 1, steps), cast(Any, SimpleNamespace()), 0)
    optimizer, cuts = object(), []
    while not progress.is_over:
        progress.on_batch("loader")
        assert not progress.cuts_pass(1000)  # within a step
        progress.on_step(optimizer)
        assert not progress.cuts_pass(steps)  # it ends by itself
        if progress.cuts_pass(1000):
            cuts.append(progress.steps)
    assert (cuts, progress.steps) == ([max(steps // 2, 1)], steps)


def test_consequences_of_consequences_are_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(case: Case) -> Finding:
        return Finding(what="", at="", why="", fix="", evidence="", effect="")

    rules = (
        Rule("root", fault),
        Rule("middle", fault, consequence_of=("root",)),
        Rule("leaf", fault, consequence_of=("middle",)),
    )
    monkeypatch.setattr(audit, "RULES", rules)
    monkeypatch.setattr(audit, "_judge", lambda rule, case: rule.judge(case))
    found = judge(cast(Any, None))
    assert [name for name, each in found.items() if isinstance(each, Finding)] == ["root"]


def test_numbers_of_numpy_are_numbers_in_an_event() -> None:
    event = PassBegun(loader="a", pass_number=0, epoch=cast(int, np.int64(3)))
    again = PassBegun.from_json(event.to_json())
    assert isinstance(again, PassBegun)
    assert again.epoch == 3


@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
def test_samples_are_counted_in_the_first_dense_input(kind: str) -> None:
    make = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
        "meta": lambda: torch.empty(4, device="meta"),
    }
    count, rows = record_loop._samples((make[kind](), torch.ones(5, 2)))
    assert count == len(rows or ()) == 5


def test_a_subset_of_a_dataset_without_a_length_has_no_root_samples(tmp_path: Path) -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    recorder = Recorder(tmp_path, 0)
    progress = Progress(RunPlan(tmp_path, "solo", 1, 20), recorder, 0)
    hooks = record_data.DataHooks(progress)
    subset = torch.utils.data.Subset(cast(Any, Endless()), range(8))
    seen = hooks._describe(DataLoader(subset, batch_size=4))
    assert (seen.samples, seen.root_samples, seen.batches) == (8, None, 2)


@pytest.mark.parametrize(
    ("index", "ids"),
    [
        (3, [6]),
        ([1, 3], [2, 6]),
        (torch.tensor(3), [6]),
        (torch.tensor([1, 3]), [2, 6]),
        (np.array([1, 3]), [2, 6]),
        ([torch.tensor(1), torch.tensor(3)], [2, 6]),
    ],
)
def test_the_samples_that_a_batch_sampler_gives(index: Any, ids: list[int]) -> None:
    subset = torch.utils.data.Subset(cast(Any, range(8)), range(0, 8, 2))
    assert record_data._samples_of(subset, index) == ids


@pytest.mark.parametrize(
    ("of_one", "of_rank", "is_refused"),
    [(12, 12, False), (12, 3, True), (12, 14, True), (12, 6, False), (9, 3, False)],
)
def test_a_rank_may_take_its_part_of_the_steps(of_one: int, of_rank: int, is_refused: bool) -> None:
    """3 of 9: three passes of 3 steps, of each of which a rank takes 1."""

    def steps(count: int) -> list[Event]:
        return [OptimizerStepBegun(step=count, at="t.py:1"), OptimizerStepEnded(step=count)]

    made = Case(run("solo", steps(of_one)), run("ordinary", steps(of_rank), steps(of_rank)))
    if is_refused:
        with pytest.raises(
            Refused, match=f"takes {of_one} steps with 1 process and {of_rank} with 2"
        ):
            refuse_other_steps(made)
    else:
        refuse_other_steps(made)


def test_a_script_that_waits_for_a_process_of_its_own_is_refused() -> None:
    log = RankLog(0, [ProcessStarted(at="t.py:25")], [])
    with pytest.raises(Refused, match="never took an optimizer step") as caught:
        refuse(Run(RunPlan(Path("x"), "solo", 1, 20), [log], 0, hung=True))
    assert caught.value.where == "t.py:25"
    assert "it started a process there" in (caught.value.why or "")


def test_ranks_that_wait_for_a_training_of_another_are_refused() -> None:
    plan = RunPlan(Path("x"), "ordinary", 2, 20)
    alone = [BackwardBegun(), OptimizerStepEnded(step=20), EndedByVerify()]
    with pytest.raises(Refused, match="only rank 0 took the 20 steps") as caught:
        refuse(Run(plan, [RankLog(0, alone, []), RankLog(1, [], [])], 0))
    assert "--steps 200" in caught.value.fix
    # One rank steps for all.
    refuse(
        Run(plan, [RankLog(0, alone, []), RankLog(1, [BackwardBegun(), EndedByVerify()], [])], 0)
    )


def test_a_pass_that_verify_ends_is_not_exhausted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("__iter__", "__len__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    events: list[Event] = []
    recorder: Any = SimpleNamespace(write=events.append)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 1), recorder, 0)
    record_data.install(progress)
    optimizer = object()
    for _ in DataLoader(cast(Any, range(6)), 2):
        progress.on_forward(trains=True)
        progress.on_backward()
        progress.on_step(optimizer)
    kinds = [type(event) for event in events]
    assert PassStopped in kinds
    assert PassExhausted not in kinds


def test_an_optimizer_in_the_memory_of_a_deleted_one_is_a_new_one(tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(write=lambda event: None)
    progress = Progress(RunPlan(tmp_path, "ordinary", 2, 90), recorder, 0)
    optimizers = [object(), object()]

    def take_steps(optimizer: object) -> None:
        for _ in range(3):
            progress.on_batch("a")
            progress.on_step(optimizer)

    for optimizer in optimizers:
        take_steps(optimizer)
    del optimizers[0]
    take_steps(object())
    assert progress.steps == 9


def test_a_note_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Finding(what="x", at="", why="", fix="", evidence="", effect="")
    for is_note in (True, False):
        rules = (
            Rule("cause", lambda _, is_note=is_note: replace(fault, is_note=is_note)),
            Rule("effect", lambda _: fault, consequence_of=("cause",)),
        )
        monkeypatch.setattr("paceline.audit.audit.RULES", rules)
        assert isinstance(judge(case([], []))["effect"], Finding) == is_note


def test_the_collectives_of_a_ddp_of_some_ranks_are_not_those_of_all() -> None:
    barrier = CollectiveBegun(op="barrier", group=[0, 1, 2], at="t.py:9")
    trainer: list[Event] = [
        DDPBuilt(group_size=2), ForwardEnded(trains=True, sync=True), BackwardBegun(at="t.py:3"), barrier,
    ]  # fmt: skip
    assert isinstance(unmatched_collective(case(trainer, trainer, [barrier])), NoFault)


def test_a_network_that_measures_between_the_forward_of_ddp_and_its_backward() -> None:
    def rank(*, measures: bool = True) -> list[Event]:
        events: list[Event] = [DDPBuilt(group_size=2)]
        for number in (1, 2, 3):
            events.append(ForwardEnded(trains=True, sync=True, steps_done=number - 1))
            events += [ForwardEnded(model=100)] * measures
            events += [BackwardBegun(), OptimizerStepBegun(step=number)]
            events.append(OptimizerStepEnded(step=number))
        return events

    assert isinstance(unmatched_collective(case(rank(), rank(measures=False))), NoFault)
    assert isinstance(unmatched_collective(case(rank(), rank()[:-5])), Finding)
