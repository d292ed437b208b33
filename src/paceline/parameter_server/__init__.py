"""Tables and their optimizers in server processes, for workers that come and go."""
