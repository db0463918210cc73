"""The KV cache: a pool of equal blocks; full ones are found by their contents.

A block that no sequence uses keeps its contents until another needs the room; the one unused for longest goes first,
and to a host cache behind the pool, where there is one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def extend_chain(chain: list[int], token_ids: Sequence[int], full_blocks: int, block_size: int, root: int = 0) -> None:
    """Extend a chain of block hashes in place until it names `full_blocks` blocks of `token_ids`.

    A hash covers its block and all before it, so equal hashes mean equal prefixes that begin at the same `root`.
    Python's hash of integers and tuples of them does not depend on the process.
    """
    for block in range(len(chain), full_blocks):
        parent = chain[-1] if chain else root
        chain.append(hash((parent, *token_ids[block * block_size : (block + 1) * block_size])))


def cache_root(salt: str) -> int:
    """Return the root of the hash chains for requests with this salt, 0 without one."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little") if salt else 0


class BlockPool:
    """The KV blocks of one engine: their users, and the free ones with a known prefix.

    A block's contents are known from `register` until the block is given to someone else. Every method is
    O(blocks it touches).
    """

    def __init__(self, blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.size = blocks
        self._users = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._block_of: dict[int, int] = {}
        # Insertion order is the order of reuse: the first has been unused for longest.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._host_blocks = host_blocks
        # Hashes of the contents of blocks in the host cache; the first has been unused for longest.
        self._host: OrderedDict[int, None] = OrderedDict()
        #: The number of unused blocks that still hold a known prefix.
        self.evictable = 0

    @property
    def used(self) -> int:
        """The number of blocks that at least one sequence uses."""
        return self.size - len(self._free)

    @property
    def host_used(self) -> int:
        """The number of blocks in the host cache."""
        return len(self._host)

    def match_host(self, chain: Sequence[int]) -> int:
        """Return the length of the prefix of a chain in the host cache, in blocks.

        They count as used now.
        """
        held = next((place for place, block_hash in enumerate(chain) if block_hash not in self._host), len(chain))
        for block_hash in reversed(chain[:held]):
            self._host.move_to_end(block_hash)
        return held

    def match(self, chain: Sequence[int]) -> list[int]:
        """Return the blocks that hold the longest known prefix of a chain; they are not taken."""
        blocks: list[int] = []
        for block_hash in chain:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, shared: Sequence[int], tokens: int) -> list[int] | None:
        """Take a match's `shared` blocks and the new ones for `tokens` tokens in all.

        Returns the blocks in order, or None (and takes nothing) when there is too little room.
        """
        new = self._blocks_for(tokens) - len(shared)
        unused_shared = sum(1 for block in shared if not self._users[block])
        if new > len(self._free) - unused_shared:
            return None
        for block in shared:
            if not self._users[block]:
                del self._free[block]
                self.evictable -= 1
            self._users[block] += 1
        return [*shared, *(self._take_free() for _ in range(new))]

    def grow(self, blocks: list[int], tokens: int) -> bool:
        """Append blocks in place until `tokens` tokens fit; false (and nothing appended) when there is no room."""
        if tokens <= len(blocks) * self.block_size:
            return True
        new = self._blocks_for(tokens) - len(blocks)
        if new > len(self._free):
            return False
        blocks.extend(self._take_free() for _ in range(new))
        return True

    def register(self, block: int, block_hash: int) -> None:
        """Register a computed full block by its prefix; a known prefix stays with the first block."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self) -> bool:
        """Forget all contents; false, and nothing forgotten, while a block is in use."""
        if self.used:
            return False
        self._hash_of = [None] * self.size
        self._block_of.clear()
        self._host.clear()
        self.evictable = 0
        return True

    def release(self, blocks: list[int]) -> None:
        """Give back the blocks of one sequence and clear the list.

        The tail becomes the first to be reused: a prefix without its tail is worth more than a tail without its
        prefix.
        """
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                self.evictable += self._hash_of[block] is not None
        blocks.clear()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _take_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            self.evictable -= 1
            if self._host_blocks:
                self._host[block_hash] = None
                self._host.move_to_end(block_hash)
                if len(self._host) > self._host_blocks:
                    self._host.popitem(last=False)
        self._users[block] = 1
        return block
