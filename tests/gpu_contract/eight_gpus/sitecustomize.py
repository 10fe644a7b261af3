"""Stand-in for the driver's answers: torch believes in eight H100, in processes with this folder on PYTHONPATH.

There is nothing behind it: the first tensor on a device fails.
"""

import types

import torch

TOTAL, FREE = 85_000_000_000, 84_000_000_000  # bytes
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=TOTAL, multi_processor_count=132, warp_size=32
)

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
torch.cuda.get_device_name = lambda device=None: H100.name
torch.cuda.get_device_properties = lambda device=None: H100
torch.cuda.mem_get_info = lambda device=None: (FREE, TOTAL)
