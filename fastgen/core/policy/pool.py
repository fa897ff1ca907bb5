"""What sequences hold of the K/V cache: whether another one fits, what it takes, what stays when it goes."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly

from fastgen.core.policy.blocks import BlockAllocator
from fastgen.core.policy.prefix_cache import Node, PrefixCache
from fastgen.core.policy.sequence import Sequence

__all__ = ["Pool"]


class Pool:
    """The blocks, the prefix cache (None if switched off), and the rules of moving between them."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, block_size) if prefix_caching else None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the K/V of this many tokens."""
        return -(-num_tokens // self.block_size)

    def hits(self, seq: Sequence) -> ReadOnly[Node]:
        """The cached prefix of a waiting sequence, as of now; always less than its known tokens."""
        if self.cache is None or not seq.read_cache:
            return ()
        if seq.match is None:
            seq.match = self.cache.match(seq.namespace, seq.tokens)
        return seq.match.refresh()

    def fits(self, seq: Sequence, staying: list[Sequence], *, released: int = 0) -> bool:
        """Whether a waiting sequence may take its blocks beside those that run and stay.

        It must leave one block for every running sequence that can still grow, or it would soon be a victim again. One
        that the cache ran out on before leaves ``headroom`` too; if that exceeds the pool, it enters only alone.

        Args:
            released: blocks to count as available besides those that are.

        The cost does not depend on lengths, so a blocked head of the queue may be asked again in every pass.
        """
        if not staying:
            return True  # `Scheduler.add` made sure
        needed = self.blocks_for(len(seq.tokens))
        if seq.headroom and needed + seq.headroom >= self.num_blocks:
            return False
        self.hits(seq)
        held = seq.match.num_held() if seq.match is not None else 0
        spare = self.allocator.available + released + held - needed
        if spare < seq.headroom:
            return False
        if spare > len(staying):
            return True
        can_grow = sum(len(other.blocks) < other.max_blocks for other in staying) + (needed < seq.max_blocks)
        return spare >= can_grow

    def take(self, seq: Sequence) -> None:
        """Give a waiting sequence blocks for all its known tokens: its cached prefix, then new ones."""
        allocator = self.allocator
        hits = self.hits(seq)
        for node in hits:  # before allocating, which could evict them
            allocator.acquire(node.block)
        blocks = [node.block for node in hits]
        blocks += [allocator.allocate() for _ in range(self.blocks_for(len(seq.tokens)) - len(blocks))]
        seq.blocks = blocks
        seq.node = hits[-1] if hits else None
        seq.match = None
        seq.num_computed = len(hits) * self.block_size

    def keep_full_blocks(self, seq: Sequence, first: int) -> list[int]:
        """Enter the computed full blocks from number ``first`` into the prefix cache.

        Returns:
            Where the block table changed: the cache had these tokens already, so now their block is shared.
        """
        assert self.cache is not None
        size, blocks, node = self.block_size, seq.blocks, seq.node
        changed = []
        for i in range(first, seq.num_computed // size):
            key = tuple(seq.tokens[i * size : (i + 1) * size])
            node = self.cache.insert(seq.namespace, node, key, blocks[i])
            if node.block != blocks[i]:
                blocks[i] = node.block
                changed.append(i)
        seq.node = node
        return changed

    def let_go(self, seq: Sequence) -> None:
        """Release all its blocks; the kept ones stay in the prefix cache until they are evicted."""
        self.allocator.release_table(seq.blocks)
        seq.blocks = []
        seq.node = None
