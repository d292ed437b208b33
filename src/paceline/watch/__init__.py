"""Diagnosis of hangs, crashes and stragglers.

`probe`, `sampling` and `flight_recorder` run in the ranks and collect evidence; `processes` reads it from the
kernel. The other files judge it and write text.
"""
