"""The shares of `paceline run --profile-steps`, from answers of ranks."""

from __future__ import annotations

from typing import Any

from paceline.launch.step_profile import REQUEST, StepProfile, describe

TRAINS = [
    ("backward", "/me/train.py:9 in step", 0.25),
    ("data", "/me/train.py:8 in read", 0.5),
    ("data", "/me/train.py:7 in read", 0.1),
    ("waiting", "/me/train.py:9 in step", 0.15),
]


class Rank:
    """As far as `StepProfile` sees a rank: it has the answers, and keeps what was asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[int] = []
        self.returncode = None

    def ask(self, request: dict[str, Any]) -> None:
        assert request["do"] == REQUEST
        self.asked.append(request["id"])

    def answer(self, spent: list[tuple[str, str, float]]) -> None:
        self.answers[REQUEST] = {"id": self.asked[-1], "spent": spent}


def _watch() -> tuple[StepProfile, list[Any]]:
    ranks = [Rank(0), Rank(1)]
    watch = StepProfile("/me")
    watch.check(0.0, ranks)  # type: ignore[arg-type]
    return watch, ranks


def test_an_answer_with_an_error_has_no_samples() -> None:
    watch, ranks = _watch()
    ranks[0].answer(TRAINS)
    ranks[1].answers[REQUEST] = {"id": ranks[1].asked[-1], "error": "ValueError('x')"}
    watch.check(1.0, ranks)
    assert "rank 0  most of it at" in watch.report()


def test_answers_are_added_up() -> None:
    watch, ranks = _watch()
    for second in (1.0, 2.0):
        ranks[0].answer(TRAINS)
        watch.check(second, ranks)
        assert len(ranks[0].asked) == second  # rank 1 has not answered yet
        ranks[1].answer([("forward", "/me/train.py:9 in step", 1.0)])
        watch.check(second, ranks)
    assert watch.report().splitlines() == [
        "the time of the steps, from samples of the stacks during 2 s:",
        "                       rank 0   rank 1  most of it at",
        "  data                   60 %      0 %  train.py:8",
        "  backward               25 %      0 %  train.py:9",
        "  forward                 0 %    100 %  train.py:9",
        "  waiting for ranks      15 %      0 %  train.py:9",
        "  30 % of the time goes to data: load samples in worker processes (num_workers), or make "
        "them cheaper.",
    ]


def test_time_without_training_does_not_count() -> None:
    watch, ranks = _watch()
    for rank in ranks:
        rank.answer([("other code", "/me/train.py:1 in <module>", 1.0)])
    watch.check(1.0, ranks)
    assert watch.report() == (
        "--profile-steps saw no training: no backward and no step of an optimizer ran for a second."
    )


def test_the_time_before_the_first_backward_does_not_count() -> None:
    watch, ranks = _watch()
    for _ in range(2):
        ranks[0].answer([("other code", "", 0.7), ("backward", "", 0.1), ("other code", "", 0.2)])
        ranks[1].answer([("forward", "", 0.5), ("data", "", 0.5)])
        watch.check(1.0, ranks)
    rows = watch.report().splitlines()[2:6]
    assert [row.split()[-4:] for row in rows] == [
        ["0", "%", "50", "%"],
        ["15", "%", "0", "%"],  # 0.2 of 1.3 s
        ["0", "%", "50", "%"],
        ["85", "%", "0", "%"],
    ]


def test_a_rank_that_does_not_answer_is_left_out() -> None:
    watch, ranks = _watch()
    ranks[0].answer(TRAINS)
    watch.check(2.9, ranks)
    assert len(ranks[0].asked) == 1
    watch.check(3.1, ranks)
    assert len(ranks[0].asked) == 2
    assert "rank 0  most" in watch.report()


def test_of_many_ranks_the_table_has_three_columns() -> None:
    spent = {
        rank: {("data", ""): 1.0 + rank, ("backward", ""): 99.0 - rank, ("optimizer", ""): 0.2}
        for rank in range(99)
    }
    lines = describe(spent, "/me").splitlines()
    assert lines[1:4] == [
        "                        least   median     most  most of it at",
        "  data                    1 %     50 %     99 %",
        "  backward                1 %     50 %     99 %",
    ]
    assert lines[4].startswith("  50 % of the time goes to data: ")  # the optimizer is below 0.5 %
