"""`paceline verify`: whether a script trains the same on 1 and on N processes.

This room runs the script and reports. `session` decides which runs are made, `forked_ranks` starts their
ranks, and `harness` installs the recording in each. Scripts that use paceline are recorded by
`record_paceline` and judged by `compare`; all others are judged by `paceline.audit`. `report` writes the
result of both.
"""
