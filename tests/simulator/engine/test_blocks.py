"""Laws of the KV block pool."""

from __future__ import annotations

from sidelight.simulator.engine.blocks import BlockPool, extend_chain


def chain_of(token_ids: list[int]) -> list[int]:
    """Return the hashes of all full blocks of four tokens."""
    chain: list[int] = []
    extend_chain(chain, token_ids, len(token_ids) // 4, 4)
    return chain


def store(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Take and register the blocks of a sequence of full blocks."""
    blocks = pool.take([], len(token_ids))
    assert blocks is not None
    for block, block_hash in zip(blocks, chain_of(token_ids), strict=True):
        pool.register(block, block_hash)
    return blocks


def test_a_released_block_is_found_again():
    """Blocks keep their contents until someone needs the room."""
    pool = BlockPool(4, 4)
    blocks = store(pool, list(range(8)))
    expected = list(blocks)
    pool.release(blocks)
    assert (expected, 0, []) == (pool.match(chain_of(list(range(8)))), pool.used, blocks)


def test_what_leaves_the_pool_is_in_host_memory_until_others_need_the_room():
    """Of three blocks there the one unused for longest goes; a prefix ends at the first that is not there."""
    pool = BlockPool(4, 4, 3)
    first, second = list(range(16)), list(range(100, 116))
    blocks = store(pool, first)
    assert 0 == pool.match_host(chain_of(first))
    pool.release(blocks)
    assert 0 == pool.host_used
    blocks = store(pool, second)
    assert ([], 3, 3) == (pool.match(chain_of(first)), pool.match_host(chain_of(first)), pool.host_used)
    pool.release(blocks)
    third = pool.take([], 4)
    assert third
    assert (2, 3) == (pool.match_host(chain_of(first)), pool.host_used)
    pool.release(third)
    assert pool.forget()
    assert 0 == pool.host_used == pool.match_host(chain_of(first))


def test_a_match_ends_at_the_first_block_that_differs():
    """Only whole prefixes match, even where a later block is alike."""
    pool = BlockPool(4, 4)
    blocks = store(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert blocks[:1] == pool.match(chain_of([1, 2, 3, 4, 9, 9, 9, 9]))
    assert [] == pool.match(chain_of([5, 6, 7, 8]))


def test_the_least_recently_released_goes_first_and_tails_before_heads():
    """With one new block needed, the tail of the sequence released first is given up."""
    pool = BlockPool(4, 4)
    older, newer = list(range(8)), list(range(100, 108))
    for blocks in (store(pool, older), store(pool, newer)):
        pool.release(blocks)
    assert pool.take([], 1) is not None
    assert (1, 2) == (len(pool.match(chain_of(older))), len(pool.match(chain_of(newer))))


def test_a_shared_block_is_used_until_its_last_user_releases_it():
    """Two sequences over one prefix use it once."""
    pool = BlockPool(4, 4)
    first = store(pool, list(range(8)))
    second = pool.take(pool.match(chain_of(list(range(8)))), 12)
    assert second is not None
    assert 3 == pool.used
    pool.release(first)
    assert 3 == pool.used
    pool.release(second)
    assert 0 == pool.used


def test_a_refused_take_takes_nothing():
    """Unused blocks of the match itself are not counted as room for the rest."""
    pool = BlockPool(3, 4)
    pool.release(store(pool, list(range(8))))
    assert pool.take(pool.match(chain_of(list(range(8)))), 16) is None
    assert (0, 2) == (pool.used, len(pool.match(chain_of(list(range(8))))))


def test_growth_is_all_or_nothing():
    """A sequence gets the blocks for all its tokens or none."""
    pool = BlockPool(3, 4)
    blocks = pool.take([], 4)
    assert blocks is not None
    assert (False, 1) == (pool.grow(blocks, 16), len(blocks))
    assert (True, 3) == (pool.grow(blocks, 12), len(blocks))
