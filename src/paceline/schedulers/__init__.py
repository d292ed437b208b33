"""Files that start a job on a cluster, made from the commented templates of this folder. No torch."""
