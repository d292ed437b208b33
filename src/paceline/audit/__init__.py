"""Records the behaviour of an unmodified script and finds known faults of distributed training in it.

In the ranks, `record_data`, `record_loop`, `record_training` and `record_collectives` replace functions of
torch and write events (`record`). `progress` counts the steps and ends the script. `replay` gives the ranks
the batches of the run of one process. In the command, `audit` plans the runs, `evidence` reads their events,
`rules` judge them, and `refusals` names the cause if a run cannot be judged.
"""
