"""Records what an unmodified script does and finds classic faults in it."""
