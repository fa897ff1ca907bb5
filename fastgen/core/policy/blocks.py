"""Which blocks of the K/V cache are free, held (and by how many), or kept for the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["BlockAllocator", "BlockError"]


class BlockError(RuntimeError):
    """A block was released twice, used while nobody held it, or asked for when none was left. Always a bug."""


class BlockAllocator:
    """Reference-counted blocks ``0 .. num_blocks - 1``.

    A block is *used* (somebody holds it), *cached* (nobody does, but the prefix cache still knows what is in it) or
    *free*. Cached blocks wait in the order they were let go; ``allocate`` takes free ones first and then evicts the
    one let go longest ago, after telling ``on_evict``. Always ``num_free + num_cached + num_used == num_blocks``.
    """

    __slots__ = ("_cached", "_free", "_kept", "counts", "num_blocks", "on_evict")

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks  # holders of each block; read-only for others
        self.on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 leaves first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._kept = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """How many ``allocate`` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """A block with one holder and nothing in it worth keeping.

        Raises:
            BlockError: every block is held.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._kept[block] = False
            if self.on_evict is not None:
                self.on_evict(block)
        else:
            raise BlockError(f"all {self.num_blocks} blocks are held; check `available` first")
        self.counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more holder of a used or cached block.

        Raises:
            BlockError: the block is free.
        """
        if self.counts[block] == 0:
            if block not in self._cached:
                raise BlockError(f"block {block} is free: nobody knows what is in it")
            del self._cached[block]
        self.counts[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one leaves it cached if it is kept, else free.

        Raises:
            BlockError: nobody holds the block.
        """
        count = self.counts[block]
        if count == 0:
            raise BlockError(f"block {block} was released twice")
        self.counts[block] = count - 1
        if count == 1:
            if self._kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def release_table(self, blocks: Iterable[int]) -> None:
        """Release a block table, deepest block first, so that a cached block is always evicted before the blocks
        that it continues."""
        for block in reversed(list(blocks)):
            self.release(block)

    def keep(self, block: int) -> None:
        """Keep what is in a held block when its last holder goes, until it is evicted.

        Raises:
            BlockError: nobody holds the block.
        """
        if self.counts[block] == 0:
            raise BlockError(f"block {block} is held by nobody; only a held block can be kept")
        self._kept[block] = True

    def cached_blocks(self) -> list[int]:
        """The cached blocks, next to be evicted first."""
        return list(self._cached)
