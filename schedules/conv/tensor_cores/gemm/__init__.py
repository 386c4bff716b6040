"""Layers of the tensor-core kernels, one concept a file, with the names of CUTLASS, CuTe and the PTX ISA.

A kernel is composed from value objects with explicit arguments; none of them knows the kernels that use it:

- `atoms`: one matrix instruction, wgmma or mma.sync, and the loads and stores of its fragments.
- `smem_layout`: a swizzled tile in shared memory, and the matrix descriptor of a wgmma operand.
- `problem`: which tensor of a convolution is operand A, B and C, how it is loaded, and its major mode.
- `residue_classes`: the pixels of a strided dgrad that have the same taps.
- `tma`, `tma_loaders`: TMA copies, and the tensors that they read as rows × (tap, channel).
- `cp_async`: asynchronous copies of single vectors.
- `pipelines`: circular buffers of stages with full and empty barriers.
- `tile_scheduler`: the work tiles of a CTA, and the cluster that it belongs to.
- `wgmma_mainloop`: loads and multiplies the K tiles of a work tile.
- `epilogue_ops`, `channel_arguments`, `tma_epilogue`: operations on accumulators, and the store of a tile.
- `residue_epilogue`: the store of a tile whose pixels are not neighbours in the output.
- `cluster_reduction`, `workspace_reduction`: sums of a reduction that several CTAs share.
"""
