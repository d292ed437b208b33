"""Diagnosis of hangs, crashes and stragglers.

- In the ranks: probe.py answers the launcher, with the evidence of flight_recorder.py, sampling.py and
  stacks.py.
- In the launcher: processes.py reads the kernel, rank_state.py what the ranks answered.
- hang.py, straggler.py and crash.py judge, and report.py formats their text. They are pure.
"""
