"""Diagnosis of hangs and crashes.

- In the ranks: probe.py answers the launcher, with the evidence of flight_recorder.py and
  stacks.py. crash.py describes the error of a rank.
- In the launcher: processes.py reads the kernel, rank_state.py what the ranks answered.
- hang.py and crash.py judge; they are pure. launch/messages.py has the text of crashes.
"""
