"""The training step and the pipeline stage of this process, for error messages and for the launcher."""

step = 0  # the training step that it is in; 0 outside of one
stage: int | None = None  # its place on the axis `pp` of the mesh; None without one
slow_ranks: set[int] = (
    set()
)  # those that the launcher has named, so that nothing else names them again
