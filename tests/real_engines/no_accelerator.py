"""Imported at the start of vLLM's processes where NO_ACCELERATOR is set: its MooncakeConnector asks
which accelerator is in use, and would get an error for an answer. Runs in vLLM's environment."""

import torch

torch.accelerator.current_device_index = lambda: 0
