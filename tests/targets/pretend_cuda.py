"""A module that leaves torch looking as if importing it had started CUDA: what a careless library does on a GPU machine."""

import torch

torch.cuda._initialized = True  # pyright: ignore[reportPrivateUsage]  # what its is_initialized reads
