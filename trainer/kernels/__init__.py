"""Triton kernels of the parts of a step that PyTorch's own leave slow. Their modules import Triton: CUDA only."""
