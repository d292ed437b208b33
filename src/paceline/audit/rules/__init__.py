"""The faults that the audit looks for. Each rule is pure: evidence in, a judgement out."""

from __future__ import annotations

from paceline.audit.rules import data, flow, gradient, shards, state, update
from paceline.audit.rules.judgement import Rule

COLLECTIVES = Rule("collective on some ranks only", flow.collectives)
ONE_RANK = Rule("clipped or stepped on one rank", update.one_rank_alone)

CHANGED = Rule("weights changed outside the optimizer", state.changed_outside)
LOADED = Rule("checkpoint loaded on one rank", state.loaded_on_one_rank)

# In the order in which faults are shown: what came first in a training stands first.
RULES = (
    Rule("same device for all ranks", state.devices),
    COLLECTIVES,
    Rule("no shards", shards.same_samples),
    Rule("shards overlap", shards.overlapping_shards),
    Rule("set_epoch forgotten", data.set_epoch),
    Rule("same augmentation in workers", data.same_augmentation),
    Rule("same dropout mask on ranks", state.same_dropout),
    Rule("gradient N times too large or small", gradient.scale),
    Rule("mean of means", gradient.ragged_means),
    Rule("no_sync on the last micro-batch", gradient.not_reduced_last),
    Rule("no_sync around backward only", gradient.no_sync_too_late),
    Rule("parameter added after wrapping", gradient.unreduced_parameter),
    Rule("clipping before unscaling", update.clipped_scaled),
    ONE_RANK,
    LOADED,
    CHANGED,
    Rule("statistics drift apart", state.statistics),
    Rule("schedule N times too fast", flow.schedule),
    Rule("evaluated twice", flow.surplus),
    Rule("metric averaged per rank", flow.metrics),
)

# Judged only where none of the above has the reason.
DRIFT = Rule("weights drift apart", state.drift)

# Under DDP's Join, ranks without batches enter their peers' collectives and get the last weights at the end.
BLIND_IN_JOIN = frozenset({COLLECTIVES.name, ONE_RANK.name, LOADED.name, CHANGED.name, DRIFT.name})
