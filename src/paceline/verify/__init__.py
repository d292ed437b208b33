"""`paceline verify`: whether a script trains the same on 1 and on N processes.

`session` runs the script. In each rank, `harness` installs the recording: that of `paceline.audit`, and
`record_paceline` for scripts that use paceline. `compare` judges the runs of such scripts; the audit judges
all others.
"""
