# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your first convolution, as a notebook
#
# This notebook builds, verifies, times and explains schedules of one convolution. It runs on the CPU, through OpenCL;
# the counts are those of an H100 or H200, from code that NVRTC compiles without a GPU (extra `cuda`). With a GPU,
# replace `opencl:0` by `cuda:0`, and the times say something as well. The command
# `jupytext --to ipynb first_convolution.py` makes a notebook of this file.

# %%
import tvmconv as tc

DEVICE = "opencl:0"
workload = tc.parse("conv2d:1x16x28x28,32x16x3x3,s1,p1")
workload

# %% [markdown]
# Which schedules can compute it, and how large is the search space of one?

# %%
tc.schedules(workload)

# %%
tiling = next(schedule for schedule in tc.schedules(workload) if schedule.name == "tiling")
tiling.space(workload)

# %% [markdown]
# ## Build and verify
#
# A kernel shows its config, its launch and its source. `verify` compares it with a float64 reference on random inputs,
# after its output was filled with NaN.

# %%
kernel = tc.build(workload, "tiling", device=DEVICE)
kernel

# %%
verification = kernel.verify()
assert verification.ok
verification

# %% [markdown]
# ## Measure
#
# `run` times several schedules in turn. The first row is the naive baseline, and × says how many times as fast as the
# baseline a schedule is.

# %%
result = tc.run(workload, ["tiling", "conflict_free"], device=DEVICE, seconds=0.05)
result

# %%
tc.plot.result(result)

# %% [markdown]
# ## Explain
#
# Why should one schedule be faster on a GPU? The counts come from the machine code for sm_90. `tiling` reads shared
# memory so that lanes of a warp need different words of one bank; `conflict_free` never does.

# %%
explanation = tc.explain(workload, "tiling", "conflict_free", arch="sm_90")
explanation

# %%
conflicts = {kernel["name"]: kernel["quantities"]["bank conflicts"] for kernel in explanation.to_json()}
assert conflicts["conflict_free"] == "0"
conflicts

# %% [markdown]
# ## Tune
#
# Each trial is a line of the log. The chart shows the best kernel so far.

# %%
tuned = tc.tune(workload, "tiling", trials=4, device=DEVICE, log="notebook.jsonl")
tuned

# %%
axes = tc.plot.search("notebook.jsonl")
