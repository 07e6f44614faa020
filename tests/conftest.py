"""Tests are tiny: one thread is the fastest, and keeps sums in one order."""

import torch

torch.set_num_threads(1)
