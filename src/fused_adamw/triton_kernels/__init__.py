"""The CUDA kernels in Triton: for cards that NVRTC does not know, and to be read beside ``csrc/cuda``.

Every kernel has two arguments: the bytes of a struct of ``csrc/cuda/launch_parameters.h`` in device memory,
and the counters of finished blocks. Its programs are the blocks of the kernel of the same name in
``csrc/cuda``, so that one host code launches both. Only ``compiler`` may be imported without Triton.
"""
