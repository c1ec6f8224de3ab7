"""Run fused DSA kernels and save the bytes that they write: `python -m tests.gpu.run_dsa_kernels OUTPUTS.pt LAUNCH...`.

The launches are the keys of FUSED.
"""

import sys

import torch

from tests.kernels.dsa_launches import FUSED
from tests.kernels.e4m3_kernels import e4m3

if __name__ == "__main__":
    outputs = {
        f"{name}: {key}": value.cpu().contiguous().view(torch.uint8)
        for name in sys.argv[2:]
        for key, value in FUSED[name](device="cuda").items()
    }
    torch.save({"software": bool(e4m3.SOFTWARE_E4M3), "outputs": outputs}, sys.argv[1])
