"""The faults that the audit looks for. Each rule is pure: evidence in, a judgement out.

Each file of this folder has a tuple `RULES`. To add a rule, add a file.
"""

from __future__ import annotations

import importlib
import pkgutil

from paceline.audit.rules.rule import Rule

_MODULES = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
]

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (rule for module in _MODULES for rule in getattr(module, "RULES", ())),
        key=lambda rule: rule.order,
    )
)
