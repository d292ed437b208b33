"""Files that start a job on a cluster: one module for each scheduler, none of which imports torch.

A scheduler is a module with `HELP`, `EXAMPLES`, `WITHOUT`, `add_options` and `write`, as `Scheduler` in
`request.py` describes them. To add one, add its file, and its name to `SCHEDULERS` in `cli/job.py`.
"""
