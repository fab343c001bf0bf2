"""The prefix cache beside a list of blocks with the times of their last use."""

import random

from meshwise.scheduling import PrefixCache


def size(cache):
    """Blocks of a tree, counted node by node; and of those that are pinned."""
    blocks = pinned = 0
    nodes = [cache.root]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        own = node.end // cache.block_tokens - node.begin // cache.block_tokens
        blocks += own
        pinned += own if node.pins else 0
        if node.parent is not None:
            assert not node.pins or node.parent.pins >= node.pins > 0
            assert node.parent.end == node.begin
    return blocks, pinned


def test_what_was_put_in_is_found_up_to_whole_parts():
    cache = PrefixCache(16)
    cache.insert((("a", 100), ("b", 50)))
    assert cache.blocks == cache.pinned == 150 // 16
    assert cache.match((("a", 100), ("b", 50), ("c", 9)))[1] == 150
    assert cache.match((("a", 100), ("x", 50)))[1] == 100
    assert cache.match((("x", 100),))[1] == 0


def test_the_least_recently_used_end_goes_first():
    cache = PrefixCache(10)
    nodes = {name: cache.insert((("system", 50), (name, 30))) for name in "abc"}
    for name in "abc":
        cache.unpin(nodes[name])
    cache.pin(nodes["a"])
    cache.unpin(nodes["a"])
    cache.evict(4)  # all of b, and the end of c
    assert cache.blocks == 5 + 3 + 2
    found = {name: cache.match((("system", 50), (name, 30)))[1] for name in "abc"}
    assert found == {"a": 80, "b": 50, "c": 70}
    cache.evict(7)  # the rest of c, a, and the end of what they shared
    assert cache.blocks == 3
    assert cache.match((("system", 50), ("a", 30)))[1] == 30
    cache.unpin(cache.insert((("system", 50), ("a", 30))))
    assert cache.blocks == 8


def test_what_is_pinned_stays():
    cache = PrefixCache(10)
    kept = cache.insert((("system", 50), ("a", 30)))
    cache.unpin(cache.insert((("system", 50), ("b", 30))))
    cache.evict(3)
    assert cache.match((("system", 50), ("a", 30)))[0] is kept
    assert cache.blocks == cache.pinned == 8


def test_blocks_are_counted_right_whatever_happens():
    for seed in range(40):
        draw = random.Random(seed)  # noqa: S311
        cache, held = PrefixCache(draw.choice([1, 4, 16])), []
        for _ in range(120):
            path = tuple((f"{depth}{draw.randint(0, 2)}", 7 + 11 * depth) for depth in range(draw.randint(1, 4)))
            chance = draw.random()
            if chance < 0.4:
                held.append(cache.insert(path))
            elif chance < 0.7 and held:
                cache.unpin(held.pop(draw.randrange(len(held))))
            elif chance < 0.85:
                node, tokens = cache.match(path)
                assert tokens <= sum(size for _, size in path)
                if tokens:
                    cache.pin(node)
                    held.append(node)
            elif cache.blocks > cache.pinned:
                before = cache.blocks
                some = draw.randint(1, cache.blocks - cache.pinned)
                cache.evict(some)
                assert cache.blocks == before - some
            assert (cache.blocks, cache.pinned) == size(cache)
        for node in held:
            cache.unpin(node)
        assert cache.pinned == 0
        cache.evict(cache.blocks)
        assert cache.blocks == 0
        assert size(cache) == (0, 0)
