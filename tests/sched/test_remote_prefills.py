"""KV that comes from prefill engines, in host memory that best-effort decodes move to as well."""

from __future__ import annotations

from collections import Counter

from omniserve.core.config import PrefillConfig
from omniserve.core.work import (
    Done,
    HostEvent,
    KVMove,
    PrefilledKV,
    PrefillEngineJoined,
    PrefillEngineLost,
    RemotePrefill,
)
from omniserve.sched.state import BE
from tests.sched.benches import Bench
from tests.sched.limits import BLOCK


class _Bench(Bench):
    """Has a prefill engine, which computes any prompt in one step."""

    def __init__(
        self, *, device_blocks: int, host_blocks: int, placement: str = "always", scheduler: str = "omniserve"
    ) -> None:
        prefill = PrefillConfig(prefill_engines=("there:1",), prefill_secret_file="file", prefill_placement=placement)
        super().__init__(
            scheduler, device_blocks=device_blocks, host_blocks=host_blocks, num_protected=0, host_prefixes=True,
            prefill=prefill,
        )  # fmt: skip
        self.scheduler.notify([PrefillEngineJoined(1)])
        self.computed: Counter[str] = Counter()
        """Tokens of chunks that this engine computed, by request."""
        self.num_offloaded = 0
        self._asked: list[RemotePrefill] = []

    def run(self, num_steps: int, *, engine_answers: bool = True) -> None:
        for _ in range(num_steps):
            plan, _ = self.step()
            self._asked += plan.side_work(RemotePrefill)
            if engine_answers:
                self.scheduler.notify(map(self._done, self._asked))
                self._asked = []
            self.num_offloaded += sum(
                not move.is_checkpoint and move.direction == "to_host" for move in plan.side_work(KVMove)
            )
            for chunk in plan.chunks:
                self.computed[chunk.request_id] += len(chunk.token_ids)

    def _done(self, prefill: RemotePrefill) -> HostEvent:
        tokens = prefill.token_ids[prefill.first_block * BLOCK :]
        slots = [block * BLOCK + offset for block in prefill.host_block_ids for offset in range(BLOCK)]
        self.device.kv |= {("host", slot): token for slot, token in zip(slots, tokens, strict=True)}
        prefilled = PrefilledKV(num_blocks=len(prefill.host_block_ids), at_s=0.0)
        return Done(move_id=prefill.move_id, ok=True, prefilled=prefilled)


def test_decodes_that_make_room_for_prompts_leave_them_the_host_blocks_of_their_kv() -> None:
    # Four decodes of 15 to 18 blocks leave a prompt of 25 too little of the device. The KV of two prompts has come, 24
    # blocks each, and the host would have room for one decode beside one of them.
    bench = _Bench(device_blocks=80, host_blocks=60)
    for number in range(4):
        bench.add(f"be{number}", prompt=60, output=12)
    bench.run(2)
    for name in ("be-long1", "be-long2"):
        bench.add(name, prompt=100, output=1)
    bench.run(100)
    assert len(bench.finished) == 6 and bench.scheduler.stats().loaded_from("prefilled")["BE"] == 2 * 96
    assert (bench.computed["be-long1"], bench.computed["be-long2"]) == (4, 4), "what has come was not pushed out"


def test_decodes_that_make_room_leave_host_blocks_for_the_prompts_that_are_asked_for_next() -> None:
    # The host has room for the KV of two prompts and one decode. The next prompts have not been asked for yet.
    bench = _Bench(device_blocks=80, host_blocks=68)
    for number in range(4):
        bench.add(f"be{number}", prompt=60, output=12)
    bench.run(2)
    for number in range(12):
        bench.add(f"be-long{number}", prompt=100, output=1)
    bench.run(5, engine_answers=False)
    loads = bench.requests.loads
    assert len([*loads]) == 2 and loads.blocks_wanted() == 8 * 25, "of ten that wait"
    assert bench.num_offloaded == 0
    bench.run(100)
    assert len(bench.finished) == 16


def test_decodes_make_room_as_usual_without_an_engine_that_can_be_asked() -> None:
    bench = _Bench(device_blocks=80, host_blocks=60)
    bench.scheduler.notify([PrefillEngineLost(1)])
    for number in range(4):
        bench.add(f"be{number}", prompt=60, output=12)
    bench.run(2)
    bench.add("be-long", prompt=100, output=1)
    bench.run(100)
    assert len(bench.finished) == 5 and bench.num_offloaded >= 1


def test_what_has_come_is_counted_once_until_the_request_is_admitted_or_ends() -> None:
    bench = _Bench(device_blocks=80, host_blocks=250)
    for number in range(4):
        bench.add(f"be{number}", prompt=60, output=12)
    bench.run(2)
    loads = bench.requests.loads
    for number in range(2):
        bench.add(f"be-long{number}", prompt=100, output=1)
    bench.run(3)
    assert loads.blocks_wanted() == 2 * 25
    bench.scheduler.abort("be-long0", bench.now_s)
    assert loads.blocks_wanted() == 25
    bench.run(100)
    assert loads.blocks_wanted() == 0 and "be-long1" in bench.finished


def _apart(*, host_blocks: int, device_blocks: int = 80) -> _Bench:
    return _Bench(device_blocks=device_blocks, host_blocks=host_blocks, placement="disaggregated", scheduler="sarathi")


def test_disaggregated_prompts_wait_for_room_on_the_host_and_are_not_computed_here() -> None:
    # The host has room for the KV of two prompts of 25 blocks, of which the last token and less than a block stay here.
    bench = _apart(host_blocks=50)
    for number in range(12):
        bench.add(f"be{number}", prompt=100, output=4)
    bench.run(3, engine_answers=False)
    assert len([*bench.requests.loads]) == 12 and len(bench.requests.waiting[BE]) == 0 and not bench.computed
    bench.run(200)
    bench.scheduler.check_integrity()
    assert len(bench.finished) == 12 and bench.scheduler.stats().loaded_from("prefilled")["BE"] == 12 * 96
    assert all(bench.computed[f"be{number}"] == 4 + 3 for number in range(12)), "4 of the prompt, 3 of the output"


def test_disaggregated_kv_that_has_come_is_not_pushed_out_by_that_of_others() -> None:
    # The device has room for one request, the host for three: their KV waits there, and the fourth prompt waits for it.
    bench = _apart(host_blocks=78, device_blocks=30)
    for number in range(6):
        bench.add(f"be{number}", prompt=100, output=8)
    bench.run(4)
    loading = [state.request_id for state in bench.requests.loads]
    assert loading and len(bench.requests.waiting[BE]) <= 3
    bench.run(300)
    assert len(bench.finished) == 6 and all(bench.computed[f"be{number}"] == 4 + 7 for number in range(6))


def test_a_disaggregated_prompt_longer_than_the_host_is_computed_here() -> None:
    bench = _apart(host_blocks=20)
    bench.add("be", prompt=100, output=1)
    bench.run(100)
    assert "be" in bench.finished and bench.computed["be"] == 100


def test_disaggregated_prompts_are_computed_here_once_the_engine_is_lost() -> None:
    bench = _apart(host_blocks=50)
    for number in range(6):
        bench.add(f"be{number}", prompt=100, output=1)
    bench.run(2, engine_answers=False)
    bench.scheduler.abort("be5", bench.now_s)  # it waits for room
    bench.scheduler.notify([PrefillEngineLost(1)])
    bench.run(200)
    bench.scheduler.check_integrity()
    assert len(bench.finished) == 5


def test_a_failed_step_lets_go_of_what_waits_for_room() -> None:
    bench = _apart(host_blocks=50)
    for number in range(6):
        bench.add(f"be{number}", prompt=100, output=1)
    bench.run(2, engine_answers=False)
    bench.requests.loads.give_up()
    assert not [*bench.requests.loads] and len(bench.requests.waiting[BE]) == 6
