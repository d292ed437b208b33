"""Strategies that train one model on several ranks: fronts to torch's DDP and FSDP2, and exact sums."""
