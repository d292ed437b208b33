"""Records the behaviour of an unmodified script and finds known faults of distributed training in it."""
