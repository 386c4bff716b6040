"""Boosted trees as arrays: they are trained by xgboost, and evaluated by NumPy in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAF_FEATURE = -1
MAX_DEPTH = 64  # maximum depth of trees in a file
MAX_LEAF_SUM = 1000.0  # maximum sum of the leaves of a forest in a file, a base-2 logarithm
_DTYPES = {"feature": "int16", "threshold": "float32", "left": "int32", "roots": "int32"}


@dataclass(frozen=True)
class Trees:
    """A forest of regression trees, whose leaves are summed."""

    feature: np.ndarray  # index of the feature that each node tests, `LEAF_FEATURE` for leaves: int16 (nodes,)
    threshold: np.ndarray  # threshold below which the left child follows, or value of a leaf: float32 (nodes,)
    # Index of the left child, before that of the right child; a leaf has its own index: int32 (nodes,).
    left: np.ndarray
    roots: np.ndarray  # index of the root of each tree: int32 (trees,)
    base: float  # number that is added to the sum of leaves
    depth: int  # depth of the deepest leaf

    def check(self, num_features: int) -> None:
        """Raise ValueError if an array is malformed, or an index of a node or of a feature is out of range."""
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"expected an array {name} of {dtype}, 1-d, not of {array.dtype}, {array.ndim}-d")
        num_nodes = len(self.feature)
        last_children = num_nodes - 1 - (self.feature >= 0)
        has_consistent_sizes = len(self.threshold) == len(self.left) == num_nodes and self.depth in range(MAX_DEPTH + 1)
        if not (
            has_consistent_sizes
            and np.all(self.left >= 0)
            and np.all(self.left <= last_children)
            and np.all(self.feature < num_features)
        ):
            raise ValueError("an index of a node or of a feature is out of range")
        leaf_magnitudes = np.abs(self.threshold[self.feature < 0])
        if not abs(self.base) + len(self.roots) * float(leaf_magnitudes.max(initial=0)) <= MAX_LEAF_SUM:
            raise ValueError(f"the sum of leaves may exceed {MAX_LEAF_SUM:g}")
        if len(self.roots) and not 0 <= self.roots.min() <= self.roots.max() < num_nodes:
            raise ValueError("an index of a root is out of range")

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Return the sums of leaves for inputs (n, features): float32 (n,)."""
        nodes = np.repeat(self.roots[None, :], len(inputs), axis=0)
        flat_inputs, num_features = np.ascontiguousarray(inputs, np.float32).ravel(), inputs.shape[1]
        row_starts = (np.arange(len(inputs), dtype=np.int32) * num_features)[:, None]
        for _ in range(self.depth):
            feature = self.feature[nodes]
            goes_right = flat_inputs[row_starts + np.maximum(feature, 0)] >= self.threshold[nodes]
            nodes = self.left[nodes] + (goes_right & (feature >= 0))
        return self.threshold[nodes].sum(axis=1) + self.base

    @classmethod
    def from_booster(cls, booster: Any) -> Trees:
        """Return the trees of a trained `xgboost.Booster` with the objective of squared errors."""
        model = json.loads(booster.save_raw("json"))["learner"]
        base = float(str(model["learner_model_param"]["base_score"]).strip("[]"))
        feature: list[int] = []
        threshold: list[float] = []
        left: list[int] = []
        roots: list[int] = []
        depth = 0
        for tree in model["gradient_booster"]["model"]["trees"]:
            first_node = len(feature)
            roots.append(first_node)
            node_order, tree_depth = _order_siblings(tree["left_children"], tree["right_children"])
            depth = max(depth, tree_depth)
            node_index = {node: first_node + number for number, node in enumerate(node_order)}
            for node in node_order:
                child = tree["left_children"][node]
                feature.append(LEAF_FEATURE if child < 0 else tree["split_indices"][node])
                threshold.append(tree["split_conditions"][node])
                left.append(node_index[node] if child < 0 else node_index[child])
        return cls(
            np.array(feature, np.int16),
            np.array(threshold, np.float32),
            np.array(left, np.int32),
            np.array(roots, np.int32),
            base,
            depth,
        )


def _order_siblings(left: list[int], right: list[int]) -> tuple[list[int], int]:
    """Return the nodes of a tree, breadth first with each right child behind its left one, and the tree's depth."""
    node_order, level, depth = [0], [0], 0
    while level := [child for node in level if left[node] >= 0 for child in (left[node], right[node])]:
        node_order += level
        depth += 1
    return node_order, depth
