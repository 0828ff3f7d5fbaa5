"""The memory of the paged cache as numbered blocks: who holds which, and which hold a known beginning.

Takes token ids, gives block ids; knows nothing of tensors or of which row goes first. Block 0 is never given out:
padding rows write there. A full block is known by its tokens and by what stands before them, compared exactly (no
hash can collide), and stays known after its last holder let go, until it is taken for other tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

_NOTHING = 0


class BlockManager:
    """``num_blocks`` blocks of ``block_size`` tokens; ``share`` keeps and reuses blocks of equal beginnings."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool) -> None:
        self.num_blocks, self.block_size, self.share = num_blocks, block_size, share
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))  # next taken first
        self._holders = [0] * (num_blocks + 1)
        self._by_content: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}  # by block; bytes, since thousands of tuples keep the collector busy
        self._numbers: dict[int, int] = {}  # by block: one for each content that was ever published
        self._new_numbers = count(_NOTHING + 1)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, tokens: Sequence[int], *, reserve: int = 0) -> tuple[list[int], int] | None:
        """Blocks for ``tokens`` and the number of leading tokens already in them; None if too few blocks are free.

        At least one token is left to compute, also when all of them are known. ``reserve`` blocks stay free.
        """
        known = self._match(tokens)
        fresh = self.blocks_for(len(tokens)) - len(known)
        idle = sum(self._holders[block] == 0 for block in known)
        if fresh + idle + reserve > len(self._free):
            return None
        for block in known:
            self._free.pop(block, None)
            self._holders[block] += 1
        return known + [self._take() for _ in range(fresh)], len(known) * self.block_size

    def fork(
        self, blocks: Sequence[int], num_tokens: int, *, reserve: int = 0
    ) -> tuple[list[int], tuple[int, int] | None] | None:
        """Blocks for another row that begins with the first ``num_tokens`` of the row that holds ``blocks``.

        Full blocks are shared. A partial one becomes a block of its own, whose content the caller must copy: the
        second value is (from, to). None, and nothing done, if too few blocks are free; ``reserve`` blocks stay free.
        """
        full, partial = divmod(num_tokens, self.block_size)
        if bool(partial) + reserve > len(self._free):
            return None
        shared = list(blocks[:full])
        for block in shared:
            self._holders[block] += 1
        if not partial:
            return shared, None
        fresh = self._take()
        return [*shared, fresh], (blocks[full], fresh)

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Lengthen ``blocks`` to hold ``num_tokens``; False, and nothing done, if too few blocks are free."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing > len(self._free):
            return False
        blocks.extend(self._take() for _ in range(missing))
        return True

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], num_computed: int) -> None:
        """Let others find the full blocks among the first ``num_computed`` of ``tokens``."""
        if not self.share:
            return
        before = _NOTHING
        full = num_computed // self.block_size
        for block, piece in zip(blocks, self._pieces(tokens, full), strict=False):
            if block not in self._contents:
                content = _content(before, piece)
                known = self._by_content.setdefault(content, block)
                if known == block:
                    self._contents[block], self._numbers[block] = content, next(self._new_numbers)
                block = known
            before = self._numbers[block]

    def release(self, blocks: list[int]) -> None:
        """Let go of ``blocks`` and empty the list. Known ones are taken again last, a row's end before its start."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released twice"
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._contents:
                    self._free.move_to_end(block, last=False)
        blocks.clear()

    def forget(self) -> None:
        """No block is known any more: the weights changed, or the content can't be trusted."""
        self._by_content.clear()
        self._contents.clear()
        self._numbers.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless holders, free blocks and known blocks agree with the rows' ``tables``."""
        held = Counter(block for table in tables for block in table)
        assert held[0] == 0, "the padding block was given out"
        for block in range(1, self.num_blocks + 1):
            assert self._holders[block] == held[block], f"block {block}: {self._holders[block]} holders, {held[block]}"
            assert (block in self._free) == (held[block] == 0), f"block {block} is both free and held, or neither"
        assert len(self._free) + sum(n > 0 for n in self._holders) == self.num_blocks
        assert {content: block for block, content in self._contents.items()} == self._by_content
        assert self._numbers.keys() == self._contents.keys()

    def _match(self, tokens: Sequence[int]) -> list[int]:
        found: list[int] = []
        if not self.share:
            return found
        before = _NOTHING
        for piece in self._pieces(tokens, (len(tokens) - 1) // self.block_size):
            block = self._by_content.get(_content(before, piece))
            if block is None:
                break
            found.append(block)
            before = self._numbers[block]
        return found

    def _pieces(self, tokens: Sequence[int], blocks: int) -> Iterator[bytes]:
        """The tokens of the first ``blocks`` blocks, block by block."""
        data = array("i", tokens[: blocks * self.block_size])
        size = self.block_size * data.itemsize
        whole = data.tobytes()
        return (whole[i * size : (i + 1) * size] for i in range(blocks))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if block in self._contents:
            del self._by_content[self._contents.pop(block)], self._numbers[block]
        self._holders[block] = 1
        return block


def _content(before: int, piece: bytes) -> bytes:
    """A block's tokens and what stands before it, as the number of that content."""
    return before.to_bytes(8, "little") + piece
