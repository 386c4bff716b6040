"""Layers of the tensor-core kernels, one concept a file, with the names of CUTLASS, CuTe and the PTX ISA.

A kernel is composed from value objects with explicit arguments; none of them knows the kernels that use it:

- `atoms`: one matrix instruction, wgmma or mma.sync, and the loads and stores of its fragments.
- `smem_layout`: a swizzled tile in shared memory, and the matrix descriptor of a wgmma operand.
- `problem`: which tensor of a convolution is operand A, B and C, how it is loaded, and its major mode.
- `tma`, `tma_loaders`: TMA copies, and the tensors that they read as rows × (tap, channel).
- `halo_image`: pixels that all taps of a filter share. `halo_loader` and `halo_transpose` transpose them if they are
  channels first, and `halo_pixels` has those that are channels last, which TMA copies.
- `cp_async`: asynchronous copies of single vectors.
- `pipelines`: circular buffers of stages with full and empty barriers.
- `cta`, `tile_scheduler`: a CTA and its threads, its work tiles, and the cluster that it belongs to.
- `prologue`: the initialization of barriers, and the wait for the previous launch.
- `warp_roles`: which warps produce and which consume, and their registers.
- `wgmma_mainloop`, `halo_mainloop`, `mma_sync_mainloop`: load and multiply the K tiles of a work tile.
- `epilogue_ops`, `channel_arguments`: the operations on accumulators, and their arguments.
- `tma_epilogue`, `channels_first_epilogue`, `staged_epilogue`: the store of a tile.
- `filter_rows_epilogue`: the store of a tile whose rows are filters.
- `scatter_epilogue`, `filter_rows_scatter_epilogue`: the stores of tiles whose pixels are not neighbours in the output.
- `residue_classes`: the pixels of a strided dgrad, by the taps that reach them.
- `cluster_reduction`, `column_reduction`, `workspace_reduction`: sums of a reduction that several CTAs share.
- `last_wave`: tiles of the last wave, which several CTAs divide.
"""
