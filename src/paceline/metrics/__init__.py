"""The values of a run: how they are combined over ranks, and the files, terminal and services they go to."""
