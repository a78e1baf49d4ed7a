"""How the processes of a trial come into being, and how all of them go away."""

from bo_tuner.objectives.launch.fork_server import ForkServer, RankGroup
from bo_tuner.objectives.launch.last_words import last_words

__all__ = ["ForkServer", "RankGroup", "last_words"]
