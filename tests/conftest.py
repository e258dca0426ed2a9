"""Shared by all tests: one torch thread, because small tensors lose more to hand-overs than they gain."""

import torch

torch.set_num_threads(1)
