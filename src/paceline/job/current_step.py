"""The training step that this process is in, for error messages and for the launcher; 0 outside of one."""

step = 0
