"""Marks on a step's first micro-batch: the step ends with a snapshot, a checkpoint, or the end of the plan."""

SNAPSHOT, CHECKPOINT, REPLAN, EXTRA = 0x8000, 0x4000, 0x2000, 0x1000
"""Of a message's flags: its step ends with a snapshot, with a checkpoint that nobody planned, with its plan, or with a
snapshot that not all stages send on."""
FLAGS = SNAPSHOT | CHECKPOINT | REPLAN | EXTRA
