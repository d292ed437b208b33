"""What a script did in its ranks, and whether that is right.

This room starts no process and prints nothing. Two sides use it, with files of events between them:

- In each rank, `record_process`, `record_data`, `record_loop` and `record_collectives` replace functions of
  torch and write `events`; `models` helps them. `progress` counts the steps, decides where a pass is cut, and
  ends the script. `union` and `saved_weights` save batches, weights and gradients of the ranks, and give them
  to a run of one process.
- In the command, `evidence` reads the events of a run. `refusals` names the cause if a run cannot be judged.
  `audit` plans the runs of a script that does not use paceline, and lets the `rules` judge them.

`run_plan` is what the command tells a rank. Both sides use `evidence`, `evaluations` and `digests`: a rank
must also know which loaders the script trains on, and a union reads the log of the ordinary run.
"""
