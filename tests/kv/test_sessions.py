"""Sessions: their older branches leave the prefix cache first, what their newest requests begin with last."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from omniserve.core.work import DiskCopy
from omniserve.kv.disk_prefixes import DiskPrefixes
from omniserve.kv.paged import PagedKVManager
from omniserve.kv.sessions import Sessions, Standing
from omniserve.kv.tiered import TieredKVManager

TTL_S = 100.0


def keys_of(names: str) -> list[bytes]:
    """Return the keys of a prefix: each stands for all before it, too."""
    return [names[: i + 1].encode() for i in range(len(names))]


class Cache:
    """A device cache with one token a block, and requests that compute all their blocks at once."""

    def __init__(self, num_blocks: int, *, share: float = 0.5, protected: int = 0) -> None:
        self.kv = PagedKVManager(
            num_device_blocks=num_blocks, num_host_blocks=0, block_size=1, prefix_cache=True,
            num_protected_blocks=protected,
        )  # fmt: skip
        assert self.kv.prefixes is not None
        self.index = self.kv.prefixes
        self.sessions = self.index.open_sessions(share=share)
        self.num_requests = 0

    def arrive(self, names: str, session: str, ttl_s: float = TTL_S) -> str:
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if session:
            self.index.begin_session(session, request_id, keys_of(names), ttl_s=ttl_s)
        return request_id

    def run(self, request_id: str, names: str, session: str, *, marks: bool = False) -> int | None:
        """Give a request its blocks; return how many it has found, or None if there is no room."""
        keys = keys_of(names)
        num_found = self.index.match(keys)
        if num_found:
            if self.index.begin(request_id, keys[:num_found], len(names), marks=marks) is None:
                return None
            self.sessions.use(session, request_id, keys[:num_found])
        elif self.kv.allocate(request_id, len(names)) is None:
            return None
        self.index.publish(request_id, 0, keys, marks=marks, session=session)
        return num_found

    def serve(self, names: str, session: str = "", *, marks: bool = False, ttl_s: float = TTL_S) -> int:
        """Serve a request from its arrival to its end; return how many blocks it has found."""
        request_id = self.arrive(names, session, ttl_s)
        num_found = self.run(request_id, names, session, marks=marks)
        assert num_found is not None
        self.kv.free(request_id)
        self.check()
        return num_found

    def check(self) -> None:
        self.kv.check_integrity()
        self.sessions.check()

    def left(self, *prefixes: str, taken: int) -> list[str]:
        """Return which of these prefixes are whole while requests take so many blocks."""
        assert self.kv.allocate("taker", taken) is not None
        found = [names for names in prefixes if self.index.match(keys_of(names)) == len(names)]
        self.kv.free("taker")
        return found


def test_older_branches_leave_first_and_the_newest_last() -> None:
    cache = Cache(10)
    cache.serve("ABcd", "mine")
    cache.serve("ABxyz", "mine")
    cache.serve("QRS")
    assert cache.left("ABcd", "ABxyz", "QRS", taken=2) == ["ABxyz", "QRS"], "c and d are an older branch"
    assert cache.index.match(keys_of("ABcd")) == 2
    assert cache.left("ABxyz", "QRS", taken=5) == ["ABxyz"], "others go first, though they came later"
    assert cache.left("ABxyz", taken=6) == []


def test_the_next_turn_of_a_chat_has_no_older_branch() -> None:
    cache = Cache(12)
    assert [cache.serve(turn, "chat") for turn in ("AB", "ABCD", "ABCDEF")] == [0, 2, 4]
    cache.serve("Q")
    assert cache.left("ABCDEF", "Q", taken=6) == ["ABCDEF"]


def test_what_others_have_used_is_no_older_branch() -> None:
    cache = Cache(12)
    cache.serve("ABc", "mine")
    assert cache.serve("ABq") == 2, "a request without a session"
    cache.serve("XY", "mine")
    assert [cache.sessions.standing(key) for key in keys_of("ABc")] == [Standing.PLAIN, Standing.PLAIN, Standing.OLDER]
    assert cache.serve("XYz", "yours") == 2
    cache.serve("M", "mine")
    assert cache.sessions.standing(keys_of("XY")[0]) is Standing.NEWEST, "another session's newest begins with it"
    cache.serve("N", "yours")
    assert cache.sessions.standing(keys_of("XY")[0]) is Standing.PLAIN
    assert cache.sessions.standing(keys_of("XYz")[2]) is Standing.OLDER


def test_an_older_branch_that_is_asked_for_again_is_the_newest() -> None:
    cache = Cache(12)
    cache.serve("ABcd", "mine")
    cache.serve("ABxy", "mine")
    assert cache.serve("ABcd", "mine") == 4
    assert cache.left("ABcd", "ABxy", taken=7) == ["ABcd"]
    cache.serve("Z", "mine")
    assert cache.sessions.standing(keys_of("ABcd")[3]) is Standing.OLDER, "it is the session's own again"


def test_a_request_that_still_runs_keeps_its_branch_until_it_ends() -> None:
    cache = Cache(10)
    slow = cache.arrive("ABcd", "mine")
    assert cache.run(slow, "ABcd", "mine") == 0
    cache.serve("ABx", "mine")
    assert cache.kv.allocate("taker", 5) is not None and cache.index.match(keys_of("ABcd")) == 4
    cache.kv.free("taker")
    cache.kv.free(slow)
    cache.check()
    cache.serve("Q")
    assert cache.left("ABcd", "ABx", "Q", taken=5) == ["ABx", "Q"]


def test_a_session_that_is_not_used_ends() -> None:
    cache = Cache(10)
    cache.serve("AB", "short", ttl_s=10.0)
    cache.serve("CD", "long", ttl_s=1000.0)
    cache.serve("Q")
    cache.sessions.at(9.0)
    assert cache.left("AB", "CD", "Q", taken=6) == ["AB", "CD"]
    cache.serve("Q")
    cache.sessions.at(10.0)
    assert cache.sessions.names == ["long"]
    assert cache.left("AB", "CD", "Q", taken=7) == ["CD", "Q"]
    cache.serve("CDE", "long", ttl_s=5.0)
    cache.sessions.at(16.0)
    assert cache.sessions.names == [], "the newest request's word counts"


def test_newest_requests_keep_no_more_than_their_share() -> None:
    cache = Cache(10, share=0.3)
    cache.serve("ABCD", "one")
    cache.serve("QRS")
    assert cache.left("ABCD", "QRS", taken=4) == ["QRS"], "one block is above the share and was used first"
    assert cache.left("ABC", "QRS", taken=7) == ["ABC"], "three are within it"


def test_marked_blocks_are_kept_before_those_of_sessions_and_both_last() -> None:
    cache = Cache(12, protected=6)
    cache.serve("AB", "ls", marks=True)
    cache.serve("MN", marks=True)
    cache.serve("XY", "be")
    cache.serve("QR")
    order = ["AB", "MN", "XY", "QR"]
    for taken, left in ((6, order[:3]), (8, order[:2]), (10, order[:1]), (12, [])):
        assert cache.left(*order, taken=taken) == left
        for names in order:
            cache.serve(names, {"AB": "ls", "XY": "be"}.get(names, ""), marks=names in ("AB", "MN"))


def test_clearing_frees_what_no_request_uses() -> None:
    cache = Cache(12)
    cache.serve("ABc", "mine")
    cache.serve("ABx", "mine")
    cache.serve("PQ", "yours")
    cache.serve("MN")
    running = cache.arrive("MNo", "")
    assert cache.run(running, "MNo", "") == 2
    freed = cache.index.forget(["mine", "unknown"])
    cache.check()
    assert freed.device == 4, "A and B, the older branch c, and x"
    assert cache.left("A", "PQ", "MN", taken=1) == ["PQ", "MN"]
    assert cache.sessions.names == ["yours"]
    assert cache.index.forget().device == 2 and cache.sessions.names == []
    cache.check()
    assert cache.left("PQ", "MNo", taken=1) == ["MNo"], "a request uses it"
    cache.kv.free(running)
    assert cache.index.forget().device == 3 and cache.kv._pool.free_ids() != []
    cache.check()


@dataclasses.dataclass
class _Block:
    """A cached block, as the model below has it."""

    depth: int
    marked: bool
    num_users: int = 0
    since: int = 0


class Model:
    """What ``Cache`` should have, said as plainly as possible: it looks at everything each time."""

    def __init__(self, num_blocks: int, *, share: float, protected: int) -> None:
        self.num_blocks, self.most_newest, self.protected = num_blocks, int(share * num_blocks), protected
        self.blocks: dict[bytes, _Block] = {}
        self.sessions: dict[str, tuple[str, list[bytes], float]] = {}  # newest request, its keys, when it ends
        self.sole_user: dict[bytes, str] = {}
        self.older: set[bytes] = set()
        self.tables: dict[str, list[bytes]] = {}
        self.now_s, self.event = 0.0, 0

    def is_newest(self, key: bytes) -> bool:
        return any(key in keys for _, keys, _ in self.sessions.values())

    def touch(self, key: bytes) -> None:
        if key in self.blocks and not self.blocks[key].num_users:
            self.blocks[key].since = self.event

    def set_newest(self, session: str, request_id: str, keys: list[bytes], *, until_s: float) -> None:
        before = self.sessions.get(session, ("", [], 0.0))[1]
        self.event += 1
        self.sessions[session] = (request_id, keys, until_s)
        for key in keys:
            if key not in before:
                self.touch(key)
                self.older.discard(key)
                if self.sole_user.get(key, session) != session or self.num_sessions(key) > 1:
                    self.sole_user.pop(key, None)
        self.event += 1
        self.leave(session, [key for key in before if key not in keys])

    def num_sessions(self, key: bytes) -> int:
        return sum(key in keys for _, keys, _ in self.sessions.values())

    def leave(self, session: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            if not self.is_newest(key):
                if self.sole_user.get(key) == session:
                    self.older.add(key)
                else:
                    self.sole_user.pop(key, None)
                self.touch(key)

    def at(self, now_s: float) -> None:
        self.now_s = now_s
        over = sorted((until_s, name) for name, (_, _, until_s) in self.sessions.items() if until_s <= now_s)
        for _, name in over:
            self.event += 1
            _, keys, _ = self.sessions.pop(name)
            self.leave(name, keys)

    def use(self, session: str, request_id: str, keys: list[bytes], *, num_found: int, marks: bool) -> bool:
        found, own = keys[:num_found], keys[num_found:]
        num_free = self.num_blocks - len({key for table in self.tables.values() for key in table})
        needed = len(own) + sum(not self.blocks[key].num_users for key in found)
        if needed > num_free:
            return False
        for key in found:
            self.blocks[key].num_users += 1
            self.blocks[key].marked |= marks
            if self.sole_user.get(key, session) != session:
                del self.sole_user[key]
                self.older.discard(key)
        while len(self.blocks) + len(own) > self.num_blocks:
            self.blocks.pop(self.victim())
        is_newest = bool(session) and session in self.sessions and self.sessions[session][0] == request_id
        # Behind a hole there may be blocks with its keys: then those that it computes have none.
        nameless = [key for key in own if key in self.blocks]
        own = [key for key in own if key not in self.blocks]
        for key in own:
            self.blocks[key] = _Block(keys.index(key), marks, num_users=1)
            self.older.discard(key)
            self.sole_user.pop(key, None)
        for key in nameless:
            self.blocks[key + request_id.encode()] = _Block(0, False, num_users=1)
        if is_newest:
            self.set_newest(session, request_id, keys, until_s=self.now_s + TTL_S)
        for key in own:
            if session in self.sessions and (not self.is_newest(key) or (is_newest and self.num_sessions(key) == 1)):
                self.sole_user[key] = session
                if not self.is_newest(key):
                    self.older.add(key)
        self.tables[request_id] = [key + request_id.encode() if key in nameless else key for key in keys]
        return True

    def end(self, request_id: str) -> None:
        self.event += 1
        for key in self.tables.pop(request_id):
            self.blocks[key].num_users -= 1
            self.touch(key)
            if key.endswith(request_id.encode()):
                del self.blocks[key]

    def victim(self) -> bytes:
        idle = {key: block for key, block in self.blocks.items() if not block.num_users}
        kinds: dict[str, list[bytes]] = {"older": [], "plain": [], "newest": [], "marked": [], "both": []}
        for key, block in idle.items():
            if self.is_newest(key):
                kinds["both" if block.marked else "newest"].append(key)
            elif key in self.older:
                kinds["older"].append(key)
            else:
                kinds["marked" if block.marked else "plain"].append(key)
        for kind in kinds.values():
            kind.sort(key=lambda key: (idle[key].since, -idle[key].depth))
        if kinds["older"]:
            return kinds["older"][0]
        marked_over = len(kinds["marked"] + kinds["both"]) > self.protected
        newest_over = len(kinds["newest"] + kinds["both"]) > self.most_newest
        chosen = kinds["plain"][:1]
        chosen += kinds["marked"][:1] if marked_over else []
        chosen += kinds["newest"][:1] if newest_over else []
        if marked_over and newest_over:
            chosen += kinds["both"][:1]
        if chosen:
            return min(chosen, key=lambda key: (idle[key].since, -idle[key].depth))
        return next(key for kind in ("newest", "marked", "both") for key in kinds[kind])

    def forget(self, names: Sequence[str] | None) -> int:
        if names is None:
            gone = [key for key, block in self.blocks.items() if not block.num_users]
            self.sessions.clear()
            self.sole_user.clear()
            self.older.clear()
        else:
            chosen: set[bytes] = set()
            for name in names:
                keys = self.sessions.get(name, ("", [], 0.0))[1]
                chosen |= {key for key in self.older if self.sole_user[key] == name}
                chosen |= {key for key in keys if self.num_sessions(key) == 1}
                self.sessions.pop(name, None)
            for key in chosen:
                self.older.discard(key)
                self.sole_user.pop(key, None)
            gone = [key for key in chosen if key in self.blocks and not self.blocks[key].num_users]
        for key in gone:
            del self.blocks[key]
        return len(gone)


@pytest.mark.parametrize("seed", range(16))
def test_random_histories_are_those_of_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, share, protected = rng.choice([6, 12, 30]), rng.choice([0.0, 0.3, 0.6]), rng.choice([0, 0, 4])
    cache, model = (
        Cache(num_blocks, share=share, protected=protected),
        Model(num_blocks, share=share, protected=protected),
    )
    cache.sessions._most_keys = 10**6  # the model forgets no session
    running: dict[str, str] = {}
    waiting: dict[str, tuple[str, str]] = {}
    prompts = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 8))) for _ in range(10)]
    reached = 0
    for _ in range(300):
        action = rng.random()
        if action < 0.3:
            names, session = rng.choice(prompts), rng.choice(["", "s", "t", "u"])
            request_id = cache.arrive(names, session)
            if session:
                known = keys_of(names)[: cache.index.match(keys_of(names))]
                model.set_newest(session, request_id, known, until_s=model.now_s + TTL_S)
            waiting[request_id] = names, session
        elif action < 0.6 and waiting:
            request_id = rng.choice([*waiting])
            (names, session), marks = waiting[request_id], rng.random() < 0.3
            keys = keys_of(names)
            found = cache.index.match(keys)
            result = cache.run(request_id, names, session, marks=marks)
            assert (result is not None) == model.use(session, request_id, keys, num_found=found, marks=marks)
            if result is not None:
                running[request_id] = names
                del waiting[request_id]
        elif action < 0.85 and running:
            request_id = rng.choice([*running])
            del running[request_id]
            cache.kv.free(request_id)
            model.end(request_id)
        elif action < 0.97:
            now_s = model.now_s + rng.choice([1.0, 10.0, 40.0])
            cache.sessions.at(now_s)
            model.at(now_s)
        else:
            asked = rng.choice([None, ["s"], ["t", "s"], ["nobody"]])
            assert cache.index.forget(asked).device == model.forget(asked)
        cache.check()
        assert set(cache.kv._pool._blocks) == {key for key in model.blocks if b"r" not in key}
        standings = {key: cache.sessions.standing(key) for key in model.blocks}
        assert {key for key, standing in standings.items() if standing is Standing.NEWEST} == {
            key for key in model.blocks if model.is_newest(key)
        }
        assert {key for key, s in standings.items() if s is Standing.OLDER} == model.older & model.blocks.keys()
        reached += Standing.OLDER in standings.values()
    assert reached


@pytest.mark.parametrize("seed", range(4))
def test_the_books_stay_small(seed: int) -> None:
    rng = random.Random(seed)
    changed: list[tuple[Sequence[bytes], bool]] = []
    sessions = Sessions(20, on_change=lambda keys, are_older: changed.append((keys, are_older)))
    for number in range(2000):
        sessions.at(number / 10)
        name = f"s{rng.randrange(60)}"
        keys = keys_of("".join(rng.choice("abc") for _ in range(rng.randint(0, 30))))
        sessions.begin(name, f"r{number}", keys[: rng.randint(0, len(keys))], ttl_s=rng.choice([1.0, 50.0]))
        sessions.publish(name, f"r{number - rng.randrange(2)}", 0, keys, keys)
        sessions.check()
        assert len(sessions._ends) <= 200
    assert changed and sessions.names


def test_older_branches_give_way_first_on_the_host_and_on_disk() -> None:
    disk = DiskPrefixes(8)
    kv = TieredKVManager(
        num_device_blocks=16, num_host_blocks=8, block_size=1, prefix_cache=True, host_prefixes=True, disk=disk
    )
    index = kv.prefixes
    assert index is not None and index.host is not None and index.disk is not None
    sessions = index.open_sessions(share=0.5)

    def serve(names: str, session: str) -> None:
        keys = keys_of(names)
        if session:
            index.begin_session(session, names, keys, ttl_s=TTL_S)
        num_found = index.match(keys)
        if num_found:
            assert index.begin(names, keys[:num_found], len(names)) is not None
            sessions.use(session, names, keys[:num_found])
        else:
            assert kv.allocate(names, len(names)) is not None
        index.publish(names, 0, keys, marks=True, session=session)
        kv.free(names)

    def copy_all() -> None:
        while (move := index.host.save(num_ahead=16, max_blocks=9)) is not None:
            kv.moves.finish(move.move_id, succeeded=True)
        while (copy := index.disk.write(max_blocks=9)) is not None:
            kv.moves.finish(copy.move_id, succeeded=True)
        kv.check_integrity()

    def on_host() -> set[bytes]:
        return set(kv._copies.prefixes.blocks)

    serve("ABcd", "mine")
    serve("QR", "")
    index.host.save(num_ahead=16, max_blocks=0)
    copy_all()
    assert on_host() == {*keys_of("ABcd"), *keys_of("QR")} and disk.num_used == 6
    serve("ABx", "mine")
    kv._copies.prefixes.reclaim(1)
    assert keys_of("ABcd")[3] not in on_host(), "its end goes first"
    kv._copies.prefixes.reclaim(1)
    assert on_host() == {*keys_of("AB"), *keys_of("QR")}
    slots = {key: slot for key, slot in disk._slots.items()}
    assert disk.begin_write([b"1", b"2"]) is not None and disk.begin_write([b"3", b"4"]) == [
        slots[key] for key in reversed(keys_of("ABcd")[2:])
    ]
    for key in (b"1", b"2", b"3", b"4"):
        disk.end(DiskCopy(move_id=0, to_disk=True, host_block_ids=(0,), slots=(0,), keys=(key,)), succeeded=False)
    freed = index.forget(["mine"])
    assert freed.host == 2 and set(freed.disk_slots) == {slots[key] for key in keys_of("AB")}
    assert on_host() == {*keys_of("QR")}
    freed = index.forget()
    assert (freed.host, len(freed.disk_slots)) == (2, 2) and on_host() == set() and disk.num_used == 0
    kv.check_integrity()
    disk.check()
