"""Strategies that train one model on several ranks: fronts to torch's DDP, FSDP2, tensor parallelism and
pipelines, and exact sums. Also SyncBatchNorm and compression."""
