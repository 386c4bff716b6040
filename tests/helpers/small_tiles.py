"""Tiles of `hopper`, built, and a GPU so small that they are taken in turn."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import emulate
import numpy as np
from cubins import space_of
from tvmconv.builtin.conv.tensor_cores.hopper import knobs, latency, tile_config

import tvmconv as tc
from tvmconv import schedule_definition
from tvmconv.space import Knobs

SMALL = {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 16, "block_k_bytes": 64, "stages": 3, "split_k": 1}
SMALL |= {"cluster_m": 1, "cluster_n": 1}


def built(w, config=None, arch="sm_90"):
    return tc.build(w, "hopper", arch=arch, config=config)


def build_checked(text, config=None):
    return emulate.build_checked(text, "hopper", config)


@contextmanager
def few_multiprocessors(count=2, in_clusters=8):
    """A GPU so small that its blocks take tiles in turn."""
    caches = (latency._select_best, schedule_definition._declare_knobs, schedule_definition._make_space)
    at_a_time = np.array([0, count, count, *[in_clusters] * 6])
    with ExitStack() as patches:
        for module in (tile_config, knobs):
            patches.enter_context(mock.patch.object(module, "NUM_MULTIPROCESSORS", count))
        patches.enter_context(mock.patch.object(tile_config, "MAX_ACTIVE_CTAS", at_a_time))
        for cache in caches:
            cache.cache_clear()
            patches.callback(cache.cache_clear)
        yield


def all_legal(w):
    """The space of what can be built, promising or not."""
    with mock.patch.object(Knobs, "prune", autospec=True):
        return space_of(w, "hopper")
