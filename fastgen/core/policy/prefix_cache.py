"""Which computed blocks hold which tokens: a radix tree over full blocks, one root per namespace.

Each node is one full block of K/V, found under its parent by the block's own tokens. A dict compares the tokens
themselves on every hit, so no hash, however weak, can hand out somebody else's K/V, and the first miss ends a match.

Whoever holds a node's block also holds the blocks of all its ancestors (a match takes the whole path, ``insert``
replaces a computed block by the one already in the tree), and tables are released deepest block first. Therefore the
allocator's oldest cached block is always a leaf, and eviction never orphans a node.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

from fastgen.core.policy.blocks import BlockAllocator

__all__ = ["Node", "PrefixCache", "PrefixMatch"]


class Node:
    """One cached block, or a root: ``block`` is -1 for a root, and for a node once it was evicted."""

    __slots__ = ("block", "children", "key", "namespace", "parent")

    def __init__(self, parent: Node | None, key: tuple[int, ...], block: int, namespace: Hashable = None) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.namespace = namespace  # of a root
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """The tree. It hears of evictions through ``allocator.on_evict``, which it takes over."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block
        allocator.on_evict = self._forget

    def __len__(self) -> int:
        """Blocks in the tree, held ones included."""
        return len(self._nodes)

    def match(self, namespace: Hashable, tokens: list[int]) -> PrefixMatch:
        """The longest cached prefix of ``tokens``, always leaving at least one token to compute."""
        return PrefixMatch(self, namespace, tokens)

    def insert(self, namespace: Hashable, parent: Node | None, key: tuple[int, ...], block: int) -> Node:
        """Enter a full computed block, held by the caller.

        Args:
            namespace: where the path starts; used when ``parent`` is None.
            parent: the node of the block before it, held by the caller too; None for the first block.
            key: the block's tokens, ``block_size`` of them.
            block: the block.

        Returns:
            The node of these tokens. If the tree had them already, in another block, the caller now holds that block
            (``node.block``) instead of its own, which was released.
        """
        if parent is None:
            parent = self._roots.get(namespace)
            if parent is None:
                parent = self._roots[namespace] = Node(None, (), -1, namespace)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = self._nodes[block] = Node(parent, key, block)
            self.allocator.keep(block)
        else:
            self.allocator.acquire(node.block)
            self.allocator.release(block)
        return node

    def _forget(self, block: int) -> None:
        node = self._nodes.pop(block)
        parent = node.parent
        if node.children or parent is None:
            raise RuntimeError(f"block {block} was evicted before the blocks that continue it")
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        node.block = -1
        node.parent = None


class PrefixMatch:
    """The longest cached prefix of one unchanging token list. ``refresh`` follows the tree's changes at a cost that
    does not depend on the length, so a waiting sequence can be asked again in every pass."""

    __slots__ = ("_cache", "_limit", "_namespace", "_nodes", "_tokens")

    def __init__(self, cache: PrefixCache, namespace: Hashable, tokens: list[int]) -> None:
        self._cache = cache
        self._namespace = namespace
        self._tokens = tokens
        self._limit = (len(tokens) - 1) // cache.block_size
        self._nodes: list[Node] = []

    def refresh(self) -> list[Node]:
        """The matched nodes as of now, first block first. Not held: acquire their blocks before allocating any."""
        nodes, tokens, size = self._nodes, self._tokens, self._cache.block_size
        while nodes and nodes[-1].block < 0:  # leaves are evicted first, so the lost ones are at the end
            nodes.pop()
        node = nodes[-1] if nodes else self._cache._roots.get(self._namespace)
        while node is not None and len(nodes) < self._limit:
            start = len(nodes) * size
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is not None:
                nodes.append(node)
        return nodes

    def num_held(self) -> int:
        """How many of the matched blocks somebody holds. Holders of a block hold all before it: a binary search."""
        counts = self._cache.allocator.counts
        return bisect_left(self._nodes, True, key=lambda node: counts[node.block] == 0)
