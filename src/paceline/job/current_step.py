"""The training step and the pipeline stage, for error messages and for the launcher."""

step = 0  # the training step that this process is in, or was last in; 0 before the first
stage: int | None = None  # the place of this process on the axis `pp` of the mesh; None without one
