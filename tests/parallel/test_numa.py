"""Ranks live on NUMA nodes: which cores they get, on made-up machines, and what their processes then have."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omniserve import EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core import numa
from omniserve.core.config import ParallelConfig
from omniserve.core.numa import Node, Share, as_ranges, equal_shares, node_numbered, parse_list, read_nodes, shares_of
from omniserve.engine.engine import Engine
from omniserve.host import cores as cores_of_processes
from omniserve.host.cores import available_cores, share_quota
from omniserve.launch.loading import EngineLoader
from omniserve.launch.replica_share import keep_to_share
from omniserve.layers.patching import patched_model
from omniserve.layers.weights.mapped import _file_mappings, copy_mapped_weights
from omniserve.parallel import group, shares
from omniserve.parallel.cli import main
from omniserve.parallel.place import Place
from omniserve.parallel.shares import pin_to_share, place_joined
from tests.machines import write_machine
from tests.parallel.placed_rank import place
from tests.parallel.ranks import checkpoint_of, load_part, reference_of, whole_model
from tests.quick import slow_except

PREFERRED, INTERLEAVE = 1, 3


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a machine whose nodes are still to be written."""
    monkeypatch.setattr(numa, "SYSTEM", tmp_path / "system")
    return tmp_path / "system"


@pytest.fixture
def allow_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control group that has the memory of nodes 0 and 2."""
    (tmp_path / "status").write_text("Name:\tpython\nMems_allowed:\t5\nMems_allowed_list:\t0,2\n")
    monkeypatch.setattr(numa, "STATUS", tmp_path / "status")
    yield


@pytest.fixture
def all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that says nothing of control groups of memory."""
    monkeypatch.setattr(numa, "STATUS", tmp_path / "nothing")


@pytest.fixture
def unpinned() -> Iterator[None]:
    """Undo what a test does to this process."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    numa.release()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    share_quota(1)


def _shares(num_processes: int, cores: set[int]) -> list[str] | None:
    found = shares_of(num_processes, cores, read_nodes(cores))
    return found and [f"{as_ranges(each.cores)} of {as_ranges(node.number for node in each.nodes)}" for each in found]


# -- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "numbers"), [("", ""), ("0", "0"), ("0-3,8\n", "0-3,8"), ("8,1-2,0,4", "0-2,4,8")])
def test_lists_of_the_kernel_are_read_and_written(text: str, numbers: str) -> None:
    assert as_ranges(parse_list(text)) == numbers


def test_one_node_is_nothing_to_place_on(machine: Path, all_memory: None) -> None:
    write_machine(machine, {0: "0-7"})
    assert [(node.number, node.cores) for node in read_nodes(range(8))] == [(0, tuple(range(8)))]
    assert _shares(2, set(range(8))) is None


def test_a_kernel_without_nodes_has_none(machine: Path, all_memory: None) -> None:
    assert read_nodes({0, 1}) == []
    assert equal_shares(2, {0, 1}) == [Share((0,)), Share((1,))]
    with pytest.raises(ValueError, match=r"no NUMA node 0 .* the kernel of this machine knows no nodes"):
        node_numbered(0, {0, 1})


def test_ranks_are_spread_evenly_and_neighbours_stay_together(machine: Path, all_memory: None) -> None:
    write_machine(machine, {1: "1,3,5,7", 0: "0,2,4,6"})
    cores = set(range(8))
    assert _shares(2, cores) == ["0,2,4,6 of 0", "1,3,5,7 of 1"]
    assert _shares(4, cores) == ["0,2 of 0", "4,6 of 0", "1,3 of 1", "5,7 of 1"]
    assert _shares(1, cores) is None, "one process has all nodes"


def test_a_rank_has_several_nodes_if_there_are_more_nodes_than_ranks(machine: Path, all_memory: None) -> None:
    write_machine(machine, {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"})
    assert _shares(2, set(range(8))) == ["0-3 of 0-1", "4-7 of 2-3"]


@pytest.mark.parametrize(
    ("nodes", "num_processes"),
    [
        ({0: "0-7", 1: "8-15"}, 3),  # a rank of a crowded node would have 4 cores instead of 5
        ({0: "0-3", 1: "4-7", 2: "8-11"}, 2),
        ({0: "0-11", 1: "12-15"}, 2),
        ({0: "0", 1: "1"}, 3),
        ({0: "0", 1: "1-7"}, 4),
    ],
)
def test_ranks_that_would_have_much_less_than_an_equal_share_are_not_placed(
    nodes: dict[int, str], num_processes: int, machine: Path, all_memory: None
) -> None:
    write_machine(machine, nodes)
    cores = {core for each in nodes.values() for core in parse_list(each)}
    assert _shares(num_processes, cores) is None


def test_a_core_less_on_one_node_hinders_nothing(machine: Path, all_memory: None) -> None:
    write_machine(machine, {0: "1-15", 1: "16-31"})
    assert _shares(2, set(range(1, 32))) == ["1-15 of 0", "16-31 of 1"]


def test_cores_that_this_process_may_not_use_are_left_out(machine: Path, all_memory: None) -> None:
    """A control group or an affinity mask allows four cores of each node, or those of one node alone."""
    write_machine(machine, {0: "0-15", 1: "16-31"})
    assert _shares(2, {*range(4), *range(20, 24)}) == ["0-3 of 0", "20-23 of 1"]
    assert [node.number for node in read_nodes(range(16, 20))] == [1]
    with pytest.raises(ValueError, match=r"no NUMA node 0 .* there is 1 \(cores 16-19\)"):
        node_numbered(0, range(16, 20))


def test_cores_that_are_offline_are_left_out(machine: Path, all_memory: None) -> None:
    """A node's list has the cores that are online alone; an offline core has no topology."""
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in (0, 1, 2, 4, 5, 6)} | {3: "3"}
    write_machine(machine, {0: "0-1,4-5", 1: "2-3,6", 2: ""}, siblings=siblings)
    cores = {0, 1, 2, 3, 4, 5, 6}
    assert [(node.number, node.cores) for node in read_nodes(cores)] == [(0, (0, 4, 1, 5)), (1, (2, 6, 3))]
    assert equal_shares(2, cores) == [Share((0, 4, 1)), Share((5, 2, 6))]


def test_nodes_without_memory_are_left_out(machine: Path, allow_memory: None) -> None:
    """Node 1 is not the control group's, node 3 has cores alone, node 4 memory alone, as of a CXL device."""
    write_machine(machine, {0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15", 4: ""}, gib={3: 0})
    assert [node.number for node in read_nodes(range(16))] == [0, 2]
    assert _shares(2, set(range(16))) is None, "half of the cores would be idle"
    assert _shares(2, {*range(4), *range(8, 12)}) == ["0-3 of 0", "8-11 of 2"]


def test_threads_of_a_physical_core_are_of_one_rank(machine: Path, all_memory: None) -> None:
    siblings = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}
    write_machine(machine, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings=siblings)
    assert _shares(4, set(range(16))) == ["0-1,8-9 of 0", "2-3,10-11 of 0", "4-5,12-13 of 1", "6-7,14-15 of 1"]
    assert [as_ranges(each.cores) for each in equal_shares(2, range(16))] == ["0-3,8-11", "4-7,12-15"]


def test_more_ranks_than_cores_share_them() -> None:
    assert equal_shares(5, {4, 6}) == [Share((core,)) for core in (4, 6, 4, 6, 4)]


def test_a_log_says_what_a_rank_has(machine: Path, all_memory: None) -> None:
    write_machine(machine, {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"})
    first, last = shares_of(2, range(8), read_nodes(range(8))) or []
    assert numa.describe(first) == ("NUMA node 0 and 1: cores 0-3, memory of the node (64.0 of 128.0 GiB free)")
    assert numa.describe(Share((1, 2, 5))) == "cores 1-2,5"
    assert last.nodes[0] == Node(2, (4, 5), 64 << 30, 32 << 30)


# -- this process ----------------------------------------------------------------------------------------------------


def _real_node() -> Node:
    cores = os.sched_getaffinity(0)
    nodes = read_nodes(cores)
    if not nodes:
        pytest.skip("this kernel knows no NUMA nodes")
    return nodes[0]


def test_a_process_is_kept_to_a_node_and_released(unpinned: None) -> None:
    node, cores = _real_node(), os.sched_getaffinity(0)
    numa.keep_to(Share(node.cores[:1], (node,)))
    assert numa.is_kept_to_nodes()
    assert os.sched_getaffinity(0) == {node.cores[0]} and numa.memory_policy() == (PREFERRED, [node.number])
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        assert f" prefer:{node.number} " in maps.read_text()
    numa.keep_to(Share(node.cores, (node,)))
    assert os.sched_getaffinity(0) == set(node.cores), "not a part of the part of before"
    numa.release()
    assert os.sched_getaffinity(0) == cores and numa.memory_policy() == (0, []) and not numa.is_kept_to_nodes()


def test_a_process_of_several_nodes_takes_memory_of_these_in_turn(unpinned: None) -> None:
    node = _real_node()
    numa._prefer([node.number, node.number])  # there is one alone here
    try:
        assert numa.memory_policy() == (INTERLEAVE, [node.number])
    finally:
        numa._set_policy(0, [])


def test_a_policy_of_numactl_stays(unpinned: None, caplog: pytest.LogCaptureFixture) -> None:
    node = _real_node()
    caplog.set_level(logging.INFO)
    numa._set_policy(INTERLEAVE, [node.number])
    try:
        numa.keep_to(Share(node.cores, (node,)))
        assert numa.memory_policy() == (INTERLEAVE, [node.number])
        numa.release()
        assert numa.memory_policy() == (INTERLEAVE, [node.number])
    finally:
        numa._set_policy(0, [])
    assert "started with stays" in caplog.text


def test_a_refused_policy_is_told_and_cores_are_kept_to(unpinned: None, caplog: pytest.LogCaptureFixture) -> None:
    node = _real_node()
    numa.keep_to(Share(node.cores[:1], (Node(1023, node.cores, 1, 1),)))
    assert os.sched_getaffinity(0) == {node.cores[0]} and numa.memory_policy() == (0, [])
    assert "no memory policy for NUMA node 1023" in caplog.text and "--cap-add SYS_NICE" in caplog.text


def test_a_kernel_whose_calls_are_not_known_is_told(
    unpinned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    node = Node(0, tuple(os.sched_getaffinity(0)), 1, 1)
    numa.keep_to(Share(node.cores, (node,)))
    assert "not known on vax" in caplog.text


def test_on_one_node_or_switched_off_ranks_have_equal_shares(
    unpinned: None, machine: Path, all_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    caplog.set_level(logging.DEBUG)
    for nodes, how, why in (({0: cores}, "auto", "1 nodes"), ({0: cores[:1], 1: cores[1:]}, "off", "off")):
        write_machine(machine / how, {number: as_ranges(own) for number, own in nodes.items()})
        numa.SYSTEM = machine / how
        pin_to_share(0, len(cores), how)
        assert os.sched_getaffinity(0) == {cores[0]} and torch.get_num_threads() == 1
        assert numa.memory_policy() == (0, []) and not numa.is_kept_to_nodes()
        assert f"not kept to NUMA nodes: {why}" in caplog.text
        assert all(record.levelno == logging.DEBUG for record in caplog.records if record.name == shares.__name__)


def test_ranks_that_cannot_be_spread_evenly_are_told(
    unpinned: None, machine: Path, all_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    caplog.set_level(logging.INFO)
    write_machine(machine, {0: str(cores[0]), 1: as_ranges(cores[1:])})
    pin_to_share(2, len(cores) + 1)
    assert f"{len(cores) + 1} ranks cannot be spread evenly over NUMA nodes (cores: 1 on node 0" in caplog.text


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_of_one_of_several_engines_divide_its_cores(
    unpinned: None, machine: Path, all_memory: None, number: int
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    write_machine(machine, {0: as_ranges(cores)})
    keep_to_share(number, 2, has_ranks=True)
    own = os.sched_getaffinity(0)
    assert own and own < set(cores)
    numa.release()  # as an engine does before it starts its ranks
    assert os.sched_getaffinity(0) == own
    pin_to_share(0, 2, num_engines=2)
    assert os.sched_getaffinity(0) <= own
    numa.release()
    assert os.sched_getaffinity(0) == own, "the next ones divide all of it"
    assert cores_of_processes._num_sharing == 4


@pytest.mark.parametrize("how", ["auto", "off"])
def test_an_engine_of_several_has_a_node_unless_that_is_switched_off(
    unpinned: None, machine: Path, all_memory: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != 2:
        pytest.skip("made for two cores")
    write_machine(machine, {0: str(cores[1]), 1: str(cores[0])})
    preferred: list[list[int]] = []
    monkeypatch.setattr(numa, "_prefer", preferred.append)
    config = _engine_config(ParallelConfig())
    config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, numa=how))
    loader = EngineLoader(model="none", dtype="float32", device="cpu", config=config).for_replica(0, 2)
    monkeypatch.setattr(EngineLoader, "load_model", _stop)
    with pytest.raises(KeyboardInterrupt):
        loader(lambda what: None)
    assert os.sched_getaffinity(0) == {cores[1] if how == "auto" else cores[0]}
    assert preferred == ([[0]] if how == "auto" else [])


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torchrun_says_which_of_a_machines_ranks_this_is(
    has_gpu: bool,
    unpinned: None,
    machine: Path,
    all_memory: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != 2:
        pytest.skip("made for two cores")
    caplog.set_level(logging.INFO)
    write_machine(machine, {0: str(cores[0]), 1: str(cores[1])})
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    place_joined("auto")
    assert os.sched_getaffinity(0) == set(cores)
    assert ("--numa NODE keeps it to one" in caplog.text) == (not has_gpu)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place_joined("off")
    assert os.sched_getaffinity(0) == set(cores)
    place_joined("auto")
    assert os.sched_getaffinity(0) == (set(cores) if has_gpu else {cores[0]})
    assert ("rank 0 of 2 on this machine has NUMA node 0" in caplog.text) == (not has_gpu)


@pytest.mark.parametrize(
    ("where", "told"),
    [("1022", "there is no NUMA node 1022 with cores and memory"), ("left", "must be auto, off or the number")],
)
def test_a_node_that_does_not_exist_is_told_in_a_sentence(
    where: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("the secret of this test")
    arguments = ["--join", "127.0.0.1:1", "--secret-file", str(tmp_path / "secret"), "--numa", where]
    try:
        assert main(arguments) == 2
    except SystemExit as end:
        assert end.code == 2
    assert told in capsys.readouterr().err


def test_settings_take_auto_and_off_alone() -> None:
    with pytest.raises(ValueError, match="numa must be auto or off, got 'on'"):
        ExecutionConfig(numa="on")  # type: ignore[arg-type]


# -- weights ---------------------------------------------------------------------------------------------------------


def _mapped(model: torch.nn.Module) -> set[str]:
    begins, ends = _file_mappings()
    return {
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if any(begin <= tensor.data_ptr() < end for begin, end in zip(begins, ends, strict=True))
    }


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
@pytest.mark.parametrize("prepack", ["auto", False])
def test_weights_of_a_stage_end_in_memory_of_the_rank(family: str, prepack: bool) -> None:
    place = Place(1, 1, 2)
    model = load_part(checkpoint_of(family), place)
    patched_model(model, compile=False, prepack=prepack, keep=place.layers)  # type: ignore[arg-type]
    assert "model.layers.0.input_layernorm.weight" in _mapped(model)
    assert ("model.layers.0.mlp.up_proj.weight" in _mapped(model)) == (not prepack)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert copy_mapped_weights(model) > 0
    is_shared = family == "llama_tied" and not prepack  # with a linear, which reads all of it
    embedding = {"model.embed_tokens.weight"} & _mapped(model)
    assert _mapped(model) == embedding and bool(embedding) == (family == "llama")
    assert copy_mapped_weights(model) == 0
    assert not is_shared or model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name]), name


# -- ranks -----------------------------------------------------------------------------------------------------------


def _engine_config(parallel: ParallelConfig) -> EngineConfig:
    return EngineConfig(
        parallel=parallel, execution=ExecutionConfig(compile=False), block_size=8, max_model_len=80,
        device_kv_bytes=1 << 15, host_kv_bytes=1 << 20,
    )  # fmt: skip


def _serve(engine: Engine) -> None:
    """See that tokens are those of Hugging Face, also those of the host tier."""
    reference = reference_of("llama")
    requests = [
        Request(
            prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=24, ignore_eos=True),
            service_class="LS" if number % 3 == 0 else "BE",
        )
        for number, prompt in enumerate(reference.prompts)
    ]  # fmt: skip
    completions = engine.generate(requests)
    assert [tuple(each.token_ids) for each in completions] == [tokens[:24] for tokens in reference.tokens]
    assert engine.host_tier is not None and engine.host_tier.stats().tasks_done > 0, "the host tier was used"


def _cores_of_threads(pid: int) -> set[str]:
    """Return the cores of each thread that a process has, those included that libraries have started."""
    return {
        line.split()[1]
        for task in Path(f"/proc/{pid}/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("Cpus_allowed_list")
    }


def _policies(pid: int) -> set[str]:
    """Return the memory policies of a process's anonymous memory; none where the kernel does not tell."""
    maps = Path(f"/proc/{pid}/numa_maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line.split()[1] for line in lines if " anon=" in line and "file=" not in line}


@pytest.mark.parametrize(("shards", "stages"), slow_except(((2, 1),), [(2, 1), (1, 2)]))
def test_each_rank_lives_on_its_node_and_tokens_are_exact(
    shards: int,
    stages: int,
    machine: Path,
    all_memory: None,
    unpinned: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two nodes of a core each; the kernel refuses to prefer node 1, which it does not have."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    has_nodes = Path("/sys/devices/system/node/node0").exists()
    caplog.set_level(logging.INFO)
    write_machine(machine, {0: str(cores[0]), 1: str(cores[1])})
    os.sched_setaffinity(0, cores[:2])
    told = tmp_path / "told"
    monkeypatch.setattr(
        group, "RANK_COMMAND", (sys.executable, "-m", "tests.parallel.placed_rank", str(machine), str(told))
    )
    monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: None)
    whole_model("llama").save_pretrained(tmp_path / "model")
    parallel = ParallelConfig(tensor_parallel_size=shards, pipeline_parallel_size=stages)
    loader = EngineLoader(
        model=str(tmp_path / "model"), dtype="float32", device="cpu", config=_engine_config(parallel),
        with_profile=False,
    )  # fmt: skip
    try:
        with loader(lambda what: None) as engine:
            _serve(engine)
            other = int(Path(f"{told}.pid").read_text())
            assert _cores_of_threads(other) == {str(cores[1])}
            if has_nodes:
                assert place() == {"cores": cores[:1], "threads": 1, "policy": [PREFERRED, [0]]}
                assert ("prefer:0" in _policies(os.getpid())) == Path("/proc/self/numa_maps").exists()
                assert "prefer:0" not in _policies(other)
    finally:
        os.sched_setaffinity(0, cores)
    assert json.loads(told.read_text()) == {"cores": cores[1:2], "threads": 1, "policy": [0, []]}
    assert "rank 0 of 2 has NUMA node 0" in caplog.text
    assert "weights were copied out of the pages" in caplog.text
    log = capfd.readouterr().err
    assert f"rank 1 of 2 has NUMA node 1: cores {cores[1]}, memory of the node" in log
    assert "no memory policy for NUMA node 1" in log


def _pages(pid: int, address: int | None = None) -> Counter[int]:
    """Return how many KiB of a process's anonymous memory are of each node, or of the mapping that has an address."""
    found: Counter[int] = Counter()
    lines = [line.split() for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()]
    begins = [int(begin, 16) for begin, *_ in lines]
    for begin, (_, _, *fields) in zip(begins, lines, strict=True):
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if "anon" not in values or "file" in values:
            continue
        if address is not None and begin != max(each for each in begins if each <= address):
            continue
        for name, value in values.items():
            if name[0] == "N" and name[1:].isdecimal():
                found[int(name[1:])] += int(value) * int(values["kernelpagesize_kB"])
    return found


@pytest.mark.skipif(len(read_nodes(os.sched_getaffinity(0))) != 2, reason="needs a machine with two NUMA nodes")
@pytest.mark.parametrize("where", ["auto", "off"])
def test_memory_of_each_rank_is_of_its_node(
    where: Any, unpinned: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other rank all memory, which it has taken since it was placed; of rank 0 its pools."""
    nodes = read_nodes(os.sched_getaffinity(0))
    told = tmp_path / "told"
    monkeypatch.setattr(
        group, "RANK_COMMAND", (sys.executable, "-m", "tests.parallel.placed_rank", str(numa.SYSTEM), str(told))
    )
    monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: None)
    whole_model("llama").save_pretrained(tmp_path / "model")
    config = _engine_config(ParallelConfig(tensor_parallel_size=2, rank_timeout_s=300.0))
    config = dataclasses.replace(config, host_kv_bytes=1 << 26, execution=ExecutionConfig(compile=False, numa=where))
    loader = EngineLoader(
        model=str(tmp_path / "model"), dtype="float32", device="cpu", config=config, with_profile=False
    )
    with loader(lambda what: None) as engine:
        _serve(engine)
        tier = engine.host_tier
        assert tier is not None
        while tier.stats().bytes_prefaulted < tier.stats().pool_bytes:
            time.sleep(0.01)
        other = int(Path(f"{told}.pid").read_text())
        own, pool = _pages(other), _pages(os.getpid(), tier.pool_LBK2SH.data_ptr() + (1 << 21))
        print(f"numa={where}: KiB by node: rank 1 {dict(own)}, pool of rank 0 {dict(pool)}")
    assert pool.total() >= 1 << 15 and own.total() >= 1 << 16
    if where == "auto":
        assert pool[nodes[0].number] == pool.total()
        assert own[nodes[1].number] >= 0.9 * own.total(), "the rest was there before it was placed"


@pytest.mark.slow
def test_a_rank_that_joins_has_the_node_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = _real_node()
    secret, told = tmp_path / "secret", tmp_path / "told"
    secret.write_text("the secret of this test")
    monkeypatch.setattr(EngineLoader, "load_tokenizer", lambda self: None)
    whole_model("llama").save_pretrained(tmp_path / "model")
    parallel = ParallelConfig(tensor_parallel_size=2, rank_listen="127.0.0.1:0", rank_secret_file=str(secret))
    loader = EngineLoader(
        model=str(tmp_path / "model"), dtype="float32", device="cpu", config=_engine_config(parallel),
        with_profile=False,
    )  # fmt: skip
    joined: list[subprocess.Popen[str]] = []

    def join(what: str) -> None:
        if "waiting for 1 ranks to join at " in what:
            command = [sys.executable, "-m", "tests.parallel.placed_rank", str(numa.SYSTEM), str(told)]
            command += ["--join", what.rpartition(" ")[2], "--secret-file", str(secret), "--once"]
            command += ["--numa", str(node.number)]
            joined.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))

    try:
        with loader(join) as engine:
            _serve(engine)
            has_maps = Path("/proc/self/numa_maps").exists()
            assert (f"prefer:{node.number}" in _policies(joined[0].pid)) == has_maps
    finally:
        for process in joined:
            _, log = process.communicate(timeout=60)
    found = json.loads(told.read_text())
    assert (found["cores"], found["policy"]) == (sorted(node.cores), [PREFERRED, [node.number]])
    assert f"this rank has NUMA node {node.number}: cores {as_ranges(node.cores)}, memory of the node" in log
    assert f"; {available_cores()} threads" in log
    assert "weights were copied" in log
