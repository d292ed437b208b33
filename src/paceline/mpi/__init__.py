"""MPI as a process group of torch, over mpi4py."""
