"""The faults that the audit looks for. Each rule only reads: evidence in, a judgement out.

A comment such as "See broken/66_class_weights" names the diff in `tests/broken`, or the script in
`tests/sound`, for which a line was written.

Few thresholds are tight. In November 2026 each was changed once on the recorded runs of these scripts: to a
quarter and to four times its value, but shares and cosines not above 1, and counts of 2 or 3 only upwards. A
comment such as "a quarter changes X" names a script whose judgement then changed; without one, none did. The
program that did this is not kept: after a change, run the scripts that are named.

To add a rule:

1. Write its function, and add a line with its flags to `RULES`.
2. Add a sound script `tests/sound/NN_name.py`, and `tests/broken/NN_name.diff`, which makes the fault in it.
3. Add NN to `RULES` in `tests/e2e/test_verify_audit.py`. A broken script must have one fault: if other rules
   report it too, name this rule in their `consequence_of`.
4. Add its name to `docs/howto/verify.md`.
"""

from __future__ import annotations

from functools import partial

from paceline.audit.rules import (
    collectives,
    devices,
    evaluation,
    files,
    groups,
    one_process,
    order,
    random_numbers,
    reduction,
    schedule,
    shards,
    statistics,
    update,
    weights,
)
from paceline.audit.rules.rule import Rule

# Rules whose faults also cause what other rules look for.
_SHARDS = "shards"
_ONE_PROCESS = "step of one process"
_ADDED = "parameter added after wrapping"
_STEPPED_ON_ONE_RANK = "clipped or stepped on one rank"
_SCHEDULE_OF_RANK = "schedule follows one rank"
_EVALUATED = "evaluated samples"

# Rules that compare the weights of ranks in equal steps, and cannot do so under Join.
_of_weights = partial(Rule, works_with_join=False, compares_weights=True)

# Faults are reported in this order.
RULES = (
    Rule("same device for all ranks", devices.shared_device, judges_split_models=True),
    # Ranks that skipped a step end at different moments.
    Rule(
        "collective on some ranks only",
        collectives.unmatched_collective,
        works_with_join=False,
        judges_split_models=True,
        consequence_of=(_STEPPED_ON_ONE_RANK,),
    ),
    Rule("process groups", groups.group_of_one, judges_split_models=True),
    Rule(_SHARDS, shards.shards),
    Rule("order of passes", order.order_of_passes, judges_split_models=True),
    Rule("random numbers", random_numbers.random_numbers),
    Rule(
        _ONE_PROCESS,
        one_process.step_of_one_process,
        works_with_join=False,
        compares_numbers=True,
        consequence_of=(_ADDED, _STEPPED_ON_ONE_RANK),
    ),
    Rule("no_sync around backward only", reduction.no_sync_around_backward),
    Rule(_ADDED, reduction.added_parameter, judges_split_models=True),
    Rule("clipping before unscaling", update.clip_before_unscale, judges_split_models=True),
    Rule(_STEPPED_ON_ONE_RANK, update.update_on_one_rank, works_with_join=False),
    _of_weights("checkpoint loaded on one rank", weights.loaded_on_one_rank),
    _of_weights("weights differ without an optimizer step", weights.changed_outside),
    Rule("statistics drift apart", statistics.different_buffers),
    Rule("evaluated models differ", statistics.different_untrained_models, compares_weights=True),
    Rule("schedule at a wrong speed", schedule.schedule_speed, judges_split_models=True),
    Rule("schedule does not reach its end", schedule.unfinished_schedule, judges_split_models=True),
    Rule(_SCHEDULE_OF_RANK, schedule.schedule_of_rank),
    Rule(_EVALUATED, evaluation.evaluated_samples, compares_numbers=True),
    # Ranks whose schedules differ have different weights.
    Rule(
        "reported numbers",
        evaluation.reported_numbers,
        compares_numbers=True,
        consequence_of=(_SHARDS, _EVALUATED, _SCHEDULE_OF_RANK),
    ),
    Rule("files", files.shared_files, judges_split_models=True),
    _of_weights("weights drift apart", weights.drifting_weights, is_last=True),
)
