"""One file for each kind of advice about a run; see `clock/judge.py`."""
