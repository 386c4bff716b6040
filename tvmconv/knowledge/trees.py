"""Boosted trees as arrays: trained by xgboost, kept as plain numbers, asked by NumPy in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAF = -1
DEEPEST = 64  # trees that are asked
MOST = 1000.0  # that the leaves of a forest may add up to: powers of two
_DTYPES = {"feature": "int16", "threshold": "float32", "left": "int32", "roots": "int32"}


@dataclass(frozen=True)
class Trees:
    """A forest of regression trees, whose leaves are added up.

    Attributes:
        feature: which feature a node asks for, `LEAF` at a leaf: int16 (nodes,).
        threshold: those below it go left; a leaf's value: float32 (nodes,).
        left: the node where they go on, the others to the one behind it; a leaf's is itself: int32 (nodes,).
        roots: the first node of each tree: int32 (trees,).
        base: what is added to all: a number.
        depth: of the deepest leaf.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    roots: np.ndarray
    base: float
    depth: int

    def check(self, features: int) -> None:
        """Raise ValueError unless it can be asked: every node leads to nodes that are there, and asks for a feature."""
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"trees whose {name} is {array.dtype} of {array.ndim} dimensions, not {dtype} of one")
        nodes = len(self.feature)
        last = nodes - 1 - (self.feature >= 0)
        there = len(self.threshold) == len(self.left) == nodes and self.depth in range(DEEPEST + 1)
        if not (there and np.all(self.left >= 0) and np.all(self.left <= last) and np.all(self.feature < features)):
            raise ValueError("trees whose nodes lead nowhere")
        leaves = np.abs(self.threshold[self.feature < 0])
        if not abs(self.base) + len(self.roots) * float(leaves.max(initial=0)) <= MOST:
            raise ValueError(f"trees whose leaves make more than {MOST:g}")
        if len(self.roots) and not 0 <= self.roots.min() <= self.roots.max() < nodes:
            raise ValueError("trees without a root")

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """The sums for rows (n, features), float32: (n,)."""
        at = np.repeat(self.roots[None, :], len(rows), axis=0)
        flat, width = np.ascontiguousarray(rows, np.float32).ravel(), rows.shape[1]
        first = (np.arange(len(rows), dtype=np.int32) * width)[:, None]
        for _ in range(self.depth):
            feature = self.feature[at]
            right = flat[first + np.maximum(feature, 0)] >= self.threshold[at]
            at = self.left[at] + (right & (feature >= 0))
        return self.threshold[at].sum(axis=1) + self.base

    @classmethod
    def of_booster(cls, booster: Any) -> Trees:
        """The trees of a trained `xgboost.Booster` of squared errors."""
        model = json.loads(booster.save_raw("json"))["learner"]
        base = float(str(model["learner_model_param"]["base_score"]).strip("[]"))
        feature: list[int] = []
        threshold: list[float] = []
        left: list[int] = []
        roots: list[int] = []
        depth = 0
        for tree in model["gradient_booster"]["model"]["trees"]:
            start = len(feature)
            roots.append(start)
            order, deep = _siblings_together(tree["left_children"], tree["right_children"])
            depth = max(depth, deep)
            place = {node: start + number for number, node in enumerate(order)}
            for node in order:
                child = tree["left_children"][node]
                feature.append(LEAF if child < 0 else tree["split_indices"][node])
                threshold.append(tree["split_conditions"][node])
                left.append(place[node] if child < 0 else place[child])
        return cls(
            np.array(feature, np.int16),
            np.array(threshold, np.float32),
            np.array(left, np.int32),
            np.array(roots, np.int32),
            base,
            depth,
        )


def _siblings_together(left: list[int], right: list[int]) -> tuple[list[int], int]:
    """The nodes of a tree, breadth first, each right child behind its left one; and the tree's depth."""
    order, level, depth = [0], [0], 0
    while level := [child for node in level if left[node] >= 0 for child in (left[node], right[node])]:
        order += level
        depth += 1
    return order, depth
