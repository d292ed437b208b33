"""Diagnoses of hangs from recorded evidence, and the text of their reports."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest

from paceline.launch.hang_watch import HangWatch
from paceline.watch import flight_recorder, probe
from paceline.watch.hang import Diagnosis, diagnose
from paceline.watch.processes import describe_workers, is_ending, read_state
from paceline.watch.rank_state import (
    Call,
    RankState,
    StackSummary,
    read_calls,
    read_dump,
    read_place,
    read_stack,
)

TRAIN = (("train.py", 57, "step"), ("train.py", 90, "<module>"))
EVALUATE = (("train.py", 31, "evaluate"), ("train.py", 88, "<module>"))
NOW = 1_000.0


def call(number: int = 4107, **more: Any) -> Call:
    given = {
        "name": "all_reduce",
        "tensor_text": "f32[1048576]",
        "since_s": 12.0,
        "members": (0, 1, 2, 3),
    }
    return Call(number=number, **(given | more))


def rank(number: int, *calls: Call, **more: Any) -> RankState:
    in_call = "all_reduce" if any(not one.completed for one in calls) else ""
    where = StackSummary(script=TRAIN, torch_call=in_call)
    given: dict[str, Any] = {"where": where, "idle_s": 12.0}
    given["last_numbers"] = {one.group_and_backend: one.number for one in calls}
    return RankState(rank=number, host="b", pid=810 + number, calls=calls, **(given | more))


def verdict(*states: RankState, world: int = 4) -> Diagnosis:
    found = diagnose(states, world, 10.0)
    assert found is not None
    assert len(found.text.splitlines()) <= 10
    return found


def waiting(*numbers: int) -> list[RankState]:
    return [rank(number, call(4106, completed=True), call()) for number in numbers]


def absent(**more: Any) -> RankState:
    given: dict[str, Any] = {"where": StackSummary(script=EVALUATE), "call": "time.sleep"}
    return rank(1, call(4106, completed=True), **(given | more))


def test_a_rank_that_has_not_entered_a_collective() -> None:
    found = verdict(*waiting(0, 2, 3), absent())
    assert not found.alarm  # it may come: from outside, a rank in its own code is slow
    assert found.culprits == (1,)
    assert found.text.splitlines() == [
        "waiting: ranks 0, 2 and 3 have waited 12 s in all_reduce #4107 (f32[1048576]) at train.py:57",
        "         rank 1 (host b, pid 811) has not entered it: evaluate() at train.py:31, in time.sleep",
        "why:  rank 1 is at train.py:88 while the others are at train.py:90: that call takes long or does "
        "not return, or only rank 1 makes it, as under `if rank == 0:`.",
        "fix:  nothing, if this may take so long; otherwise find what it waits for. If only rank 1 makes "
        "it, call the same collectives on all ranks, whatever the branch.",
    ]


def test_the_axis_of_a_mesh_and_the_stage_are_named() -> None:
    entries = [entry(group="3")]
    (late,) = read_calls(entries, {"3": [0, 1]}, NOW, {"3": "dp_shard"})
    others = [
        rank(number, call(4106, group="4", members=(2, 3), completed=True)) for number in (2, 3)
    ]
    found = verdict(rank(0, late, stage=0), absent(stage=0), *others)
    assert found.text.splitlines()[:2] == [
        "waiting: rank 0 (host b, pid 810, stage 0) has waited 30 s in all_reduce #7 "
        "(bf16[1024,512], group of ranks 0 and 1 on axis dp_shard) at train.py:57",
        "         rank 1 (host b, pid 811, stage 0) has not entered it: evaluate() at train.py:31, "
        "in time.sleep",
    ]


LOADER = StackSummary(script=TRAIN, loader=True)
LOCK = StackSummary(script=EVALUATE, lock=True)
RECEIVES = StackSummary(script=TRAIN, torch_call="recv", waits=True)
PICKLES = StackSummary(script=TRAIN, torch_call="all_gather_object")
UNKNOWN = StackSummary()
CAUSES = [
    ({"holds_gil": True}, "holding the GIL", "native code of rank 1 holds the GIL"),
    ({"state": "T"}, "stopped (state T) at train.py:31", "with `kill -CONT 811`."),
    ({"state": "t"}, "stopped (state t) at train.py:31", "detach the debugger"),
    ({"state": "D", "kernel_function": "nfs"}, "(state D, nfs) at train.py:31", "network file"),
    ({"state": "Z"}, "other threads run on (state Z)", "the main thread of rank 1 has ended"),
    ({"state": "", "returncode": 0}, "ended with exit code 0", "while the others still run"),
    ({"where": LOADER, "workers": ("pid 9 stopped",)}, "worker: pid 9 stopped", "gets no batch"),
    ({"where": LOADER}, "but none was found", "gets no batch"),
    ({"where": LOCK}, "in time.sleep", "a lock, a queue"),
    ({"where": RECEIVES, "peer": 2}, "in recv with rank 2", "different"),
    ({"where": PICKLES}, "in all_gather_object", "has not come back"),
    ({"where": UNKNOWN, "call": ""}, "not in the script", "has not come back from there"),
    ({"where": UNKNOWN, "call": "", "answered": False}, "not report where", "not come back"),
]


@pytest.mark.parametrize(("state", "doing", "cause"), CAUSES)
def test_each_cause_has_its_own_text(state: dict[str, Any], doing: str, cause: str) -> None:
    found = verdict(*waiting(0, 2, 3), absent(**state))
    lines = found.text.splitlines()
    proven = state.get("state") == "T" or state.get("where") == RECEIVES or "returncode" in state
    assert found.alarm is proven
    assert lines[0].startswith("hang: " if found.alarm else "waiting: ")
    assert f"has not entered it: {lines[1].partition(': ')[2]}" in lines[1]
    assert doing in lines[1]
    assert cause in "\n".join(lines[2:])


def test_the_training_step_is_named_where_it_is_known() -> None:
    states = [rank(number, call(), step=812) for number in (0, 2, 3)]
    assert "at train.py:57, in step 812\n" in verdict(*states, absent()).text


def test_a_stopped_rank_beside_one_in_its_own_code_is_no_alarm() -> None:
    found = verdict(*waiting(0, 3), absent(), rank(2, call(4106, completed=True), state="T"))
    assert not found.alarm
    assert found.culprits == (1, 2)


def test_a_rank_that_goes_on_beside_its_open_collective_is_no_alarm() -> None:
    """As with `async_op=True`: rank 1 is in its own code, and will enter the collective of rank 0."""
    goes_on = rank(1, call(1, group="2", members=(0, 1)), where=StackSummary(script=EVALUATE))
    here = rank(0, call(1, group="1", members=(0, 1)))
    assert not verdict(here, goes_on, world=2).alarm
    waits = rank(1, *goes_on.calls, where=goes_on.where, call="work.wait")
    assert verdict(here, waits, world=2).alarm


def test_another_collective() -> None:
    others = [rank(number, call(tensor_text="f32[5]")) for number in (0, 2, 3)]
    found = verdict(*others, rank(1, call(name="barrier", tensor_text="")))
    assert found.alarm
    assert found.culprits == (1,)
    assert found.text.splitlines() == [
        "hang: ranks 0, 2 and 3 have waited 12 s in all_reduce #4107 (f32[5]) at train.py:57",
        "      rank 1 (host b, pid 811) waits in barrier #4107 at train.py:57",
        "why:  the ranks called different collectives as number 4107 of this group.",
        "fix:  call the same collectives, with the same tensors, in the same order on all ranks.",
    ]


@pytest.mark.parametrize("by_hand", [0, 1])
def test_of_two_ranks_the_one_that_called_by_hand_is_named(by_hand: int) -> None:
    in_step = rank(1 - by_hand, call(), in_step=True)
    found = verdict(in_step, rank(by_hand, call(tensor_text="f32[]")), world=2)
    assert found.culprits == (by_hand,)


C10D = "/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("stack", "called", "name"),
    [
        ([(C10D, 1, "reduce_scatter_single"), (C10D, 2, "reduce_scatter_tensor")], "", "reduce_sc"),
        ([(C10D, 1, "all_reduce")], "dist.all_reduce", "all_reduce"),
        ([], "dist.reduce_scatter(x, y, async_op=True).wait", "reduce_scatter"),
        ([], "work.wait", "all_reduce or reduce_scatter"),
    ],
)
def test_a_reduce_scatter_of_gloo_is_not_called_an_all_reduce(
    stack: list[tuple[str, int, str]], called: str, name: str
) -> None:
    """Gloo runs it as an all_reduce, and the flight recorder shows that."""
    where = read_stack([*stack, *TRAIN], "/a")
    waits = rank(0, call(members=(0, 1)), where=where, call=called)
    assert f"waited 12 s in {name}" in verdict(waits, absent(), world=2).text


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((39, 40), "optimizer.step() was called 39 times by rank 0, 40 times by rank 1"),
        ((40, 40), "optimizer.step() was called 40 times by ranks 0 and 1"),
        ((0, 0), ""),
    ],
)
@pytest.mark.parametrize(
    ("other", "why"),
    [("barrier", "different collectives as number 4107"), ("all_reduce", "different tensors")],
)
def test_a_rank_with_more_batches_than_the_others_is_a_possible_cause(
    other: str, why: str, steps: tuple[int, int], said: str
) -> None:
    ended = rank(0, call(name=other, tensor_text=""), optimizer_steps=steps[0])
    found = verdict(ended, rank(1, call(), in_step=True, optimizer_steps=steps[1]), world=2)
    assert why in found.text
    assert "Or rank 1 takes more steps than the others: uneven batches." in found.text
    assert said in found.text
    assert ("optimizer.step()" in found.text) is bool(said)


def test_an_error_in_flight_is_the_cause_unless_all_ranks_have_it() -> None:
    raised = "KeyError: 'label 7' at train.py:23 in lookup"
    barrier = call(name="barrier", tensor_text="")
    found = verdict(*waiting(0, 2, 3), rank(1, barrier, raised=raised))
    assert found.culprits == (1,)
    assert f"rank 1 (host b, pid 811) raised {raised}, and still runs" in found.text
    assert "why:  rank 1 raised an error" in found.text
    assert "batches" not in found.text
    missing = "ModuleNotFoundError: No module named 'apex' at train.py:1 in <module>"
    states = [*waiting(0, 2, 3), rank(1, barrier)]
    states = [dataclasses.replace(state, raised=missing) for state in states]
    assert "raised" not in verdict(*states).text
    states[3] = dataclasses.replace(states[3], raised=f"{raised}\n{missing}")
    found = verdict(*states)
    assert found.culprits == (1,)
    assert (f"raised {raised}, and" in found.text, "apex" in found.text) == (True, False)


def test_of_two_ranks_that_both_called_by_hand_none_is_named() -> None:
    found = verdict(rank(0, call()), rank(1, call(name="barrier", tensor_text="")), world=2)
    assert found.culprits == (0, 1)
    assert "different collectives" in found.text


def test_another_collective_that_was_over_at_once() -> None:
    stuck = rank(0, call(tensor_text="f32[5]"))
    gone_on = rank(
        1, call(name="broadcast", completed=True), call(4108, name="barrier", tensor_text="")
    )
    found = verdict(stuck, gone_on, world=2)
    called = "rank 1 (host b, pid 811) called broadcast #4107 (f32[1048576]), now in barrier #4108"
    assert called in found.text
    assert found.culprits == (1,)


def test_a_stopped_process_is_the_reason_before_a_lock() -> None:
    found = verdict(*waiting(0, 3), rank(1, where=LOCK), rank(2, state="T"))
    assert "stopped the process of rank 2.\n" in found.text


@pytest.mark.parametrize(("name", "differs"), [("all_reduce", True), ("gather", False)])
def test_another_shape(name: str, differs: bool) -> None:
    states = [rank(n, call(name=name, tensor_text=f"f32[{5 + n // 3}]")) for n in range(4)]
    found = verdict(*states)
    assert ("same collective with different tensors" in found.text) is differs
    assert found.culprits == ((3,) if differs else (0, 1, 2, 3))


def test_tensors_of_another_shape_with_as_many_elements_are_equal() -> None:
    for one, other in (("f32[4,6]", "f32[24]"), ("f32[]", "f32[1]")):
        shapes = [rank(0, call(tensor_text=one)), rank(2, call(tensor_text=other))]
        found = verdict(*shapes, absent(), world=3)
        assert found.culprits == (1,)
        assert "different tensors" not in found.text


def test_a_collective_that_the_last_rank_has_just_entered_is_no_hang() -> None:
    # The last rank can enter it between the launcher's question and the answers.
    late = rank(3, call(4106, completed=True), call(since_s=0.2), idle_s=0.2)
    assert diagnose([*waiting(0, 1, 2), late], 4, 10.0) is None
    unanswered = rank(3, in_unreported_collective=True, answered=False, idle_s=0.4)
    assert diagnose([*waiting(0, 1, 2), unanswered], 4, 10.0) is None
    # The same after it has ended for the last rank.
    gone_on = rank(3, call(since_s=0.2, completed=True), idle_s=0.1)
    assert diagnose([*waiting(0, 1, 2), gone_on], 4, 10.0) is None
    assert "all ranks have entered it" in verdict(*waiting(0, 1, 2, 3)).text


def test_a_rank_that_is_briefly_in_another_group_is_no_hang() -> None:
    here = rank(0, call(1, group="1", members=(0, 1)))
    there = rank(1, call(1, group="2", members=(0, 1), since_s=0.2), idle_s=0.2)
    assert diagnose([here, there], 2, 10.0) is None


def test_a_job_of_one_rank_that_waits_for_other_processes() -> None:
    begins = StackSummary(
        script=(("train.py", 3, "<module>"),), torch_call="init_process_group", waits=True
    )
    found = verdict(rank(0, where=begins), world=1)
    assert found.text.splitlines() == [
        "waiting: rank 0 (host b, pid 810) has waited 12 s in init_process_group at train.py:3",
        "why:  the job has one rank, and it waits for processes that this launcher did not start.",
        "fix:  start them too; or leave rank, world_size and init_method out of the call, and choose the "
        "number of ranks with --nproc-per-node.",
    ]
    assert diagnose([rank(0)], 1, 10.0) is None


def test_two_groups_in_another_order() -> None:
    here = rank(0, call(1, group="1", members=(0, 1)))
    there = rank(1, call(1, group="2", members=(0, 1)))
    found = verdict(here, there, world=2)
    assert found.alarm
    assert "waited 12 s in all_reduce #1 (f32[1048576], group of ranks 0 and 1) at" in found.text
    assert "two groups were entered in different orders" in found.text


def test_an_earlier_collective_of_the_same_group() -> None:
    here = rank(0, call(4106, name="broadcast", completed=True), call(4107))
    there = rank(1, call(4106, name="broadcast"))
    text = verdict(here, there, world=2).text
    assert "rank 1 (host b, pid 811) has not entered it: in broadcast #4106" in text
    assert "an earlier collective of this group has ended on some ranks only." in text
    assert "groups" not in text


def recorded(
    number: int, nccl: Iterable[Any], gloo: Iterable[Any], patch: Any, **ended: int
) -> RankState:
    """A rank with these entries in the flight recorders of both backends.

    Args:
        ended: How many collectives of groups of Gloo have left no entry, by the name of the group.
    """
    dumps = {flight_recorder._DUMP_NCCL: list(nccl), flight_recorder._DUMP: list(gloo)}
    status = {name.strip("_"): {"last_enqueued_collective": count} for name, count in ended.items()}
    found = {
        path: lambda *_, path=path, entries=entries: pickle.dumps(
            {
                "entries": entries,
                "pg_status": status if path == flight_recorder._DUMP else {},
            }
        )
        for path, entries in dumps.items()
    }
    patch.setattr(flight_recorder, "_loaded", found.get)
    table = flight_recorder.table()
    calls = read_calls(table["entries"], {"0": [0, 1], "1": [0, 1, 2]}, NOW)
    return rank(number, *calls, last_numbers=table["last_numbers"])


def test_each_backend_of_a_group_counts_its_own_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `cpu:gloo,cuda:nccl`, torch's default on a host with GPUs, both belong to group 0."""

    def state(number: int, gloo: int) -> RankState:
        nccl = entry(state="completed", collective_seq_id=50)
        last = entry(collective_seq_id=gloo, retired=number == 1)
        return recorded(number, [nccl], [last], monkeypatch)

    found = verdict(state(0, gloo=3), state(1, gloo=2), world=2)
    assert found.culprits == (1,)
    assert "rank 1 (host b, pid 811) has not entered it" in found.text


def test_a_completed_collective_before_many_of_another_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_group_1(number: int, **more: Any) -> dict[str, Any]:
        return entry(process_group=("1", ""), collective_seq_id=number, **more)

    many = [entry(collective_seq_id=number, retired=True) for number in range(1, 71)]
    root = recorded(0, [of_group_1(5, retired=True), *many], [], monkeypatch)
    late = recorded(1, [of_group_1(4, retired=True)], [], monkeypatch)
    assert verdict(root, late, recorded(2, [of_group_1(5)], [], monkeypatch)).culprits == (1,)


def test_a_completed_collective_whose_entry_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder keeps a number of entries, of all groups together."""
    in_group_1 = entry(process_group=("1", ""), collective_seq_id=5)
    waits = recorded(0, [], [in_group_1], monkeypatch)
    root = recorded(1, [], [entry(collective_seq_id=900)], monkeypatch, _1=5)
    sends = entry(process_group=("1", ""), is_p2p=True, collective_seq_id=4)
    for late in (
        recorded(2, [], [], monkeypatch, _1=4),
        recorded(2, [], [sends], monkeypatch, _1=900),  # after a send, NCCL counts sends
    ):
        found = verdict(waits, root, late, world=3)
        assert found.culprits == (2,)
        assert "rank 1 (host b, pid 811) has not entered" not in found.text


def test_the_collectives_of_two_backends_are_in_order_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barrier = entry(profiling_name="gloo:barrier", time_created_ns=int((NOW - 60) * 1e9))
    found = recorded(0, [entry()], [barrier], monkeypatch)
    assert [one.name for one in found.calls] == ["barrier", "all_reduce"]


def test_the_first_of_a_chain_is_named() -> None:
    # 0 waits for 1 in one group, 1 waits for 2 in another, 2 sleeps.
    first = rank(0, call(5, group="1", members=(0, 1)))
    second = rank(1, call(9, group="2", members=(1, 2)))
    third = rank(2, where=StackSummary(script=EVALUATE), call="time.sleep")
    found = verdict(first, second, third, world=3)
    assert found.culprits == (2,)
    assert "rank 0 (host b, pid 810) waits in all_reduce #5" in found.text


@pytest.mark.parametrize(
    ("state", "cause", "alarm"),
    [
        (
            {"where": StackSummary(script=EVALUATE, loader=True)},
            "the DataLoader of rank 3 gets no batch",
            False,
        ),
        ({"state": "T"}, "SIGSTOP or a shell's job control", True),
        ({"where": StackSummary(script=EVALUATE)}, "that call takes long", False),
    ],
)
@pytest.mark.parametrize("by_group", [True, False])
def test_a_rank_behind_one_that_waits_for_it(
    state: dict[str, Any], cause: str, alarm: bool, by_group: bool
) -> None:
    """All wait for rank 2, which waits for rank 3, in a group of both or in `recv`."""
    recv = StackSummary(script=TRAIN, torch_call="recv", waits=True)
    inner = call(9, group="2", members=(2, 3))
    second = rank(2, inner) if by_group else rank(2, where=recv, peer=3)
    found = verdict(*waiting(0, 1), second, rank(3, **state))
    assert (found.culprits, found.alarm) == ((3,), alarm)
    assert cause in found.text


def test_the_last_of_this_node_waits_for_one_that_ended() -> None:
    recv = StackSummary(script=TRAIN, torch_call="recv", waits=True)
    found = verdict(rank(0, where=recv, peer=1), rank(1, returncode=0, state=""))
    assert "why:  rank 1 finished while the others still run." in found.text


def test_ranks_of_other_nodes_make_a_notice() -> None:
    found = verdict(*waiting(0, 1), world=4)
    assert not found.alarm
    assert "ranks 2 and 3: on other nodes, whose launchers have not answered" in found.text
    ended = rank(1, state="", returncode=0)
    assert verdict(*waiting(0), ended).alarm  # but one of this node will not come


def test_all_ranks_have_entered_it() -> None:
    found = verdict(*waiting(0, 1, 2, 3))
    assert not found.alarm  # a slow network, or a GPU that computes
    assert "the connection between the ranks is stuck" in found.text


def test_calls_that_the_flight_recorder_does_not_know() -> None:
    begins = StackSummary(
        script=(("train.py", 3, "<module>"),), torch_call="init_process_group", waits=True
    )
    found = verdict(
        rank(0, where=begins), rank(1, where=StackSummary(script=EVALUATE), call="time.sleep")
    )
    assert found.text.startswith(
        "waiting: rank 0 (host b, pid 810) has waited 12 s in init_process_group at train.py:3\n"
        "         rank 1 (host b, pid 811): evaluate() at train.py:31, in time.sleep\n"
    )
    alone = verdict(*(rank(number, where=begins) for number in range(4)))
    assert "all ranks are in init_process_group" in alone.text


def test_states_that_are_no_hang() -> None:
    fresh = call(since_s=0.2)
    assert diagnose([rank(0, fresh), absent()], 2, 10.0) is None
    assert diagnose([rank(0, idle_s=3.0), rank(1, idle_s=12.0)], 2, 10.0) is None
    assert diagnose([rank(0), rank(1)], 2, 10.0) is None  # neither waits for the other
    assert diagnose([rank(0)], 1, 10.0) is None  # one process may wait for whatever it likes
    assert diagnose([rank(0, where=LOADER)], 1, 10.0) is not None


def test_many_states_are_cut_to_ten_lines() -> None:
    members = tuple(range(32))
    here = [rank(number, call(members=members)) for number in range(16)]
    there = [rank(n, where=StackSummary(script=(("t.py", n, "f"),))) for n in range(16, 32)]
    lines = verdict(*here, *there, world=32).text.splitlines()
    assert len(lines) == 10
    assert "... and 10 more" in lines[7]


def test_a_situation_has_one_key() -> None:
    assert verdict(*waiting(0, 2, 3), absent()).key == verdict(*waiting(0, 2, 3), absent()).key
    later = [rank(number, call(4108)) for number in (0, 2, 3)]
    assert verdict(*waiting(0, 2, 3), absent()).key == verdict(*later, absent()).key
    stopped = absent(state="T")
    assert verdict(*waiting(0, 2, 3), stopped).key != verdict(*later, stopped).key


def entry(**more: Any) -> dict[str, Any]:
    """An entry of the flight recorder as NCCL writes it, what is not read left out."""
    return {
        "profiling_name": "nccl:all_reduce",
        "process_group": ("0", "default_pg"),
        "group": "0",
        "backend": "nccl",
        "collective_seq_id": 7,
        "is_p2p": False,
        "input_sizes": ((1024, 512),),
        "input_dtypes": ["BFloat16"],
        "state": "started",
        "retired": False,
        "time_created_ns": int((NOW - 30) * 1e9),
    } | more


def test_nccl_entries() -> None:
    entries = [
        entry(state="completed", collective_seq_id=6, profiling_name="nccl:_all_gather_base"),
        entry(),
        entry(is_p2p=True, profiling_name="nccl:send 0->1"),
        entry(group="3", input_sizes=((3,), (4,)), retired=True),
    ]
    calls = read_calls(entries, {"0": [0, 1]}, NOW)
    assert calls == (
        call(
            6,
            name="all_gather",
            group="0",
            backend="nccl",
            members=(0, 1),
            tensor_text="bf16[1024,512]",
            since_s=30,
            completed=True,
        ),
        call(
            7, group="0", backend="nccl", members=(0, 1), tensor_text="bf16[1024,512]", since_s=30
        ),
        call(
            7,
            group="3",
            backend="nccl",
            members=(),
            tensor_text="bf16[3] and 1 more",
            since_s=30,
            completed=True,
        ),
    )


@pytest.mark.parametrize(
    ("dtype", "kind"), [("Float", "f32[2]"), ("float16", "f16[2]"), ("bfloat16", "bf16[2]")]
)
def test_dtypes_of_both_recorders(dtype: str, kind: str) -> None:
    (found,) = read_calls([entry(input_dtypes=[dtype], input_sizes=[[2]])], {}, NOW)
    assert found.tensor_text == kind


@pytest.mark.parametrize(
    "packages", ["/v/lib/python3.12/site-packages/", "/usr/local/lib/python3.12/dist-packages/"]
)
def test_stacks(packages: str) -> None:
    torch = packages + "torch/"
    found = read_stack(
        [
            (torch + "distributed/distributed_c10d.py", 3252, "recv"),
            (torch + "distributed/c10d_logger.py", 83, "wrapper"),
            ("/home/me/run/train.py", 9, "exchange"),
            (packages + "other/loop.py", 1, "call"),
            ("/elsewhere/tool.py", 2, "<module>"),
        ],
        "/home/me/run",
    )
    assert found == StackSummary(
        script=(("train.py", 9, "exchange"), ("/elsewhere/tool.py", 2, "<module>")),
        torch_call="recv",
        waits=True,
    )
    package = read_stack(
        [(torch + "distributed/distributed_c10d.py", 7, "recv"), (packages + "a/b.py", 3, "f")], "/"
    )
    script = ((packages[1:] + "a/b.py", 3, "f"),)
    assert package == StackSummary(script=script, torch_call="recv", waits=True)
    backward = read_stack([(torch + "autograd/graph.py", 1, "_engine"), ("/a.py", 2, "f")], "/")
    assert backward.gradients
    assert not backward.torch_call
    queue = [(threading.__file__, 1, "wait"), (torch + "utils/data/dataloader.py", 5, "_get")]
    loading = read_stack(queue, "/")
    assert loading.loader
    assert loading.lock
    saving = read_stack(
        [
            (torch + "distributed/checkpoint/filesystem.py", 9, "write_data"),
            (torch + "distributed/checkpoint/logger.py", 5, "inner_func"),
            ("/a.py", 2, "f"),
        ],
        "/",
    )
    assert not saving.torch_call
    assert read_place("/a/b.py:7 in f", "/a").script == (("b.py", 7, "f"),)
    assert read_place("", "/a") == StackSummary()


def test_a_dump_of_faulthandler() -> None:
    text = """{"time": 1}
Timeout (0:00:01.500000)!
Thread 0x00007f1 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Thread 0x00007f2 (most recent call first):
  File "/lib/re/__init__.py", line 166 in match
  File "/me/train.py", line 8 in evaluate
  File "/me/train.py", line 12 in <module>
"""
    frames = [frame[1:] for frame in read_dump(text)]
    assert frames == [(166, "match"), (8, "evaluate"), (12, "<module>")]
    assert read_dump(f"{text}...\n") == []  # of more than 100 threads, the main one is left out


OUTLIVED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_whether_a_dead_main_thread_is_the_end_of_its_process() -> None:
    for text, want in (("print('up', flush=True)", True), (OUTLIVED, False)):
        child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            deadline = time.monotonic() + 20
            while read_state(child.pid) != "Z":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert is_ending(child.pid) == want, text
        finally:
            child.kill()
            child.communicate()


WORLD = "torch.distributed.distributed_c10d._world"


class Silent:
    """A rank that is idle and is never asked."""

    def __init__(self, number: int, pid: int = 0) -> None:
        self.rank = self.local_rank = number
        self.pid = pid or os.getpid()
        self.returncode = None
        self.counts = (0, 0)

    def probe_text(self) -> str:
        entered, completed = self.counts
        beat = {"time": 0.0, "entered": entered, "completed": completed, "place": ""}
        return json.dumps(beat) + "\n"


class Asked(Silent):
    """One of two ranks. Rank 0 waits in a collective; both are idle until they are asked."""

    def __init__(self, number: int, pid: int = 0) -> None:
        super().__init__(number, pid)
        self.counts = (1 - number, 0)
        self.state: dict[str, Any] = {}

    def ask_state(self, number: int) -> None:
        stack = [("/a/train.py", 5 + self.rank, "step")]
        entries = [entry()] if self.rank == 0 else []
        table = {"entries": entries, "groups": {"0": [0, 1]}, "missing": [WORLD], "axes": {}}
        table["last_numbers"] = {"0 nccl": 7} if entries else {}
        threads = [{"name": "main", "stack": stack, "in_step": False}]
        told = {"step": 0, "stage": None, "optimizer_steps": 0, **table}
        self.state = {"id": number, "threads": threads, **told}


class Watched:
    """Ranks under a `HangWatch`, whose time the test passes."""

    def __init__(
        self, patch: pytest.MonkeyPatch, ranks: Sequence[Silent], after_s: float | None = 2.0
    ) -> None:
        self.now, self.said, self.ranks = 100.0, list[str](), ranks
        patch.setattr("paceline.launch.hang_watch.time.monotonic", lambda: self.now)
        self.say = self.show = self.said.append
        self.watch = HangWatch(cast(Any, self), after_s=after_s, ends=False)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.watch.check(len(self.ranks))
            self.now += 0.5


def test_a_launcher_that_did_not_run_has_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Watched(monkeypatch, [Silent(0)], after_s=0)
    ranks.run(4.0)
    ranks.now += 60.0
    ranks.watch.check(1)
    assert ranks.now - ranks.watch._activities[0].progress_at == pytest.approx(3.5 + 1.0)


def test_a_missing_name_of_torch_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.watch.processes.read_state", lambda pid: "S")
    ranks = Watched(monkeypatch, [Asked(0), Asked(1)])
    ranks.run(10.0)
    warning = "reports of hangs do not name the ranks of a group"
    assert ranks.said[0] == f"torch has no {WORLD}: {warning}"
    assert ranks.said[1].startswith("waiting: rank 0 "), ranks.said
    assert len(ranks.said) == 2


def test_a_rank_reports_names_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_recorder.table()["missing"] == []
    monkeypatch.delattr(WORLD)
    assert flight_recorder.table()["missing"] == [WORLD]
    assert flight_recorder.table()["groups"] == {}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("after_s", "step_s", "patience_s"), [(None, 0.5, 10.0), (None, 30.0, 300.0), (2.0, 30.0, 2.0)]
)
def test_the_patience_follows_the_usual_time_between_collectives(
    monkeypatch: pytest.MonkeyPatch,
    after_s: float | None,
    step_s: float,
    patience_s: float,
    world_size: int,
) -> None:
    ranks = Watched(monkeypatch, [Silent(number) for number in range(world_size)], after_s)
    ranks.watch.check(world_size)
    ranks.now += 120.0  # the start, such as to load the data
    for number in range(1, 6):
        if number == 2:
            assert ranks.watch.patience_s == (after_s or 10.0)
        ranks.now += step_s + 0.001
        for rank in ranks.ranks:
            rank.counts = (number, number)
        ranks.watch.check(world_size)
    assert ranks.watch.patience_s == pytest.approx(patience_s, rel=0.01)


@pytest.mark.parametrize("after", ["a restart", "progress"])
def test_a_hang_at_the_same_place_is_reported_again(
    monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr("paceline.watch.processes.read_state", lambda pid: "T" if pid % 10 else "S")
    ranks = Watched(monkeypatch, [Asked(0, pid=10), Asked(1, pid=11)])
    for round in range(2):
        ranks.run(8.0)
        assert sum(text.startswith("hang: ") for text in ranks.said) == round + 1, ranks.said
        if after == "progress":
            ranks.ranks[1].counts = (1, 1)
        else:
            ranks.ranks = [Asked(0, pid=20), Asked(1, pid=21)]


def test_loader_workers_have_a_probe_of_their_own() -> None:
    def file_at(function: str) -> int:
        fd = os.memfd_create(probe.PROBE_NAME)
        os.write(fd, json.dumps({"time": 0.0, "place": f"/a/data.py:7 in {function}"}).encode())
        return fd

    files = [file_at("train"), file_at("<module>"), file_at("load")]
    children = [
        subprocess.Popen(["sleep", "60"], pass_fds=[files[0], *more])
        for more in ([], [files[1]], [files[2]])
    ]
    own = files.pop(0)
    for fd in files:
        os.close(fd)
    try:
        _, outside, inside = (child.pid for child in children)
        want = {f"pid {outside} at data.py:7", f"pid {inside} in load() at data.py:7"}
        assert {*describe_workers(os.getpid(), "/a")} == want
    finally:
        os.close(own)
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize(("does", "text"), [("while True: pass", "runs"), ("input()", "waits")])
def test_a_loader_worker_without_a_probe(does: str, text: str) -> None:
    """As one of the spawn method, which torch names `pt_data_worker`."""
    rename = "from pathlib import Path; Path('/proc/self/comm').write_text('pt_data_worker')"
    code = f"{rename}; print('named', flush=True)\n{does}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as worker:
        assert worker.stdout is not None
        try:
            worker.stdout.readline()
            expected = (f"pid {worker.pid} {text}",)
            deadline = time.monotonic() + 10
            while describe_workers(os.getpid(), "/a") != expected and time.monotonic() < deadline:
                time.sleep(0.01)  # it has not reached `does`
            assert describe_workers(os.getpid(), "/a") == expected
        finally:
            worker.kill()


def test_a_forked_child_does_not_close_a_file_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script has closed all files, and the number of the probe's file belongs to another one now."""
    monkeypatch.setattr(probe.Probe, "_start", lambda _, fd: os.close(fd))
    one: Any = probe.Probe.__new__(probe.Probe)
    fd = os.memfd_create("data")
    of_script = os.fstat(fd).st_ino
    vars(one).update(_timer=False, _fd=fd, _inode=0)
    one._in_child()
    assert os.fstat(fd).st_ino == of_script
    os.close(fd)


def test_the_probe_does_not_replace_a_timer_that_the_script_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[str] = []
    monkeypatch.setattr(
        probe, "_dump_later", lambda *_, **options: timers.append("probe" if options else "script")
    )
    monkeypatch.setattr(faulthandler, "dump_traceback_later", None)  # restored after the test
    monkeypatch.setattr(probe.time, "sleep", Mock(side_effect=StopIteration))
    one: Any = probe.Probe.__new__(probe.Probe)
    fd = os.memfd_create("probe")
    vars(one).update(main=0, _timer=True, _fd=fd, _timer_lock=threading.RLock())
    one._forked_while = []
    one._inode = os.fstat(fd).st_ino
    script = threading.Thread(target=one._give_timer_away, args=(9.0,))

    def lseek(*_: int) -> None:  # between the check of the probe and its own timer
        script.start()
        script.join(0.2)

    monkeypatch.setattr(probe.os, "lseek", lseek)
    with pytest.raises(StopIteration):
        one._beat()
    script.join()
    assert timers[-1] == "script"
    os.close(fd)


def _in_paceline(*script: tuple[str, int, str], call: str = "evaluate") -> StackSummary:
    return StackSummary(script=script, torch_call=f"paceline's {call}", waits=True)


BACKWARD = dataclasses.replace(
    _in_paceline(("train.py", 50, "main"), call="backward"), gradients=True
)
EXTRA = StackSummary(script=(("train.py", 9, "report"), ("train.py", 57, "main")), torch_call="x")


@pytest.mark.parametrize(
    ("step", "where", "named"),
    [
        pytest.param(3, _in_paceline(("train.py", 60, "main")), (0,), id="later line"),
        pytest.param(3, _in_paceline(("train.py", 50, "main")), (1, 2), id="earlier line"),
        pytest.param(4, _in_paceline(("train.py", 50, "main")), (0,), id="next step"),
        pytest.param(3, _in_paceline(("train.py", 50, "main"), call="steps"), (0,), id="loop"),
        pytest.param(3, _in_paceline(("train.py", 50, "main"), call="leave"), (0,), id="end"),
        pytest.param(3, _in_paceline(("train.py", 57, "main")), (0,), id="called by Paceline"),
        pytest.param(3, BACKWARD, (0,), id="backward"),
        pytest.param(3, _in_paceline(("train.py", 60, "other")), (1, 2), id="unknown"),
    ],
)
def test_the_rank_with_the_extra_call(
    step: int, where: StackSummary, named: tuple[int, ...]
) -> None:
    one = rank(0, call(members=(0, 1, 2)), where=EXTRA, step=3)
    found = verdict(one, *(rank(number, where=where, step=step) for number in (1, 2)), world=3)
    assert found.alarm
    assert found.culprits == named
    is_unknown = "a call that the others do not make" not in found.text
    assert is_unknown == (where.script[0][2] == "other")


@pytest.mark.parametrize("function", ["rpc_sync", "_end"])
def test_ranks_that_answer_remote_calls_are_no_hang(function: str) -> None:
    packages = "/v/lib/python3.12/site-packages/"
    files = {"rpc_sync": "torch/distributed/rpc/api.py", "_end": "paceline/job/rpc.py"}
    where = read_stack([(packages + files[function], 9, function), *TRAIN], "/")
    serving = [rank(number, call(), where=where) for number in (0, 2, 3)]
    assert all(state.where.serves for state in serving)
    assert diagnose([*serving, absent()], 4, 10.0) is None
    idle = [dataclasses.replace(state, calls=()) for state in serving]
    assert diagnose([*idle, dataclasses.replace(absent(), calls=())], 4, 10.0) is None
