"""Reading and writing quantised checkpoints."""

from tilefuse.formats import autoawq
from tilefuse.formats.checkpoint import Checkpoint, open_checkpoint
from tilefuse.formats.store import LinearInfo

__all__ = ["Checkpoint", "LinearInfo", "autoawq", "open_checkpoint"]
