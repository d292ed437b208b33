"""The checks of the audit. Each rule only reads: evidence in, a judgement out.

To add a rule:

1. Write its function, and add a line with its flags to `RULES`.
2. Add mutations for it to `tests/e2e/mutations.py`. A mutated program must have one fault: if other rules
   report it too, name this rule in their `consequence_of`.
3. Add a page to `docs/verify`, and a line to the table of `docs/howto/verify.md`.
"""

from __future__ import annotations

from paceline.audit.rules import (
    buffers,
    collectives,
    evaluation,
    files,
    groups,
    lints,
    one_process,
    order,
    random_numbers,
    schedule,
    shards,
    weights,
)
from paceline.audit.rules.rule import Rule

# Rules whose faults also cause what other rules look for.
_SHARDS = "shards"
_ONE_PROCESS = "step of one process"
_GROUPS = "process groups"
_WEIGHTS = "weights"
_SCHEDULE = "schedule"
_EVALUATED = "evaluated samples"

# Faults are reported in this order.
RULES = (
    Rule("devices", lints.shared_device, judges_split_models=True),
    # Ranks that skipped a step end at different moments.
    Rule(
        "collectives",
        collectives.unmatched_collective,
        works_with_join=False,
        judges_split_models=True,
        consequence_of=(_WEIGHTS,),
    ),
    Rule(_GROUPS, groups.group_of_one, judges_split_models=True),
    Rule(_SHARDS, shards.shards),
    Rule("order of passes", order.order_of_passes, judges_split_models=True),
    Rule("random numbers", random_numbers.random_numbers),
    Rule(
        _ONE_PROCESS,
        one_process.step_of_one_process,
        works_with_join=False,
        compares_numbers=True,
        consequence_of=(_WEIGHTS,),
    ),
    # Ranks under Join take steps that others do not take.
    Rule(_WEIGHTS, weights.equal_weights, works_with_join=False, consequence_of=(_GROUPS,)),
    Rule("buffers", buffers.equal_buffers, consequence_of=(_WEIGHTS,)),
    Rule("clipping before unscaling", lints.clip_before_unscale, judges_split_models=True),
    Rule("no_sync around backward only", lints.no_sync_around_backward),
    Rule(_SCHEDULE, schedule.schedule, judges_split_models=True),
    Rule(_EVALUATED, evaluation.evaluated_samples, compares_numbers=True),
    # Ranks whose schedules differ have different weights.
    Rule(
        "reported numbers",
        evaluation.reported_numbers,
        compares_numbers=True,
        consequence_of=(_SHARDS, _EVALUATED, _SCHEDULE, _WEIGHTS),
    ),
    Rule("files", files.shared_files, judges_split_models=True),
)
